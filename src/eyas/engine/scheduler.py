"""Which requests take part in the next step, with how many tokens, and in which pages.

First come, first served. A step goes through these in order, and what comes late gets what is left:

    decoding   every running request with one pending token reads it; nothing holds it up
    drafts     tokens behind it for the target to verify; half of the remaining budget, if prompts want the rest
    reading    prompts in arrival order, in chunks; something is always left for the first
    admission  waiting requests in arrival order, behind what the prefix cache has of them

Pages follow the same order but for drafts, which come last: speculation never takes a page from a request. A request
gets the pages of all its tokens when it is admitted and one more now and then as it decodes; if there is none, the
latest arrival loses its pages and waits again, and the prefix cache makes reading it again cheap.

Invariants: running requests arrived before waiting ones; the oldest moves in every step and is never preempted;
between steps a request owns no page beyond its tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from eyas.engine.pages import PagePool
from eyas.engine.request import FinishReason, Live
from eyas.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request's part in a step."""

    live: Live
    start: int
    """Position of its first token; all before it are in the target's cache."""
    count: int
    """Tokens to read."""
    drafts: int
    """Draft tokens there is room for behind them."""
    samples: bool
    """Whether the tokens end with the newest, so that the step chooses the next."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What the next step computes."""

    rows: tuple[Row, ...]
    """Decoding requests, then reading ones, then admitted ones; each in arrival order."""
    preempted: tuple[Live, ...]
    """Requests that lost their pages for it."""


