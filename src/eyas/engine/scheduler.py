"""Which requests take part in the next step, with how many tokens, and in which blocks.

First come, first served, among requests of equal priority; lower priorities go first. That order is a request's turn.
A step goes through these in order, and what comes late gets what is left:

    decoding   every running request with one pending token reads it; nothing holds it up
    drafts     tokens behind it for the target to verify; half of the remaining budget, if prompts want the rest
    reading    prompts by turn, in chunks; something is always left for the first
    admission  waiting requests by turn, behind what the prefix cache has of them

Blocks follow the same order but for drafts, which come last: speculation never takes a block from a request. A request
gets the blocks of all its tokens when it is admitted and one more now and then as it decodes; if there is none, the
one whose turn is last loses its blocks and waits again, and the prefix cache makes reading it again cheap.

Invariants: running and waiting requests each stand in the order of their turns, and with one priority all running ones
before all waiting ones; the first running one moves in every step and is never preempted; between steps a request owns
no block beyond its tokens.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, SequenceState
from eyas.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ScheduledRow:
    """One request's part in a step."""

    seq: SequenceState
    start: int
    """Position of its first token; all before it are in the target's cache."""
    count: int
    """Tokens to read."""
    drafts: int
    """Draft tokens there is room for behind them."""
    samples: bool
    """Whether the tokens end with the newest, so that the step chooses the next."""

    @property
    def prompt_logits(self) -> int:
        """How many of its first tokens have a successor in the prompt whose logprob is asked for."""
        if not self.seq.lacks_prompt_logprobs:
            return 0
        return max(0, min(self.start + self.count, self.seq.prompt_length - 1) - self.start)


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """What the next step computes."""

    rows: tuple[ScheduledRow, ...]
    """Decoding requests, then reading ones, then admitted ones; each by turn."""
    preempted: tuple[SequenceState, ...]
    """Requests that lost their blocks for it."""


