"""What an engine gives: pieces as they come, whole answers, and how speculation went."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from eyas.engine.request import FinishReason
from eyas.engine.sampler import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """What one step gave one request."""

    key: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """For each token the text that can no longer change once it has come; often empty, never to be taken back."""
    depths: tuple[int, ...]
    """For each token the draft depth it was accepted from, or 0: the target's own."""
    drafted: int = 0
    """Draft tokens that the step verified."""
    accepted: int = 0
    """Those of them that it accepted; more than came out of it where the answer ended among them."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: FinishReason | None = None
    num_cached_tokens: int = 0
    """Tokens that the prefix cache had when the request was first admitted."""
    hidden_states: "Tensor | None" = field(default=None, compare=False)
    """With the last piece, if the engine was told to keep them (`EngineConfig.hidden_state_layers`)."""

    @property
    def text(self) -> str:
        """The text of all of them."""
        return "".join(self.texts)


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

    def count(self, *, drafted: int, accepted: int, tokens: int) -> None:
        """Add one pass."""
        self.passes += 1
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        if accepted > len(self.accepted_at):
            self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1

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
    tally: SpecDecodeStats
    accepted: tuple[int, ...] = ()
    """Accepted drafts of every round, that is of every step that verified a draft. The last round is counted whole,
    also where the answer ended inside it."""
    round_starts: tuple[int, ...] = ()
    """How many tokens the answer had when each of these rounds began."""
    num_cached_tokens: int = 0
    """Tokens that were not read, since the prefix cache had them."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    hidden_states: "Tensor | None" = field(default=None, compare=False)
    """The target's states [T, X] of `EngineConfig.hidden_state_layers`, side by side: of all tokens, prompt included,
    but the last, which the target has not read."""

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words: stop, length, or error."""
        return self.finished.value

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft; 1 without drafts."""
        return self.tally.acceptance_length

    @classmethod
    def of(cls, pieces: Sequence[OutputDelta], tally: SpecDecodeStats) -> "RequestOutput":
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
            tally=tally,
            accepted=tuple(piece.accepted for piece in pieces if piece.drafted),
            round_starts=tuple(start for start, piece in zip(made, pieces, strict=False) if piece.drafted),
            num_cached_tokens=pieces[-1].num_cached_tokens,
            logprobs=logprobs,
            hidden_states=pieces[-1].hidden_states,
        )
