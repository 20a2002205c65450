"""Outputs of requests: deltas per step, finished outputs, speculation statistics, and the processor that makes them.

Detokenizing costs host time and decides nothing, except where a stop string ends an answer. So tokens are recorded at
commit and turned into text later, while the device runs the next step.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import accumulate

from torch import Tensor

from eyas.engine.detokenizer import TextStream, text_behind
from eyas.engine.logprobs import TokenLogprobs
from eyas.engine.request import FinishReason, Request, SequenceState

KEPT_TEXTS = 2**16
"""Cached texts of one or two tokens, which is what streams decode over and over."""


# Neither frozen nor keyword-only: a step creates hundreds of these, and either option doubles the time.
@dataclass(slots=True)
class OutputDelta:
    """Output of one step for one request. Do not change it after it was returned."""

    key: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """Text of each token once it can no longer change; often empty while text is held back, never revised. All empty
    without `Request.detokenize`."""
    depths: tuple[int, ...]
    """Draft depth from which each token was accepted; 0 for the target's own token."""
    drafted: int = 0
    """Draft tokens verified in the step."""
    accepted: int = 0
    """Draft tokens accepted, including any behind the end of the answer."""
    suffix_drafted: int = 0
    """Verified draft tokens from the suffix index; they come behind the drafter's."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Logprobs of all prompt tokens but the first, with the first delta, if requested."""
    finished: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop id that ended the answer."""
    num_cached_tokens: int = 0
    """Prefix cache hit when the request was first admitted, in tokens."""
    hidden_states: Tensor | None = field(default=None, compare=False)
    """States of `EngineConfig.hidden_state_layers`, with the last delta."""
    ranks: tuple[int, ...] | None = None
    """After a tree: at each depth of the accepted path, the rank of the target's token among the drafter's candidates
    (1 is the first, 0 none). Shows how a chain would have fared."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def suffix_accepted(self) -> int:
        """Accepted draft tokens from the suffix index."""
        return max(0, self.accepted - (self.drafted - self.suffix_drafted))

    @property
    def sources(self) -> tuple[str, ...]:
        """Source of each token: target, drafter or suffix."""
        by_drafter = self.drafted - self.suffix_drafted
        return tuple("target" if not depth else "drafter" if depth <= by_drafter else "suffix" for depth in self.depths)


@dataclass(kw_only=True)
class SpecDecodeStats:
    """Speculation statistics of one request or of all."""

    passes: int = 0
    """Target passes that sampled tokens."""
    drafts: int = 0
    """Passes that verified drafts."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """Number of passes that accepted the draft at each depth, from depth 1 on."""
    tokens: int = 0
    suffix_drafted: int = 0
    suffix_accepted: int = 0
    """Suffix drafts among `accepted`."""
    steps: tuple[tuple[int, int], ...] | None = None
    """Drafted and accepted tokens of every pass, from engines that report them only at the end."""

    def count(self, drafted: int, accepted: int, tokens: int, by_suffix: int = 0, times: int = 1) -> None:
        """Add `times` equal passes; the last `by_suffix` drafts of each came from the suffix index."""
        self.passes += times
        self.tokens += times * tokens
        if drafted:
            if by_suffix:
                self.suffix_drafted += times * by_suffix
                self.suffix_accepted += times * max(0, accepted - (drafted - by_suffix))
            self.drafts += times
            self.drafted += times * drafted
            if accepted:
                self.accepted += times * accepted
                at = self.accepted_at
                if accepted > len(at):
                    at += [0] * (accepted - len(at))
                for depth in range(accepted):
                    at[depth] += times

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verified draft, the target's own included: 1 + accepted / drafts."""
        return 1 + self.accepted / max(1, self.drafts)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per target pass, with or without drafts."""
        return self.tokens / max(1, self.passes)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Output of a finished request."""

    key: int
    tokens: tuple[int, ...]
    """New tokens, including a stop token."""
    text: str
    finished: FinishReason
    depths: tuple[int, ...]
    stats: SpecDecodeStats
    accepted: tuple[int, ...] = ()
    """Accepted drafts of every step that verified drafts. The last step counts in full even if the answer ended inside
    it."""
    round_starts: tuple[int, ...] = ()
    """Number of answer tokens before each of these steps."""
    num_cached_tokens: int = 0
    """Prefix cache hit in tokens."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Logprobs of all prompt tokens but the first."""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended the answer, if any."""
    hidden_states: Tensor | None = field(default=None, compare=False)
    """Concatenated target states [T, X] of `EngineConfig.hidden_state_layers`, for all tokens, prompt included, but the
    last, which the target has not read."""

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's terms: stop, length, or error."""
        return self.finished.value

    @property
    def acceptance_length(self) -> float:
        return self.stats.acceptance_length

    @classmethod
    def of(cls, deltas: Sequence[OutputDelta], stats: SpecDecodeStats) -> "RequestOutput":
        """Join the deltas of a request; the last one must finish it."""
        assert deltas, "a request that ended has at least one delta"
        assert deltas[-1].finished is not None, "the request has not ended"
        starts = list(accumulate((len(delta.tokens) for delta in deltas), initial=0))
        logprobs = None
        if deltas[-1].logprobs is not None:
            logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
        return cls(
            key=deltas[-1].key,
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            text="".join(delta.text for delta in deltas),
            finished=deltas[-1].finished,
            depths=tuple(depth for delta in deltas for depth in delta.depths),
            stats=stats,
            accepted=tuple(delta.accepted for delta in deltas if delta.drafted),
            round_starts=tuple(start for start, delta in zip(starts, deltas, strict=False) if delta.drafted),
            num_cached_tokens=deltas[-1].num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=deltas[0].prompt_logprobs,
            stop_reason=deltas[-1].stop_reason,
            hidden_states=deltas[-1].hidden_states,
        )


