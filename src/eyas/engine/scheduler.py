"""Which requests take part in the next step, with how many tokens, and in which blocks.

First come, first served, among requests of equal priority; lower priorities go first. That order is a request's turn.
A step goes through these in order, and what comes late gets what is left:

    decoding   every running request with one pending token reads it; nothing holds it up
    drafts     tokens behind it for the target to verify; half of the remaining budget, if prompts want the rest
    reading    prompts by turn, in chunks; something is always left for the first
    admission  waiting requests by turn, behind what the prefix cache has of them

A prefix is right for a request as far as the target has read it. Where the drafter has read less of it, the request
lags: it decodes without the drafter until that is to draft for it, then stands still and reads again from where the
drafter is (`_read_again`), in chunks like those of prompts. An answer of one token never does.

Blocks follow the same order but for drafts, which come last: speculation never takes a block from a request. A request
gets the blocks of all its tokens when it is admitted and one more now and then as it decodes; if there is none, the
one whose turn is last loses its blocks and waits again, and the prefix cache makes reading it again cheap.

A step may be planned while another is under way (`launched`, then `landed`). What is chosen there is known within
bounds only (`Flight`), so a request that may go on gets a row, with blocks for the deepest outcome, but never beyond
its limit: the device reads and writes nothing from its last allowed token on. Nothing is taken from a request with a
step under way: if a block is missing, the plan has no rows until that step was committed. A step may write any block
that its requests owned when it was launched: what a request gives up meanwhile is set aside until every step launched
before has landed.

Invariants: running and waiting requests each stand in the order of their turns, and with one priority all running ones
before all waiting ones; the first running one moves in every step and is never preempted; with no step under way a
request owns no block beyond its tokens; a block is registered with tokens that were committed, and the one behind them;
no block or slot is given to another while a launched step may write it.
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


# Neither frozen nor keyword-only: a step makes one for each of hundreds of requests, and either takes twice as long.
@dataclass(eq=False, slots=True)
class ScheduledRow:
    """One request's part in a step."""

    seq: SequenceState
    start: int
    """Position of its first token; all before it are in the target's cache. A lower bound, if the request decodes and
    has a step under way: accepted drafts put it further on, and only the device knows."""
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
    """Decoding requests, then reading ones, then admitted ones; each by turn. Without any, there is nothing to launch:
    commit the steps under way and plan again."""
    preempted: tuple[SequenceState, ...]
    """Requests that lost their blocks for it."""


WantedDrafts = Callable[[Sequence[SequenceState]], Mapping[int, int]]
"""The most drafts of requests that decode, by key."""
_Prospect = tuple[SequenceState, int, int, int]
"""A request, tokens that it will surely have read before the next step, and the fewest and the most that it will have.
Only where it decodes, and a step with drafts is under way, these are not the same."""


