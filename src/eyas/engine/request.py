"""What a caller asks for, and how far the engine has come with it.

A `Request` never changes; a `SequenceState` is the engine's own record of one. Two caches belong to a live request, the
target's and the drafter's, and each holds a prefix of its tokens. Drafter slot i is made of the target's state at i and
of token i + 1, so the drafter cannot be ahead of the target.

Invariant: drafter_length <= target_length < len(tokens), since the newest token has been chosen but not read yet. All
three are what the host has confirmed; steps that are still under way (`flights`) will raise them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Literal

from eyas.errors import UserError

if TYPE_CHECKING:  # these import torch, which bookkeeping must not
    from eyas.engine.grammar import Grammar, GrammarMatcher
    from eyas.engine.logprobs import TokenLogprobs
    from eyas.sampling import Sampling

MOST_LOGPROBS = 20
SEED_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How much a request may be drafted for. It changes the speed of an answer, never its tokens."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    """auto: as deep as pays, perhaps not at all; off: never; fixed: `depth`, wherever there is room for it."""
    depth: int | None = None
    """Draft tokens in a row; with fixed alone. At 0 the drafter reads along and drafts nothing, which is for measuring
    what that costs."""
    method: Literal["auto", "eagle3", "suffix"] = "auto"
    """Who drafts: whichever pays of what the engine has; the drafter alone; or suffix drafts alone, which repeat what
    followed the like of the text before. Of fixed depth are the drafter's drafts, unless it is suffix; then there are
    up to so many wherever the text has occurred before."""

    def __post_init__(self) -> None:
        if self.method not in ("auto", "eagle3", "suffix"):
            raise UserError(f"speculation method {self.method!r} is unknown; use auto, eagle3 or suffix")
        if self.mode not in ("auto", "off", "fixed"):
            raise UserError(f"speculation mode {self.mode!r} is unknown; use auto, off or fixed")
        if self.mode == "fixed" and (self.depth is None or self.depth < 0):
            raise UserError(f"speculation fixed has depth {self.depth}; give 0 or more")
        if self.mode != "fixed" and self.depth is not None:
            raise UserError(f"speculation {self.mode} does not take depth {self.depth}; drop it or use mode fixed")

    @property
    def by_drafter(self) -> bool:
        """Whether the drafter may draft."""
        return self.mode != "off" and self.method != "suffix"

    @property
    def by_suffix(self) -> bool:
        """Whether suffix drafts may be verified."""
        if self.mode == "fixed":
            return self.method == "suffix" and self.depth != 0
        return self.mode == "auto" and self.method != "eagle3"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue, and all that decides how."""

    prompt: tuple[int, ...]
    sampling: "Sampling"
    max_new_tokens: int
    min_new_tokens: int = 0
    """Before there are as many, no stop id may be chosen."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer does not have: the last token may not come behind the others."""
    include_stop: bool = False
    """Whether the text has the stop string or the stop token's text that ended it."""
    detokenize: bool = True
    """Whether text is made of the tokens; without, all texts are empty."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    seed: int = 0
    """With the position it decides all chance of the request, in whatever company it runs."""
    seeded: bool = True
    """Whether the caller chose the seed; if not, an engine may draw by chance of its own."""
    logprobs: int | None = None
    """How many alternatives to report beside each chosen token; 0 reports the chosen one alone, None nothing."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The whole prompt is computed then, past the prefix cache."""
    speculation: Speculation = field(default_factory=Speculation)
    grammar: "Grammar | None" = None
    """What the answer may say; it ends where the grammar is complete, if not before."""
    priority: int = 0
    """Lower goes first; among equals, whoever came first. It decides when an answer comes, never its tokens."""
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("the prompt has 0 tokens; give at least 1")
        if min(self.prompt) < 0:
            raise UserError(f"the prompt holds token {min(self.prompt)}; token ids are 0 or more")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, outside 0 to max_new_tokens {self.max_new_tokens}; lower it"
            )
        if self.stop_strings and not self.detokenize:
            raise UserError("stop strings are found in the text, and detokenize is off; drop one")
        if "" in self.stop_strings:
            raise UserError("a stop string is empty, which would stop every answer at once; drop it")
        if not -(2 ** (SEED_BITS - 1)) <= self.seed < 2 ** (SEED_BITS - 1):
            raise UserError(f"seed {self.seed} does not fit in {SEED_BITS} bits; use a smaller number")
        for name, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
                raise UserError(f"{name} is {asked}, outside 0 to {MOST_LOGPROBS}; choose within")
        if () in self.bad_words:
            raise UserError("a bad word has 0 tokens; drop it")
        if self.bad_words and (self.grammar is not None or self.sampling.allowed_tokens is not None):
            other = "a grammar" if self.grammar is not None else "allowed_tokens"
            raise UserError(f"bad_words may leave nothing of what {other} allows; drop one")
        if self.grammar is not None:
            self._require_an_end()

    def _require_an_end(self) -> None:
        """A grammar decides what may come and where the answer ends; nothing else may take that away."""
        if not self.stop_ids:
            raise UserError("a grammar ends with a stop token and there is none; give stop_ids, or drop ignore_eos")
        if self.min_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, but a grammar decides where the answer ends; drop one"
            )
        if self.sampling.allowed_tokens is not None:
            raise UserError("allowed_tokens may leave nothing of what a grammar allows; drop one")


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop id or a stop string."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Flight:
    """What a launched step may do to a request that goes on behind it."""

    read: int
    """Tokens that the target surely reads: the chunk, or the newest token."""
    fewest: int
    """New tokens that are surely chosen: 1 if the tokens end with the newest, else 0."""
    most: int
    """New tokens with all drafts accepted. As many more tokens may be read as are chosen beyond the fewest."""