@dataclass(kw_only=True, slots=True)
class StopCheck:
    """New tokens up to the end of the answer."""

    tokens: list[int]
    finished: FinishReason | None
    reason: str | int | None = None
    """The stop string or stop id that ends the answer."""
    texts: list[str] | None = None
    """Texts of the tokens, if they were needed to find a stop string."""


@dataclass(slots=True)
class _OpenAnswer:
    """State of an unfinished answer."""

    key: int
    stream: TextStream | None
    """None if no text is wanted."""
    include_stop: bool
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)


class OutputProcessor:
    """Turns recorded tokens into deltas with text, and counts speculation statistics."""

    def __init__(self, decode: Callable[[Sequence[int], bool], str]) -> None:
        self.stats = SpecDecodeStats()
        self._decode = lru_cache(maxsize=KEPT_TEXTS)(decode)
        self._behind: dict[bool, Callable[[int, int], str]] = {
            skip: lru_cache(maxsize=KEPT_TEXTS)(partial(text_behind, partial(self._decode_skipping, skip)))
            for skip in (False, True)
        }
        self._answers: dict[int, _OpenAnswer] = {}
        self._notes: list[tuple[_OpenAnswer, OutputDelta]] = []
        """Deltas not returned yet; most have no text so far."""

    @property
    def behind(self) -> bool:
        """Whether recorded deltas were not returned yet."""
        return bool(self._notes)

    def open(self, key: int, request: Request) -> None:
        skip, stream = request.skip_special_tokens, None
        if request.detokenize:
            stream = TextStream(
                partial(self._decode_skipping, skip),
                request.stop_strings,
                include_stop=request.include_stop,
                behind=self._behind[skip],
            )
        self._answers[key] = _OpenAnswer(key, stream, request.include_stop)

    def close(self, key: int) -> None:
        """Remove a finished answer; its recorded deltas are still returned."""
        self._answers.pop(key, None)

    def drop(self, key: int) -> None:
        self._notes = [note for note in self._notes if note[0].key != key]
        self.close(key)

    def stats_of(self, key: int) -> SpecDecodeStats:
        """Statistics of a running request; the object is updated live."""
        return self._answers[key].stats

    def check_stop(self, seq: SequenceState, tokens: Sequence[int]) -> StopCheck:
        """Find how many of these new tokens belong to the answer, and whether it ends."""
        if seq.matcher is not None and seq.matcher.failure is not None and tokens:
            return StopCheck(tokens=list(tokens[:1]), finished=FinishReason.ERROR)  # chosen without the grammar
        stop = _until_the_end(seq, tokens)
        if seq.request.stop_strings:
            stream = self._answers[seq.key].stream
            assert stream is not None, "a request with stop strings has text"
            stop.texts, stop.finished = _texts_of(stream, stop.tokens, stop.finished, seq.request.include_stop)
            stop.tokens = stop.tokens[: len(stop.texts)]
            stop.reason = stream.stop_string if stream.stopped else stop.reason
        return stop

    def add(
        self,
        seq: SequenceState,
        stop: StopCheck,
        *,
        drafted: int,
        accepted: int,
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        hidden_TX: Tensor | None = None,
        suffix_drafted: int = 0,
    ) -> OutputDelta:
        """Record the output of a step for a request with special options or at its end."""
        delta = self.add_tokens(seq, stop.tokens, drafted, accepted, suffix_drafted)
        delta.texts = () if stop.texts is None else tuple(stop.texts)
        delta.logprobs, delta.prompt_logprobs, delta.hidden_states = logprobs, prompt_logprobs, hidden_TX
        delta.finished, delta.stop_reason = stop.finished, stop.reason
        return delta

    def add_tokens(
        self, seq: SequenceState, tokens: Sequence[int], drafted: int, accepted: int, suffix_drafted: int = 0
    ) -> OutputDelta:
        """Record the output of a step for a request that goes on, without special options."""
        answer, depths, cached = self._answers[seq.key], _depths(accepted, len(tokens)), seq.num_cached_tokens or 0
        delta = OutputDelta(
            answer.key, tuple(tokens), (), depths, drafted, accepted, suffix_drafted, num_cached_tokens=cached
        )
        self._notes.append((answer, delta))
        return delta

    def process(self) -> list[OutputDelta]:
        """Return the recorded deltas with their text, and count them."""
        kinds = Counter[tuple[int, int, int, int]]()
        for answer, delta in self._notes:
            tokens, stream = delta.tokens, answer.stream
            count = len(tokens)
            if stream is None:
                delta.texts = _no_texts(count)
            elif not delta.texts and count:
                if delta.finished is None:
                    delta.texts = tuple([stream.push(token) for token in tokens])
                else:
                    delta.texts = tuple(_texts_of(stream, tokens, delta.finished, answer.include_stop)[0])
            answer.stats.count(delta.drafted, delta.accepted, count, delta.suffix_drafted)
            kinds[delta.drafted, delta.accepted, count, delta.suffix_drafted] += 1
        for kind, times in kinds.items():  # equal deltas are counted together
            self.stats.count(*kind, times)
        deltas, self._notes = [delta for _, delta in self._notes], []
        return deltas

    def _decode_skipping(self, skip_special_tokens: bool, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special_tokens)


