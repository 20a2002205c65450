"""The engine: many requests, one target, one drafter; each step is schedule, draft, verify, accept, commit.

    schedule  which requests take part, with how many tokens, and how deep each is drafted for
    draft     the drafter reads what the target has seen since, and proposes tokens
    verify    one pass of the target over all rows: chunks of prompts, newest tokens, drafts
    accept    the target's own token at every position; drafts that equal it are accepted
    commit    tokens, blocks, text; ended requests leave

The law: a request's token at position t is a function of the target's distribution there and of the request's own
noise at t (`verify.choose`). Drafts, depths, the batch around it and preemptions change when it is computed, never
which it is, up to rounding of near-ties.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig, choose_length, plan_budget
from eyas.engine.drift_probe import DriftProbe
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.output import OutputDelta, RequestOutput, SpecDecodeStats
from eyas.engine.output_processor import OutputProcessor
from eyas.engine.proposer import Proposal, Proposer
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner.cuda_graphs import CUDAGraphRunner
from eyas.engine.runner.drafter import Draft, DrafterRunner, States
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.runner.swap import require_fit, reserve_cache
from eyas.engine.runner.target import TargetRunner
from eyas.engine.sampler import SamplingMetadata, TokenLogprobs, choose, log_probabilities
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.drift import DriftAlarm
from eyas.engine.verify import (
    TargetOutput,
    VerifyResult,
    accepted_nodes,
    is_plainly_greedy,
    lay_out,
    ranking,
    sampling_metadata,
)
from eyas.errors import UserError
from eyas.kernels.attention.dense import PagedAttention, has_triton
from eyas.kernels.attention.metadata import AttentionMetadata, KVCache, integers
from eyas.kernels.llama.recognise import fused_llama
from eyas.target.capture import capture
from eyas.target.model import Target

NOTHING = Draft()


class Engine:
    """Serves requests step by step. One thread at a time may use it; `async_engine.py` serves many."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        options: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options = options = options or EngineConfig()
        self.target = target
        self.max_model_len = choose_length(options.max_model_len, target)
        self.budget = plan_budget(target, drafter, options, self.max_model_len)
        self._device = target.device
        self._clock = clock
        self._model = TargetRunner(target, KVCache(blocks=self.budget.blocks, block_size=options.block_size))
        self._lean = fused_llama(target)
        self.pool = BlockManager(self.budget.blocks, options.block_size, prefix_cache=options.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_chunk=None,
            drafter=drafter is not None,
        )
        self._take_drafter(drafter, KVCache(blocks=self.budget.blocks, block_size=options.block_size))
        self.recorded: CUDAGraphRunner | None = None
        """Passes as CUDA graphs; None where there are none."""
        if self._records:
            self.recorded = self._recorded_steps(GraphCapture(device=self._device))
        self._teller = OutputProcessor(target.decode)
        self._keys = 0

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Take a request on; its key comes back with every piece."""
        depth = request.speculation.depth
        if depth is not None and self._drafter is None:
            raise UserError(f"depth {depth} was asked for, but there is no drafter; load one or use mode auto")
        if depth is not None and depth > self.options.max_depth:
            raise UserError(f"depth {depth} is above the engine's max_depth {self.options.max_depth}; lower it")
        vocab_size = self.target.facts.vocab_size
        request.sampling.require_vocabulary(vocab_size)
        allowed = request.sampling.allowed_tokens
        if request.min_new_tokens and allowed is not None and allowed <= request.stop_ids:
            raise UserError("allowed_tokens holds stop tokens only, which min_new_tokens forbids; allow another token")
        if max(request.prompt) >= vocab_size:
            raise UserError(f"the prompt holds token {max(request.prompt)}; the target knows 0 to {vocab_size - 1}")
        if request.grammar is not None and request.grammar.vocab_size != vocab_size:
            raise UserError(
                f"the grammar is for {request.grammar.vocab_size} tokens, not the target's {vocab_size}; make another"
            )
        key, self._keys = self._keys, self._keys + 1
        self.scheduler.add(SequenceState(key=key, arrival=key, request=request))
        self._teller.open(key, request.stop_strings)
        return key

    def cancel(self, key: int) -> bool:
        """Drop a request, wherever it is, and all that it held; False if it has ended already."""
        if not self.scheduler.cancel(key):
            return False
        self._teller.drop(key)
        self._forget(key)
        return True

    def tally_of(self, key: int) -> SpecDecodeStats:
        """How speculation goes for a request that is under way; the object goes on counting."""
        return self._teller.tally_of(key)

    @property
    def tally(self) -> SpecDecodeStats:
        """How speculation went for all requests together."""
        return self._teller.tally

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._teller.behind)

    def generate(
        self, requests: Iterable[Request], *, on_piece: Callable[[OutputDelta], None] | None = None
    ) -> list[RequestOutput]:
        """Answer requests, all together, in their order. If one is refused or a step fails, none is left behind."""
        tallies: dict[int, SpecDecodeStats] = {}
        pieces: dict[int, list[OutputDelta]] = {}
        try:
            for request in requests:
                key = self.submit(request)
                tallies[key], pieces[key] = self.tally_of(key), []
            while self.busy:
                for piece in self.step():
                    if piece.key in pieces:
                        pieces[piece.key].append(piece)
                    if on_piece is not None:
                        on_piece(piece)
        except BaseException:
            for key in pieces:
                self.cancel(key)
            raise
        return [RequestOutput.of(pieces[key], tally) for key, tally in tallies.items()]

    def swap_drafter(self, drafter: Drafter | None) -> None:
        """Go on with another drafter, or none; to be called between steps. If it is refused, nothing has changed.

        Requests under way are kept: they wait for their turn again, and read what they have so far once more.
        """
        cache = None
        if drafter is not None:
            require_fit(drafter, self.target)
            cache = reserve_cache(drafter, blocks=self.budget.blocks, block_size=self.options.block_size)
        self._take_drafter(drafter, cache)
        self.pool.forget_drafts()
        self.scheduler.begin_anew(drafter=drafter is not None)
        if self.recorded is not None:
            recorder, self.recorded = self.recorded.recorder, None  # its memory is free before more is taken
            self.recorded = self._recorded_steps(replace(recorder, bytes=0, refused=set(), _made={}, _pool=None))

    @torch.inference_mode()
    def capture_graphs(self) -> int:
        """Record the usual steps as CUDA graphs now instead of when they are first met; how many there are."""
        if self.recorded is None:
            return 0
        recordings = self.recorded.capture_graphs()
        if self._checkups is not None:
            self._checkups.rehearse()
        return recordings

    @property
    def _records(self) -> bool:
        """Whether passes are to be CUDA graphs."""
        return self.options.graphs and self._device.type == "cuda" and has_triton()

    def _take_drafter(self, drafter: Drafter | None, cache: KVCache | None) -> None:
        """Draft by this one from now on; of all that was learnt about another, nothing holds for it."""
        options = self.options
        self._drafter: DrafterRunner | None = None
        self._proposer: Proposer | None = None
        self._layer_ids: tuple[int, ...] = ()
        self._checkups: DriftProbe | None = None
        self.drift = DriftAlarm(options.max_depth)
        """Whether the drafter holds as deep as it is served; `report()` is for metrics."""
        # A recorded step drafts chains: growing a tree asks the host at every depth.
        self.controller = Controller(max_depth=options.max_depth, drift=self.drift, trees=not self._records)
        self.controller.thinks_later = self._records
        if drafter is None or cache is None:
            return
        self._layer_ids = drafter.config.aux_layer_ids or self.target.facts.default_aux_layer_ids()
        window, sinks = options.drafter_window, options.drafter_sinks
        self._drafter = DrafterRunner(drafter, cache, window=window, sinks=sinks)
        self._proposer = Proposer(self._drafter, self.controller, self.scheduler, tree=options.tree, clock=self._clock)
        if options.drift_share:
            self._checkups = DriftProbe(
                self._drafter,
                self.drift,
                share=options.drift_share,
                sampling_metadata=sampling_metadata,
                clock=self._clock,
            )

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Go once through the algorithm; what it gave to whom.

        With recorded steps, what a step gave is put into words during the next one, while the device is busy.
        """
        began = self._clock()
        plan = self._schedule()
        if plan.rows:
            if self._checkups is not None:
                self._checkups.look([row.seq for row in plan.rows if row.drafts])
            for rows in self._passes(plan.rows):
                self._pass(rows)
            if self._tells(plan.rows):
                self.controller.observe_step(self._clock() - began)
            if self._proposer is not None:
                self._proposer.catch_up(plan.rows)
        if self.recorded is None or not self.scheduler.running:
            self._teller.tell()
        return self._teller.take()

    def _schedule(self) -> SchedulerOutput:
        """Rows of this step; requests that lost their blocks to it start anew later."""
        wanted: dict[int, int] = {}
        decoding = [seq for seq in self.scheduler.running if seq.pending == 1]
        if self._proposer is not None and decoding:
            wanted = self._proposer.wanted(decoding, recorded=self.recorded is not None)
        plan = self.scheduler.plan(wanted)
        if self._drafter is not None:
            for seq in plan.preempted:
                self._drafter.forget(seq.key)
        return plan

    def _passes(self, rows: Sequence[ScheduledRow]) -> list[Sequence[ScheduledRow]]:
        """Which rows the target reads together: all of them, unless chunks of prompts are recorded for themselves."""
        if self.recorded is None or _only_decode(rows):
            return [rows]
        chunks, others = list[Sequence[ScheduledRow]](), list[ScheduledRow]()
        for row in rows:
            if self.recorded.reads(row):
                chunks.append([row])
            else:
                others.append(row)
        return [others, *chunks] if others else chunks

    def _pass(self, rows: Sequence[ScheduledRow]) -> None:
        """Draft for rows, verify that, accept and commit what came of it."""
        started = self._clock()
        proposal = self._draft(rows)
        # A device that has drafted and verified in one go tells what the former took; the rest is the latter.
        started = self._clock() if proposal.said is None else started + proposal.seconds
        said = self._verify(rows, proposal)
        self._meanwhile()
        verdicts = self._accept(rows, proposal.drafts, said)
        if self._tells(rows):
            self._tell_time(rows, proposal.drafts, self._clock() - started)
        for verdict in verdicts:
            self._commit(verdict, said)
        if said.of_chunk and self._proposer is not None:
            self._proposer.note_chunk(rows[0])

    def _draft(self, rows: Sequence[ScheduledRow]) -> Proposal:
        """Drafts of the rows that get any."""
        if self._proposer is None:
            return Proposal(drafts={})
        return self._proposer.propose(rows, self.recorded, self._meanwhile)

    def _meanwhile(self) -> None:
        """What can wait until the device is busy, and is best done by then: the words and lessons of the last step."""
        self._teller.tell()
        if self.controller.thinks_later:
            self.controller.think()

    def _verify(self, rows: Sequence[ScheduledRow], proposal: Proposal) -> TargetOutput:
        """One pass of the target: logits behind every token that chooses, and the states of all tokens."""
        if proposal.said is not None:
            return proposal.said
        drafts = proposal.drafts
        if self.recorded is not None:
            if len(rows) == 1 and self.recorded.reads(rows[0]):
                said = self.recorded.read(rows[0], self._meanwhile)
                if said is not None:
                    return said
            self.recorded.save()
            said = self.recorded.verify(rows, [drafts.get(row.seq.key, NOTHING) for row in rows])
            if said is not None:
                return said
        ids: list[int] = []
        keep: list[int] = []
        shares = []
        for row in rows:
            seq, draft = row.seq, drafts.get(row.seq.key, NOTHING)
            newest = len(ids) + row.count - 1
            ids += [*seq.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(lay_out(row, draft))
        ids_N, keep_M = integers(ids, self._device), integers(keep, self._device)
        layout = AttentionMetadata.of(shares, block_size=self.options.block_size, device=self._device)
        follows = any(self._follows(row.seq) for row in rows)
        logits_MV, aux_NX = self._run_target(ids_N, layout, keep_M, self._layer_ids if follows else ())
        return TargetOutput(logits_MV=logits_MV, aux_NX=aux_NX)

    def _run_target(
        self, ids_N: Tensor, layout: AttentionMetadata, keep_M: Tensor | None, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        if self._lean is not None:
            return self._lean.forward(ids_N, PagedAttention(self._model.cache, layout), keep_M, layer_ids)
        if not layer_ids:
            return self._model.forward(ids_N, layout, keep_M), None
        with capture(self.target.model, layer_ids) as captured:
            logits_MV = self._model.forward(ids_N, layout, keep_M)
        return logits_MV, captured.aux_hidden()[0]

    def _recorded_steps(self, recorder: GraphCapture) -> CUDAGraphRunner:
        options, most_rows = self.options, min(self.options.max_num_seqs, self.options.max_num_batched_tokens)
        return CUDAGraphRunner(
            lambda ids_N, layout, keep_M: self._run_target(ids_N, layout, keep_M, self._layer_ids),
            self._model.cache,
            self._drafter,
            recorder=recorder,
            max_num_seqs=most_rows,
            most_tokens=min(options.max_num_batched_tokens, most_rows * (options.max_depth + 1)),
            longest_chunk=options.max_num_batched_tokens,
            most_blocks=-(-self.max_model_len // options.block_size),
            max_depth=options.max_depth,
            vocab_size=self.target.facts.vocab_size,
            dtype=self.target.dtype,
            # A model's own code may compute logits more finely than the rest.
            logits_dtype=self.target.dtype if self._lean is not None else torch.float32,
        )

    def _accept(
        self, rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], said: TargetOutput
    ) -> list[VerifyResult]:
        """The target's own token behind every position, along the drafts as far as they equal it."""
        offered = [(row, drafts.get(row.seq.key, NOTHING)) for row in rows]
        own_M = self._choose(offered, said)
        verdicts, first_n, first_m = [], 0, 0
        for row, draft in offered:
            own = own_M[first_m : first_m + 1 + len(draft.tokens)] if row.samples else []
            nodes = accepted_nodes(draft, own) if row.samples else []
            verdicts.append(
                VerifyResult(
                    row=row,
                    draft=draft,
                    nodes=nodes,
                    tokens=[own[1 + node] for node in (-1, *nodes)] if row.samples else [],
                    token_at=first_n,
                    logits_at=first_m,
                )
            )
            first_n += said.stride or row.count + len(draft.tokens)
            first_m += said.stride or len(own)
        return verdicts

    def _choose(self, offered: Sequence[tuple[ScheduledRow, Draft]], said: TargetOutput) -> list[int]:
        """The target's own tokens, each at the place of its logits."""
        if said.largest_RQ is not None and all(is_plainly_greedy(row.seq) for row, _ in offered):
            largest: list[int] = said.largest_RQ.flatten().tolist()
            return largest
        wanted, places = list[SamplingMetadata](), list[int]()
        for number, (row, draft) in enumerate(offered):
            if row.samples:
                wanted += [sampling_metadata(row.seq, draft.tokens_to(node)) for node in range(-1, len(draft.tokens))]
                places += range(number * said.stride, number * said.stride + 1 + len(draft.tokens))
        if not wanted:
            return []
        if not said.stride:
            chosen: list[int] = choose(said.logits_MV, wanted).tolist()
            return chosen
        token_M = choose(said.logits_MV[torch.tensor(places, device=self._device)], wanted)
        at = dict(zip(places, token_M.tolist(), strict=True))
        return [at.get(place, 0) for place in range(len(offered) * said.stride)]

    def _tells(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the controller learns of the time that these rows take: they decode, and it chose how."""
        return self._proposer is not None and self._proposer.chosen and _only_decode(rows)

    def _tell_time(self, rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], seconds: float) -> None:
        """What a pass that only decodes took."""
        tokens = len(rows) + sum(len(draft.tokens) for draft in drafts.values())
        self.controller.observe_target(tokens, sum(row.start for row in rows), seconds)

    def _commit(self, verdict: VerifyResult, said: TargetOutput) -> None:
        """Write down what a request got, and let it go if that was its end."""
        row, draft, seq = verdict.row, verdict.draft, verdict.row.seq
        heard = self._teller.hear(seq, verdict.tokens, self.scheduler.limit(seq))
        nodes = verdict.nodes[: max(0, len(heard.tokens) - 1)]
        if self._follows(seq) and said.aux_NX is not None and self._drafter is not None:
            first, size = verdict.token_at, row.count + len(nodes)
            states = States(said.aux_NX, first, size)
            if not draft.is_chain:
                places = [*range(first, first + row.count), *(first + row.count + node for node in nodes)]
                states = States(said.aux_NX[places], 0, size)
            self._drafter.take(seq, states)
        moved = [] if draft.is_chain else [(node, depth) for depth, node in enumerate(nodes) if node != depth]
        if moved:
            behind = row.start + row.count
            self._move(seq, [behind + node for node, _ in moved], [behind + depth for _, depth in moved])
        self.scheduler.commit(seq, read=row.count + len(nodes), new_tokens=heard.tokens)
        if not row.samples:
            return
        if self._drafter is not None and row.drafts:
            ranks = ranking(verdict)
            sure = ranks.firsts or (draft.confidences if draft.is_chain else ())
            told = (draft.depth, len(verdict.nodes), sure, ranks.ranks, ranks.candidates)
            self.controller.observe_round(seq.key, *told)
        if self._checkups is not None:
            self._checkups.follow(seq, draft, len(verdict.nodes), ended=heard.finished is not None)
        logprobs = self._logprobs(seq, heard.tokens, said.logits_MV, verdict)
        drafted, accepted = len(draft.tokens), len(verdict.nodes)
        self._teller.note(seq.key, heard, drafted=drafted, accepted=accepted, logprobs=logprobs)
        if heard.finished is not None:
            self.scheduler.finish(seq, heard.finished)
            self._forget(seq.key)

    def _move(self, seq: SequenceState, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Put the accepted path of a tree side by side, as if it had been a chain."""
        size = self.options.block_size
        places = [[seq.blocks[slot // size] * size + slot % size for slot in slots] for slots in (from_slots, to_slots)]
        self._model.cache.move(*torch.tensor(places, device=self._device))

    def _logprobs(
        self, seq: SequenceState, tokens: Sequence[int], logits_MV: Tensor, verdict: VerifyResult
    ) -> tuple[TokenLogprobs, ...] | None:
        if seq.request.logprobs is None:
            return None
        rows = [verdict.logits_at + 1 + node for node in (-1, *verdict.nodes)][: len(tokens)]
        token_M = torch.tensor(list(tokens), device=logits_MV.device)
        return tuple(log_probabilities(logits_MV[rows], token_M, seq.request.logprobs))

    def _follows(self, seq: SequenceState) -> bool:
        """Whether the drafter reads along."""
        return self._drafter is not None and seq.speculates

    def _forget(self, key: int) -> None:
        self._teller.close(key)
        self.controller.forget(key)
        if self._drafter is not None:
            self._drafter.forget(key)
        if self._checkups is not None:
            self._checkups.forget(key)


def _only_decode(rows: Sequence[ScheduledRow]) -> bool:
    """Whether no prompt is among what is read."""
    return all(row.count == 1 for row in rows)
