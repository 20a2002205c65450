"""`eyas plan` from the outside: what it prints, what it refuses, and that it answers at once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.errors import UserError
from eyas.plan.report import render_report
from known_configs import LLAMA_8B, QWEN3_30B_A3B
from reports.hostile import hostile
from reports.pages import assert_sound

CPU = ["--gpu", "cpu", "--memory", "24", "--bandwidth", "25", "--tflops", "0.1"]


def run(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "llama" / "config.json")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return str(tmp_path / "qwen")


def test_it_answers_without_torch_and_with_few_imports() -> None:
    """Modules are counted instead of seconds: what takes long is importing, and a busy machine does not change it."""
    script = (
        "import sys; from eyas.cli.app import app\n"
        "app(['plan', '--json'], standalone_mode=False)\n"
        "heavy = [n for n in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'rich.table') if n in sys.modules]\n"
        "print(heavy, len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy, _, count = done.stderr.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(count) < 700
    assert json.loads(done.stdout)["recommended_depth"] > 0


def test_the_default_needs_no_file_and_no_network() -> None:
    code, record = run()
    assert code == 0
    assert record["target"]["parameters"] == 134_515_008
    assert record["drafter"] == {"name": "smollm2-eagle3.1", "family": "EAGLE-3.1", "assumed": False}
    assert "docs/shipped.md" in record["acceptance"]["source"]
    assert record["memory"]["kv_per_token"] == 2 * 30 * 3 * 64 * 2


def test_the_printed_form_has_the_same_figures(llama: str) -> None:
    said = CliRunner().invoke(app, ["plan", llama, "--gpu", "h100", "--users", "8"]).stdout
    _, record = run(llama, "--gpu", "h100", "--users", "8")
    assert record["verdict"] in said
    assert all(command in said for command in record["commands"])
    assert f"{record['recommended_speedup']:.2f}x" in said
    assert "14.96 GiB" in said, "8.03 B weights in 16 bits"


def test_what_does_not_fit_says_so_in_its_exit_code(llama: str) -> None:
    code, record = run(llama, "--gpu", "rtx4090", "--users", "64")
    assert code == 1
    assert not record["fits"]
    assert record["verdict"].startswith("does not fit")
    assert 0 < record["users_fit"] < 64


def test_fit_for_a_home_lab(llama: str, qwen: str) -> None:
    code, record = run(llama, "--gpu", "rtx4090", "--users", "64", "--fit")
    assert code == 0
    assert record["fits"]
    assert [change.split(":")[0] for change in record["changes"]] == ["users"]
    code, record = run(qwen, "--gpu", "rtx3090", "--users", "4", "--context", "16384", "--fit")
    assert code == 0
    assert record["quantisation"]["name"] == "int4"
    assert any(change.startswith("quantisation: int4") for change in record["changes"])
    assert record["memory"]["needed"] <= record["memory"]["usable"]
    assert any("quantised so" in note for note in record["notes"])
    code, record = run("--fit")
    assert record["changes"] == ["nothing: it fits as asked"]


@pytest.mark.slow
@pytest.mark.parametrize("card", ["rtx4090", "l4", "a100-40", "h200"])
@pytest.mark.parametrize("users", [1, 7, 300])
def test_what_was_fitted_fits(llama: str, card: str, users: int) -> None:
    code, record = run(llama, "--gpu", card, "--users", str(users), "--context", "32768", "--fit")
    assert code == 0
    assert record["memory"]["needed"] <= record["memory"]["usable"] <= record["card"]["memory_bytes"]
    again, same = run(
        *(llama, "--gpu", card, "--users", str(record["asked"]["users"])),
        *("--context", str(record["asked"]["context"]), "--quantization", record["quantisation"]["name"]),
    )
    assert again == 0, "as settings of their own"
    assert same["memory"] == record["memory"]


def test_nothing_fits_where_nothing_can(llama: str) -> None:
    with pytest.raises(UserError, match=r"does not fit on toy .* larger card such as rtx3090"):
        run(llama, "--gpu", "toy", "--memory", "2", "--bandwidth", "100", "--tflops", "10", "--fit")


def test_more_memory_never_means_fewer_users_and_a_longer_context_never_more(llama: str) -> None:
    fits = [run(llama, "--gpu", "h100", "--memory", str(size))[1]["users_fit"] for size in (20, 24, 48, 80, 640)]
    assert fits == sorted(fits)
    fits = [run(llama, "--gpu", "h100", "--context", str(count))[1]["users_fit"] for count in (128, 4096, 131072)]
    assert fits == sorted(fits, reverse=True)
    sizes = [
        run(llama, "--gpu", "h100", "--quantization", kind)[1]["memory"]["weights"]
        for kind in ("float32", "bf16", "int8", "int4-g32", "int4", "int4-g1024")
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_the_lines_are_lines_that_servers_take(llama: str) -> None:
    import inspect

    from eyas.cli.serve import serve
    from eyas.serve.speculative_config import read_speculative_config

    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    for words in ([], [llama], ["--drafter", "none"], CPU):
        _, record = run(*words, "--users", "2")
        own, vllm = (shlex.split(line) for line in record["commands"])
        assert own[:2] == ["eyas", "serve"]
        assert {word for word in own if word.startswith("--")} <= known
        config = own[own.index("--speculative-config") + 1]
        assert (read_speculative_config(config, own[2]).drafter is None) == ("none" in words)
        assert vllm[:2] == ["vllm", "serve"]
        if "--speculative-config" in vllm:
            depth = json.loads(vllm[vllm.index("--speculative-config") + 1])["num_speculative_tokens"]
            assert depth == record["recommended_depth"] > 0


def test_keys_and_values_in_fp8_take_half(llama: str) -> None:
    words = [llama, "--gpu", "h200", "--users", "256", "--context", "8192"]
    (_, wide), (_, narrow) = run(*words), run(*words, "--kv-cache-dtype", "fp8_e4m3")
    for key in ("kv_per_token", "drafter_kv_per_token"):
        assert wide["memory"][key] == 2 * narrow["memory"][key] > 0
    assert 2 * wide["users_fit"] <= narrow["users_fit"] <= 2 * wide["users_fit"] + 1
    assert narrow["expected"][0]["step_seconds"] < wide["expected"][0]["step_seconds"], "a step reads less"
    assert (wide["kv_cache_dtype"], narrow["kv_cache_dtype"]) == ("auto", "fp8")
    for line in narrow["commands"]:
        assert "--kv-cache-dtype fp8" in line
    assert not any("--kv-cache-dtype" in line for line in wide["commands"])


def test_blocks_are_granted_as_the_line_says(llama: str) -> None:
    from eyas.plan.memory import Footprint, blocks_of, plan_blocks

    _, record = run(llama, "--gpu", "h100", "--users", "5", "--context", "3000")
    memory, words = record["memory"], shlex.split(record["commands"][0])
    budget = plan_blocks(
        footprint=Footprint(
            weights=0,
            drafter=0,
            token=memory["kv_per_token"],
            drafter_token=memory["drafter_kv_per_token"],
            working=memory["working"],
            recorded=memory["recorded"],
        ),
        block_size=16,
        max_num_seqs=5,
        max_model_len=3000,
        free_bytes=memory["usable"] - memory["runtime"] - memory["weights"] - memory["drafter"],
        memory=int(float(words[words.index("--memory-gib") + 1]) * 2**30),
    )
    assert budget.blocks == record["kv_blocks"]["blocks"]
    assert budget.blocks == 5 * blocks_of(3000, 16), "all five at full length"


def test_acceptance_is_taken_from_where_it_is_said() -> None:
    for words, source, length in (
        (["--length", "2.5@3"], "given: 2.5", 2.5),
        (["--acceptance", "0.8,0.5,0.2"], "given: 0.8", 2.5),
    ):
        _, record = run(*words)
        assert record["acceptance"]["source"].startswith(source)
        assert record["acceptance"]["length_by_depth"][2] == pytest.approx(length)


def test_a_target_without_a_drafter_is_planned_with_the_usual_one(llama: str) -> None:
    _, record = run(llama, "--gpu", "h100")
    assert record["drafter"]["assumed"]
    assert "assumed" in record["acceptance"]["source"]
    assert any("yet to be trained" in note for note in record["notes"])
    assert "my-drafter" in record["commands"][0]


def test_calibration_on_measured_rows_predicts_the_others_within_10_percent(tmp_path: Path) -> None:
    """Spec-Bench prompts on two cores of a processor: docs/plan.md shows the same table."""
    measured = Path(__file__).parent.parent.parent / "docs" / "plan-cpu.json"
    _, record = run(*CPU, "--measured", str(measured), "--out", str(tmp_path))
    found = record["calibration"]
    assert len(found["steps"]) == 8
    assert found["worst_speedup_error"] < 0.1
    assert found["worst_error"] < 0.1
    assert json.loads((tmp_path / "plan.json").read_text()) == record
    drawn = (tmp_path / "plan.html").read_text()
    assert f"{found['worst_speedup_error']:.1%} off at worst" in drawn


@each("words", [["--gpu", "h100", "--users", "8"], ["--drafter", "none", "--users", "100000"]])
def test_the_page_shows_the_plan_and_needs_nothing_else(tmp_path: Path, words: list[str]) -> None:
    _, record = run("smollm2", *words, "--out", str(tmp_path))
    drawn = (tmp_path / "plan.html").read_text()
    assert_sound(drawn)
    assert drawn.count('<svg class="chart"') == 2
    assert drawn.count('<svg class="stack"') == 1
    assert record["verdict"] in unescape(drawn)
    assert all(command in unescape(drawn) for command in record["commands"])
    assert ("Drafting" in drawn) == (record["drafter"] is not None)
    assert_sound(render_report(hostile(record)))


def test_a_page_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(UserError, match=f"cannot write to {tmp_path}: .*--out"):
        run("smollm2", "--out", str(tmp_path))


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text(commit)
    _, record = run("some/model", "--gpu", "h100")
    assert record["target"]["parameters"] == 8_030_261_248
    with pytest.raises(
        UserError, match=r"the local cache does not have it and the hub cannot be asked .*; check the name"
    ):
        run("other/model")


@each(
    ("words", "said"),
    [
        (["no-such-folder"], "no-such-folder.*config.json"),
        (["no-such.gguf"], "no GGUF file"),
        (["--gpu", "rtx9999"], "rtx9999 is not in the table; choose one of rtx3090.*--memory, --bandwidth, --tflops"),
        (["--gpu", "cpu", "--memory", "8"], "--bandwidth, --tflops"),
        (["--memory", "8"], "no --gpu is named.*--bandwidth, --tflops"),
        (["--memory", "0"], "--memory is 0"),
        (["--bandwidth", "-3"], "--bandwidth is -3"),
        (["--quantization", "int3"], "int3.*not one of"),
        (["--quantization", "int4-g0"], "int4-g0"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype is 'int8'; it must be one of auto, fp8, fp8_e4m3"),
        (["--kv-cache-dtype", "fp8", "--gpu", "a100-80"], "a card that computes in fp8, which a100-80 does not"),
        (["--context", "9000"], "9,000 is above the 8,192"),
        (["--acceptance", "0.5", "--length", "2@3"], "one of them"),
        (["--drafter", "no-such-drafter"], "no-such-drafter"),
        (["--measured", "no-such.json"], "cannot read --measured"),
        (["--out", f"{__file__}/plan"], "cannot make .*--out"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_fix(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(*words)


def test_a_drafter_of_another_target_is_refused(llama: str) -> None:
    with pytest.raises(UserError, match=r"hidden size 576.*has 4096"):
        run(llama, "--drafter", "smollm2-eagle3.1")


def test_a_target_in_place_of_its_drafter_is_told(llama: str) -> None:
    with pytest.raises(UserError, match="target instead of its drafter"):
        run(llama, "--drafter", llama)


@each(("text", "said"), [("{", "not valid JSON"), ("[]", "must be an object"), ('{"model_type": "rwkv"}', "rwkv")])
def test_a_broken_configuration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=said):
        run(str(tmp_path))


GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}


def test_experts_in_mxfp4_are_planned_with_a_quarter_more_than_four_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    record = run(str(tmp_path))[1]
    assert record["quantisation"] == {"name": "mxfp4", "bits_per_weight": pytest.approx(4.63, abs=0.01)}
    assert record["memory"]["weights"] == pytest.approx(13.76e9, rel=0.01)  # the published files: 13.76 GB
    dense = run(str(tmp_path), "--quantization", "none")[1]
    assert dense["memory"]["weights"] > 3 * record["memory"]["weights"]
    assert any("experts stay mxfp4" in note for note in record["notes"])


def test_a_quantised_checkpoint_is_planned_as_it_is_stored(tmp_path: Path) -> None:
    for said, name in (
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4-g64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8-g1048576"),
        ({"quant_method": "fp8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
            },
            "int4-g32",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": said}))
        assert run(str(tmp_path))[1]["quantisation"]["name"] == name
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(UserError, match=r"'hqq'.*--quantization"):
        run(str(tmp_path))