@cache
def _depths(accepted: int, count: int) -> tuple[int, ...]:
    """Draft depths of the first `count` tokens of a round."""
    return (*range(1, accepted + 1), 0)[:count]


@cache
def _no_texts(count: int) -> tuple[str, ...]:
    return ("",) * count


def _until_the_end(seq: SequenceState, tokens: Sequence[int]) -> StopCheck:
    """Cut tokens at a stop id or the length limit, without looking for stop strings."""
    request = seq.request
    for count, token in enumerate(tokens, 1):
        if token in request.stop_ids and seq.new_tokens + count > request.min_new_tokens:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.STOP, reason=token)
        if len(seq.tokens) + count >= seq.limit:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.LENGTH)
    return StopCheck(tokens=list(tokens), finished=None)


def _texts_of(
    stream: TextStream, tokens: Sequence[int], finished: FinishReason | None, include_stop: bool
) -> tuple[list[str], FinishReason | None]:
    """Texts of tokens, and whether a stop string ends the answer. A final stop id has no text unless `include_stop`."""
    texts: list[str] = []
    hidden_stop = finished is FinishReason.STOP and not include_stop
    for token in tokens[:-1] if hidden_stop else tokens:
        texts.append(stream.push(token))
        if stream.stopped:
            return texts, FinishReason.STOP
    if hidden_stop:
        texts.append(stream.finish())
    elif finished is not None:
        texts[-1] += stream.finish()
    return texts, finished
