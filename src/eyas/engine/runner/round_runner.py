"""Launches rounds: which captured passes a step is made of, and how what came of it is brought to the host.

A step of decoding is one copy in, up to three replays (draft, verify, sample) and one copy out; a step that reads
prompts has another read and sample (`round_graphs.py`). Nobody waits between them, nor for the step before.

The host keeps bounds: `_waiting` has the most states that may wait for the drafter, by slot. Before they could outgrow
the ring, or what a draft reads, the drafter reads them in a pass of its own (`catch_up`).

A batch in which the host must say what may come (grammars, bad words) is sampled apart: `LaunchedRound.sample` is then
to be called with a mask, once the tokens before are known. The passes before it are under way by then.

Shapes: R rows, Q tokens of a row, K drafts, V vocabulary, X concatenated auxiliary states.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import SequenceState
from eyas.engine.runner import round_passes
from eyas.engine.runner.buckets import USUAL_BLOCKS
from eyas.engine.runner.device_queue import DeviceQueue
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.runner.launched_round import LaunchedRound
from eyas.engine.runner.round_graphs import RoundGraphs
from eyas.engine.runner.round_passes import RoundDrafter, RoundLine, RoundTarget
from eyas.engine.runner.round_state import RoundState, SentOffer
from eyas.engine.runner.sampling_needs import NOTHING, Needs
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import Tree

NOBODY = -1
"""The number of no stay and of no block table."""
Integers = NDArray[np.int64]


class RoundRunner:
    """Rounds over the slots of a `RoundState`."""

    def __init__(
        self,
        run: round_passes.RunTarget,
        cache: KVCache,
        drafter: DrafterRunner | None,
        *,
        capture: GraphCapture,
        queue: DeviceQueue,
        max_num_seqs: int,
        most_tokens: int,
        longest_chunk: int,
        max_model_len: int,
        max_depth: int,
        vocab_size: int,
        dtype: torch.dtype,
        logits_dtype: torch.dtype,
        tree: Tree | None = None,
        chance: float | None = None,
        max_offers: int = 0,
    ) -> None:
        """The host may look up `max_offers` drafts of a request, which may be more than a drafter's `max_depth`."""
        device = capture.device
        self.capture, self.queue, self.chance = capture, queue, chance
        self._most_tokens = most_tokens
        self._calibration: Sequence[tuple[float, float]] = ()
        """As the device has it."""
        most_blocks = -(-max_model_len // cache.block_size)
        self._usual_blocks = min(USUAL_BLOCKS, 1 << (most_blocks - 1).bit_length())
        widest = self._usual_blocks
        while widest < most_blocks:
            widest *= 4
        # One more row is nobody's, and all are finite: where only some drafts are verified, old ones are sampled from.
        logits_SV = torch.zeros(max(most_tokens, max_num_seqs) + 1, vocab_size, dtype=logits_dtype, device=device)
        self._target = RoundTarget(run=run, cache=cache, logits_SV=logits_SV)
        like_X, self._drafter = None, None
        if drafter is not None:
            config = drafter.model.config
            like_X = torch.empty(config.num_aux_hidden_states * config.target_hidden_size, dtype=dtype, device=device)
            self._drafter = RoundDrafter(
                run=drafter.run,
                dtype=drafter.dtype,
                cache=drafter.cache,
                attend=drafter.attention,
                token_W=drafter.token_W,
                remembers=drafter.remembers,
            )
        self.state = RoundState(
            slots=max_num_seqs,
            blocks=widest,
            max_depth=max(max_depth, max_offers),
            like_X=like_X,
            device=device,
            offers=max_offers > 0,
        )
        self.sampling = SlotSampling(max_num_seqs, vocab_size, device)
        self.graphs = RoundGraphs(
            capture,
            queue,
            state=self.state,
            target=self._target,
            drafter=self._drafter,
            sampling=self.sampling,
            max_num_seqs=max_num_seqs,
            most_tokens=most_tokens,
            longest_chunk=longest_chunk,
            max_depth=max_depth,
            blocks=self._usual_blocks,
            tree=tree,
            chance=chance,
            max_offers=max_offers,
        )
        self.shapes = self.graphs.shapes
        self._stays = [NOBODY] * max_num_seqs
        """Who sits where, by the numbers of their stays (`SequenceState.stay`)."""
        self._tables = [NOBODY] * max_num_seqs
        """Whose blocks the device has (`SequenceState.table`): where that is the same, nothing needs a look."""
        self._blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """Block tables as the device has them, by slot."""
        self._decoding: set[int] = set()
        """Stays whose prompts are read."""
        self._block_counts, self._waiting, self._follows, self._asked = np.zeros((4, max_num_seqs), dtype=np.int64)
        """By slot: blocks, states that may wait for the drafter, whether it follows, and the depth asked for."""
        self._kept_needs: tuple[list[int], Needs] = [], NOTHING
        self.vocab_size = vocab_size

    def decodes(self, seq: SequenceState) -> bool:
        """Whether a request's prompt is read, or will be by what was launched: the device has its newest token."""
        return seq.stay in self._decoding

    def split(self, rows: Sequence[ScheduledRow]) -> tuple[list[ScheduledRow], list[ScheduledRow]]:
        """Rows that decode, and those that read."""
        decoding = [row for row in rows if row.seq.stay in self._decoding]
        return decoding, [] if len(decoding) == len(rows) else [row for row in rows if not self.decodes(row.seq)]

    def states_of(self, seq: SequenceState) -> Tensor:
        """The states [T, X] that wait for the drafter; nothing may be in flight."""
        assert self.state.states_SLX is not None
        position_T = torch.arange(seq.drafter_length, seq.target_length, device=self.state.device)
        return self.state.states_SLX[slot_of(seq), position_T % self.state.ring]

    @torch.inference_mode()
    def seat(self, seq: SequenceState, aux_TX: Tensor | None) -> None:
        """Let a request decode that was read elsewhere, with the states that wait for the drafter."""
        slot, state = slot_of(seq), self.state
        self._take_seat(seq)
        self.queue.run(self.sampling.admit([slot], [seq]))
        state.set("length", slot, seq.target_length)
        state.set("drafted", slot, seq.drafter_length)
        waiting = range(seq.drafter_length if aux_TX is not None else seq.target_length, seq.target_length)
        for position in (*waiting, seq.target_length):
            state.set("tokens", slot, seq.tokens[position], at=position % state.ring)
        self._waiting[slot] = len(waiting)
        self._decoding.add(seq.stay)
        state.send(self.queue)
        if aux_TX is not None:
            assert state.states_SLX is not None
            states_LX, place_T = state.states_SLX[slot], torch.tensor([p % state.ring for p in waiting])
            self.queue.run(lambda: states_LX.index_copy_(0, place_T.to(states_LX.device), aux_TX.to(states_LX.dtype)))

    @property
    def bytes(self) -> int:
        """Memory taken beside weights and blocks."""
        return self.graphs.bytes + self._target.logits_SV.nbytes + self.state.bytes

    # --- launching ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch_round(
        self,
        rows: Sequence[ScheduledRow],
        *,
        masked: bool = False,
        budget: int | None = None,
        calibration: Sequence[tuple[float, float]] = (),
        tree: Tree | None = None,
        offers: Sequence[SentOffer | None] = (),
        drafter_depth: int | None = None,
    ) -> LaunchedRound:
        """Get a round of requests that decode under way, with up to `row.drafts` drafts for each.

        `offers` are, for some rows, what the host has looked up: where the request has come to be as expected, they are
        its drafts, and else those of the drafter. That drafts no deeper than `drafter_depth`, if one is given, and not
        at all if it is 0: then deeper ones are the host's.

        With a budget, so many drafts of all together are verified, or a few more: those that are likeliest to survive,
        given what the drafter's confidence is worth (`Acceptance.calibration`). With a tree, each grows one within
        `row.drafts` slots; where the host says what may come they draft chains instead, as deep: a mask for every node
        would take the host longer than trees gain.
        """
        slots, drafts_R = [slot_of(row.seq) for row in rows], np.array([row.drafts for row in rows])
        needs = self._take_seats(rows, slots)
        slot_R = np.array(slots)
        bucket, blocks = self.shapes.rows_for(len(rows)), self._block_bucket(slot_R)
        trees = None
        if tree is not None:
            trees = None if masked or not drafts_R.any() else self.graphs.trees(bucket, tree)
            drafts_R = drafts_R if trees is not None else drafts_R.clip(max=tree.depth)
        if trees is not None:
            depth = trees.depth
        else:
            depth = self._depth_for(slot_R, drafts_R, bucket) if tree is None or drafts_R.any() else 0
            drafts_R = drafts_R.clip(max=depth)
        placed, own_depth = any(offers) and depth > 0, 0  # of the drafter
        if self._drafter is not None:
            own_depth = depth if drafter_depth is None else min(depth, self.shapes.depth_for(drafter_depth))
        assert own_depth == depth or placed, "somebody drafts"
        waiting, reads = int((self._waiting * self._follows)[slot_R].max()), 1 + own_depth
        if own_depth and waiting > reads:
            reads = self.graphs.most_reads(bucket)
        late = waiting > reads if own_depth else waiting + 1 + depth > self.state.most_waiting
        if late:
            reads = 1 + own_depth
        # Before the rows are sent: to capture a pass is to run it, for nobody.
        catch_up = self.graphs.catching_up(bucket, blocks) if late else None
        flat_tokens = None
        if trees is not None:
            draft: Callable[[], object] | None = self.graphs.drafting_trees(trees, blocks, reads, needs)
            verify, sample = self.graphs.verifying_trees(trees, blocks), self.graphs.sampling_trees(trees, needs)
        else:
            draft = self.graphs.drafting(bucket, blocks, reads, own_depth, needs) if own_depth else None
            flat_tokens = self.shapes.tokens_for(len(rows), depth, budget) if depth else None
            verify = self.graphs.verifying(bucket, blocks, depth, flat_tokens, followed=self._are_followed(slot_R))
            sample = self.graphs.sampling(bucket, depth, needs, masked=masked)
        place = self.graphs.placing(bucket, depth, own_depth) if placed else None

        if flat_tokens is not None and calibration is not self._calibration:
            self._calibration = calibration
            self.state.send_calibration(self.queue, calibration)
        self.state.send_rows(self.queue, slot_R, drafts_R, 1)
        if place is not None:
            self.state.send_offers(self.queue, offers)
        caught_up = None
        if catch_up is not None:
            caught_up = self.queue.mark()
            self.queue.run(catch_up)
        began = self.queue.mark()
        drafted = drafts_RK = None
        if draft is not None:
            self.queue.run(draft)
        if place is not None:
            self.queue.run(place)
        if depth:
            drafts_RK = (
                self._bring(lambda: self.state.drafts_RK[: len(rows), :depth], len(rows), depth) if masked else None
            )
            drafted = self.queue.mark()
        self.queue.run(verify)
        known = 0 if own_depth else 1 if late else self._waiting[slot_R]
        self._waiting[slot_R] = known + 1 + drafts_R.clip(max=depth)
        grown = None if trees is None else Tree(depth=depth, width=trees.width, budget=trees.budget)
        launched = LaunchedRound(
            rows=rows,
            of_prompts=False,
            bucket=bucket,
            line=RoundLine(depth=depth, alternatives=needs.logprobs, tree=grown),
            reads=reads,
            drafter_depth=own_depth,
            caught_up=caught_up,
            began=began,
            drafted=drafted,
            flat_tokens=flat_tokens,
            drafts_RK=drafts_RK,
        )
        return self._launched(launched, sample, masked=masked)

    @torch.inference_mode()
    def launch_read(self, rows: Sequence[ScheduledRow], *, masked: bool = False) -> LaunchedRound:
        """Get chunks of prompts under way, all in one pass; behind those that end, a token is chosen."""
        slots = [slot_of(row.seq) for row in rows]
        needs, slot_R = self._take_seats(rows, slots), np.array(slots)
        bucket, blocks = self.graphs.chunk_rows_for(len(rows)), self._block_bucket(slot_R)
        ids, behind, start = list[int](), list[int](), [0]
        for row in rows:
            tokens, end = row.seq.tokens, row.start + row.count
            ids += tokens[row.start : end]
            behind += [*tokens[row.start + 1 : end + 1], 0][: row.count]
            start.append(len(ids))
        inputs, read = self.graphs.reading(len(ids), bucket, blocks, followed=self._are_followed(slot_R))
        sample = self.graphs.sampling(bucket, 0, needs, masked=masked)
        inputs.write("ids", ids)
        inputs.write("behind", behind)
        inputs.write("start", start + [len(ids)] * (bucket + 1 - len(start)))
        inputs.write("base", [row.start for row in rows])

        began = self.queue.mark()
        self.queue.run(inputs.staged())
        self.state.send_rows(self.queue, slot_R, 0, [row.samples for row in rows])
        self.queue.run(read)
        for slot, row in zip(slots, rows, strict=True):
            self._waiting[slot] = 1
            if row.samples:
                self._decoding.add(row.seq.stay)
        launched = LaunchedRound(
            rows=rows,
            of_prompts=True,
            bucket=bucket,
            line=RoundLine(depth=0, alternatives=needs.logprobs),
            reads=0,
            drafter_depth=0,
            caught_up=None,
            began=began,
            drafted=None,
            flat_tokens=None,
            drafts_RK=None,
        )
        return self._launched(launched, sample, masked=masked)

    def _launched(
        self, launched: LaunchedRound, sample: Callable[[Tensor | None], Tensor], *, masked: bool
    ) -> LaunchedRound:
        rows, width = len(launched.rows), launched.line.width

        def finish(mask_NV: Tensor | None) -> None:
            launched.output = self._bring(lambda: sample(mask_NV)[:rows], rows, width)
            launched.landed = self.queue.mark()

        launched.sample = finish
        if not masked:
            finish(None)
        return launched

    def _bring(self, compute: Callable[[], Tensor], *shape: int) -> Tensor:
        """Numbers of the device on their way to the host: there once a mark behind this has been waited for."""
        host = torch.empty(shape, dtype=torch.int64, pin_memory=self.capture.device.type == "cuda")
        self.queue.run(lambda: host.copy_(compute(), non_blocking=True))
        return host

    # --- seats -------------------------------------------------------------------------------------------------

    def _take_seats(self, rows: Sequence[ScheduledRow], slots: list[int]) -> Needs:
        """Tell the device of requests that are new in their slots, and of new blocks; what all of them need."""
        tables, kept_slots = self._tables, self._kept_needs[0]
        changed = [row.seq for row, slot in zip(rows, slots, strict=True) if tables[slot] != row.seq.table]
        new = [seq for seq in changed if self._stays[slot_of(seq)] != seq.stay]
        for seq in new:
            self._take_seat(seq)
        if new:
            self.queue.run(self.sampling.admit([slot_of(seq) for seq in new], new))
        for seq in changed:
            self._send_blocks(seq)
        self.state.send(self.queue)
        # The same requests need the same, until one has the length before which it may not stop.
        if new or slots != kept_slots or self._kept_needs[1].early:
            self._kept_needs = slots, self.sampling.needs([row.seq for row in rows])
        return self._kept_needs[1]

    def _send_blocks(self, seq: SequenceState) -> None:
        slot, settled = slot_of(seq), seq.target_length // self._target.cache.block_size
        sent, blocks = self._blocks[slot], seq.blocks
        # A block all of whose tokens are read stays a request's own: only those behind may be others by now.
        if len(sent) < len(blocks) or sent[settled:] != blocks[settled : len(sent)]:
            first = min(settled, len(sent))
            self.state.set_blocks(slot, first, blocks[first:])
            sent[first:] = blocks[first:]
        self._tables[slot], self._block_counts[slot] = seq.table, len(blocks)

    def _take_seat(self, seq: SequenceState) -> None:
        slot = slot_of(seq)
        self._decoding.discard(self._stays[slot])
        self._stays[slot], self._tables[slot], self._blocks[slot] = seq.stay, NOBODY, []
        follows = self._drafter is not None and seq.speculates
        self._waiting[slot], self._follows[slot] = 0, follows
        speculation = seq.request.speculation
        self._asked[slot] = speculation.depth or 0 if speculation.by_drafter else 0
        self._kept_needs = [], NOTHING
        self.state.set("limit", slot, seq.limit)
        self.state.set("follows", slot, int(follows))

    def release(self, seq: SequenceState) -> None:
        """The drafter does not follow a request any longer."""
        if seq.slot is not None and self._stays[seq.slot] == seq.stay:
            self._follows[seq.slot] = 0
            self.state.set("follows", seq.slot, 0)

    def _are_followed(self, slot_R: Integers) -> bool:
        """Whether the drafter follows any of these."""
        return bool(self._follows[slot_R].any())

    # --- buckets -----------------------------------------------------------------------------------------------

    def _depth_for(self, slot_R: Integers, drafts_R: Integers, bucket: int) -> int:
        """Drafts of a row that are captured together with the deepest of these; fewer if they outnumber the logits."""
        deepest, asked_R = int(drafts_R.max()), self._asked[slot_R]
        # What all ask for, or they would need other graphs towards their end, also for the last token.
        depth = int(asked_R.max()) if asked_R.all() else self.shapes.depth_for(deepest)
        return depth if bucket * (1 + depth) <= self._most_tokens else min(deepest, self._most_tokens // bucket - 1)

    def _block_bucket(self, slot_R: Integers) -> int:
        blocks, needed = self._usual_blocks, int(self._block_counts[slot_R].max())
        while blocks < needed:
            blocks *= 4
        return blocks


def slot_of(seq: SequenceState) -> int:
    """The slot of a request that runs."""
    assert seq.slot is not None, f"request {seq.key} has no slot"
    return seq.slot
