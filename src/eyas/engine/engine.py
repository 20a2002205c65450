"""The engine: many requests, one target, one drafter; each step is schedule, draft, verify, accept, commit.

    schedule  which requests take part, with how many tokens, and how deep each is drafted for
    draft     the drafter reads what the target has seen since, and proposes tokens
    verify    one pass of the target over all rows: chunks of prompts, newest tokens, drafts
    accept    the target's own token at every position; drafts that equal it are accepted
    commit    tokens, pages, text; ended requests leave

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
from eyas.engine.answer import Answer, Piece, Tally
from eyas.engine.checkup import CheckUps
from eyas.engine.controller import Controller
from eyas.engine.draft import Draft, PagedDrafter, States
from eyas.engine.drift import DriftAlarm
from eyas.engine.graphs import RecordedSteps
from eyas.engine.lean import lean_pass
from eyas.engine.options import EngineOptions, choose_length, plan_budget
from eyas.engine.paged import Layout, PageCache, integers
from eyas.engine.paged_attention import PagedAttention, has_triton
from eyas.engine.paged_target import PagedTarget
from eyas.engine.pages import PagePool
from eyas.engine.proposing import Proposal, Proposer
from eyas.engine.recorder import Recorder
from eyas.engine.request import Live, Request
from eyas.engine.scheduler import Row, Scheduler, StepPlan
from eyas.engine.swapping import require_fit, reserve_cache
from eyas.engine.telling import Teller
from eyas.engine.verdict import Said, Verdict, accepted_nodes, is_plainly_greedy, lay_out, ranking, wanted_at
from eyas.engine.verify import TokenLogprobs, Wanted, choose, log_probabilities
from eyas.errors import UserError
from eyas.target.capture import capture
from eyas.target.model import Target

NOTHING = Draft()


class Engine:
    """Serves requests step by step. One thread at a time may use it; `stream.py` serves many."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.target = target
        self.max_length = choose_length(options.max_length, target)
        self.budget = plan_budget(target, drafter, options, self.max_length)
        self._device = target.device
        self._clock = clock
        self._model = PagedTarget(target, PageCache(pages=self.budget.pages, page_size=options.page_size))
        self._lean = lean_pass(target)
        self.pool = PagePool(self.budget.pages, options.page_size, prefix_cache=options.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=options.max_rows,
            token_budget=options.token_budget,
            max_length=self.max_length,
            prefill_chunk=None,
            drafter=drafter is not None,
        )
        self._take_drafter(drafter, PageCache(pages=self.budget.pages, page_size=options.page_size))
        self.recorded: RecordedSteps | None = None
        """Passes as CUDA graphs; None where there are none."""
        if self._records:
            self.recorded = self._recorded_steps(Recorder(device=self._device))
        self._teller = Teller(target.decode)
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
        self.scheduler.add(Live(key=key, arrival=key, request=request))
        self._teller.open(key, request.stop_strings)
        return key

    def cancel(self, key: int) -> bool:
        """Drop a request, wherever it is, and all that it held; False if it has ended already."""
        if not self.scheduler.cancel(key):
            return False
        self._teller.drop(key)
        self._forget(key)
        return True

    def tally_of(self, key: int) -> Tally:
        """How speculation goes for a request that is under way; the object goes on counting."""
        return self._teller.tally_of(key)

    @property
    def tally(self) -> Tally:
        """How speculation went for all requests together."""
        return self._teller.tally

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._teller.behind)

    def generate(self, requests: Iterable[Request], *, on_piece: Callable[[Piece], None] | None = None) -> list[Answer]:
        """Answer requests, all together, in their order. If one is refused or a step fails, none is left behind."""
        tallies: dict[int, Tally] = {}
        pieces: dict[int, list[Piece]] = {}
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
        return [Answer.of(pieces[key], tally) for key, tally in tallies.items()]

    def swap_drafter(self, drafter: Drafter | None) -> None:
        """Go on with another drafter, or none; to be called between steps. If it is refused, nothing has changed.

        Requests under way are kept: they wait for their turn again, and read what they have so far once more.
        """
        cache = None
        if drafter is not None:
            require_fit(drafter, self.target)
            cache = reserve_cache(drafter, pages=self.budget.pages, page_size=self.options.page_size)
        self._take_drafter(drafter, cache)
        self.pool.forget_drafts()
        self.scheduler.begin_anew(drafter=drafter is not None)
        if self.recorded is not None:
            recorder, self.recorded = self.recorded.recorder, None  # its memory is free before more is taken
            self.recorded = self._recorded_steps(replace(recorder, bytes=0, refused=set(), _made={}, _pool=None))

    @torch.inference_mode()
    def record_ahead(self) -> int:
        """Record the usual steps as CUDA graphs now instead of when they are first met; how many there are."""
        if self.recorded is None:
            return 0
        recordings = self.recorded.record_ahead()
        if self._checkups is not None:
            self._checkups.rehearse()
        return recordings

    @property
    def _records(self) -> bool:
        """Whether passes are to be CUDA graphs."""
        return self.options.graphs and self._device.type == "cuda" and has_triton()

    def _take_drafter(self, drafter: Drafter | None, cache: PageCache | None) -> None:
        """Draft by this one from now on; of all that was learnt about another, nothing holds for it."""
        options = self.options
        self._drafter: PagedDrafter | None = None
        self._proposer: Proposer | None = None
        self._layer_ids: tuple[int, ...] = ()
        self._checkups: CheckUps | None = None
        self.drift = DriftAlarm(options.max_depth)
        """Whether the drafter holds as deep as it is served; `report()` is for metrics."""
        # A recorded step drafts chains: growing a tree asks the host at every depth.
        self.controller = Controller(max_depth=options.max_depth, drift=self.drift, trees=not self._records)
        self.controller.thinks_later = self._records
        if drafter is None or cache is None:
            return
        self._layer_ids = drafter.config.aux_layer_ids or self.target.facts.default_aux_layer_ids()
        window, sinks = options.drafter_window, options.drafter_sinks
        self._drafter = PagedDrafter(drafter, cache, window=window, sinks=sinks)
        self._proposer = Proposer(self._drafter, self.controller, self.scheduler, tree=options.tree, clock=self._clock)
        if options.drift_share:
            self._checkups = CheckUps(
                self._drafter, self.drift, share=options.drift_share, wanted_at=wanted_at, clock=self._clock
            )

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Go once through the algorithm; what it gave to whom.

        With recorded steps, what a step gave is put into words during the next one, while the device is busy.
        """
        began = self._clock()
        plan = self._schedule()
        if plan.rows:
            if self._checkups is not None:
                self._checkups.look([row.live for row in plan.rows if row.drafts])
            for rows in self._passes(plan.rows):
                self._pass(rows)
            if self._tells(plan.rows):
                self.controller.observe_step(self._clock() - began)
            if self._proposer is not None:
                self._proposer.catch_up(plan.rows)
        if self.recorded is None or not self.scheduler.running:
            self._teller.tell()
        return self._teller.take()

    def _schedule(self) -> StepPlan:
        """Rows of this step; requests that lost their pages to it start anew later."""
        wanted: dict[int, int] = {}
        decoding = [live for live in self.scheduler.running if live.pending == 1]
        if self._proposer is not None and decoding:
            wanted = self._proposer.wanted(decoding, recorded=self.recorded is not None)
        plan = self.scheduler.plan(wanted)
        if self._drafter is not None:
            for live in plan.preempted:
                self._drafter.forget(live.key)
        return plan

    def _passes(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        """Which rows the target reads together: all of them, unless chunks of prompts are recorded for themselves."""
        if self.recorded is None or _only_decode(rows):
            return [rows]
        chunks, others = list[Sequence[Row]](), list[Row]()
        for row in rows:
            if self.recorded.reads(row):
                chunks.append([row])
            else:
                others.append(row)
        return [others, *chunks] if others else chunks

    def _pass(self, rows: Sequence[Row]) -> None:
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

    def _draft(self, rows: Sequence[Row]) -> Proposal:
        """Drafts of the rows that get any."""
        if self._proposer is None:
            return Proposal(drafts={})
        return self._proposer.propose(rows, self.recorded, self._meanwhile)

    def _meanwhile(self) -> None:
        """What can wait until the device is busy, and is best done by then: the words and lessons of the last step."""
        self._teller.tell()
        if self.controller.thinks_later:
            self.controller.think()

    def _verify(self, rows: Sequence[Row], proposal: Proposal) -> Said:
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
            said = self.recorded.verify(rows, [drafts.get(row.live.key, NOTHING) for row in rows])
            if said is not None:
                return said
        ids: list[int] = []
        keep: list[int] = []
        shares = []
        for row in rows:
            live, draft = row.live, drafts.get(row.live.key, NOTHING)
            newest = len(ids) + row.count - 1
            ids += [*live.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(lay_out(row, draft))
        ids_N, keep_M = integers(ids, self._device), integers(keep, self._device)
        layout = Layout.of(shares, page_size=self.options.page_size, device=self._device)
        follows = any(self._follows(row.live) for row in rows)
        logits_MV, aux_NX = self._run_target(ids_N, layout, keep_M, self._layer_ids if follows else ())
        return Said(logits_MV=logits_MV, aux_NX=aux_NX)

    def _run_target(
        self, ids_N: Tensor, layout: Layout, keep_M: Tensor | None, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        if self._lean is not None:
            return self._lean.forward(ids_N, PagedAttention(self._model.cache, layout), keep_M, layer_ids)
        if not layer_ids:
            return self._model.forward(ids_N, layout, keep_M), None
        with capture(self.target.model, layer_ids) as captured:
            logits_MV = self._model.forward(ids_N, layout, keep_M)
        return logits_MV, captured.aux_hidden()[0]

    def _recorded_steps(self, recorder: Recorder) -> RecordedSteps:
        options, most_rows = self.options, min(self.options.max_rows, self.options.token_budget)
        return RecordedSteps(
            lambda ids_N, layout, keep_M: self._run_target(ids_N, layout, keep_M, self._layer_ids),
            self._model.cache,
            self._drafter,
            recorder=recorder,
            max_rows=most_rows,
            most_tokens=min(options.token_budget, most_rows * (options.max_depth + 1)),
            longest_chunk=options.token_budget,
            most_pages=-(-self.max_length // options.page_size),
            max_depth=options.max_depth,
            vocab_size=self.target.facts.vocab_size,
            dtype=self.target.dtype,
            # A model's own code may compute logits more finely than the rest.
            logits_dtype=self.target.dtype if self._lean is not None else torch.float32,
        )

    def _accept(self, rows: Sequence[Row], drafts: Mapping[int, Draft], said: Said) -> list[Verdict]:
        """The target's own token behind every position, along the drafts as far as they equal it."""
        offered = [(row, drafts.get(row.live.key, NOTHING)) for row in rows]
        own_M = self._choose(offered, said)
        verdicts, first_n, first_m = [], 0, 0
        for row, draft in offered:
            own = own_M[first_m : first_m + 1 + len(draft.tokens)] if row.samples else []
            nodes = accepted_nodes(draft, own) if row.samples else []
            verdicts.append(
                Verdict(
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

    def _choose(self, offered: Sequence[tuple[Row, Draft]], said: Said) -> list[int]:
        """The target's own tokens, each at the place of its logits."""
        if said.largest_RQ is not None and all(is_plainly_greedy(row.live) for row, _ in offered):
            largest: list[int] = said.largest_RQ.flatten().tolist()
            return largest
        wanted, places = list[Wanted](), list[int]()
        for number, (row, draft) in enumerate(offered):
            if row.samples:
                wanted += [wanted_at(row.live, draft.tokens_to(node)) for node in range(-1, len(draft.tokens))]
                places += range(number * said.stride, number * said.stride + 1 + len(draft.tokens))
        if not wanted:
            return []
        if not said.stride:
            chosen: list[int] = choose(said.logits_MV, wanted).tolist()
            return chosen
        token_M = choose(said.logits_MV[torch.tensor(places, device=self._device)], wanted)
        at = dict(zip(places, token_M.tolist(), strict=True))
        return [at.get(place, 0) for place in range(len(offered) * said.stride)]

    def _tells(self, rows: Sequence[Row]) -> bool:
        """Whether the controller learns of the time that these rows take: they decode, and it chose how."""
        return self._proposer is not None and self._proposer.chosen and _only_decode(rows)

    def _tell_time(self, rows: Sequence[Row], drafts: Mapping[int, Draft], seconds: float) -> None:
        """What a pass that only decodes took."""
        tokens = len(rows) + sum(len(draft.tokens) for draft in drafts.values())
        self.controller.observe_target(tokens, sum(row.start for row in rows), seconds)

    def _commit(self, verdict: Verdict, said: Said) -> None:
        """Write down what a request got, and let it go if that was its end."""
        row, draft, live = verdict.row, verdict.draft, verdict.row.live
        heard = self._teller.hear(live, verdict.tokens, self.scheduler.limit(live))
        nodes = verdict.nodes[: max(0, len(heard.tokens) - 1)]
        if self._follows(live) and said.aux_NX is not None and self._drafter is not None:
            first, size = verdict.token_at, row.count + len(nodes)
            states = States(said.aux_NX, first, size)
            if not draft.is_chain:
                places = [*range(first, first + row.count), *(first + row.count + node for node in nodes)]
                states = States(said.aux_NX[places], 0, size)
            self._drafter.take(live, states)
        moved = [] if draft.is_chain else [(node, depth) for depth, node in enumerate(nodes) if node != depth]
        if moved:
            behind = row.start + row.count
            self._move(live, [behind + node for node, _ in moved], [behind + depth for _, depth in moved])
        self.scheduler.commit(live, read=row.count + len(nodes), new_tokens=heard.tokens)
        if not row.samples:
            return
        if self._drafter is not None and row.drafts:
            ranks = ranking(verdict)
            sure = ranks.firsts or (draft.confidences if draft.is_chain else ())
            told = (draft.depth, len(verdict.nodes), sure, ranks.ranks, ranks.candidates)
            self.controller.observe_round(live.key, *told)
        if self._checkups is not None:
            self._checkups.follow(live, draft, len(verdict.nodes), ended=heard.finished is not None)
        logprobs = self._logprobs(live, heard.tokens, said.logits_MV, verdict)
        drafted, accepted = len(draft.tokens), len(verdict.nodes)
        self._teller.note(live.key, heard, drafted=drafted, accepted=accepted, logprobs=logprobs)
        if heard.finished is not None:
            self.scheduler.finish(live, heard.finished)
            self._forget(live.key)

    def _move(self, live: Live, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Put the accepted path of a tree side by side, as if it had been a chain."""
        size = self.options.page_size
        places = [[live.pages[slot // size] * size + slot % size for slot in slots] for slots in (from_slots, to_slots)]
        self._model.cache.move(*torch.tensor(places, device=self._device))

    def _logprobs(
        self, live: Live, tokens: Sequence[int], logits_MV: Tensor, verdict: Verdict
    ) -> tuple[TokenLogprobs, ...] | None:
        if live.request.logprobs is None:
            return None
        rows = [verdict.logits_at + 1 + node for node in (-1, *verdict.nodes)][: len(tokens)]
        token_M = torch.tensor(list(tokens), device=logits_MV.device)
        return tuple(log_probabilities(logits_MV[rows], token_M, live.request.logprobs))

    def _follows(self, live: Live) -> bool:
        """Whether the drafter reads along."""
        return self._drafter is not None and live.speculates

    def _forget(self, key: int) -> None:
        self._teller.close(key)
        self.controller.forget(key)
        if self._drafter is not None:
            self._drafter.forget(key)
        if self._checkups is not None:
            self._checkups.forget(key)


def _only_decode(rows: Sequence[Row]) -> bool:
    """Whether no prompt is among what is read."""
    return all(row.count == 1 for row in rows)
