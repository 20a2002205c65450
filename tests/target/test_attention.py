"""The replaced attention of a target, and rotary embeddings that do not depend on other requests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from each import each
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.attention import attend_for_transformers, attending_through, settle_rope
from eyas.target.facts import facts_of
from eyas.target.model import Target
from target.test_parts import target_of


def test_every_layer_asks_the_callable_and_the_model_is_left_as_it_was() -> None:
    model: Any = target_of("llama").model
    before, asked = model.config._attn_implementation, list[int]()

    def nothing(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        asked.append(module.layer_idx)
        assert q.shape[0] == k.shape[0] == v.shape[0] == 3
        return torch.zeros_like(q)

    with attending_through(model):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, eyas_attend=nothing)
    assert asked == list(range(model.config.num_hidden_layers))
    assert model.config._attn_implementation == before


@each(
    ("given", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "a bias of positions"),
        ({"s_aux": torch.zeros(3)}, "sinks"),
    ],
)
def test_unsupported_attention_features_are_refused_by_name(given: dict[str, Tensor], message: str) -> None:
    x = torch.zeros(1, 2, 3, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "eyas_attend": lambda *_: x[0], **given}
    with pytest.raises(UserError, match=f"Linear attends with {message}"):
        attend_for_transformers(torch.nn.Linear(1, 1), x, x, x, **arguments)


def test_a_layer_without_an_attend_callable_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UserError, match="Linear does not hand its attention what the caller passed"):
        attend_for_transformers(torch.nn.Linear(1, 1), x, x, x, None)


ORIGINAL, LONGEST = 32, 160
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.6,
}


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "longrope":
        rope: dict[str, Any] = {
            "rope_type": kind,
            "rope_theta": 100.0,
            "short_factor": [1.0] * 8,
            "long_factor": [float(2 + i) for i in range(8)],
            "original_max_position_embeddings": ORIGINAL,
        }
        config: Any = Phi3Config(
            **SIZES, max_position_embeddings=LONGEST, original_max_position_embeddings=ORIGINAL, rope_parameters=rope
        )
        return Phi3ForCausalLM(config).eval()
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=ORIGINAL, rope_parameters=rope)).eval()


def angles(model: Any, *positions: int) -> torch.Tensor:
    return torch.stack(model.model.rotary_emb(torch.zeros(1, 1, 1), position_ids=torch.tensor([positions])))[:, 0]


@each("kind", ["longrope", "dynamic"])
def test_rotation_of_a_position_does_not_depend_on_other_positions(kind: str) -> None:
    model = tiny(kind)
    short, far = angles(model, 5)[:, 0], angles(model, 5, 100)[:, 0]
    assert not torch.equal(short, far), "transformers looks at the furthest"
    for longest in (LONGEST, ORIGINAL, 101):
        settle_rope(model, longest)
        alone = angles(model, 5)[:, 0]
        assert torch.equal(alone, angles(model, 5, longest - 1)[:, 0])
        assert torch.equal(alone, short) == (longest == ORIGINAL)
    assert torch.equal(alone, far), "as transformers has it where 101 tokens are the longest"


def test_rope_types_that_ignore_length_are_unchanged() -> None:
    model = tiny("linear")
    before = angles(model, 5, 30)
    settle_rope(model, LONGEST)
    assert model.model.rotary_emb.rope_type == "linear"
    assert torch.equal(angles(model, 5, 30), before)


def test_an_answer_does_not_depend_on_other_requests() -> None:
    model = tiny("longrope")
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "")
    target = Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=tokenizer)
    config = EngineConfig(max_num_seqs=4, max_model_len=LONGEST, block_size=4, memory=2**22, prefix_cache=False)
    short, long = tuple(range(1, 9)), tuple(i % 64 for i in range(90))

    def answers(*prompts: tuple[int, ...]) -> list[list[int]]:
        engine = Engine(target, config=config)
        said = {engine.submit(Request(prompt=p, sampling=Sampling(), max_new_tokens=24)): list[int]() for p in prompts}
        while engine.busy:
            for piece in engine.step():
                said[piece.key] += piece.tokens
        return list(said.values())

    assert answers(short, long)[0] == answers(short)[0]