class Scheduler:
    """Requests from arrival to end. A step is `plan`, then `commit` for each of its rows, then `finish` for some.

    Without a `drafter`, prefixes are right for every request as soon as the target has read them.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        token_budget: int,
        max_length: int,
        prefill_chunk: int | None,
        drafter: bool = True,
    ) -> None:
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("token_budget", token_budget, 1),
            ("max_length", max_length, 2),
            ("prefill_chunk", prefill_chunk, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be {least} or more")
        self._pool, self._drafter = pool, drafter
        self._max_rows = min(max_rows, token_budget)  # a token for each, so that none stands still
        self._budget, self._max_length = token_budget, max_length
        self._chunk = token_budget if prefill_chunk is None else prefill_chunk
        self._lives: dict[int, Live] = {}
        self._running: list[Live] = []
        self._waiting: deque[Live] = deque()
        self._latest_arrival: int | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> list[Live]:
        """Requests that own pages, in arrival order."""
        return list(self._running)

    def limit(self, live: Live) -> int:
        """The most tokens a request can come to, prompt included; with them it must be finished."""
        return min(len(live.request.prompt) + live.request.max_new_tokens, self._max_length)

    def add(self, live: Live) -> None:
        """Let a request wait for its turn; refuse one whose turn could never come."""
        assert live.key not in self._lives, f"request {live.key} is here already"
        assert self._latest_arrival is None or live.arrival > self._latest_arrival, "arrivals ascend"
        if live.prompt_length + 1 > self._max_length:
            raise UserError(
                f"the prompt of request {live.key} has {live.prompt_length} tokens, above the {self._max_length - 1} "
                f"that leave room for an answer; shorten it or raise the longest context {self._max_length}"
            )
        size, most = self._pool.page_size, self._pool.pages
        pages = self._pool.pages_for(self.limit(live) - 1)  # the last token is never read
        if pages > most:
            raise UserError(
                f"request {live.key} may grow to {self.limit(live)} tokens, which need {pages} pages of {size}, above "
                f"the {most} there are; keep prompt and answer within {most * size + 1} tokens or add pages"
            )
        self._latest_arrival = live.arrival
        self._lives[live.key] = live
        self._waiting.append(live)

    def cancel(self, key: int) -> bool:
        """End a request at any moment, even during a step, and free what it owns. False if it is not here."""
        live = self._lives.get(key)
        if live is None:
            return False
        self.finish(live, FinishReason.CANCELLED)
        return True

    def finish(self, live: Live, reason: FinishReason) -> None:
        """End a request that has not ended yet. Its full pages stay in the prefix cache."""
        if live.finished is not None:
            return
        del self._lives[live.key]
        (self._running if live in self._running else self._waiting).remove(live)
        live.finished = reason
        self._vacate(live)

    def plan(self, wanted_drafts: Mapping[int, int]) -> StepPlan:
        """Decide on the next step and reserve its pages. `wanted_drafts` has the most drafts of requests, by key.

        Only decoding requests carry drafts: behind tokens that the target has yet to read there is nothing to draft
        from.
        """
        preempted = self._seat_tokens()
        decoding = [live for live in self._running if live.pending == 1]
        reading = [live for live in self._running if live.pending > 1]
        left = self._budget - len(decoding)
        prompts_want = bool(reading or (self._waiting and len(self._running) < self._max_rows))
        useful = [min(wanted_drafts.get(live.key, 0), self.limit(live) - len(live.tokens) - 1) for live in decoding]
        assert min(useful, default=0) >= 0, "drafts are 0 or more, and a request at its limit is finished"
        drafts = _share(useful, left // 2 if prompts_want else left)
        left -= sum(drafts)

        prefill: list[Row] = []
        readers = chain(reading, () if preempted else iter(self._admit, None))
        while left > 0 and (live := next(readers, None)) is not None:
            prefill.append(_row(live, min(live.pending, self._chunk, left)))
            left -= prefill[-1].count

        rows = [_row(live, 1, drafts=self._seat_drafts(live, n)) for live, n in zip(decoding, drafts, strict=True)]
        return StepPlan(rows=(*rows, *prefill), preempted=tuple(preempted))

    def commit(self, live: Live, *, read: int, new_tokens: Sequence[int]) -> None:
        """Take note of a step: tokens read, accepted drafts among them, and tokens chosen, which are one more.

        Nothing happens to a request that was cancelled during the step.
        """
        if live.finished is not None:
            return
        full = live.target_length // self._pool.page_size
        live.tokens.extend(new_tokens)
        live.target_length += read
        assert live.pending == 1 or (live.pending > 1 and not new_tokens), f"request {live.key}: {live.pending} pending"
        assert len(live.tokens) <= self.limit(live), f"request {live.key} has {len(live.tokens)} tokens"
        self._register(live, range(full, live.target_length // self._pool.page_size))
        needed = self._pool.pages_for(len(live.tokens))
        if len(live.pages) > needed:
            self._pool.release(live.pages[needed:])
            del live.pages[needed:]

    def note_read(self, live: Live, drafter_length: int) -> None:
        """Take note of how far the drafter has read."""
        if live.finished is not None:
            return
        assert live.drafter_length <= drafter_length <= live.target_length, f"drafter at {drafter_length}"
        full = live.drafter_length // self._pool.page_size
        live.drafter_length = drafter_length
        self._register(live, range(full, drafter_length // self._pool.page_size))

    def begin_anew(self, *, drafter: bool) -> None:
        """Let all running requests wait again, as if preempted: there is another drafter, or none. Between steps."""
        self._drafter = drafter
        while self._running:
            live = self._running.pop()
            self._vacate(live)
            live.preemptions += 1
            self._waiting.appendleft(live)

    def check(self) -> None:
        """Raise AssertionError unless requests and pages are in order. For between steps."""
        self._pool.check(live.pages for live in self._running)
        queue = [*self._running, *self._waiting]
        assert {live.key: live for live in queue} == self._lives
        assert [live.arrival for live in queue] == sorted({live.arrival for live in queue}), "not in arrival order"
        assert len(self._running) <= self._max_rows
        for live in queue:
            assert live.finished is None, f"request {live.key} is finished and still here"
            assert 0 <= live.drafter_length <= live.target_length < len(live.tokens) <= self.limit(live)
            assert self._pool.pages_for(live.target_length) <= len(live.pages) <= self._pool.pages_for(len(live.tokens))
        for live in self._waiting:
            assert not live.pages, f"request {live.key} waits but owns pages"

    def _seat_tokens(self) -> list[Live]:
        """Give each request the pages of its tokens, oldest first, and preempt the latest where none is left.

        Reading requests have theirs since they were admitted; it is for the newest token of decoding ones.
        """
        preempted: list[Live] = []
        index = 0
        while index < len(self._running):
            live = self._running[index]
            if self._extend(live, len(live.tokens)):
                index += 1
                continue
            assert len(self._running) > 1, "add() lets in only what fits alone"
            latest = self._running.pop()
            self._vacate(latest)
            latest.preemptions += 1
            self._waiting.appendleft(latest)
            preempted.append(latest)
        return preempted

    def _seat_drafts(self, live: Live, drafts: int) -> int:
        """Reserve the pages of drafts behind the newest token; fewer drafts, if pages are short."""
        if drafts == 0:
            return 0
        room = (len(live.pages) + self._pool.free) * self._pool.page_size - len(live.tokens)
        drafts = min(drafts, room)
        seated = self._extend(live, len(live.tokens) + drafts)
        assert seated, "no more drafts than free pages hold"
        return drafts

    def _admit(self) -> Live | None:
        """Let the first waiting request run, if a row and the pages of all its tokens are there."""
        # One free page for each of the others, or the newcomer would soon be preempted.
        spare = len(self._running)
        if not self._waiting or len(self._running) == self._max_rows or self._pool.free <= spare:
            return None
        live = self._waiting[0]
        followed = self._drafter and live.speculates
        total = self._pool.pages_for(len(live.tokens)) + spare
        pages = self._pool.match(live.tokens, need_draft=followed, total=total)
        if pages is None:
            return None
        live.pages = pages
        live.target_length = len(pages) * self._pool.page_size
        live.drafter_length = live.target_length if followed else 0
        seated = self._extend(live, len(live.tokens))
        assert seated, "match() said that the pages are there"
        self._running.append(self._waiting.popleft())
        return live

    def _extend(self, live: Live, positions: int) -> bool:
        """Let a request own the pages of so many positions, or change nothing."""
        missing = self._pool.pages_for(positions) - len(live.pages)
        if missing > 0:
            room = self._pool.pages_for(self.limit(live) - 1) - len(live.pages)
            after = live.pages[-1] if live.pages else None
            pages = self._pool.allocate(missing, after=after, room=room)
            if pages is None:
                return False
            live.pages += pages
        return True

    def _vacate(self, live: Live) -> None:
        self._pool.release(live.pages)
        live.pages, live.target_length, live.drafter_length = [], 0, 0

    def _register(self, live: Live, indexes: range) -> None:
        """Let full pages be found. Their last token is read, so the one behind it is known."""
        size = self._pool.page_size
        for index in indexes:
            end = (index + 1) * size
            self._pool.register(
                live.pages[index],
                after=live.pages[index - 1] if index else None,
                tokens=live.tokens[end - size : end],
                successor=live.tokens[end],
                drafted=end <= live.drafter_length,
            )


def _row(live: Live, count: int, *, drafts: int = 0) -> Row:
    return Row(live=live, start=live.target_length, count=count, drafts=drafts, samples=count == live.pending)


def _share(wanted: Sequence[int], budget: int) -> list[int]:
    """Divide a budget so that nobody gets more than they want, nor less than others unless they want less."""
    if sum(wanted) <= budget:
        return list(wanted)
    shares = [0] * len(wanted)
    for served, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], budget // (len(wanted) - served))
        budget -= shares[index]
    return shares
