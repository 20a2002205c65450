"""The `vllm serve` line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from each import each
from eyas.errors import UserError
from eyas.serve.vllm.command import ServeOptions

TABLE = {"model": "d", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"model": "/m", "name": "m", "max_model_len": 512, "max_num_seqs": 8, **changes})


def test_options_of_eyas_are_said_in_vllms_words() -> None:
    words = options(
        dtype="float32",
        quantization="fp8",
        memory_gib=0.5,
        scheduling_policy="priority",
        async_scheduling=False,
        speculative_config=TABLE,
        others=("--tensor-parallel-size", "2"),
    ).words()
    line = " ".join(words)
    assert line.startswith("vllm serve /m --served-model-name m --max-model-len 512 --max-num-seqs 8 --dtype float32")
    assert "--quantization fp8 --kv-cache-memory-bytes 536870912 --no-async-scheduling" in line
    assert json.loads(words[words.index("--speculative-config") + 1]) == TABLE
    assert words[-2:] == ["--tensor-parallel-size", "2"]


def test_what_was_not_said_is_left_to_vllm() -> None:
    assert options().words() == [
        *("vllm", "serve", "/m", "--served-model-name", "m", "--max-model-len", "512", "--max-num-seqs", "8")
    ]


def test_the_line_for_eyas_listens_on_loopback_alone() -> None:
    words = options().seam_words(1234)
    assert words[-4:] == ["--host", "127.0.0.1", "--port", "1234"]
    assert "--enable-scale-out" in words


def test_vllm_counts_drafts_by_request_only_where_it_drafts() -> None:
    assert "--per-request-spec-decode-metrics" not in options().seam_words(1)
    assert "--per-request-spec-decode-metrics" in options(speculative_config=TABLE).seam_words(1)


@each("word", ["--port", "--max-model-len=9", "--speculative-config.model", "--max_num_seqs", "-q"])
def test_what_eyas_says_itself_is_refused_behind_the_dashes(word: str) -> None:
    with pytest.raises(UserError, match="does not go behind the --"):
        options(others=(word, "1"))


@each("others", [("--data-parallel-size", "2"), ("--data_parallel_size=2",), ("-dp", "2")])
def test_a_table_that_replicas_would_drop_is_refused(others: tuple[str, ...]) -> None:
    assert options(others=others).data_parallel == 2
    with pytest.raises(UserError, match="drop the table"):
        options(others=others, speculative_config=TABLE)


def test_quantisation_of_eyas_own_engine_is_refused() -> None:
    with pytest.raises(UserError, match="--quantization int4"):
        options(quantization="int4")
