"""A target over KV cache blocks computes what it computes alone, whatever its attention adds; others are refused."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from each import each
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import Request
from eyas.engine.runner.target import TargetRunner
from eyas.errors import UserError
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.sampling import Sampling
from eyas.target.capture import capture
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.packed import tells_layers
from target.test_capture import EXTRA, FAMILIES

CPU = torch.device("cpu")
PAGES, PAGE_SIZE, WINDOW = 24, 4, 5
ALWAYS = ("mistral", "mixtral", "phi3", "starcoder2", "gemma2", "gemma3_text")
ON_REQUEST = ("qwen2", "qwen3", "qwen2_moe")
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "glm4": {"pad_token_id": 0},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512},
}
SHARED_KV = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0}
EMBEDDED_BY_LAYER = {"vocab_size_per_layer_input": 80, "hidden_size_per_layer_input": 16, "sliding_window": 8}
BY_LAYER: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**SHARED_KV, **EMBEDDED_BY_LAYER, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "gemma4_text": {**SHARED_KV, **EMBEDDED_BY_LAYER},
}
"""Widths of the MLP given as a list, or other heads in layers with full attention."""


@torch.no_grad()
def built(family: str, **changes: Any) -> Target:
    """A small target of the family with weights that make attention matter."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    if family != "gpt2":
        sizes["intermediate_size"] = 48
    if family not in ("phi", "phi3", "gpt2"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **{**sizes, **EXTRA.get(family, {}), **MORE.get(family, {}), **changes})
    # Fused attention has no softcap, but some versions of transformers choose it.
    how = {"attn_implementation": "eager"} if "attn_logit_softcapping" in MORE.get(family, {}) else {}
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.mul_(12) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    model.get_output_embeddings().weight.mul_(0.2)
    model.eval().requires_grad_(False)
    return Target(facts=facts_of(config, family), model=model, tokenizer=PreTrainedTokenizerBase())


@dataclass
class Conversation:
    """A request with scattered blocks."""

    ids: list[int]
    blocks: list[int]
    cached: int = 0


