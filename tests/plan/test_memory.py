"""Planned bytes are allocated bytes."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.drafter.checkpoint import load_drafter
from eyas.engine.config import EngineConfig, footprint_of, weight_bytes
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner.device_queue import ImmediateQueue, RoundDevice
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.linear.quantised_linear import QuantisedLinear, load_quantised
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.loading import load_pair
from eyas.plan.decoder import read_decoder
from eyas.plan.footprint import DrafterShape, Room, drafter_bytes, footprint, recorded_bytes, target_bytes
from eyas.plan.kv_cache_dtype import KVCacheKind
from eyas.plan.quantisation import GGUF_BITS, gguf_quantisation, in_blocks, parse_quantisation, stored_quantisation
from eyas.plan.resolve import DEFAULT_CONFIG, drafter_shape, gguf_kinds, target_config
from eyas.plan.roofline import Pair
from eyas.sampling import Sampling
from eyas.target.gguf_blocks import blocks_of, is_packable
from eyas.target.quantise import replace_linears

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

WITHIN = 0.03
OPTIONS = EngineConfig(max_num_seqs=3, max_model_len=256, memory=2**26)
ROOM = Room(max_num_seqs=3, max_model_len=256, max_num_batched_tokens=512)


class Ids:
    """A tokenizer for a target that speaks in ids."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    """Sizes do not depend on what was learnt."""
    from transformers import LlamaForCausalLM

    from eyas.target.facts import facts_of
    from eyas.target.model import Target
    from tiny import drafter_config, random_drafter, target_config

    model = LlamaForCausalLM(target_config()).eval().requires_grad_(False)
    target = Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=Ids())  # type: ignore[arg-type]
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True), own_embedding=False)
    return target, drafter.share_target(target.embedding(), target.head())


def allocated(engine: Engine, target: Target, drafter: Drafter) -> int:
    """What lies in memory for good: weights, each once, and both caches once they were written."""
    ask = Request(
        prompt=(5, 6, 7, 8), sampling=Sampling(), max_new_tokens=6, speculation=Speculation(mode="fixed", depth=2)
    )
    engine.generate([ask])
    assert engine._drafting is not None
    caches = engine.model_runner.cache.bytes + engine._drafting.cache.bytes
    return weight_bytes(target.model) + weight_bytes(drafter, beside=target.model) + caches


def compare(
    target: Target,
    drafter: Drafter,
    config: dict[str, object],
    shape: DrafterShape,
    kv_cache_dtype: KVCacheKind = "auto",
) -> None:
    options = replace(OPTIONS, kv_cache_dtype=kv_cache_dtype)
    engine, decoder = Engine(target, drafter, config=options), read_decoder(config, "it")
    planned = footprint(
        *(decoder, shape, parse_quantisation("float32")), room=ROOM, device="cpu", kv_cache_dtype=kv_cache_dtype
    )
    of_loaded = footprint_of(target, drafter, options, 256)
    assert planned.token == of_loaded.token, "keys and values of a token"
    assert planned.drafter_token == of_loaded.drafter_token
    assert planned.weights == pytest.approx(of_loaded.weights, rel=WITHIN)
    assert planned.drafter == pytest.approx(of_loaded.drafter, rel=WITHIN)
    assert planned.working == of_loaded.working
    positions = (engine.budget.blocks + 1) * engine.budget.block_size
    together = planned.weights + planned.drafter + positions * planned.per_token
    assert together == pytest.approx(allocated(engine, target, drafter), rel=WITHIN)
    assert engine.budget.bytes == positions * planned.per_token


@each("kv_cache_dtype", ["auto", "fp8"])
def test_a_small_target_with_its_drafter(pair: tuple[Target, Drafter], kv_cache_dtype: KVCacheKind) -> None:
    target, drafter = pair
    shape = DrafterShape(name="tiny", config=drafter.config, own_embedding=False, own_head=True)
    compare(target, drafter, target.model.config.to_dict(), shape, kv_cache_dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_matrices_take_half_the_bytes_where_float32_is_computed(tied: bool) -> None:
    import torch
    from transformers import LlamaForCausalLM

    import tiny

    config = tiny.target_config(tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    if not pack_linears(model, halve=True, widen=True).linears:
        pytest.skip("no compiler here to pack linears")
    decoder = read_decoder(config.to_dict(), "it")
    kept = replace(parse_quantisation("float32"), halved=True)
    assert target_bytes(decoder, kept, device="cpu") == pytest.approx(weight_bytes(model), rel=WITHIN)
    work = Pair(decoder=decoder, drafter=None, quantisation=kept).verify(rows=1, tokens=1, context=0)
    assert work.bytes == 2 * (decoder.matrices + decoder.vocabulary) + 4 * (decoder.vectors - decoder.hidden_size)


@pytest.mark.slow
@pytest.mark.default
def test_the_default_target_with_the_drafter_that_ships(default_target: Target) -> None:
    shape = drafter_shape("smollm2-eagle3.1")
    planned = footprint(
        read_decoder(DEFAULT_CONFIG, "it"), shape, parse_quantisation("float32"), room=ROOM, device="cpu"
    )
    # One copy of the embedding before the linears are packed, two behind it.
    head = read_decoder(DEFAULT_CONFIG, "it").vocabulary * 4
    assert planned.weights - head == pytest.approx(weight_bytes(default_target.model), rel=WITHIN)
    # As `eyas serve` runs on a processor, but the session's target stays as it is.
    packed = replace(default_target, model=deepcopy(default_target.model))
    drafter = load_drafter("smollm2-eagle3.1").float().share_target(packed.embedding(), packed.head())
    if not pack_linears(packed.model, halve=False).linears:  # halved, as on some processors, they take less
        pytest.skip("no compiler here to pack linears")
    pack_linears(drafter, halve=True)
    compare(packed, drafter, dict(DEFAULT_CONFIG), shape)


@pytest.mark.slow
@pytest.mark.default
@pytest.mark.parametrize("asked", ["gguf", "int8"])
def test_the_default_target_quantised_on_a_processor(asked: str) -> None:
    if load_quantised()[0] is None:
        pytest.skip("no compiler here for integer products")
    target, drafter = load_pair("smollm2", "smollm2-eagle3.1", dtype="auto", device="cpu", quantization=asked)
    decoder, kinds = read_decoder(DEFAULT_CONFIG, "it"), gguf_kinds("smollm2")
    assert kinds is not None
    kept = gguf_quantisation(kinds, tied=True) if asked == "gguf" else in_blocks(asked, tied=True)
    assert kept is not None
    planned = footprint(decoder, drafter_shape("smollm2-eagle3.1"), kept, room=ROOM, device="cpu")
    held = footprint_of(target, drafter, OPTIONS, 256)
    assert planned.weights == pytest.approx(held.weights, rel=1e-4)  # but for some numbers of the rotation
    assert planned.drafter == pytest.approx(held.drafter, rel=1e-4)
    assert (planned.token, planned.drafter_token) == (held.token, held.drafter_token)


@pytest.mark.parametrize("kind", GGUF_BITS)
def test_gguf_types_take_the_planned_bits(kind: str) -> None:
    kernel, words = load_quantised()
    if kernel is None:
        pytest.skip(f"no integer products here: {words}")
    per_block, size = GGML_QUANT_SIZES[Kind[kind]]
    stored = np.zeros((64, 512 // per_block * size), dtype=np.uint8)
    packed = QuantisedLinear.of(kernel, blocks_of(stored, Kind[kind], 512))
    assert packed.nbytes * 8 == 64 * 512 * GGUF_BITS[kind]
    assert {one.name for one in Kind if is_packable(one)} == GGUF_BITS.keys()


@each("kind", ["fp8", "int4"])
def test_linears_that_a_gpu_quantises(kind: str) -> None:
    from transformers import LlamaForCausalLM

    from tiny import target_config as tiny_config

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = tiny_config(hidden_size=512, intermediate_size=1024, **heads)
    model = LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)
    replace_linears(model, kind)
    planned = target_bytes(read_decoder(config.to_dict(), "it"), parse_quantisation(kind), device="cuda")
    assert planned == pytest.approx(weight_bytes(model), rel=WITHIN)


@each("layout", ["fp8", "w4a16"])
def test_compressed_tensors_take_the_planned_bytes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU loads them; the products that it has are patched in."""
    from eyas.target import quantised_checkpoint
    from eyas.target.model import Target
    from target import test_quantised_checkpoint as published

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    monkeypatch.setattr(
        published, "CONFIG", type(published.CONFIG)(**{**published.CONFIG.to_dict(), **sizes, "head_dim": 64})
    )
    monkeypatch.setattr(quantised_checkpoint, "multiplies", lambda *_: None)
    published.write(tmp_path, layout)
    loaded = Target.load(str(tmp_path), dtype="bfloat16", device="cpu")
    config = target_config(str(tmp_path))
    decoder, kept = read_decoder(config, "it"), stored_quantisation(config, "it")
    held = weight_bytes(loaded.model)
    assert target_bytes(decoder, kept, device="cuda") == pytest.approx(held, rel=0.02)
    assert held < 0.6 * target_bytes(decoder, parse_quantisation("bfloat16"), device="cuda")
    done = CliRunner().invoke(
        app, ["plan", str(tmp_path), "--gpu", "h100", "--drafter", "none", "--context", "64", "--json"]
    )
    record = json.loads(done.stdout)
    assert record["memory"]["weights"] == target_bytes(decoder, kept, device="cuda")
    assert record["quantisation"]["name"] == ("fp8" if layout == "fp8" else "int4-g128")