class Scheduler:
    """Requests from arrival to end. A step is `plan`, then `commit` for each of its rows, then `finish` for some.

    To plan ahead of a device, call `launched` right after `plan`, before any request can end, and `landed` after the
    step's last `commit`. In between the next step may be planned and launched.

    Without a `drafter` nobody lags. Of prompts whose logprobs are asked for, a step reads `max_prompt_logits` tokens:
    each of them takes a row of logits.
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
        self._size = block_manager.block_size
        self._slots = list(range(self._max_num_seqs))[::-1]
        self._steps: deque[tuple[SchedulerOutput, list[tuple[list[int], int]]]] = deque()
        """Launched ones, oldest first, each with blocks and slot of all that left while it was the newest."""
        self._lives: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._waiting: list[SequenceState] = []
        self._latest_arrival: int | None = None
        self._numbers = count_up()
        """Of stays and of block tables."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def requests(self) -> list[SequenceState]:
        """All that have not ended."""
        return list(self._lives.values())

    @property
    def running(self) -> list[SequenceState]:
        """Requests that own blocks, by turn."""
        return list(self._running)

    @property
    def in_flight(self) -> int:
        """How many launched steps have not landed."""
        return len(self._steps)

    def add(self, seq: SequenceState) -> None:
        """Let a request wait for its turn; refuse one whose turn could never come."""
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
        """End a request at any moment, even during a step, and free what it owns; what a launched step may still write,
        when that has landed. False if it is not here.
        """
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
        (self._waiting if seq.slot is None else self._running).remove(seq)
        seq.finished = reason
        self._vacate(seq)

    def plan(self, wanted_drafts: WantedDrafts) -> SchedulerOutput:
        """Decide on the next step and reserve its blocks.

        Only decoding requests carry drafts, those with one token to read next, whatever steps under way choose: behind
        tokens that the target has yet to read there is nothing to draft from. Once who decodes is known, they are asked
        for.
        """
        decoding: list[_Prospect] = []
        reading: list[_Prospect] = []
        preempted: list[SequenceState] = []
        running, size = self._running, self._size
        for seq in running:  # which may lose its last meanwhile
            if seq.catches_up and self._read_again(seq):
                continue
            start, limit = seq.target_length, seq.limit
            fewest = most = len(seq.tokens)
            for flight in seq.flights:
                start += flight.read
                fewest += flight.fewest
                most += flight.most
            if fewest >= limit:
                continue  # what is under way ends it
            reach = most if most < limit else limit - 1
            while reach > len(seq.blocks) * size and not self._extend(seq, reach):
                assert len(running) > 1 or seq.flights, "add() lets in only what fits alone"
                last = running[-1]
                if last.flights:
                    return SchedulerOutput(rows=(), preempted=tuple(preempted))
                self._send_back()
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
            assert min(useful, default=0) >= 0, "drafts are 0 or more, and a request at its limit has no row"
            drafts = _share(useful, left // 2 if prompts_want else left)
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
                n = self._seat_drafts(seq, most, n)
            rows.append(ScheduledRow(seq, start, 1, n, True))
        return SchedulerOutput(rows=(*rows, *prefill), preempted=tuple(preempted))

    def launched(self, output: SchedulerOutput, *, deepest: int | None = None) -> None:
        """Take note that the device works on a step: its requests' blocks and slots are its own until it has landed.

        With `deepest` its drafts are nodes of trees: of a request that many can be accepted, and all of them have room.
        """
        self._steps.append((output, []))
        for row in output.rows:
            assert row.seq.slot is not None, f"request {row.seq.key} left between plan and launch"
            drafts = row.drafts if deepest is None else min(row.drafts, deepest)
            row.seq.flights.append(flight_of(row.count, drafts, row.samples))

    def landed(self, output: SchedulerOutput) -> None:
        """The oldest launched step is over and its rows are committed, but for those of requests that have ended."""
        step, aside = self._steps.popleft()
        assert step is output, "steps land in the order in which they were launched"
        for blocks, slot in aside:
            self._give_back(blocks, slot)

    def abandon(self) -> None:
        """No launched step will land, and the device is at rest; their requests have been cancelled."""
        assert not any(seq.flights for seq in self._running), "cancelled first"
        for step, _ in list(self._steps):
            self.landed(step)

    def commit(self, seq: SequenceState, read: int, new_tokens: Sequence[int], drafter_length: int = 0) -> None:
        """Take note of a step: tokens read, accepted drafts among them, and tokens chosen, which are one more.

        `drafter_length` is how far the drafter has read, if that is more than before. Of launched steps it is the
        oldest that is not committed. Nothing happens to a request that was cancelled during the step.
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
        # The next step, if it is under way, may write all that was reserved: of an answer that stops among accepted
        # drafts, the device is further on than its tokens tell.
        if not flights and len(seq.blocks) * size >= len(tokens) + size:
            needed = self._block_manager.blocks_for(len(tokens))
            self._block_manager.release(seq.blocks[needed:])
            del seq.blocks[needed:]
            seq.table = next(self._numbers)

    def begin_anew(self, *, drafter: bool) -> None:
        """Let all running requests wait again, as if preempted: there is another drafter, or none. Between steps."""
        assert not self._steps, "a step is under way"
        self._drafter = drafter
        while self._running:
            self._send_back()
        self._follow_waiting()

    def note_new_weights(self) -> None:
        """The drafter has other weights: what it has read of running requests is of use to them alone. Between steps.

        Requests that wait will be read from the beginning, so it follows those again that it had left alone.
        """
        assert not self._steps, "a step is under way"
        self._block_manager.forget_drafts()
        for seq in self._running:
            seq.drafts_outdated = not seq.lags  # what it lacks will be read with the new ones
        self._follow_waiting()

    def _follow_waiting(self) -> None:
        for seq in self._waiting:
            seq.speculates = seq.request.speculation.by_drafter

    def check(self) -> None:
        """Raise AssertionError unless requests, blocks, slots and flights are in order. For between steps."""
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
                "a later one runs before its turn"
            )
        assert len(self._running) <= self._max_num_seqs
        for seq in queue:
            assert seq.finished is None, f"request {seq.key} is finished and still here"
            assert 0 <= seq.drafter_length <= seq.target_length < len(seq.tokens) <= seq.limit <= self._max_length
            assert not seq.lags or seq.drafter_length < seq.written_length <= seq.target_length, (
                f"request {seq.key} lags"
            )
            assert seq.lags or not seq.catches_up, f"request {seq.key} lacks nothing"
            assert len(seq.flights) <= launched[seq.key], f"request {seq.key} has a flight of no step"
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

    def _seat_drafts(self, seq: SequenceState, tokens: int, drafts: int) -> int:
        """Reserve the blocks of drafts behind so many tokens; fewer drafts, if blocks are short."""
        reach = min(tokens + drafts, seq.limit - 1)
        if reach <= len(seq.blocks) * self._size:
            return drafts
        room = (len(seq.blocks) + self._block_manager.free) * self._size
        if reach > room:
            reach, drafts = room, room - tokens
        seated = self._extend(seq, reach)
        assert seated, "no more drafts than free blocks hold"
        return drafts

    def _admit(self) -> _Prospect | None:
        """Let the first waiting request run, if a slot and the blocks of all its tokens are there."""
        # One free block for each of the others, or the newcomer would soon be preempted.
        spare = len(self._running)
        if not self._waiting or not self._slots or self._block_manager.free <= spare:
            return None
        seq = self._waiting[0]
        followed = self._drafter and seq.speculates
        total = self._block_manager.blocks_for(len(seq.tokens)) + spare
        # Logprobs need every token of the prompt to be computed: the first alone is never found.
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
        # A gap no longer than the rest is read with it: later it would take both to be read once more.
        if seq.lags and found - seq.drafter_length <= len(seq.tokens) - found:
            self._read_again(seq)
        seated = self._extend(seq, len(seq.tokens))
        assert seated, "match() said that the blocks are there"
        seq.slot, seq.stay, seq.table = self._slots.pop(), next(self._numbers), next(self._numbers)
        insort(self._running, self._waiting.pop(0), key=_turn)
        return seq, seq.target_length, len(seq.tokens), len(seq.tokens)

    def _read_again(self, seq: SequenceState) -> bool:
        """Let a request that lags go back to where the drafter has read to; whether it must wait until nothing of it is
        under way.

        Nothing changes where no draft could be of use, or while another one reads the same for the drafter.
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
        """Let a request own the blocks of so many positions, or change nothing."""
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

    def _send_back(self) -> None:
        """Let the last running request wait again."""
        seq = self._running.pop()
        self._vacate(seq)
        seq.preemptions += 1
        insort(self._waiting, seq, key=_turn)

    def _vacate(self, seq: SequenceState) -> None:
        """Take what a request owns; what a launched step may write is set aside until that has landed."""
        if seq.slot is not None:
            if seq.flights:
                self._steps[-1][1].append((seq.blocks, seq.slot))
            else:
                self._give_back(seq.blocks, seq.slot)
        seq.blocks, seq.slot, seq.flights = [], None, []
        seq.target_length = seq.drafter_length = seq.written_length = 0
        seq.drafts_outdated = seq.lags = seq.catches_up = False
        if seq.lacks_prompt_logprobs:
            seq.prompt_logprobs.clear()  # it will read its prompt from the beginning

    def _give_back(self, blocks: Sequence[int], slot: int) -> None:
        self._block_manager.release(blocks)
        self._slots.append(slot)

    def _register(self, seq: SequenceState, indexes: range) -> None:
        """Let full blocks be found. Their last token is read, so the one behind it is known."""
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


def _share(wanted: Sequence[int], budget: int) -> list[int]:
    """Divide a budget so that nobody gets more than they want, nor less than others unless they want less."""
    if sum(wanted) <= budget:
        return list(wanted)
    shares = [0] * len(wanted)
    for served, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], budget // (len(wanted) - served))
        budget -= shares[index]
    return shares
