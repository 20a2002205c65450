"""The planned memory of a GPU is what an engine takes after drafting and capturing."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.plan.decoder import read_decoder
from eyas.plan.footprint import Room, default_batched_tokens, footprint
from eyas.plan.memory import Footprint
from eyas.plan.quantisation import parse_quantisation
from eyas.plan.resolve import usual_drafter
from eyas.sampling import Sampling
from eyas.target.facts import facts_of
from eyas.target.model import Target
from known_configs import LLAMA_8B

pytestmark = pytest.mark.gpu
USERS, LENGTH = 8, 2048


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def drafted(layers: int) -> tuple[Engine, Footprint]:
    """An engine that has drafted and captured, and its plan."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
            decoder = read_decoder(config.to_dict(), "it")
            shape = usual_drafter(decoder)
            drafter = Drafter(shape.config, own_embedding=False, own_head=True).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "x" * len(ids))
    target = Target(facts=facts_of(config, "it"), model=model, tokenizer=tokenizer)
    drafter = drafter.to("cuda").share_target(target.embedding(), target.head())
    tokens = default_batched_tokens(on_gpu=True, max_num_seqs=USERS)
    room = Room(max_num_seqs=USERS, max_model_len=LENGTH, max_num_batched_tokens=tokens)
    planned = footprint(decoder, shape, parse_quantisation("bfloat16"), room=room, device="cuda")
    options = EngineConfig(max_num_seqs=USERS, max_model_len=LENGTH)
    engine = Engine(target, drafter, config=options)
    deep = Speculation(mode="fixed", depth=3)
    ask = [
        Request(prompt=(7,) * (600 + user), sampling=Sampling(), max_new_tokens=24, speculation=deep)
        for user in range(USERS)
    ]
    engine.generate(ask)
    return engine, planned


def test_planned_bytes_are_those_that_a_gpu_holds() -> None:
    # Kernels are loaded on first use and stay; the plan counts their memory as the runtime's.
    engine, _ = drafted(layers=7)
    del engine
    gc.collect()
    before = used()
    engine, planned = drafted(layers=8)
    together = planned.weights + planned.drafter + planned.beside_weights + engine.budget.bytes
    held = used() - before
    print(f"held {held:,}, planned {together:,}")
    assert held == pytest.approx(together, rel=0.05)
