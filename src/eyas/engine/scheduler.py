"""Decides which requests take part in the next step, with how many tokens, and allocates their blocks.

Requests are ordered by priority (lower first), then by arrival. That order is called a request's turn. A step's token
budget is given out in this sequence:

    decoding   every running request with one pending token gets that token
    drafts     draft tokens for the decoding requests; at most half of the remaining budget while prompts are waiting
    reading    chunks of prompts, by turn; the first prompt always gets something
    admission  waiting requests by turn, starting behind their prefix cache hit

A cached prefix may have keys and values of the target only. If the drafter lacks some of it, the request lags: it
decodes without the drafter. When drafting for it would pay, it stops and reads again, in chunks, from where the
drafter's part ends (`_read_again`). A request with fewer than two tokens left never does.

Blocks are given out in the same sequence, except that drafts come last: speculation never takes a block from a request.
A request gets the blocks of all its tokens at admission and one more at a time as it decodes. If there is none left,
the request whose turn is last is preempted and waits again; the prefix cache makes reading it again cheap.

A step may be planned while another is in flight (between `launched` and `landed`). How many tokens that step yields is
known only within bounds (`Flight`). A request that may go on gets a row, with blocks for the longest outcome but never
beyond its limit; the device reads and writes nothing from the last allowed token on. A request in flight is never
preempted: if a block is missing, the plan has no rows until that step is committed. A step may write to any block that
its requests owned at launch, so blocks released meanwhile are reused only after all launched steps have landed.

Invariants: running and waiting requests are sorted by turn, and with equal priorities all running ones come before all
waiting ones; the first running request advances in every step and is never preempted; with nothing in flight a request
owns no block beyond its tokens; a block is registered under committed tokens and their successor; no block or slot is
reused while a launched step may write to it.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import count as count_up

from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, SequenceState, flight_of
from eyas.errors import UserError


# Neither frozen nor keyword-only: a step creates hundreds of these, and either option doubles the time.
@dataclass(eq=False, slots=True)
class ScheduledRow:
    """One request's part in a step."""

    seq: SequenceState
    start: int
    """Position of its first token; the target's cache holds all before it. For a decoding request in flight this is a
    lower bound: accepted drafts move it further, which only the device knows."""
    count: int
    """Tokens to run through the target, without drafts."""
    drafts: int
    """Draft slots behind these tokens."""
    samples: bool
    """Whether these tokens include the newest one, so that the step samples the next token."""

    @property
    def prompt_logits(self) -> int:
        """How many of its first tokens need prompt logprobs of their successors."""
        if not self.seq.lacks_prompt_logprobs:
            return 0
        return max(0, min(self.start + self.count, self.seq.prompt_length - 1) - self.start)


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """The rows of the next step."""

    rows: tuple[ScheduledRow, ...]
    """Decoding requests, then prompts being read, then newly admitted ones, each sorted by turn. If empty, there is
    nothing to launch: commit the steps in flight and plan again."""
    preempted: tuple[SequenceState, ...]
    """Requests that were preempted for this step."""


WantedDrafts = Callable[[Sequence[SequenceState]], Mapping[int, int]]
"""Maps decoding requests to the most drafts of each, by key."""
_Prospect = tuple[SequenceState, int, int, int]
"""A request, the tokens read before the next step, and its fewest and most tokens by then. The last two differ only for
decoding requests with drafts in flight."""