@cache
def flight_of(count: int, drafts: int, samples: bool) -> Flight:
    """The flight of a row; one object for all rows of a kind, since a step has hundreds of them."""
    return Flight(count, 1, 1 + drafts) if samples else Flight(count, 0, 0)


@dataclass(eq=False, kw_only=True)
class SequenceState:
    """A request in the engine. The scheduler alone changes its lengths, tokens and blocks."""

    key: int
    """The engine's name for it."""
    arrival: int
    """Of requests with equal priority, earlier ones go first and are sent back last."""
    request: Request
    tokens: list[int] = field(init=False)
    """The prompt, then what was chosen."""
    target_length: int = 0
    """Tokens that have keys and values of the target."""
    drafter_length: int = 0
    """Tokens that have keys and values of the drafter."""
    written_length: int = 0
    """Tokens that have had keys and values of the target since before it began to read: a pass that reads one of them
    again, for the drafter, leaves these as they are."""
    lags: bool = False
    """Whether the drafter lacks tokens that the prefix cache had for the target. It does not read along then."""
    catches_up: bool = False
    """Whether they are to be read again, because the drafter is to draft."""
    drafts_outdated: bool = False
    """Whether some of those were computed by weights that the drafter had before."""
    blocks: list[int] = field(default_factory=list)
    """Where both caches keep token i: in block number i // block_size of this list."""
    slot: int | None = None
    """Its place in buffers by request, as long as it runs; no other has the same until no launched step uses it."""
    stay: int = -1
    """Which stay among the running requests this is: no other has the same number, nor has its next one."""
    table: int = -1
    """Another number whenever its blocks change, and never the same as another request's."""
    flights: list[Flight] = field(default_factory=list)
    """What launched steps may do to it that are not committed yet, oldest first."""
    limit: int = field(init=False)
    """The most tokens it can come to, prompt included; the scheduler lowers it to the longest context."""
    finished: FinishReason | None = None
    preemptions: int = 0
    """How often it lost its blocks to an earlier request."""
    num_cached_tokens: int | None = None
    """Tokens that the prefix cache had when it was first admitted."""
    prompt_logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they were read; only if the request asks for them."""
    matcher: "GrammarMatcher | None" = field(init=False, default=None)
    """Its way through its grammar."""
    speculates: bool = field(init=False)
    """Whether the drafter follows it."""
    is_ordinary: bool = field(init=False)
    """Whether it is asked for nothing but tokens, up to a stop id or a length."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt)
        self.limit = len(request.prompt) + request.max_new_tokens
        if request.grammar is not None:
            self.matcher = request.grammar.matcher(prompt_length=len(request.prompt), stop_ids=request.stop_ids)
        self.speculates = request.speculation.by_drafter
        told = request.logprobs is not None or request.prompt_logprobs is not None
        self.is_ordinary = not (request.stop_strings or told or self.matcher is not None)

    @property
    def followed(self) -> bool:
        """Whether the drafter reads along."""
        return self.speculates and not self.lags

    @property
    def turn(self) -> tuple[int, int]:
        """Lower goes first and is sent back last."""
        return self.request.priority, self.arrival

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether it asks for logprobs of its prompt and does not have all of them yet."""
        return self.request.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def new_tokens(self) -> int:
        """How many tokens were chosen so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens the target has not read yet. With 1 the request decodes, with more it reads (again, if preempted)."""
        return len(self.tokens) - self.target_length
