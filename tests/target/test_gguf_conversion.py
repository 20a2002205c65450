"""A folder converted from GGUF gives the logits of the file's model; unknown keys and tensors are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from each import each
from eyas.errors import UserError
from eyas.target import gguf as conversion
from eyas.target.facts import read_facts
from eyas.target.gguf_architectures import llama3_factors
from eyas.target.locate import locate
from eyas.target.model import Target
from tiny_gguf import as_stored, tiny_model, write_gguf

Edit = Callable[[gguf.GGUFWriter], None]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    ids_BT = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(3))
    logits_BTV: torch.Tensor = model(input_ids=ids_BT).logits
    return logits_BTV


def converted(path: Path) -> Any:
    return Target.load(str(path), dtype="float32", cache=path.parent / "cache").model


@each("family", ["llama", "qwen2", "qwen3", "phi3", "qwen3_moe"])
@each("tied", [False, True])
def test_a_converted_model_gives_exactly_the_logits_of_the_original(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    ours = converted(write_gguf(model, tmp_path / "m.gguf"))
    assert torch.equal(logits_of(ours), logits_of(model))
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied


SAID: dict[str, tuple[list[bool], Edit]] = {
    "nothing": ([True] * 5 + [False, True], lambda w: None),
    "one number": ([True, True, False], lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 3)),
    "each layer": (
        [False, True, True],
        lambda w: w.add_array("gemma3.attention.sliding_window_pattern", [False, True, True]),
    ),
}


@each("scaled", [False, True])
@each("said", SAID)
def test_gemma3_keeps_windows_rotations_and_norms(said: str, scaled: bool, tmp_path: Path) -> None:
    slides, edit = SAID[said]
    scaling = {"rope_type": "linear", "factor": 8.0} if scaled else {"rope_type": "default"}
    model = tiny_model(
        "gemma3_text",
        num_hidden_layers=len(slides),
        layer_types=["sliding_attention" if slide else "full_attention" for slide in slides],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_theta": 50000.0, **scaling},
        },
    )
    ours = converted(write_gguf(model, tmp_path / "m.gguf", edit=edit))
    assert torch.equal(logits_of(ours), logits_of(model))
    assert ours.config.layer_types == model.config.layer_types
    wide = tiny_model(
        "gemma3_text",
        sliding_window=40,
        num_hidden_layers=len(slides),
        layer_types=model.config.layer_types,
        rope_parameters=model.config.rope_parameters,
    )
    assert not torch.equal(logits_of(ours), logits_of(wide)), "the window must matter"


def test_gemma3_of_62_layers_scales_attention_by_its_heads(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 62, "layer_types": None}
    model = tiny_model("gemma3_text", query_pre_attn_scalar=8, **small)
    ours = converted(write_gguf(model, tmp_path / "m.gguf"))
    assert torch.equal(logits_of(ours), logits_of(model))


def test_a_quantised_model_gives_exactly_the_logits_of_its_dequantised_weights(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", kind=kind)
    ours = converted(path)
    assert torch.equal(logits_of(ours), logits_of(as_stored(tiny_model(), kind)))
    assert not torch.equal(logits_of(ours), logits_of(tiny_model()))
    record = json.loads((Path(locate(str(path), cache=tmp_path / "cache")) / "eyas.json").read_text())
    assert record["dequantised_from"]["tensor_types"] == {"F32": 7, "Q8_0": 23}


def test_rotary_rows_in_the_wrong_order_would_be_noticed(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", reorder=False)
    assert not torch.allclose(logits_of(converted(path)), logits_of(tiny_model()), atol=1e-2)


@each(
    ("rope", "edit"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(4.0)),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(32),
            ),
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            lambda w: w.add_tensor("rope_freqs.weight", llama3_factors(8.0, 50000.0, 16).astype(np.float32)),
        ),
    ],
)
def test_rotary_scaling_survives_conversion(rope: dict[str, Any], edit: Edit, tmp_path: Path) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 50000.0, **rope})
    ours = converted(write_gguf(model, tmp_path / "m.gguf", edit=edit))
    assert torch.equal(logits_of(ours), logits_of(model))
    assert not torch.equal(logits_of(ours), logits_of(tiny_model())), "the scaling must matter"


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + k / 4 for k in range(8)], "long_factor": [2.0] * 8}


@each(
    "rope",
    [
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {**LONGROPE, "original_max_position_embeddings": 32},  # what is read is longer
        {**LONGROPE, "original_max_position_embeddings": 64},
    ],
)
def test_phi3_keeps_its_window_and_its_rotations(rope: dict[str, Any], tmp_path: Path) -> None:
    original = {key: rope[key] for key in ("original_max_position_embeddings",) if key in rope}
    model = tiny_model("phi3", rope_parameters={"rope_theta": 50000.0, **rope}, **original)
    ours = converted(write_gguf(model, tmp_path / "m.gguf"))
    torch.testing.assert_close(logits_of(ours), logits_of(model), rtol=1e-5, atol=1e-4)
    assert not torch.allclose(logits_of(ours), logits_of(tiny_model("phi3")), atol=1e-2), "the rotation must matter"
    wide = tiny_model("phi3", sliding_window=None, rope_parameters=model.config.rope_parameters, **original)
    assert not torch.allclose(logits_of(ours), logits_of(wide), atol=1e-2), "the window must matter"


def test_large_models_are_split_into_shards_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.target.gguf import write_bfloat16

    monkeypatch.setattr(
        conversion, "write_bfloat16", lambda *args: write_bfloat16(*args, shard_bytes=100_000), raising=True
    )
    model = tiny_model()
    folder = Path(locate(str(write_gguf(model, tmp_path / "m.gguf")), cache=tmp_path / "cache"))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert not (folder / "model.safetensors").exists()
    assert all(shard.stat().st_size < 110_000 for shard in shards)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits_of(ours), logits_of(model))


def test_facts_come_from_the_file(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    facts = read_facts(str(path), cache=tmp_path / "cache")
    assert (facts.source, facts.model_type, facts.num_hidden_layers) == (str(path), "llama", 3)
    assert (facts.hidden_size, facts.vocab_size, facts.max_position_embeddings) == (64, 264, 128)


@each(
    ("edit", "message"),
    [
        (lambda w: w.add_sliding_window(64), r"llama\.attention\.sliding_window, which eyas does not understand"),
        (lambda w: w.add_expert_count(8), "mixture of 8 experts of architecture 'llama'"),
        (lambda w: w.add_key_length(16) or w.add_value_length(8), "keys and values of different sizes"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rotary scaling 'longrope'"),
        (lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 64), np.float32)), "ffn_gate_inp"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3.0, np.float32)), "is not Llama 3's scaling"),
        (
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
            "rope_factors_short.weight beside",
        ),
        (lambda w: w.add_rope_scaling_attn_factors(1.2), "sets llama.rope.scaling.attn_factor without"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 pieces"),
    ],
)
def test_unknown_keys_and_tensors_are_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", edit=edit)
    refuses(path, message)


@each(
    ("edit", "message"),
    [
        (lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 0), "neither a number above 0 nor 3 truth"),
        (lambda w: w.add_array("gemma3.attention.sliding_window_pattern", [True]), "neither a number above 0 nor 3"),
        (lambda w: w.add_final_logit_softcapping(30.0), "gemma3.final_logit_softcapping, which eyas does not"),
    ],
)
def test_unknown_gemma3_values_are_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    refuses(write_gguf(tiny_model("gemma3_text"), tmp_path / "m.gguf", edit=edit), message)


@each(
    ("edit", "message"),
    [
        (lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)), "no tensor rope_factors_short"),
        (
            lambda w: w.add_tensor("blk.0.attn_q.weight", np.ones((64, 64), np.float32)),
            "blk.0.attn_q.weight that a phi3",
        ),
    ],
)
def test_unknown_phi3_tensors_are_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    refuses(write_gguf(tiny_model("phi3"), tmp_path / "m.gguf", edit=edit), message)


@each(
    ("edit", "drop", "message"),
    [
        (lambda w: None, "blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.0.up_proj.weight is missing"),
        (lambda w: w.add_expert_weights_scale(2.0), "", "qwen3moe.expert_weights_scale, which eyas does not"),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_shexp.weight", np.ones((32, 64), np.float32)),
            "",
            "blk.0.ffn_gate_shexp.weight that a qwen3moe",
        ),
    ],
)
def test_missing_or_unknown_parts_of_a_mixture_are_refused(edit: Edit, drop: str, message: str, tmp_path: Path) -> None:
    refuses(write_gguf(tiny_model("qwen3_moe"), tmp_path / "m.gguf", edit=edit, drop=drop), message)


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", architecture="mamba")
    refuses(path, "architecture 'mamba'; supported are models of llama, qwen2, qwen3, gemma3, phi3, qwen3moe:")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    refuses(write_gguf(tiny_model(), tmp_path / "m.gguf", pre="kimi-k2"), "pre-tokenizer 'kimi-k2'; supported are")


@each("lost", ["blk.1.ffn_up.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(lost: str, tmp_path: Path) -> None:
    expected = "model.layers.1.mlp.up_proj.weight is missing" if lost.startswith("blk") else lost
    refuses(write_gguf(tiny_model(), tmp_path / "m.gguf", drop=lost), expected)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    refuses(path, "is not a GGUF file")
    path.write_bytes(b"")
    refuses(path, "is not a GGUF file")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tiny_model(), tmp_path / "whole.gguf").read_bytes()
    for length in (5, 20, 300, 3000, 9000, len(whole) // 2, len(whole) - 1000):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        refuses(path, "damaged or cut short")


def test_an_absurd_length_is_refused_at_once(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tiny_model(), tmp_path / "whole.gguf").read_bytes())
    at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    whole[at : at + 8] = (2**62).to_bytes(8, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    refuses(path, "damaged or cut short")


def refuses(path: Path, message: str) -> None:
    cache = path.parent / "cache"
    with pytest.raises(UserError) as raised:
        locate(str(path), cache=cache)
    assert message.replace("\\", "") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert folders_in(cache) == []


def folders_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "targets").iterdir() if path.is_dir())


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_gguf(tiny_model(), tmp_path / "m.gguf"), tmp_path / "cache"
    produced = 0
    weight = conversion.dense_weight

    def interrupted(*args: Any) -> torch.Tensor:
        nonlocal produced
        produced += 1
        if produced == 5:
            raise KeyboardInterrupt
        return weight(*args)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "dense_weight", interrupted)
        with pytest.raises(KeyboardInterrupt):
            locate(str(path), cache=cache)
    assert produced == 5
    assert folders_in(cache) == []
    folder = Path(locate(str(path), cache=cache))
    assert folders_in(cache) == [folder.name]


@pytest.mark.slow
def test_two_first_runs_at_once_make_one_good_folder(tmp_path: Path) -> None:
    model = tiny_model()
    path, cache = write_gguf(model, tmp_path / "m.gguf"), tmp_path / "cache"
    program = (
        "import io, logging, sys; from pathlib import Path; from eyas.target.locate import locate\n"
        "said = io.StringIO()\n"
        "logging.basicConfig(stream=said, level='INFO', format='%(message)s')\n"
        "print(locate(sys.argv[1], cache=Path(sys.argv[2])))\n"
        "print(sum(line.startswith('dequantising') for line in said.getvalue().splitlines()))"
    )
    command = [sys.executable, "-c", program, str(path), str(cache)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["0", "1"]
    assert folders_in(cache) == [Path(answers[0][0]).name]
    assert torch.equal(logits_of(converted(path)), logits_of(model))
