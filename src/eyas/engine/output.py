"""What requests get: deltas as they come, whole answers, how speculation went, and the processor that makes them.

Text takes the host time and decides nothing, except where a stop string ends an answer. So what a step gave is noted
when it is committed and put into words later, for instance while a device is busy with the next step.
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
"""Texts of a token or two, which is what streams decode, and the same ones again and again."""


# Neither frozen nor keyword-only: a step makes one for each of hundreds of requests, and either doubles the time.
@dataclass(slots=True)
class OutputDelta:
    """What one step gave one request. Not to be changed once it is told."""

    key: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """For each token the text that can no longer change once it has come; often empty, never to be taken back. All
    empty, if the request wants no text (`Request.detokenize`)."""
    depths: tuple[int, ...]
    """For each token the draft depth it was accepted from, or 0: the target's own."""
    drafted: int = 0
    """Draft tokens that the step verified."""
    accepted: int = 0
    """Those of them that it accepted; more than came out of it where the answer ended among them."""
    suffix_drafted: int = 0
    """Draft tokens that came from the suffix index; they are the last of those that the step verified."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first piece, if the request asks for them: of all prompt tokens but the first."""
    finished: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop id that ended it."""
    num_cached_tokens: int = 0
    """Tokens that the prefix cache had when the request was first admitted."""
    hidden_states: Tensor | None = field(default=None, compare=False)
    """With the last piece, if the engine was told to keep them (`EngineConfig.hidden_state_layers`)."""
    ranks: tuple[int, ...] | None = None
    """Of a step that verified a tree: which of the drafter's candidates the target's token was, depth by depth as far
    as accepted drafts lead; 1 is the first, 0 none of them. So it tells how a chain would have fared."""

    @property
    def text(self) -> str:
        """The text of all of them."""
        return "".join(self.texts)

    @property
    def suffix_accepted(self) -> int:
        """Those of them that the step accepted."""
        return max(0, self.accepted - (self.drafted - self.suffix_drafted))

    @property
    def sources(self) -> tuple[str, ...]:
        """For each token who proposed it: the target, the drafter, or the suffix index."""
        by_drafter = self.drafted - self.suffix_drafted
        return tuple("target" if not depth else "drafter" if depth <= by_drafter else "suffix" for depth in self.depths)


@dataclass(kw_only=True)
class SpecDecodeStats:
    """How speculation went, for one request or for all."""

    passes: int = 0
    """Target passes that chose tokens."""
    drafts: int = 0
    """Those among them that verified a draft."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """In how many drafts the token of each depth was accepted, depth 1 first."""
    tokens: int = 0
    suffix_drafted: int = 0
    suffix_accepted: int = 0
    """Of these, suffix drafts."""
    steps: tuple[tuple[int, int], ...] | None = None
    """Drafted and accepted tokens of every draft, of an engine that tells them at the end and not as they come."""

    def count(self, drafted: int, accepted: int, tokens: int, by_suffix: int = 0, times: int = 1) -> None:
        """Add one pass, or so many alike; of the drafts the last so many are from the suffix index."""
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
        """Tokens per verified draft, the target's own included: 1 + accepted / drafts."""
        return 1 + self.accepted / max(1, self.drafts)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass, whether it verified a draft or not."""
        return self.tokens / max(1, self.passes)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    key: int
    tokens: tuple[int, ...]
    """New tokens, a stop token included."""
    text: str
    finished: FinishReason
    depths: tuple[int, ...]
    stats: SpecDecodeStats
    accepted: tuple[int, ...] = ()
    """Accepted drafts of every round, that is of every step that verified a draft. The last round is counted whole,
    also where the answer ended inside it."""
    round_starts: tuple[int, ...] = ()
    """How many tokens the answer had when each of these rounds began."""
    num_cached_tokens: int = 0
    """Tokens that were not read, since the prefix cache had them."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of all prompt tokens but the first."""
    stop_reason: str | int | None = None
    """The stop string or the stop id that ended it; None if neither did."""
    hidden_states: Tensor | None = field(default=None, compare=False)
    """The target's states [T, X] of `EngineConfig.hidden_state_layers`, side by side: of all tokens, prompt included,
    but the last, which the target has not read."""

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words: stop, length, or error."""
        return self.finished.value

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft; 1 without drafts."""
        return self.stats.acceptance_length

    @classmethod
    def of(cls, pieces: Sequence[OutputDelta], stats: SpecDecodeStats) -> "RequestOutput":
        """Join the pieces of a request, the last of which is its end."""
        assert pieces, "a request that ended gave something"
        assert pieces[-1].finished is not None, "the request has not ended"
        made = list(accumulate((len(piece.tokens) for piece in pieces), initial=0))
        logprobs = None
        if pieces[-1].logprobs is not None:
            logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
        return cls(
            key=pieces[-1].key,
            tokens=tuple(token for piece in pieces for token in piece.tokens),
            text="".join(piece.text for piece in pieces),
            finished=pieces[-1].finished,
            depths=tuple(depth for piece in pieces for depth in piece.depths),
            stats=stats,
            accepted=tuple(piece.accepted for piece in pieces if piece.drafted),
            round_starts=tuple(start for start, piece in zip(made, pieces, strict=False) if piece.drafted),
            num_cached_tokens=pieces[-1].num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=pieces[0].prompt_logprobs,
            stop_reason=pieces[-1].stop_reason,
            hidden_states=pieces[-1].hidden_states,
        )


