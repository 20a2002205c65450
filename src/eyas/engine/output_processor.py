"""What requests get, put into words: where an answer ends, its text, its pieces, and how speculation went.

Words take the host time and decide nothing, except where a stop string ends an answer. So what a step gave is noted
when it is committed and told later, for instance while a device is busy with the next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from eyas.engine.detokenizer import TextStream
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import FinishReason, SequenceState
from eyas.engine.sampler import TokenLogprobs

KEPT_TEXTS = 2**16
"""Texts of a token or two, which is what streams decode, and the same ones again and again."""


@dataclass(kw_only=True, slots=True)
class StopCheck:
    """New tokens as far as they belong to the answer."""

    tokens: list[int]
    finished: FinishReason | None
    texts: list[str] | None = None
    """Where they were needed to tell whether the answer ends."""


@dataclass(kw_only=True, slots=True)
class _Note:
    """What a request got in a step, before it is put into words."""

    key: int
    stop: StopCheck
    drafted: int
    accepted: int
    cached: int
    logprobs: tuple[TokenLogprobs, ...] | None
    hidden_TX: Tensor | None
    stream: TextStream
    tally: SpecDecodeStats


class OutputProcessor:
    """The texts and counts of all requests under way, and pieces that nobody has taken yet."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.tally = SpecDecodeStats()
        """Of all requests together."""
        self._decode = lru_cache(maxsize=KEPT_TEXTS)(decode)
        self._streams: dict[int, TextStream] = {}
        self._tallies: dict[int, SpecDecodeStats] = {}
        self._notes: list[_Note] = []
        self._ready: list[OutputDelta] = []

    @property
    def behind(self) -> bool:
        """Whether something was noted and not told."""
        return bool(self._notes)

    def open(self, key: int, stop_strings: Sequence[str]) -> None:
        """Begin an answer."""
        self._streams[key] = TextStream(self._decode, stop_strings)
        self._tallies[key] = SpecDecodeStats()

    def close(self, key: int) -> None:
        """Let go of an answer that has ended; what was noted of it is still told."""
        self._streams.pop(key, None)
        self._tallies.pop(key, None)

    def drop(self, key: int) -> None:
        """Forget an answer that nobody wants any more."""
        self._notes = [note for note in self._notes if note.key != key]
        self._ready = [piece for piece in self._ready if piece.key != key]
        self.close(key)

    def tally_of(self, key: int) -> SpecDecodeStats:
        """How speculation goes for a request under way; the object goes on counting."""
        return self._tallies[key]

    def check_stop(self, seq: SequenceState, tokens: Sequence[int], limit: int) -> StopCheck:
        """How many of these new tokens belong to the answer, which may come to `limit` tokens, and whether it ends."""
        if seq.walk is not None and seq.walk.failure is not None and tokens:
            return StopCheck(tokens=list(tokens[:1]), finished=FinishReason.ERROR)  # chosen without the grammar
        stop = _until_the_end(seq, tokens, limit)
        if seq.request.stop_strings:
            stop.texts, stop.finished = _words(self._streams[seq.key], stop.tokens, stop.finished)
            stop.tokens = stop.tokens[: len(stop.texts)]
        return stop

    def add(
        self,
        key: int,
        stop: StopCheck,
        *,
        drafted: int,
        accepted: int,
        cached: int,
        logprobs: tuple[TokenLogprobs, ...] | None,
        hidden_TX: Tensor | None = None,
    ) -> None:
        """Take down what a request got of a step that verified so many drafts."""
        self._notes.append(
            _Note(
                key=key,
                stop=stop,
                drafted=drafted,
                accepted=accepted,
                cached=cached,
                logprobs=logprobs,
                hidden_TX=hidden_TX,
                stream=self._streams[key],
                tally=self._tallies[key],
            )
        )

    def process(self) -> None:
        """Put into words and count what was noted."""
        for note in self._notes:
            stop, count = note.stop, len(note.stop.tokens)
            texts = stop.texts
            if texts is None:
                texts, _ = _words(note.stream, stop.tokens, stop.finished)
            for tally in (self.tally, note.tally):
                tally.count(drafted=note.drafted, accepted=note.accepted, tokens=count)
            self._ready.append(
                OutputDelta(
                    key=note.key,
                    tokens=tuple(stop.tokens),
                    texts=tuple(texts),
                    depths=(*range(1, note.accepted + 1), 0)[:count],
                    drafted=note.drafted,
                    accepted=note.accepted,
                    logprobs=note.logprobs,
                    finished=stop.finished,
                    num_cached_tokens=note.cached,
                    hidden_states=note.hidden_TX,
                )
            )
        self._notes = []

    def take(self) -> list[OutputDelta]:
        """Everything processed since the last time."""
        ready, self._ready = self._ready, []
        return ready


def _until_the_end(seq: SequenceState, tokens: Sequence[int], limit: int) -> StopCheck:
    """Up to a stop token or the limit; what the text may say is left out."""
    request = seq.request
    for count, token in enumerate(tokens, 1):
        if token in request.stop_ids and seq.new_tokens + count > request.min_new_tokens:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.STOP)
        if len(seq.tokens) + count >= limit:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.LENGTH)
    return StopCheck(tokens=list(tokens), finished=None)


def _words(
    stream: TextStream, tokens: Sequence[int], finished: FinishReason | None
) -> tuple[list[str], FinishReason | None]:
    """The text of each token, none of its own for a stop id at the end; a stop string may end it earlier."""
    texts: list[str] = []
    for token in tokens[:-1] if finished is FinishReason.STOP else tokens:
        texts.append(stream.push(token))
        if stream.stopped:
            return texts, FinishReason.STOP
    if finished is FinishReason.STOP:
        texts.append(stream.finish())
    elif finished is not None:
        texts[-1] += stream.finish()
    return texts, finished
