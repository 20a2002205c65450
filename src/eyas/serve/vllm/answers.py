"""Turns events of vLLM's stream into output deltas; text, stops and counts are made as for eyas' own engine.

Only token ids are read from the answer, so text, stop strings and stop tokens are handled alike for both engines. Exact
counts of speculation come with the end; while a stream runs, each event counts as one step, which is true as long as
events are read as fast as they come.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eyas.engine.async_engine import EngineError
from eyas.engine.logprobs import TokenLogprobs
from eyas.engine.output import OutputDelta, OutputProcessor, SpecDecodeStats
from eyas.engine.request import FinishReason, Request, SequenceState

Json = Mapping[str, Any]


class AnswerStream:
    """One answer as it is streamed."""

    def __init__(self, key: int, request: Request, processor: OutputProcessor, max_depth: int) -> None:
        self.stats = SpecDecodeStats()
        """The counts, complete once the answer has ended."""
        # vLLM follows the grammar; here it would be compiled for nothing.
        self._seq = SequenceState(key=key, arrival=key, request=replace(request, grammar=None))
        self._processor, self._max_depth = processor, max_depth
        self._first: OutputDelta | None = None
        self._last: OutputDelta | None = None
        processor.open(key, self._seq.request)

    @property
    def ended(self) -> OutputDelta | None:
        """The last output, once it exists. Send it after `count`."""
        return self._last

    def close(self) -> None:
        self._processor.drop(self._seq.key)

    def add(self, choice: Json, prompt_logprobs: Sequence[Json | None] | None = None) -> OutputDelta | None:
        """The outputs of one event; None if there are none, or if it is the last output, which is then in `ended`."""
        if self._last is not None:
            return None
        seq, tokens = self._seq, [int(token) for token in choice.get("token_ids") or ()]
        stop = self._processor.check_stop(seq, tokens)
        if stop.finished is None and (reason := choice.get("finish_reason")) is not None:
            if reason in ("abort", "error"):
                raise EngineError(f"vLLM ended the answer: {reason}")
            stop.finished = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
            stop.reason = choice.get("stop_reason")
        if not stop.tokens and stop.finished is None:
            return None
        logprobs = None
        if seq.request.logprobs is not None:
            content = (choice.get("logprobs") or {}).get("content") or ()
            logprobs = tuple(_logprobs(one, seq.request.logprobs) for one in content[: len(stop.tokens)])
        told = None
        if prompt_logprobs is not None and seq.request.prompt_logprobs is not None:
            asked = seq.request.prompt_logprobs
            told = tuple(
                _prompt_logprobs(token, entry, asked)
                for token, entry in zip(seq.request.prompt[1:], prompt_logprobs[1:], strict=True)
                if entry is not None
            )
        self._processor.add(seq, stop, drafted=0, accepted=0, logprobs=logprobs, prompt_logprobs=told)
        seq.tokens += stop.tokens
        (delta,) = self._processor.process()
        if self._first is not None and 1 < len(delta.tokens) <= self._max_depth + 1:
            delta.depths = (*range(1, len(tokens)), 0)[: len(delta.tokens)]
        else:
            delta.depths = (0,) * len(delta.tokens)
        self._first = self._first or delta
        if stop.finished is not None:
            self._last = delta
            return None
        return delta

    def count(self, event: Json) -> None:
        """Read the counts of the last event: speculation, and tokens from the prefix cache."""
        usage, stats = event.get("usage") or {}, self.stats
        stats.tokens = self._seq.new_tokens
        if self._first is not None:
            # It comes after the first output was sent; it is read once the answer is complete.
            self._first.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        told = (event.get("metrics") or {}).get("speculative_decoding")
        if told:
            exactly = [int(count) for count in told["acceptance_histogram"]]
            stats.drafts, stats.drafted = int(told["num_spec_steps"]), int(told["num_draft_tokens"])
            stats.accepted = int(told["num_accepted_draft_tokens"])
            at_least = [sum(exactly[depth:]) for depth in range(1, len(exactly))]
            stats.accepted_at = at_least[: len([count for count in at_least if count])]
            drafted, accepted = told.get("per_step_drafted") or (), told.get("per_step_accepted") or ()
            stats.steps = tuple(zip(drafted, accepted, strict=True))
        # The first token comes from the prefill; the last round may have accepted more tokens than the answer has.
        stats.passes = max(stats.drafts + 1, stats.tokens - stats.accepted)


def events_of(buffer: bytes) -> tuple[list[Json], bytes]:
    """The complete events of a stream, and the remaining bytes."""
    *whole, rest = buffer.split(b"\n\n")
    data = [part.removeprefix(b"data: ") for part in whole if part.startswith(b"data: ")]
    return [json.loads(part) for part in data if part != b"[DONE]"], rest


def _logprobs(entry: Json, asked: int) -> TokenLogprobs:
    """The logprobs of an event. vLLM lists the chosen token first, then cuts the list: one more was requested."""
    ranked = sorted(
        ((int(one["token_id"]), float(one["logprob"])) for one in entry.get("top_logprobs") or ()),
        key=lambda pair: -pair[1],
    )
    return TokenLogprobs(
        token=int(entry["token_id"]),
        logprob=float(entry["logprob"]),
        rank=int(entry.get("rank") or 0),
        top=tuple(ranked[:asked]),
    )


def _prompt_logprobs(token: int, entry: Json, asked: int) -> TokenLogprobs:
    own = entry[str(token)]
    ranked = sorted(((int(name), one["logprob"], one["rank"]) for name, one in entry.items()), key=lambda one: one[2])
    return TokenLogprobs(
        token=token,
        logprob=float(own["logprob"]),
        rank=int(own["rank"]),
        top=tuple((name, float(logprob)) for name, logprob, rank in ranked if rank <= asked),
    )