@dataclass
class Server:
    """Uses a paged target as an engine does."""

    target: Target
    requests: list[Conversation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paged = TargetRunner(self.target, KVCache(blocks=PAGES, block_size=PAGE_SIZE))
        blocks = random.Random(0).sample(range(PAGES), PAGES)
        generator = torch.Generator().manual_seed(2)
        for i, length in enumerate((13, 7, 18)):
            ids = torch.randint(80, (length,), generator=generator).tolist()
            self.requests.append(Conversation(ids, blocks[8 * i : 8 * i + 8]))

    @torch.inference_mode()
    def read(self, counts: Sequence[int]) -> list[Tensor]:
        """Let the target read the next tokens of each request; returns its logits."""
        taking = [(r, n) for r, n in zip(self.requests, counts, strict=True) if n]
        ids = [token for r, n in taking for token in r.ids[r.cached : r.cached + n]]
        layout = AttentionMetadata.of(
            [AttentionRow(blocks=r.blocks, base=r.cached, count=n) for r, n in taking],
            block_size=PAGE_SIZE,
            device=self.target.device,
        )
        logits = self.paged.forward(torch.tensor(ids, device=self.target.device), layout).cpu()
        for r, n in taking:
            r.cached += n
        return list(logits.split([n for _, n in taking]))

    @torch.inference_mode()
    def alone(self, ids: Sequence[int]) -> Tensor:
        logits: Tensor = self.target.model(
            torch.tensor([list(ids)], device=self.target.device), use_cache=False
        ).logits[0]
        return logits.cpu()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def assert_reads_all_as_alone(server: Server, counts: Sequence[int]) -> None:
    before = [r.cached for r in server.requests]
    ours = iter(server.read(counts))
    for r, start, n in zip(server.requests, before, counts, strict=True):
        if n:
            assert_same(next(ours), server.alone(r.ids[: start + n])[start:])


ANCESTORS = torch.tensor(
    [
        [1, 0, 0, 0, 0, 0],  # the newest token, and a tree of drafts behind it
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ],
    dtype=torch.bool,
)
ACCEPTED = [0, 2, 4, 5]


@torch.inference_mode()
def verify_a_tree(server: Server) -> None:
    """Let every request verify the same tree of other tokens; one path of it is accepted."""
    size, generator = len(ANCESTORS), torch.Generator().manual_seed(3)
    drafts = torch.randint(80, (len(server.requests), size), generator=generator)
    rows = [AttentionRow(blocks=r.blocks, base=r.cached, count=size, ancestors=ANCESTORS) for r in server.requests]
    device = server.target.device
    layout = AttentionMetadata.of(rows, block_size=PAGE_SIZE, device=device)
    ours = server.paged.forward(drafts.flatten().to(device), layout).view(len(rows), size, -1).cpu()
    for r, tree, logits in zip(server.requests, drafts, ours, strict=True):
        for node, seen in enumerate(ANCESTORS):
            assert_same(logits[node], server.alone(r.ids[: r.cached] + tree[seen].tolist())[-1])
    place = torch.arange(len(rows))[:, None] * size
    sources, targets = place + torch.tensor(ACCEPTED), place + torch.arange(len(ACCEPTED))
    server.paged.cache.move(*(layout.slot_mapping_N[some.flatten().to(device)] for some in (sources, targets)))
    for r, tree in zip(server.requests, drafts, strict=True):
        r.ids = r.ids[: r.cached] + tree[ACCEPTED].tolist() + [5, 6]
        r.cached += len(ACCEPTED)


def assert_serves(target: Target) -> None:
    before = target.model.config._attn_implementation
    server = Server(target)
    assert_reads_all_as_alone(server, (6, 3, 11))
    assert_reads_all_as_alone(server, (7, 0, 7))  # the second waits
    assert_reads_all_as_alone(server, (0, 4, 0))
    verify_a_tree(server)
    assert_reads_all_as_alone(server, (1, 1, 1))
    assert_reads_all_as_alone(server, (1, 1, 1))
    assert target.model.config._attn_implementation == before


@each("family", [*FAMILIES, "granite", "cohere", "olmo2", "starcoder2", "glm4", "deepseek_v2", "deepseek_v3"])
def test_a_target_over_blocks_computes_what_it_computes_alone(family: str) -> None:
    extra: dict[str, Any] = {}
    if family.startswith("deepseek"):  # values are narrower than keys
        extra = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        extra |= {"qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 4}
    assert_serves(built(family, **extra))


@each("family", [*ALWAYS, *ON_REQUEST])
def test_windows_shorter_than_the_context_are_honoured(family: str) -> None:
    request = {"use_sliding_window": True, "max_window_layers": 2} if family in ON_REQUEST else {}
    target = built(family, sliding_window=WINDOW, **request)
    wide = built(family, sliding_window=1000, **request)
    ids = torch.arange(12)[None]
    assert not torch.allclose(target.model(ids).logits[:, -1], wide.model(ids).logits[:, -1], atol=0.1), "it matters"
    assert_serves(target)


@torch.inference_mode()
def test_auxiliary_states_come_from_the_same_pass() -> None:
    target = built("llama")
    server = Server(target)
    with capture(target.model, (1, 2, 4)) as captured:
        server.read((6, 3, 11))
        first = captured.aux_hidden()[0]
        server.read((7, 4, 7))
        ours = torch.cat([first, captured.aux_hidden()[0]])
    theirs = [target.forward(torch.tensor([r.ids]), (1, 2, 4)).aux_hidden_BTX[0] for r in server.requests]
    whole = [theirs[0][:6], theirs[1][:3], theirs[2][:11], theirs[0][6:], theirs[1][3:7], theirs[2][11:]]
    torch.testing.assert_close(ours, torch.cat(whole), rtol=1e-4, atol=1e-4)


@each("family", ["llama", "gpt2"])
@torch.inference_mode()
def test_only_requested_logits_are_computed(family: str) -> None:
    target = built(family)
    paged = TargetRunner(target, KVCache(blocks=4, block_size=4))
    layout = AttentionMetadata.of(
        [AttentionRow(blocks=[3, 1], base=0, count=5), AttentionRow(blocks=[0], base=0, count=2)],
        block_size=4,
        device=CPU,
    )
    ids = torch.arange(7)
    every = paged.forward(ids, layout)
    assert every.shape == (7, 80)
    torch.testing.assert_close(paged.forward(ids, layout, torch.tensor([4, 6])), every[[4, 6]])


def test_a_cache_of_one_block_tells_the_size_of_blocks() -> None:
    target = built("gemma2")
    small, large = KVCache(blocks=1, block_size=4), KVCache(blocks=50, block_size=4)
    TargetRunner(target, small)
    assert small.bytes_per_block == 4 * 4 * 2 * 2 * 8 * 4  # layers, slots, keys and values, heads, dim, bytes
    TargetRunner(target, large)
    assert large.bytes == 51 * small.bytes_per_block


def refusal(target: Target) -> str:
    before = target.model.config._attn_implementation
    cache = KVCache(blocks=4, block_size=4)
    with pytest.raises(UserError) as caught:
        TargetRunner(target, cache)
    assert cache.bytes == 0, "no memory is allocated for a refused target"
    assert target.model.config._attn_implementation == before
    return str(caught.value)


def test_layers_of_other_types_are_refused() -> None:
    linear = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    linear |= {"shared_expert_intermediate_size": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    assert "qwen3_next has layers of type linear_attention" in refusal(built("qwen3_next", **linear))
    chunked = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8}
    assert "layers of type chunked_attention" in refusal(built("llama4_text", **chunked))


def test_sinks_are_honoured() -> None:
    target = built("gpt_oss", sliding_window=WINDOW)
    model: Any = target.model
    ids = torch.arange(12)[None]
    before = model(ids).logits[:, -1]
    for layer in model.model.layers:
        layer.self_attn.sinks.data.sub_(30.0)
    assert not torch.allclose(model(ids).logits[:, -1], before, atol=0.1), "they matter"
    assert_serves(built("gpt_oss", sliding_window=WINDOW))


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    assert "the attention of GPTJForCausalLM cannot be replaced" in refusal(built("gptj", rotary_dim=4))


@each("family", ["bart", "bloom", "pegasus"])
def test_targets_without_position_ids_are_refused(family: str) -> None:
    heads = {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "is_encoder_decoder": False}
    assert f"{family} ({family}) takes no position_ids" in refusal(built(family, **heads))


def test_scales_by_the_targets_own_positions_are_refused() -> None:
    told_elsewhere = {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 2}
    target = built("llama4_text", intermediate_size_mlp=48, **told_elsewhere)
    assert "(attn_temperature_tuning)" in refusal(target)
    target.model.config.attn_temperature_tuning = False
    TargetRunner(target, KVCache(blocks=4, block_size=4))


@pytest.mark.parametrize("family", BY_LAYER)
def test_targets_with_layers_of_different_sizes_are_served(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}; a newer one runs it")
    target, prompts = built(family, **BY_LAYER[family]), [tuple(range(1, 4)), tuple(range(40, 65))]
    asked = {"sampling": Sampling(), "max_new_tokens": 9, "detokenize": False}
    requests = [Request(prompt=prompt, **asked) for prompt in prompts]
    answers = Engine(target, None, config=EngineConfig(max_num_seqs=2, max_model_len=64)).generate(requests)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9, eos_token_id=None)
        assert list(answer.tokens) == alone[0, len(prompt) :].tolist()


@each("family", ["stablelm", "nemotron"])
def test_layers_that_drop_the_callers_arguments_are_served(family: str) -> None:
    target = built(family)
    assert_serves(target)
    assert not tells_layers(target)
    assert tells_layers(built("llama"))


def test_layers_that_attend_twice_are_refused() -> None:
    assert "asked for attention in layers [0, 0, 1, 1, 2, 2, 3, 3] of 4" in refusal(built("diffllama"))


def test_a_target_on_several_devices_is_refused() -> None:
    target = built("llama")
    target.model.get_output_embeddings().to("meta")
    assert "llama lies on several devices" in refusal(target)


def test_a_window_that_no_layer_confirms_is_refused() -> None:
    stray = built("llama")
    stray.model.config.sliding_window = 64
    assert "a sliding_window of 64 tokens, but its layers do not say" in refusal(stray)
    stray.model.config.sliding_window = stray.model.config.max_position_embeddings  # cannot matter
    assert_serves(stray)