@dataclass(kw_only=True, slots=True)
class StopCheck:
    """New tokens as far as they belong to the answer."""

    tokens: list[int]
    finished: FinishReason | None
    reason: str | int | None = None
    """The stop string or stop id that ends it."""
    texts: list[str] | None = None
    """Where they were needed to tell whether the answer ends."""


@dataclass(slots=True)
class _OpenAnswer:
    """An answer under way."""

    key: int
    stream: TextStream | None
    """None if nobody wants its text."""
    include_stop: bool
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)


class OutputProcessor:
    """The texts and counts of all requests under way, and pieces that nobody has taken yet."""

    def __init__(self, decode: Callable[[Sequence[int], bool], str]) -> None:
        self.stats = SpecDecodeStats()
        """Of all requests together."""
        self._decode = lru_cache(maxsize=KEPT_TEXTS)(decode)
        self._behind: dict[bool, Callable[[int, int], str]] = {
            skip: lru_cache(maxsize=KEPT_TEXTS)(partial(text_behind, partial(self._decode_skipping, skip)))
            for skip in (False, True)
        }
        self._answers: dict[int, _OpenAnswer] = {}
        self._notes: list[tuple[_OpenAnswer, OutputDelta]] = []
        """Pieces whose texts are not made yet, unless they were needed to tell whether the answer ends."""

    @property
    def behind(self) -> bool:
        """Whether something was noted and not told."""
        return bool(self._notes)

    def open(self, key: int, request: Request) -> None:
        """Begin an answer."""
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
        """Let go of an answer that has ended; what was noted of it is still told."""
        self._answers.pop(key, None)

    def drop(self, key: int) -> None:
        """Forget an answer that nobody wants any more."""
        self._notes = [note for note in self._notes if note[0].key != key]
        self.close(key)

    def stats_of(self, key: int) -> SpecDecodeStats:
        """How speculation goes for a request under way; the object goes on counting."""
        return self._answers[key].stats

    def check_stop(self, seq: SequenceState, tokens: Sequence[int]) -> StopCheck:
        """How many of these new tokens belong to the answer, and whether it ends."""
        if seq.matcher is not None and seq.matcher.failure is not None and tokens:
            return StopCheck(tokens=list(tokens[:1]), finished=FinishReason.ERROR)  # chosen without the grammar
        stop = _until_the_end(seq, tokens)
        if seq.request.stop_strings:
            stream = self._answers[seq.key].stream
            assert stream is not None, "a request with stop strings has text"
            stop.texts, stop.finished = _words(stream, stop.tokens, stop.finished, seq.request.include_stop)
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
        """Take down what a request got of a step that verified so many drafts."""
        piece = self.add_tokens(seq, stop.tokens, drafted, accepted, suffix_drafted)
        piece.texts = () if stop.texts is None else tuple(stop.texts)
        piece.logprobs, piece.prompt_logprobs, piece.hidden_states = logprobs, prompt_logprobs, hidden_TX
        piece.finished, piece.stop_reason = stop.finished, stop.reason
        return piece

    def add_tokens(
        self, seq: SequenceState, tokens: Sequence[int], drafted: int, accepted: int, suffix_drafted: int = 0
    ) -> OutputDelta:
        """The same where the answer goes on and nothing but its tokens was asked for."""
        answer, depths, cached = self._answers[seq.key], _depths(accepted, len(tokens)), seq.num_cached_tokens or 0
        piece = OutputDelta(
            answer.key, tuple(tokens), (), depths, drafted, accepted, suffix_drafted, num_cached_tokens=cached
        )
        self._notes.append((answer, piece))
        return piece

    def process(self) -> list[OutputDelta]:
        """Put into words and count what was noted."""
        kinds = Counter[tuple[int, int, int, int]]()
        for answer, piece in self._notes:
            tokens, stream = piece.tokens, answer.stream
            count = len(tokens)
            if stream is None:
                piece.texts = _no_texts(count)
            elif not piece.texts and count:
                if piece.finished is None:
                    piece.texts = tuple([stream.push(token) for token in tokens])
                else:
                    piece.texts = tuple(_words(stream, tokens, piece.finished, answer.include_stop)[0])
            answer.stats.count(piece.drafted, piece.accepted, count, piece.suffix_drafted)
            kinds[piece.drafted, piece.accepted, count, piece.suffix_drafted] += 1
        for kind, times in kinds.items():  # of all requests together, alike ones at once
            self.stats.count(*kind, times)
        pieces, self._notes = [piece for _, piece in self._notes], []
        return pieces

    def _decode_skipping(self, skip_special_tokens: bool, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special_tokens)


@cache
def _depths(accepted: int, count: int) -> tuple[int, ...]:
    """Depths of the first tokens of a round that accepted so many drafts."""
    return (*range(1, accepted + 1), 0)[:count]


@cache
def _no_texts(count: int) -> tuple[str, ...]:
    return ("",) * count


def _until_the_end(seq: SequenceState, tokens: Sequence[int]) -> StopCheck:
    """Up to a stop token or the limit; what the text may say is left out."""
    request = seq.request
    for count, token in enumerate(tokens, 1):
        if token in request.stop_ids and seq.new_tokens + count > request.min_new_tokens:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.STOP, reason=token)
        if len(seq.tokens) + count >= seq.limit:
            return StopCheck(tokens=list(tokens[:count]), finished=FinishReason.LENGTH)
    return StopCheck(tokens=list(tokens), finished=None)


def _words(
    stream: TextStream, tokens: Sequence[int], finished: FinishReason | None, include_stop: bool
) -> tuple[list[str], FinishReason | None]:
    """The text of each token, none of its own for a stop id at the end unless it was asked for.

    A stop string may end it earlier.
    """
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
