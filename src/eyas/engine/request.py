"""A caller's request, and the engine's record of its progress.

A `Request` is immutable; a `SequenceState` is the engine's mutable record of one. A live request has entries in two KV
caches, the target's and the drafter's, each for a prefix of its tokens. Drafter slot i needs the target's state at i
and token i + 1, so the drafter is never ahead of the target.

Invariant: drafter_length <= target_length < len(tokens), because the newest token is chosen but not read yet. All three
are confirmed by the host; steps in flight (`flights`) will raise them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Literal

from eyas.errors import UserError

if TYPE_CHECKING:  # these import torch, which this module must not
    from eyas.engine.grammar import Grammar, GrammarMatcher
    from eyas.engine.logprobs import TokenLogprobs
    from eyas.sampling import Sampling

MOST_LOGPROBS = 20
SEED_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculation settings of a request. They change the speed of an answer, never its tokens."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    """auto: the depth that pays, possibly 0; off: never; fixed: always `depth`, where there is room."""
    depth: int | None = None
    """Draft tokens per step, for mode fixed only. With 0 the drafter reads along without drafting, to measure that
    cost."""
    method: Literal["auto", "eagle3", "suffix"] = "auto"
    """The source of drafts. auto: whichever pays; eagle3: the drafter; suffix: only tokens that followed similar text
    earlier. With a fixed depth, auto uses the drafter; suffix then gives up to `depth` drafts wherever the text
    occurred before."""

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
    """A prompt and all options of its completion."""

    prompt: tuple[int, ...]
    sampling: "Sampling"
    max_new_tokens: int
    min_new_tokens: int = 0
    """No stop id may be chosen before this many tokens."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the answer: the last token is banned behind the others."""
    include_stop: bool = False
    """Whether the text includes the stop string or stop token that ended it."""
    detokenize: bool = True
    """Whether to produce text; otherwise all texts are empty."""
    skip_special_tokens: bool = True
    """Whether to leave special tokens out of the text."""
    seed: int = 0
    """Seed and position determine all random numbers of the request, in any batch."""
    seeded: bool = True
    """Whether the caller chose the seed; if not, an engine may use its own source of randomness."""
    logprobs: int | None = None
    """Number of alternatives to report with each chosen token; 0 reports the chosen token only, None nothing."""
    prompt_logprobs: int | None = None
    """Number of alternatives for each prompt token but the first. Disables prefix cache hits for the request."""
    speculation: Speculation = field(default_factory=Speculation)
    grammar: "Grammar | None" = None
    """Constrains the answer, which ends when the grammar is complete, if not earlier."""
    priority: int = 0
    """Lower runs first; equal priorities in order of arrival. Affects when tokens come, never which."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests with equal salt."""

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
        """Refuse options that conflict with a grammar, which decides the allowed tokens and the end of the answer."""
        if not self.stop_ids:
            raise UserError("a grammar ends with a stop token and there is none; give stop_ids, or drop ignore_eos")
        if self.min_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, but a grammar decides where the answer ends; drop one"
            )
        if self.sampling.allowed_tokens is not None:
            raise UserError("allowed_tokens may leave nothing of what a grammar allows; drop one")


class FinishReason(StrEnum):
    """The reason why a request ended."""

    STOP = "stop"
    """A stop id or a stop string."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Flight:
    """Bounds of what a launched step does to a request."""

    read: int
    """Tokens that the target reads in any case: the chunk, or the newest token."""
    fewest: int
    """New tokens in any case: 1 if the step samples, else 0."""
    most: int
    """New tokens if all drafts are accepted; the target then reads `most - fewest` more tokens too."""


@cache
def flight_of(count: int, drafts: int, samples: bool) -> Flight:
    """Make a `Flight`. Cached, because a step needs hundreds of equal ones."""
    return Flight(count, 1, 1 + drafts) if samples else Flight(count, 0, 0)


@dataclass(eq=False, kw_only=True)
class SequenceState:
    """State of a request in the engine. Only the scheduler changes its lengths, tokens and blocks."""

    key: int
    """The engine's id of the request."""
    arrival: int
    """Order of arrival. Among equal priorities, earlier requests run first and are preempted last."""
    request: Request
    tokens: list[int] = field(init=False)
    """The prompt, then the chosen tokens."""
    target_length: int = 0
    """Tokens in the target's KV cache."""
    drafter_length: int = 0
    """Tokens in the drafter's KV cache."""
    written_length: int = 0
    """Tokens that were in the target's KV cache when reading began. When the drafter needs some of them to be read
    again, the target's entries are not written again."""
    lags: bool = False
    """Whether the prefix cache had more for the target than for the drafter, so that the drafter does not follow."""
    catches_up: bool = False
    """Whether the gap is to be read again, because drafting would pay."""
    drafts_outdated: bool = False
    """Whether the drafter's entries include some that were computed with earlier weights."""
    blocks: list[int] = field(default_factory=list)
    """Block table of both caches: token i is in blocks[i // block_size]."""
    slot: int | None = None
    """Index into per-request buffers while it runs; not reused while a launched step uses it."""
    stay: int = -1
    """Unique number of its current residency among the running requests; it changes when it is readmitted."""
    table: int = -1
    """Unique version number of its block table; it changes with the blocks."""
    flights: list[Flight] = field(default_factory=list)
    """Launched steps that are not committed yet, oldest first."""
    limit: int = field(init=False)
    """Maximum length, prompt included; the scheduler lowers it to the longest context."""
    finished: FinishReason | None = None
    preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prefix cache hit when it was first admitted, in tokens."""
    prompt_logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    """Logprobs of prompt tokens from the second on, as far as read; only if requested."""
    matcher: "GrammarMatcher | None" = field(init=False, default=None)
    """State of its grammar."""
    speculates: bool = field(init=False)
    """Whether drafting may use the drafter."""
    is_ordinary: bool = field(init=False)
    """Whether it needs no stop strings, logprobs or grammar, so that commits take the fast path."""

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
        """Whether the drafter reads its tokens."""
        return self.speculates and not self.lags

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key; lower runs first and is preempted last."""
        return self.request.priority, self.arrival

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether it still needs logprobs of prompt tokens."""
        return self.request.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens the target has not read. With 1 the request decodes, with more it reads its prompt (again)."""
        return len(self.tokens) - self.target_length