class Scheduler:
    """Requests from arrival to end. A step is `plan`, then `commit` for each of its rows, then `finish` for some.

    Without a `drafter`, prefixes are right for every request as soon as the target has read them. Of prompts whose
    logprobs are asked for, a step reads `max_prompt_logits` tokens: each of them takes a row of logits.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_prompt_logits: int | None = None,
        drafter: bool = True,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
        ):
            if value < least:
                raise UserError(f"{name} is {value}; it must be {least} or more")
        self._block_manager, self._drafter = block_manager, drafter
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # a token for each, so that none stands still
        self._budget, self._max_length = max_num_batched_tokens, max_model_len
        self._max_prompt_logits = max_prompt_logits or max_num_batched_tokens
        self._lives: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._waiting: list[SequenceState] = []
        self._latest_arrival: int | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> list[SequenceState]:
        """Requests that own blocks, by turn."""
        return list(self._running)

    def limit(self, seq: SequenceState) -> int:
        """The most tokens a request can come to, prompt included; with them it must be finished."""
        return min(len(seq.request.prompt) + seq.request.max_new_tokens, self._max_length)

    def add(self, seq: SequenceState) -> None:
        """Let a request wait for its turn; refuse one whose turn could never come."""
        assert seq.key not in self._lives, f"request {seq.key} is here already"
        assert self._latest_arrival is None or seq.arrival > self._latest_arrival, "arrivals ascend"
        if seq.prompt_length + 1 > self._max_length:
            raise UserError(
                f"the prompt of request {seq.key} has {seq.prompt_length} tokens, above the {self._max_length - 1} "
                f"that leave room for an answer; shorten it or raise the longest context {self._max_length}"
            )
        size, most = self._block_manager.block_size, self._block_manager.blocks
        blocks = self._block_manager.blocks_for(self.limit(seq) - 1)  # the last token is never read
        if blocks > most:
            raise UserError(
                f"request {seq.key} may grow to {self.limit(seq)} tokens, which need {blocks} blocks of {size}, above "
                f"the {most} there are; keep prompt and answer within {most * size + 1} tokens or add blocks"
            )
        self._latest_arrival = seq.arrival
        self._lives[seq.key] = seq
        insort(self._waiting, seq, key=_turn)

    def cancel(self, key: int) -> bool:
        """End a request at any moment, even during a step, and free what it owns. False if it is not here."""
        seq = self._lives.get(key)
        if seq is None:
            return False
        self.finish(seq, FinishReason.CANCELLED)
        return True

    def finish(self, seq: SequenceState, reason: FinishReason) -> None:
        """End a request that has not ended yet. Its full blocks stay in the prefix cache."""
        if seq.finished is not None:
            return
        del self._lives[seq.key]
        (self._running if seq in self._running else self._waiting).remove(seq)
        seq.finished = reason
        self._vacate(seq)

    def plan(self, wanted_drafts: Mapping[int, int]) -> SchedulerOutput:
        """Decide on the next step and reserve its blocks. `wanted_drafts` has the most drafts of requests, by key.

        Only decoding requests carry drafts: behind tokens that the target has yet to read there is nothing to draft
        from.
        """
        preempted = self._seat_tokens()
        decoding = [seq for seq in self._running if seq.pending == 1]
        reading = [seq for seq in self._running if seq.pending > 1]
        left = self._budget - len(decoding)
        prompts_want = bool(reading or (self._waiting and len(self._running) < self._max_num_seqs))
        useful = [min(wanted_drafts.get(seq.key, 0), self.limit(seq) - len(seq.tokens) - 1) for seq in decoding]
        assert min(useful, default=0) >= 0, "drafts are 0 or more, and a request at its limit is finished"
        drafts = _share(useful, left // 2 if prompts_want else left)
        left -= sum(drafts)

        prefill: list[ScheduledRow] = []
        readers = chain(reading, () if preempted else iter(self._admit, None))
        logits_left = self._max_prompt_logits
        while left > 0 and (seq := next(readers, None)) is not None:
            count = min(seq.pending, left)
            if seq.lacks_prompt_logprobs:
                count = min(count, logits_left)
                logits_left -= count
            if count:
                prefill.append(_row(seq, count))
                left -= count

        rows = [_row(seq, 1, drafts=self._seat_drafts(seq, n)) for seq, n in zip(decoding, drafts, strict=True)]
        return SchedulerOutput(rows=(*rows, *prefill), preempted=tuple(preempted))

    def commit(self, seq: SequenceState, *, read: int, new_tokens: Sequence[int]) -> None:
        """Take note of a step: tokens read, accepted drafts among them, and tokens chosen, which are one more.

        Nothing happens to a request that was cancelled during the step.
        """
        if seq.finished is not None:
            return
        full = seq.target_length // self._block_manager.block_size
        seq.tokens.extend(new_tokens)
        seq.target_length += read
        assert seq.pending == 1 or (seq.pending > 1 and not new_tokens), f"request {seq.key}: {seq.pending} pending"
        assert len(seq.tokens) <= self.limit(seq), f"request {seq.key} has {len(seq.tokens)} tokens"
        self._register(seq, range(full, seq.target_length // self._block_manager.block_size))
        needed = self._block_manager.blocks_for(len(seq.tokens))
        if len(seq.blocks) > needed:
            self._block_manager.release(seq.blocks[needed:])
            del seq.blocks[needed:]

    def note_read(self, seq: SequenceState, drafter_length: int) -> None:
        """Take note of how far the drafter has read."""
        if seq.finished is not None:
            return
        assert seq.drafter_length <= drafter_length <= seq.target_length, f"drafter at {drafter_length}"
        full = seq.drafter_length // self._block_manager.block_size
        seq.drafter_length = drafter_length
        self._register(seq, range(full, drafter_length // self._block_manager.block_size))

    def begin_anew(self, *, drafter: bool) -> None:
        """Let all running requests wait again, as if preempted: there is another drafter, or none. Between steps."""
        self._drafter = drafter
        while self._running:
            seq = self._running.pop()
            self._vacate(seq)
            seq.preemptions += 1
            insort(self._waiting, seq, key=_turn)

    def check(self) -> None:
        """Raise AssertionError unless requests and blocks are in order. For between steps."""
        self._block_manager.check(seq.blocks for seq in self._running)
        queue = [*self._running, *self._waiting]
        assert {seq.key: seq for seq in queue} == self._lives
        for part in (self._running, self._waiting):
            assert [seq.turn for seq in part] == sorted({seq.turn for seq in part}), "not by turn"
        if len({seq.request.priority for seq in queue}) == 1:
            assert [seq.turn for seq in queue] == sorted({seq.turn for seq in queue}), (
                "a later one runs before its turn"
            )
        assert len(self._running) <= self._max_num_seqs
        for seq in queue:
            assert seq.finished is None, f"request {seq.key} is finished and still here"
            assert 0 <= seq.drafter_length <= seq.target_length < len(seq.tokens) <= self.limit(seq)
            assert (
                self._block_manager.blocks_for(seq.target_length)
                <= len(seq.blocks)
                <= self._block_manager.blocks_for(len(seq.tokens))
            )
        for seq in self._waiting:
            assert not seq.blocks, f"request {seq.key} waits but owns blocks"

    def _seat_tokens(self) -> list[SequenceState]:
        """Give each request the blocks of its tokens by turn, and preempt the last where none is left.

        Reading requests have theirs since they were admitted; it is for the newest token of decoding ones.
        """
        preempted: list[SequenceState] = []
        index = 0
        while index < len(self._running):
            seq = self._running[index]
            if self._extend(seq, len(seq.tokens)):
                index += 1
                continue
            assert len(self._running) > 1, "add() lets in only what fits alone"
            last = self._running.pop()
            self._vacate(last)
            last.preemptions += 1
            insort(self._waiting, last, key=_turn)
            preempted.append(last)
        return preempted

    def _seat_drafts(self, seq: SequenceState, drafts: int) -> int:
        """Reserve the blocks of drafts behind the newest token; fewer drafts, if blocks are short."""
        if drafts == 0:
            return 0
        room = (len(seq.blocks) + self._block_manager.free) * self._block_manager.block_size - len(seq.tokens)
        drafts = min(drafts, room)
        seated = self._extend(seq, len(seq.tokens) + drafts)
        assert seated, "no more drafts than free blocks hold"
        return drafts

    def _admit(self) -> SequenceState | None:
        """Let the first waiting request run, if a row and the blocks of all its tokens are there."""
        # One free block for each of the others, or the newcomer would soon be preempted.
        spare = len(self._running)
        if not self._waiting or len(self._running) == self._max_num_seqs or self._block_manager.free <= spare:
            return None
        seq = self._waiting[0]
        followed = self._drafter and seq.speculates
        total = self._block_manager.blocks_for(len(seq.tokens)) + spare
        # Logprobs need every token of the prompt to be computed: the first alone is never found.
        known = seq.tokens[:1] if seq.lacks_prompt_logprobs else seq.tokens
        blocks = self._block_manager.match(known, need_draft=followed, total=total, cache_salt=seq.request.cache_salt)
        if blocks is None:
            return None
        seq.blocks = blocks
        seq.target_length = len(blocks) * self._block_manager.block_size
        seq.drafter_length = seq.target_length if followed else 0
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.target_length
        seated = self._extend(seq, len(seq.tokens))
        assert seated, "match() said that the blocks are there"
        insort(self._running, self._waiting.pop(0), key=_turn)
        return seq

    def _extend(self, seq: SequenceState, positions: int) -> bool:
        """Let a request own the blocks of so many positions, or change nothing."""
        missing = self._block_manager.blocks_for(positions) - len(seq.blocks)
        if missing > 0:
            room = self._block_manager.blocks_for(self.limit(seq) - 1) - len(seq.blocks)
            after = seq.blocks[-1] if seq.blocks else None
            blocks = self._block_manager.allocate(missing, after=after, room=room)
            if blocks is None:
                return False
            seq.blocks += blocks
        return True

    def _vacate(self, seq: SequenceState) -> None:
        self._block_manager.release(seq.blocks)
        seq.blocks, seq.target_length, seq.drafter_length = [], 0, 0
        if seq.lacks_prompt_logprobs:
            seq.prompt_logprobs.clear()  # it will read its prompt from the beginning

    def _register(self, seq: SequenceState, indexes: range) -> None:
        """Let full blocks be found. Their last token is read, so the one behind it is known."""
        size = self._block_manager.block_size
        for index in indexes:
            end = (index + 1) * size
            self._block_manager.register(
                seq.blocks[index],
                after=seq.blocks[index - 1] if index else None,
                tokens=seq.tokens[end - size : end],
                successor=seq.tokens[end],
                drafted=end <= seq.drafter_length,
                cache_salt=seq.request.cache_salt,
            )


def _turn(seq: SequenceState) -> tuple[int, int]:
    return seq.turn


def _row(seq: SequenceState, count: int, *, drafts: int = 0) -> ScheduledRow:
    return ScheduledRow(seq=seq, start=seq.target_length, count=count, drafts=drafts, samples=count == seq.pending)


def _share(wanted: Sequence[int], budget: int) -> list[int]:
    """Divide a budget so that nobody gets more than they want, nor less than others unless they want less."""
    if sum(wanted) <= budget:
        return list(wanted)
    shares = [0] * len(wanted)
    for served, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], budget // (len(wanted) - served))
        budget -= shares[index]
    return shares
