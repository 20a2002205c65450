"""Invalid requests are refused, and a live request knows its state."""

import subprocess
import sys
from typing import Any

import pytest

from each import each
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.errors import UserError
from eyas.sampling import Sampling


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {"prompt": (1, 2, 3), "sampling": Sampling(), "max_new_tokens": 5}
    return Request(**fields | changes)


@each(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt has 0 tokens"),
        ({"prompt": (4, -1)}, "token -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 6}, "min_new_tokens is 6, outside 0 to max_new_tokens 5"),
        ({"stop_strings": ("END", "")}, "stop string is empty"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21, outside 0 to 20"),
        ({"seed": 2**63}, "does not fit in 64 bits"),
    ],
)
def test_a_request_names_what_is_wrong_with_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(**changes)


def test_a_request_takes_every_value_up_to_its_limits() -> None:
    for changes in (
        {"min_new_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": -(2**63)},
        {"max_new_tokens": 1},
    ):
        request(**changes)
    assert request().speculation == Speculation(mode="auto", depth=None)


@each(
    ("fields", "message"),
    [
        ({"mode": "fixed"}, "depth None"),
        ({"mode": "fixed", "depth": -1}, "depth -1"),
        ({"mode": "auto", "depth": 3}, "auto does not take depth 3"),
        ({"mode": "off", "depth": 3}, "off does not take depth 3"),
        ({"mode": "fast"}, "'fast' is unknown"),
    ],
)
def test_only_fixed_speculation_takes_a_depth(fields: dict[str, Any], message: str) -> None:
    assert Speculation(mode="fixed", depth=0).depth == 0
    with pytest.raises(UserError, match=message):
        Speculation(**fields)


def test_a_live_request_knows_its_state() -> None:
    seq = SequenceState(key=7, arrival=0, request=request())
    assert (seq.tokens, seq.pending, seq.new_tokens, seq.prompt_length, seq.limit) == ([1, 2, 3], 3, 0, 3, 8)
    assert seq.finished is None
    assert seq.speculates
    assert not SequenceState(key=8, arrival=1, request=request(speculation=Speculation(mode="off"))).speculates
    seq.tokens += [4, 5]
    seq.target_length = 4
    assert (seq.new_tokens, seq.pending, seq.prompt_length, seq.limit) == (2, 1, 3, 8)
    assert seq.request.prompt == (1, 2, 3)
    assert seq != SequenceState(key=7, arrival=0, request=seq.request), "compared by identity"


def test_finish_reasons_are_their_names_on_the_wire() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled", "error"]


def test_bookkeeping_does_not_import_torch() -> None:
    code = (
        "import sys, eyas.engine.request, eyas.engine.kv_cache.block_manager, eyas.engine.scheduler;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