class Scheduler:
    """Tracks requests from arrival to finish. A step is `plan`, then `commit` for each row, then `finish` for some.

    To plan ahead of the device, call `launched` right after `plan`, before any request can finish, and `landed` after
    the step's last `commit`. The next step may be planned and launched in between.

    Without a `drafter` no request lags. A step reads at most `max_prompt_logits` tokens of prompts whose logprobs are
    requested, because each of them takes a row of logits.
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
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # one token each, so that every request advances
        self._budget, self._max_length = max_num_batched_tokens, max_model_len
        self._max_prompt_logits = max_prompt_logits or max_num_batched_tokens
        self._size = block_manager.block_size
        self._slots = list(range(self._max_num_seqs))[::-1]
        self._steps: deque[tuple[SchedulerOutput, list[tuple[list[int], int]]]] = deque()
        """Launched steps, oldest first, each with the blocks and slots to release when it lands."""
        self._lives: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._waiting: list[SequenceState] = []
        self._latest_arrival: int | None = None
        self._numbers = count_up()
        """Numbers of residencies (`SequenceState.stay`) and of block tables."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[SequenceState]:
        return list(self._lives.values())

    @property
    def running(self) -> list[SequenceState]:
        """Requests that own blocks, sorted by turn."""
        return list(self._running)

    @property
    def in_flight(self) -> int:
        """Number of launched steps that have not landed."""
        return len(self._steps)

    def add(self, seq: SequenceState) -> None:
        """Add a request to the waiting queue. Refuse one that could never be scheduled."""
        assert seq.key not in self._lives, f"request {seq.key} is here already"
        assert self._latest_arrival is None or seq.arrival > self._latest_arrival, "arrivals ascend"
        if seq.prompt_length + 1 > self._max_length:
            raise UserError(
                f"the prompt of request {seq.key} has {seq.prompt_length} tokens, above the {self._max_length - 1} "
                f"that leave room for an answer; shorten it or raise the longest context {self._max_length}"
            )
        size, most, limit = self._size, self._block_manager.blocks, min(seq.limit, self._max_length)
        blocks = self._block_manager.blocks_for(limit - 1)  # the last token is never read
        if blocks > most:
            raise UserError(
                f"request {seq.key} may grow to {limit} tokens, which need {blocks} blocks of {size}, above "
                f"the {most} there are; keep prompt and answer within {most * size + 1} tokens or add blocks"
            )
        seq.limit = limit
        self._latest_arrival = seq.arrival
        self._lives[seq.key] = seq
        insort(self._waiting, seq, key=_turn)

    def cancel(self, key: int) -> bool:
        """Finish a request at any time and free its blocks, those in flight when their step lands. False if unknown."""
        seq = self._lives.get(key)
        if seq is None:
            return False
        self.finish(seq, FinishReason.CANCELLED)
        return True

    def finish(self, seq: SequenceState, reason: FinishReason) -> None:
        """Finish a request unless it is finished. Its full blocks stay in the prefix cache."""
        if seq.finished is not None:
            return
        del self._lives[seq.key]
        (self._waiting if seq.slot is None else self._running).remove(seq)
        seq.finished = reason
        self._free(seq)

    def plan(self, wanted_drafts: WantedDrafts) -> SchedulerOutput:
        """Plan the next step and allocate its blocks.

        Only decoding requests get drafts. They are passed to `wanted_drafts`, which returns how many each should have.
        """
        decoding: list[_Prospect] = []
        reading: list[_Prospect] = []
        preempted: list[SequenceState] = []
        running, size = self._running, self._size
        for seq in running:  # preemption may shorten this list
            if seq.catches_up and self._read_again(seq):
                continue
            start, limit = seq.target_length, seq.limit
            fewest = most = len(seq.tokens)
            for flight in seq.flights:
                start += flight.read
                fewest += flight.fewest
                most += flight.most
            if fewest >= limit:
                continue  # a step in flight will finish it
            reach = most if most < limit else limit - 1
            while reach > len(seq.blocks) * size and not self._extend(seq, reach):
                assert len(running) > 1 or seq.flights, "add() accepts only requests that fit alone"
                last = running[-1]
                if last.flights:
                    return SchedulerOutput(rows=(), preempted=tuple(preempted))
                self._preempt_last()
                preempted.append(last)
                if last is seq:
                    break
            else:
                (decoding if fewest - start == 1 else reading).append((seq, start, fewest, most))

        left = self._budget - len(decoding)
        prompts_want = bool(reading or (self._waiting and self._slots))
        drafts = [0] * len(decoding)
        wanted = wanted_drafts([prospect[0] for prospect in decoding])
        if wanted:
            useful = [min(wanted.get(seq.key, 0), seq.limit - fewest - 1) for seq, _, fewest, _ in decoding]
            assert min(useful, default=0) >= 0, "drafts must be 0 or more, and a request at its limit has no row"
            drafts = _split_fairly(useful, left // 2 if prompts_want else left)
            left -= sum(drafts)

        prefill: list[ScheduledRow] = []
        readers = chain(reading, () if preempted else iter(self._admit, None))
        logits_left = self._max_prompt_logits
        while left > 0 and (prospect := next(readers, None)) is not None:
            seq, start, tokens, _ = prospect
            count = min(tokens - start, left)
            if seq.lacks_prompt_logprobs:
                count = min(count, logits_left)
                logits_left -= count
            if count:
                prefill.append(
                    ScheduledRow(seq=seq, start=start, count=count, drafts=0, samples=start + count == tokens)
                )
                left -= count

        rows = []
        for (seq, start, _, most), n in zip(decoding, drafts, strict=True):
            if n and most + n > len(seq.blocks) * size:
                n = self._allocate_drafts(seq, most, n)
            rows.append(ScheduledRow(seq, start, 1, n, True))
        return SchedulerOutput(rows=(*rows, *prefill), preempted=tuple(preempted))

    def launched(self, output: SchedulerOutput, *, deepest: int | None = None) -> None:
        """Record that the step was launched: its requests' blocks and slots are in use until it lands.

        `deepest` is the depth of draft trees: no more drafts of a request than that can be accepted.
        """
        self._steps.append((output, []))
        for row in output.rows:
            assert row.seq.slot is not None, f"request {row.seq.key} left between plan and launch"
            drafts = row.drafts if deepest is None else min(row.drafts, deepest)
            row.seq.flights.append(flight_of(row.count, drafts, row.samples))

    def landed(self, output: SchedulerOutput) -> None:
        """Release what was set aside for the oldest launched step. All its rows must be committed."""
        step, aside = self._steps.popleft()
        assert step is output, "steps land in the order in which they were launched"
        for blocks, slot in aside:
            self._release(blocks, slot)

    def abandon(self) -> None:
        """Drop all launched steps, with the device idle. Their requests must have been cancelled."""
        assert not any(seq.flights for seq in self._running), "requests in flight must be cancelled first"
        for step, _ in list(self._steps):
            self.landed(step)

    def commit(self, seq: SequenceState, read: int, new_tokens: Sequence[int], drafter_length: int = 0) -> None:
        """Record the result of a step: tokens read, accepted drafts among them, and the chosen tokens (one more).

        `drafter_length` is how many tokens the drafter has read, if more than before. With several steps in flight
        this is the oldest. A request that was cancelled meanwhile is left alone.
        """
        if seq.finished is not None:
            return
        flights, tokens, size = seq.flights, seq.tokens, self._size
        if flights:
            flight = flights.pop(0)
            assert flight.read <= read <= flight.read + flight.most - flight.fewest, f"request {seq.key}: {read} read"
        before = seq.target_length
        tokens.extend(new_tokens)
        seq.target_length = length = before + read
        pending = len(tokens) - length
        assert pending == 1 or (pending > 1 and not new_tokens), f"request {seq.key}: {pending} pending"
        assert len(tokens) <= seq.limit, f"request {seq.key} has {len(tokens)} tokens"
        if length // size > before // size:
            self._register(seq, range(before // size, length // size))
        if drafter_length > seq.drafter_length:
            assert drafter_length <= length, f"drafter at {drafter_length}"
            full, seq.drafter_length = seq.drafter_length // size, drafter_length
            if drafter_length // size > full:
                self._register(seq, range(full, drafter_length // size))
        # Keep reserved blocks while the next step is in flight: if the answer stops among accepted drafts, the device
        # is further than its tokens.
        if not flights and len(seq.blocks) * size >= len(tokens) + size:
            needed = self._block_manager.blocks_for(len(tokens))
            self._block_manager.release(seq.blocks[needed:])
            del seq.blocks[needed:]
            seq.table = next(self._numbers)

    def preempt_all(self, *, drafter: bool) -> None:
        """Preempt all running requests because the drafter was replaced or removed. Call between steps."""
        assert not self._steps, "a step is under way"
        self._drafter = drafter
        while self._running:
            self._preempt_last()
        self._follow_waiting()

    def note_new_weights(self) -> None:
        """Record new drafter weights: old drafter entries of running requests are not shared. Call between steps.

        Waiting requests will be read from the start, so the drafter follows them again.
        """
        assert not self._steps, "a step is under way"
        self._block_manager.forget_drafts()
        for seq in self._running:
            seq.drafts_outdated = not seq.lags  # entries that are missing will be computed with the new weights
        self._follow_waiting()

    def _follow_waiting(self) -> None:
        for seq in self._waiting:
            seq.speculates = seq.request.speculation.by_drafter

    def check(self) -> None:
        """Raise AssertionError unless requests, blocks, slots and flights are consistent. Call between steps."""
        aside = [entry for _, entries in self._steps for entry in entries]
        self._block_manager.check([*(seq.blocks for seq in self._running), *(blocks for blocks, _ in aside)])
        slots = [*self._slots, *(slot for _, slot in aside), *(seq.slot for seq in self._running)]
        assert sorted(slot for slot in slots if slot is not None) == list(range(self._max_num_seqs)), f"slots {slots}"
        launched = Counter(row.seq.key for step, _ in self._steps for row in step.rows)
        queue = [*self._running, *self._waiting]
        assert {seq.key: seq for seq in queue} == self._lives
        for part in (self._running, self._waiting):
            assert [seq.turn for seq in part] == sorted({seq.turn for seq in part}), "not by turn"
        if len({seq.request.priority for seq in queue}) == 1:
            assert [seq.turn for seq in queue] == sorted({seq.turn for seq in queue}), (
                "a later request runs before an earlier one"
            )
        assert len(self._running) <= self._max_num_seqs
        for seq in queue:
            assert seq.finished is None, f"request {seq.key} is finished but still queued"
            assert 0 <= seq.drafter_length <= seq.target_length < len(seq.tokens) <= seq.limit <= self._max_length
            assert not seq.lags or seq.drafter_length < seq.written_length <= seq.target_length, (
                f"request {seq.key} lags"
            )
            assert seq.lags or not seq.catches_up, f"request {seq.key} catches up without lagging"
            assert len(seq.flights) <= launched[seq.key], f"request {seq.key} has a flight without a step"
            written, most = seq.target_length, len(seq.tokens)
            if seq.flights:
                new = sum(flight.most for flight in seq.flights)
                written, most = min(most + max(0, new - 1), seq.limit - 1), seq.limit - 1
            blocks_for = self._block_manager.blocks_for
            assert blocks_for(written) <= len(seq.blocks) <= blocks_for(most), f"request {seq.key}: {seq.blocks}"
        for seq in self._waiting:
            assert not seq.blocks, f"request {seq.key} waits but owns blocks"
            assert not seq.flights, f"request {seq.key} waits but is in flight"
            assert seq.slot is None, f"request {seq.key} waits but has slot {seq.slot}"

    def _allocate_drafts(self, seq: SequenceState, tokens: int, drafts: int) -> int:
        """Allocate blocks for drafts behind `tokens`; returns how many drafts fit."""
        reach = min(tokens + drafts, seq.limit - 1)
        if reach <= len(seq.blocks) * self._size:
            return drafts
        room = (len(seq.blocks) + self._block_manager.free) * self._size
        if reach > room:
            reach, drafts = room, room - tokens
        allocated = self._extend(seq, reach)
        assert allocated, "drafts were cut to the free blocks"
        return drafts

    def _admit(self) -> _Prospect | None:
        """Admit the first waiting request if there are a slot and blocks for all its tokens."""
        # Leave one free block for each running request, or the new one would soon be preempted.
        spare = len(self._running)
        if not self._waiting or not self._slots or self._block_manager.free <= spare:
            return None
        seq = self._waiting[0]
        followed = self._drafter and seq.speculates
        total = self._block_manager.blocks_for(len(seq.tokens)) + spare
        # Logprobs need every prompt token computed; one token alone never matches a block.
        known = seq.tokens[:1] if seq.lacks_prompt_logprobs else seq.tokens
        blocks = self._block_manager.match(known, total=total, cache_salt=seq.request.cache_salt)
        if blocks is None:
            return None
        seq.blocks = blocks
        seq.target_length = seq.written_length = found = len(blocks) * self._size
        seq.drafter_length = self._block_manager.drafted(blocks) * self._size if followed else 0
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = found
        seq.lags = bool(followed and seq.drafter_length < found)
        # If the gap is no longer than the rest, read both now: later they would have to be read again together.
        if seq.lags and found - seq.drafter_length <= len(seq.tokens) - found:
            self._read_again(seq)
        allocated = self._extend(seq, len(seq.tokens))
        assert allocated, "match() ensured enough blocks"
        seq.slot, seq.stay, seq.table = self._slots.pop(), next(self._numbers), next(self._numbers)
        insort(self._running, self._waiting.pop(0), key=_turn)
        return seq, seq.target_length, len(seq.tokens), len(seq.tokens)

    def _read_again(self, seq: SequenceState) -> bool:
        """Move a lagging request back to where the drafter's entries end. True if its steps in flight must land first.

        Does nothing if no draft could be used, or while another request reads the same block for the drafter.
        """
        start = self._block_manager.drafted(seq.blocks) * self._size
        block = seq.blocks[start // self._size]
        readers = (other for other in self._running if other.target_length < other.written_length)
        if seq.limit - len(seq.tokens) < 2 or any(block in other.blocks for other in readers):
            return False
        if seq.flights:
            return True
        seq.written_length, seq.target_length, seq.drafter_length = seq.target_length, start, start
        seq.lags = seq.catches_up = False
        seq.stay, seq.table = next(self._numbers), next(self._numbers)
        return False

    def _extend(self, seq: SequenceState, positions: int) -> bool:
        """Allocate blocks so that a request has so many positions; False and no change if there are too few."""
        missing = self._block_manager.blocks_for(positions) - len(seq.blocks)
        if missing > 0:
            room = self._block_manager.blocks_for(seq.limit - 1) - len(seq.blocks)
            after = seq.blocks[-1] if seq.blocks else None
            blocks = self._block_manager.allocate(missing, after=after, room=room)
            if blocks is None:
                return False
            seq.blocks += blocks
            seq.table = next(self._numbers)
        return True

    def _preempt_last(self) -> None:
        seq = self._running.pop()
        self._free(seq)
        seq.preemptions += 1
        insort(self._waiting, seq, key=_turn)

    def _free(self, seq: SequenceState) -> None:
        """Release a request's blocks and slot; with steps in flight, when the latest of them lands."""
        if seq.slot is not None:
            if seq.flights:
                self._steps[-1][1].append((seq.blocks, seq.slot))
            else:
                self._release(seq.blocks, seq.slot)
        seq.blocks, seq.slot, seq.flights = [], None, []
        seq.target_length = seq.drafter_length = seq.written_length = 0
        seq.drafts_outdated = seq.lags = seq.catches_up = False
        if seq.lacks_prompt_logprobs:
            seq.prompt_logprobs.clear()  # the prompt is read again from its start

    def _release(self, blocks: Sequence[int], slot: int) -> None:
        self._block_manager.release(blocks)
        self._slots.append(slot)

    def _register(self, seq: SequenceState, indexes: range) -> None:
        """Enter full blocks in the prefix cache. Their last token is read, so its successor is known."""
        size = self._size
        for index in indexes:
            end = (index + 1) * size
            self._block_manager.register(
                seq.blocks[index],
                after=seq.blocks[index - 1] if index else None,
                tokens=seq.tokens[end - size : end],
                successor=seq.tokens[end],
                drafted=end <= seq.drafter_length and not seq.drafts_outdated,
                cache_salt=seq.request.cache_salt,
            )


def _turn(seq: SequenceState) -> tuple[int, int]:
    return seq.turn


def _split_fairly(wanted: Sequence[int], budget: int) -> list[int]:
    """Split a budget fairly: smaller wishes are met in full, the others get equal shares."""
    if sum(wanted) <= budget:
        return list(wanted)
    shares = [0] * len(wanted)
    for served, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], budget // (len(wanted) - served))
        budget -= shares[index]
    return shares