@each("kind", ["int8", "fp8"])
def test_a_drafter_that_is_quantised_on_disk(
    kind: str, pair: tuple[Target, Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas import loading
    from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
    from eyas.drafter.quantise import quantised
    from tiny import drafter_config, random_drafter

    # Products of a GPU read multiples of 128 inputs.
    wide = {"hidden_size": 128, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = drafter_config(dtype="bfloat16", num_aux_hidden_states=2, aux_layer_ids=(1, 3), **wide)
    drafter = random_drafter(config).bfloat16()
    write_checkpoint(quantised(checkpoint_of(drafter), kind, "it"), tmp_path / kind)
    shape = drafter_shape(str(tmp_path / kind))
    assert (shape.own_embedding, shape.own_head, shape.halved) == (True, True, True)
    target = pair[0]
    if load_quantised()[0] is not None:
        loaded = loading.load_drafter_for(target, str(tmp_path / kind))
        planned = drafter_bytes(shape, parse_quantisation("float32"), device="cpu")
        assert planned == pytest.approx(weight_bytes(loaded, beside=target.model), rel=WITHIN)
    monkeypatch.setattr(
        loading, "_multiply_integers", lambda model, linears, _: loading._multiply_on_gpu(model, linears)
    )
    monkeypatch.setattr(loading, "multiplies", lambda *_: None)
    monkeypatch.setattr(loading, "pack_linears", lambda *_, **__: None)
    half = replace(target, model=deepcopy(target.model).bfloat16())
    loaded = loading.load_drafter_for(half, str(tmp_path / kind))
    planned = drafter_bytes(shape, parse_quantisation("bfloat16"), device="cuda")
    # Scales of whole rows are not planned, and only those of tiny drafters weigh anything.
    scales = sum(part.scale_EG.nbytes for part in loaded.modules() if isinstance(part, W8A8Linear))
    assert planned == pytest.approx(weight_bytes(loaded, beside=half.model) - scales, rel=WITHIN)


@pytest.mark.default
def test_the_built_in_configuration_is_that_of_the_default_target(default_target: Target) -> None:
    true = default_target.model.config.to_dict()
    for key, value in target_config("smollm2").items():
        if key != "dtype":
            assert true[key] == value, key


@pytest.mark.parametrize("padded", [True, False], ids=["captured", "exact"])
def test_the_buffers_of_rounds_take_the_planned_bytes(pair: tuple[Target, Drafter], padded: bool) -> None:
    target, drafter = pair
    device = RoundDevice(capture=GraphCapture(device=target.device, enabled=padded), queue=ImmediateQueue())
    engine = Engine(target, drafter, config=OPTIONS, device=device)
    states = drafter.config.num_aux_hidden_states * drafter.config.target_hidden_size
    vocabulary = target.facts.vocab_size
    planned = recorded_bytes(vocab_size=vocabulary, states=states, room=ROOM, element=4, padded=padded)
    assert engine.core.runner.bytes == pytest.approx(planned, rel=0.02)


def test_own_tensors_of_a_drafter_are_read_from_file_headers(tmp_path: Path) -> None:
    from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
    from tiny import drafter_config, random_drafter

    for own in (True, False):
        folder = tmp_path / f"own-{own}"
        drafter = random_drafter(drafter_config(), own_embedding=own, own_head=own)
        write_checkpoint(checkpoint_of(drafter), folder)
        shape = drafter_shape(str(folder))
        assert (shape.own_embedding, shape.own_head) == (own, own)
        of_config = drafter_shape(str(folder / "config.json"))
        assert not of_config.own_embedding, "what can be lent is taken to be lent"
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == shape.config.hidden_size
