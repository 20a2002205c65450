"""A stream gives latencies and counts, however its bytes are split; invalid streams are errors."""

import json
from typing import Any

import pytest

from each import each
from eyas.bench.counters import DraftCounts, draft_counts_of_event, pooled
from eyas.bench.stream import StreamedAnswer, parse_stream

ASKED = StreamedAnswer(key="k", category="c", turn=1, sent=1.0)
USAGE = {"prompt_tokens": 5, "completion_tokens": 7}


def line(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    return line({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


END = line({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


def test_times_are_those_of_the_text() -> None:
    role = line({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    found = parse_stream(
        ASKED, [(1.1, role), (1.5, chunk("ab")), (1.7, chunk("c") + chunk("d")), (2.1, chunk("", "stop")), (2.2, END)]
    )
    assert found.error is None
    assert found.text == "abcd"
    assert found.time_to_first_token == pytest.approx(0.5)
    assert found.seconds == pytest.approx(1.1)  # the usage that follows is no token
    assert found.time_per_output_token == pytest.approx((2.1 - 1.5) / 6)
    assert found.chunk_gaps == pytest.approx([0.2])  # two events at once are one arrival
    assert found.event_gaps == pytest.approx([0.4, 0.2, 0.0, 0.4])
    assert (found.tokens, found.prompt_tokens, found.chunks) == (7, 5, 2)


@each("size", [1, 2, 7, 1000])
def test_streams_may_be_split_at_any_byte(size: int) -> None:
    stream = b": ping\r\n\r\n" + chunk("hällo").replace(b"\n", b"\r\n") + chunk(" wörld", "length") + END
    parts = [(2.0, stream[i : i + size]) for i in range(0, len(stream), size)]
    found = parse_stream(ASKED, parts)
    assert (found.text, found.tokens, found.error) == ("hällo wörld", 7, None)


def test_reasoning_and_plain_completions_are_text_too() -> None:
    thought = line({"choices": [{"delta": {"reasoning_content": "hm "}, "finish_reason": None}]})
    plain = line({"choices": [{"text": "so", "finish_reason": "stop"}]})
    assert parse_stream(ASKED, [(2.0, thought + plain + END)]).text == "hm so"


@each(
    ("stream", "words"),
    [
        (b"<html>hello</html>", "no events"),
        (b"", "no events"),
        (b"data: {oops\n\n", "no JSON"),
        (b"data: 3\n\n", "no object"),
        (line({"hello": "world"}), "without choices"),
        (line({"choices": ["x"]}), "choice is no object"),
        (line({"error": {"message": "engine fell over"}}), "engine fell over"),
        (chunk("a"), "broke off after 1"),
        (chunk("a", "stop"), "no usage"),
    ],
)
def test_invalid_streams_are_errors(stream: bytes, words: str) -> None:
    found = parse_stream(ASKED, [(2.0, stream)])
    assert found.error is not None
    assert words in found.error
    assert found.tokens == 0


def test_drafting_is_read_from_eyas_and_from_vllm() -> None:
    eyas = {
        "usage": {"speculative": {"drafts": 4, "drafted_tokens": 8, "accepted_tokens": 6, "accepted_by_depth": [4, 2]}}
    }
    histogram = {"acceptance_histogram": [0, 2, 2], "num_spec_steps": 4, "num_accepted_draft_tokens": 6}
    vllm = {"metrics": {"speculative_decoding": histogram | {"num_draft_tokens": 8}}}
    expected = DraftCounts(drafts=4, drafted=8, accepted=6, accepted_at=(4, 2))
    assert draft_counts_of_event(eyas) == draft_counts_of_event(vllm) == expected
    assert expected.length == 2.5
    assert expected.by_depth == (1.0, 0.5)
    assert draft_counts_of_event({"usage": {"speculative": {"mode": "x"}}}) is None
    assert draft_counts_of_event({"usage": USAGE}) is None


def test_acceptance_is_pooled_over_rounds_not_averaged_over_requests() -> None:
    many, few = DraftCounts(drafts=90, accepted=180, accepted_at=(90, 90)), DraftCounts(drafts=10)
    both = pooled([many, None, few])
    assert both is not None
    assert both.length == pytest.approx(2.8)
    assert both.accepted_at == (90, 90)
    assert pooled([None]) is None
    assert DraftCounts().length is None
