"""Prepares and launches rounds: batches that go through draft, verify and accept together.

A round of decoding requests is one copy to the device, up to three passes (draft, verify, sample) and one copy back. A
round of prompt chunks has a read pass and a sample pass. The host waits for none of them. The passes are in
`round_graphs.py`; `drafter_proposer.py` queues the drafter's.

    begin_round, begin_read   assign slots to the rows and look up their passes
    verify                    run the target over newest tokens and drafts, or over prompt chunks
    accept                    sample the target's tokens, accept equal drafts, start the copy to the host

Invariant: all passes of a round are looked up before the first one is queued, because capturing a pass runs it on blank
rows.

Shapes: R rows, Q tokens of a row, K drafts, V vocabulary, N tokens of a pass, M prompt logits.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.engine.runner.device_queue import RoundDevice
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.exact_passes import ExactPasses
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.round import Integers, Round, no_time
from eyas.engine.runner.round_graphs import USUAL_BLOCKS, RoundGraphs
from eyas.engine.runner.round_passes import PromptTokens, RoundPasses
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.sampling_needs import NOTHING, Needs
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import Tree
from eyas.kernels.attention.metadata import integers
from eyas.kernels.mapped_memory import untouched_zeros
from eyas.plan.footprint import Room

NONE = -1
"""Value of `_stays` and `_tables` for empty slots."""


class RoundRunner:
    """Launches rounds over the slots of a `RoundState`."""

    def __init__(
        self,
        model: ModelRunner,
        drafter: DrafterRunner | None,
        device: RoundDevice,
        room: Room,
        *,
        tree: Tree | None = None,
    ) -> None:
        """`tree` forces draft trees of that shape."""
        self.capture, self.queue, self.synchronous = device.capture, device.queue, device.synchronous
        cache, vocab_size = model.cache, model.vocab_size
        slots, most_tokens = room.recorded_rows, room.recorded_tokens
        most_blocks = -(-room.max_model_len // cache.block_size)
        self._most_tokens = most_tokens
        self._usual_blocks = min(USUAL_BLOCKS, 1 << (most_blocks - 1).bit_length())
        widest = self._usual_blocks
        while widest < most_blocks:
            widest *= 4
        place = self.capture.device
        # One extra row for padding. All rows stay finite, because unverified drafts sample from old values.
        rows = max(most_tokens, slots) + 1
        logits_SV = untouched_zeros(rows, vocab_size, dtype=model.logits_dtype, device=place)
        self.model, self._logits_SV, like_X = model, logits_SV, None
        if drafter is not None:
            config = drafter.model.config
            width = config.num_aux_hidden_states * config.target_hidden_size
            like_X = torch.empty(width, dtype=model.dtype, device=place)
        # On a CPU nothing is captured and the host can read the state, so passes need no padding.
        exact = place.type == "cpu" and not self.capture.enabled
        self.state = RoundState(
            slots=slots,
            blocks=widest,
            max_depth=max(room.max_depth, room.max_offers),
            ring=room.ring(0 if like_X is None else like_X.nbytes, padded=not exact),
            like_X=like_X,
            device=place,
            offers=room.max_offers > 0,
        )
        self.sampling = SlotSampling(slots, vocab_size, place)
        chance = device.chance
        passes = (ExactPasses if exact else RoundPasses)(
            state=self.state,
            model=model,
            drafter=drafter,
            sampling=self.sampling,
            logits_SV=logits_SV,
            chance=None if chance is None else torch.tensor(chance, dtype=torch.float64, device=place),
        )
        self.graphs = RoundGraphs(self.capture, self.queue, passes, room=room, blocks=self._usual_blocks, tree=tree)
        self.shapes = self.graphs.shapes
        self._drafts = drafter is not None
        self._stays = [NONE] * slots
        """Residency number (`SequenceState.stay`) of the request in each slot."""
        self._tables = [NONE] * slots
        """Block table version (`SequenceState.table`) that the device has for each slot."""
        self._blocks: list[list[int]] = [[] for _ in range(slots)]
        """Block tables as the device has them, by slot."""
        self._decoding: set[int] = set()
        """Residency numbers of requests whose prompts are read."""
        self._by_slot = np.zeros((4, slots), dtype=np.int64)
        """By slot: number of blocks, requested depth, whether the drafter follows, bound of states waiting for it."""
        self._block_counts, self._asked, self.follows, self.waiting = self._by_slot
        self._kept_needs: tuple[list[int], Needs] = [], NOTHING

    def split(self, rows: Sequence[ScheduledRow]) -> tuple[list[ScheduledRow], list[ScheduledRow]]:
        """Split into rows that decode, whose newest token the device has or will have, and rows that read prompts."""
        decoding = [row for row in rows if row.seq.stay in self._decoding]
        return decoding, [] if len(decoding) == len(rows) else [r for r in rows if r.seq.stay not in self._decoding]

    @property
    def bytes(self) -> int:
        """Memory besides weights and KV caches."""
        return self.graphs.bytes + self._logits_SV.nbytes + self.state.bytes

    # --- a round -----------------------------------------------------------------------------------------------

    def begin_round(
        self,
        rows: Sequence[ScheduledRow],
        *,
        tree: Tree | None = None,
        drafter_depth: int | None = None,
    ) -> Round:
        """Prepare a round of decoding requests with up to `row.drafts` drafts each.

        `drafter_depth` limits the drafter's own drafts. With `tree` each row grows a tree within its draft slots,
        except where the host computes masks: one mask per node would cost more than trees gain.
        """
        needs, slot_R = self._update_slots(rows)
        block_counts, asked, follows, _ = self._by_slot[:, slot_R].tolist()
        bucket, blocks = self.shapes.rows_for(len(rows)), self._block_bucket(max(block_counts))
        drafts, trees = [row.drafts for row in rows], None
        deepest = max(drafts)
        if tree is not None and deepest and not needs.masked:
            trees = self.graphs.trees(bucket, tree)
        if trees is not None:
            depth = trees.depth
        else:
            deepest = deepest if tree is None else min(deepest, tree.depth)
            depth = self._depth_for(deepest, asked, bucket) if tree is None or deepest else 0
            drafts = [min(most, depth, deepest) for most in drafts]
        own_depth = 0
        if self._drafts and depth:
            own_depth = depth if drafter_depth is None else min(depth, self.shapes.depth_for(drafter_depth))
        round_ = Round(rows=rows, slot_R=slot_R, of_prompts=False, bucket=bucket, blocks=blocks, needs=needs)
        round_.drafts, round_.depth, round_.drafter_depth, round_.trees = drafts, depth, own_depth, trees
        if trees is not None:
            round_.run_verify = self.graphs.verifying_trees(trees, blocks)
            round_.run_sample = self.graphs.sampling_trees(trees, needs)
        else:
            round_.run_verify = self.graphs.verifying(bucket, blocks, depth, followed=any(follows))
            round_.run_sample = self.graphs.sampling(bucket, depth, needs)
        return round_

    def begin_read(self, rows: Sequence[ScheduledRow]) -> Round:
        """Prepare a round of prompt chunks, read in one pass; a token is sampled for chunks that end their prompt."""
        needs, slot_R = self._update_slots(rows)
        bucket = self.graphs.chunk_rows_for(len(rows))
        blocks = self._block_bucket(int(self._block_counts[slot_R].max()))
        ids, behind, kept, start, told = list[int](), list[int](), list[int](), [0], list[int]()
        for row in rows:
            tokens, end = row.seq.tokens, row.start + row.count
            told += range(len(ids), len(ids) + row.prompt_logits)
            ids += tokens[row.start : end]
            behind += [*tokens[row.start + 1 : end + 1], 0][: row.count]
            again = min(max(0, row.seq.written_length - row.start), row.count)
            kept += [1] * again + [0] * (row.count - again)
            start.append(len(ids))
        round_ = Round(rows=rows, slot_R=slot_R, of_prompts=True, bucket=bucket, blocks=blocks, needs=needs)
        followed = bool(self.follows[slot_R].any())
        asked, device = None, self.capture.device
        if told:
            most = max(row.seq.request.prompt_logprobs or 0 for row in rows)
            asked = PromptTokens(
                place_M=integers(told, device),
                token_M=integers([behind[place] for place in told], device),
                alternatives=min(most, self._logits_SV.shape[1]),
            )
        inputs, read = self.graphs.reading(len(ids), bucket, blocks, followed=followed, asked=asked)
        round_.run_sample = self.graphs.sampling(bucket, 0, needs)
        start += [len(ids)] * (bucket + 1 - len(start))
        send = inputs.staged(ids=ids, behind=behind, kept=kept, start=start, base=[row.start for row in rows])

        def run() -> None:
            self.queue.run(send)
            self.queue.run(read)
            if asked is not None:
                round_.prompt_output = self._copy_to_host(asked.take, *asked.shape)

        round_.run_verify, round_.drafter_reads = run, followed
        return round_

    def verify(self, round_: Round) -> None:
        """Queue the target's pass over a round."""
        self.send_rows(round_)
        if round_.masked and round_.depth:
            state, shape = self.state, (len(round_.rows), round_.depth)
            # The host needs the drafts for their masks.
            round_.drafts_RK = self._copy_to_host(lambda: state.drafts_RK[: shape[0], : shape[1]], *shape)
            round_.drafted = self.queue.mark()
        if not round_.of_prompts:
            self.queue.run(round_.run_verify)
            return
        round_.run_verify()
        for slot, row in zip(round_.slot_R, round_.rows, strict=True):
            self.waiting[slot] = 1
            if row.samples:
                self._decoding.add(row.seq.stay)

    def accept(self, round_: Round, mask_NV: Tensor | None = None) -> None:
        """Queue sampling and acceptance, and the copy of the results to the host."""

        def take() -> None:
            round_.output = round_.run_sample(mask_NV)

        rows = len(round_.rows)
        if self.graphs.exact:
            self.queue.run(take)
        else:
            round_.output = self._copy_to_host(lambda: round_.run_sample(mask_NV)[:rows], rows, round_.line.width)
        round_.landed = self.queue.mark()

    def send_rows(self, round_: Round) -> None:
        """Send the round's rows to the device, unless that was done."""
        if not round_.sent:
            samples = [row.samples for row in round_.rows] if round_.of_prompts else 1
            self.state.send_rows(self.queue, round_.slot_R, round_.drafts or 0, samples)
            round_.sent = True

    def queue_timed(self, run: Callable[[], object] | None) -> Callable[[], float]:
        """Queue a pass, if given; returns a function for its seconds, to be called after it has run."""
        if run is None:
            return no_time
        began = self.queue.mark()
        self.queue.run(run)
        ended = self.queue.mark()
        return lambda: ended.seconds_since(began)

    def states_of(self, seq: SequenceState) -> Tensor:
        """States [T, X] that wait for the drafter. Nothing may be in flight."""
        assert self.state.states_SLX is not None
        position_T = torch.arange(seq.drafter_length, seq.target_length, device=self.state.device)
        return self.state.states_SLX[slot_of(seq), position_T % self.state.ring]

    def _copy_to_host(self, compute: Callable[[], Tensor], *shape: int) -> Tensor:
        """Start a copy of device integers to the host, complete once a mark queued after it was waited for."""
        host = torch.empty(shape, dtype=torch.int64, pin_memory=self.capture.device.type == "cuda")
        self.queue.run(lambda: host.copy_(compute(), non_blocking=True))
        return host

    # --- seats -------------------------------------------------------------------------------------------------

    def _update_slots(self, rows: Sequence[ScheduledRow]) -> tuple[Needs, Integers]:
        """Send new requests and changed block tables to the device; returns the sampling needs and the slots."""
        slots, tables, kept_slots = [slot_of(row.seq) for row in rows], self._tables, self._kept_needs[0]
        changed = [row.seq for row, slot in zip(rows, slots, strict=True) if tables[slot] != row.seq.table]
        new = [seq for seq in changed if self._stays[slot_of(seq)] != seq.stay]
        for seq in new:
            self._reset_slot(seq)
        if new:
            self.queue.run(self.sampling.admit([slot_of(seq) for seq in new], new))
        for seq in changed:
            self._send_blocks(seq)
        self.state.send(self.queue)
        # Needs stay the same for the same requests, until one reaches its minimum length.
        if new or slots != kept_slots or self._kept_needs[1].early:
            self._kept_needs = slots, self.sampling.needs([row.seq for row in rows])
        return self._kept_needs[1], np.array(slots)

    def _send_blocks(self, seq: SequenceState) -> None:
        slot, settled = slot_of(seq), seq.target_length // self.model.cache.block_size
        sent, blocks = self._blocks[slot], seq.blocks
        # Blocks whose tokens are all read never change: only later entries can differ.
        if len(sent) < len(blocks) or sent[settled:] != blocks[settled : len(sent)]:
            first = min(settled, len(sent))
            self.state.set_blocks(slot, first, blocks[first:])
            sent[first:] = blocks[first:]
        self._tables[slot], self._block_counts[slot] = seq.table, len(blocks)

    def _reset_slot(self, seq: SequenceState) -> None:
        slot = slot_of(seq)
        self._decoding.discard(self._stays[slot])
        self._stays[slot], self._tables[slot], self._blocks[slot] = seq.stay, NONE, []
        follows = self._drafts and seq.followed
        self.waiting[slot], self.follows[slot] = 0, follows
        speculation = seq.request.speculation
        self._asked[slot] = speculation.depth or 0 if speculation.by_drafter else 0
        self._kept_needs = [], NOTHING
        self.state.set("limit", slot, seq.limit)
        self.state.set("follows", slot, int(follows))

    def unfollow(self, seq: SequenceState) -> None:
        """Stop the drafter from following a request, for the rest of its answer."""
        if seq.slot is not None and self._stays[seq.slot] == seq.stay:
            self.follows[seq.slot] = 0
            self.state.set("follows", seq.slot, 0)

    # --- buckets -----------------------------------------------------------------------------------------------

    def _depth_for(self, deepest: int, asked: Sequence[int], bucket: int) -> int:
        """Depth of the captured pass for these drafts; less if they would exceed the logits buffer."""
        # If all have a fixed depth, keep it to the end of their answers, so that no other graph is needed.
        depth = max(asked) if all(asked) and not self.graphs.exact else self.shapes.depth_for(deepest)
        return depth if bucket * (1 + depth) <= self._most_tokens else min(deepest, self._most_tokens // bucket - 1)

    def _block_bucket(self, needed: int) -> int:
        blocks = self._usual_blocks
        while blocks < needed:
            blocks *= 4
        return blocks


def slot_of(seq: SequenceState) -> int:
    """Slot of a running request."""
    assert seq.slot is not None, f"request {seq.key} has no slot"
    return seq.slot
