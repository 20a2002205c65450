"""vLLM as a child process: options, answers and errors."""

from pathlib import Path
from typing import Any

import pytest
from vllm_process import VLLMProcess, capture_sizes, installed, vllm_options

from eyas.errors import UserError


def options(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"users": [1, 4], "max_model_len": 64, "memory_share": 0.3, "dtype": "float32"}
    return vllm_options("model", **{**given, **changes})


def test_prompts_are_answered_with_limited_concurrency(vllm_python: str, tmp_path: Path) -> None:
    assert installed(vllm_python) == "9.9"
    with VLLMProcess(vllm_python, options(), tmp_path / "log") as vllm:
        assert vllm.version == "9.9"
        told = vllm.answer([(1, 2)] * 10, users=4, max_tokens=3)
        again = vllm.answer([(1, 2)] * 2, users=1, max_tokens=5)
    assert (told["tokens"], told["steps"]) == (30, 9)  # 4, 4 and 2 requests of three steps
    assert (again["tokens"], again["steps"]) == (10, 10)
    assert told["seconds"] > 0
    assert told["ms_per_step"] > 0
    assert "noise" in (tmp_path / "log").read_text()


def test_errors_of_vllm_are_reported(vllm_python: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no drafts here"),
        VLLMProcess(vllm_python, options(depth=3, drafter="d"), tmp_path / "log"),
    ):
        pass


def test_an_interpreter_without_it_is_refused(tmp_path: Path) -> None:
    assert installed(None) is None
    with pytest.raises(UserError, match="cannot be run"):
        installed(str(tmp_path / "python"))


def test_options_force_an_acceptance_length_and_capture_what_is_measured() -> None:
    drafting = options(users=[1, 256], depth=3, drafter="d", length=2.5, random_weights=True)
    assert drafting["speculative_config"] == {
        "model": "d",
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    assert drafting["load_format"] == "dummy"
    assert 1024 in drafting["compilation_config"]["cudagraph_capture_sizes"]
    plain = options(eager=True)
    assert "speculative_config" not in plain
    assert "compilation_config" not in plain
    assert plain["enforce_eager"] is True


def test_no_size_is_above_the_largest_step() -> None:
    assert capture_sizes([1, 6], 0) == [1, 2, 4, 6, 8]
    assert max(capture_sizes([1, 512], 3)) == 2048
