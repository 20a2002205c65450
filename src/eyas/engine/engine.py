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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.answer import Answer, Piece, Tally
from eyas.engine.checkup import CheckUps
from eyas.engine.controller import Choice, Controller, RowFacts
from eyas.engine.draft import LUMP, Draft, GoesOn, PagedDrafter, States, Tree
from eyas.engine.drift import DriftAlarm
from eyas.engine.grammar import lawful
from eyas.engine.graphs import RecordedSteps, Recorder
from eyas.engine.lean import lean_pass
from eyas.engine.options import EngineOptions, choose_length, plan_budget
from eyas.engine.paged import Layout, PageCache
from eyas.engine.paged_attention import PagedAttention, has_triton
from eyas.engine.paged_target import PagedTarget
from eyas.engine.pages import PagePool
from eyas.engine.request import Live, Request
from eyas.engine.scheduler import Row, Scheduler, StepPlan
from eyas.engine.swapping import require_fit, reserve_cache
from eyas.engine.telling import Teller
from eyas.engine.verdict import Said, Verdict, accepted_nodes, is_plainly_greedy, lay_out, ranking
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
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.target = target
        self.max_length = choose_length(options.max_length, target)
        self.budget = plan_budget(target, drafter, options, self.max_length)
        self._device = target.device
        self._clock = clock
        self._model = PagedTarget(target, PageCache(pages=self.budget.pages, page_size=options.page_size))
        self._lean = lean_pass(target, report)
        self._take_drafter(drafter, PageCache(pages=self.budget.pages, page_size=options.page_size))
        self.pool = PagePool(self.budget.pages, options.page_size, prefix_cache=options.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=options.max_rows,
            token_budget=options.token_budget,
            max_length=self.max_length,
            prefill_chunk=None,
            drafter=drafter is not None,
        )
        self.recorded: RecordedSteps | None = None
        """Steps that only decode, as CUDA graphs; None where there are none."""
        if self._records:
            self.recorded = self._recorded_steps(Recorder(device=self._device, report=report))
        self._said_early: Said | None = None
        self._choice: Choice | None = None
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

    @property
    def _records(self) -> bool:
        """Whether steps that only decode are to be CUDA graphs."""
        return self.options.graphs and self._device.type == "cuda" and has_triton()

    def _take_drafter(self, drafter: Drafter | None, cache: PageCache | None) -> None:
        """Draft by this one from now on; of all that was learnt about another, nothing holds for it."""
        options = self.options
        self._drafter: PagedDrafter | None = None
        self._layer_ids: tuple[int, ...] = ()
        self._checkups: CheckUps | None = None
        self.drift = DriftAlarm(options.max_depth)
        """Whether the drafter holds as deep as it is served; `report()` is for metrics."""
        # A recorded step drafts chains: growing a tree asks the host at every depth.
        self.controller = Controller(max_depth=options.max_depth, drift=self.drift, trees=not self._records)
        if drafter is None or cache is None:
            return
        self._layer_ids = drafter.config.aux_layer_ids or self.target.facts.default_aux_layer_ids()
        window, sinks = options.drafter_window, options.drafter_sinks
        self._drafter = PagedDrafter(drafter, cache, window=window, sinks=sinks)
        if options.drift_share:
            self._checkups = CheckUps(
                self._drafter, self.drift, share=options.drift_share, wanted_at=self._wanted, clock=self._clock
            )

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Go once through the algorithm; what it gave to whom.

        With recorded steps, what a step gave is put into words during the next one, while the device is busy.
        """
        self._said_early = None
        plan = self._schedule()
        if plan.rows:
            if self._checkups is not None:
                self._checkups.look([row.live for row in plan.rows if row.drafts])
            drafts = self._draft(plan)
            started = self._clock()
            said = self._verify(plan.rows, drafts)
            self._teller.tell()
            verdicts = self._accept(plan.rows, drafts, said)
            if not said.early:
                self._tell_time(plan.rows, drafts, self._clock() - started)
            for verdict in verdicts:
                self._commit(verdict, said)
            self._catch_up(plan.rows)
        if self.recorded is None or not self.scheduler.running:
            self._teller.tell()
        return self._teller.take()

    def _schedule(self) -> StepPlan:
        """Rows of this step; requests that lost their pages to it start anew later."""
        wanted: dict[int, int] = {}
        decoding = [live for live in self.scheduler.running if live.pending == 1]
        if self._drafter is not None and decoding:
            self._choice = choice = self.controller.choose([_facts(live) for live in decoding])
            # Nobody looks on the way while a recorded chain is drafted.
            limits = choice.limits if self.recorded is None or self.options.tree is not None else choice.depths
            for live, limit in zip(decoding, limits, strict=True):
                tree = self._tree(live) if limit else None
                wanted[live.key] = limit if tree is None else tree.slots
        plan = self.scheduler.plan(wanted)
        if self._drafter is not None:
            for live in plan.preempted:
                self._drafter.forget(live.key)
        return plan

    def _draft(self, plan: StepPlan) -> dict[int, Draft]:
        """Drafts of the rows that get any."""
        rows = [row for row in plan.rows if row.drafts]
        if self._drafter is None or not rows:
            return {}
        lives = [row.live for row in rows]
        started = self._clock()
        first: tuple[int, float] | None = None
        reads = sum(live.target_length - live.drafter_length for live in lives)

        def goes_on(keys: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[bool]:
            nonlocal first
            first = first or (reads, self._clock() - started)
            return self.controller.goes_on(keys, confidences)

        keys, shapes = [live.key for live in lives], self._shapes(rows)
        nodes: Sequence[Collection[int]]
        if shapes is None:
            limits = [row.drafts for row in rows]
            drafts = self._draft_chains(lives, limits, goes_on, everyone=len(rows) == len(plan.rows))
            nodes = [range(count) for count in self.controller.keeps(keys, [draft.confidences for draft in drafts])]
            deepest = max(draft.depth for draft in drafts)
            deeper = sum(draft.depth - 1 for draft in drafts)  # the first draft comes of the reading itself
        else:
            self._read(lives)
            drafts = self._drafter.tree(lives, shapes, self._wanted, look=self._look)
            nodes = [range(len(draft.tokens)) for draft in drafts]
            if self.options.tree is None:
                sure = [draft.confidences for draft in drafts]
                nodes = self.controller.prunes(keys, [draft.parents for draft in drafts], sure)
            deepest, deeper = max(shape.depth for shape in shapes), sum(shape.grown for shape in shapes)
        if self._said_early is None:
            seconds, trees = self._clock() - started, shapes is not None
            self.controller.observe_draft(deepest, reads + deeper, seconds, first, trees=trees)
        offered = {key: draft.only(kept) for key, draft, kept in zip(keys, drafts, nodes, strict=True)}
        if self._said_early is None:  # else it was verified together with drafts that may be unlawful, and says so
            for live in lives:
                if live.walk is not None:
                    offered[live.key] = lawful(offered[live.key], live.walk, live.tokens)
        return offered

    def _draft_chains(
        self, lives: Sequence[Live], limits: Sequence[int], goes_on: GoesOn, *, everyone: bool
    ) -> list[Draft]:
        """Chains for requests, by a recorded step where there is one.

        If they are all that the target is to read, and none of them asks whether a draft is worth it, the target
        reads them at once, and `_verify` finds that done.
        """
        assert self._drafter is not None
        drafts: list[Draft] | None = None
        if self.recorded is not None and self.recorded.drafts(lives):
            strangers = self.recorded.strangers(lives)
            if strangers:
                self._read(strangers, but_last=True)
                self.recorded.adopt(strangers)
            if everyone and all(live.request.speculation.mode == "fixed" for live in lives):
                both = self.recorded.draft_and_verify(lives, limits, self._teller.tell)
                if both is not None:
                    drafts, made = both
                    self._said_early = self._recorded_said(*made, early=True)
            if drafts is None:
                drafts = self.recorded.draft(lives, limits, self._teller.tell)
        if drafts is None:
            self._read(lives)
            return self._drafter.chain(lives, limits, self._wanted, goes_on, look=self._look)
        for live in lives:
            self.scheduler.note_read(live, live.target_length)
        return drafts

    @property
    def _look(self) -> int:
        """Candidates to note for every draft of this step."""
        return 1 if self._choice is None else self._choice.look

    def _shapes(self, rows: Sequence[Row]) -> list[Tree] | None:
        """The trees to grow in this step, those of one branch included; None where every row drafts a chain."""
        trees = [self._tree(row.live) for row in rows]
        if not any(trees):
            return None
        return [
            Tree(depth=row.drafts, width=1, budget=row.drafts) if tree is None else tree.within(row.drafts)
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _tree(self, live: Live) -> Tree | None:
        """The tree to grow for a request: the engine's own, or what the controller chose for those on auto.

        While the drift alarm fires, these grow no deeper than is healthy.
        """
        tree, auto = self.options.tree, live.request.speculation.mode == "auto"
        if tree is None and auto and self._choice is not None and self._choice.shape.kind == "tree":
            shape = self._choice.shape
            tree = Tree(depth=shape.depth, width=shape.width, budget=shape.budget)
        if tree is not None and auto and self.drift.firing:
            tree = replace(tree, depth=min(tree.depth, self.drift.deepest))
        return tree

    def _verify(self, rows: Sequence[Row], drafts: Mapping[int, Draft]) -> Said:
        """One pass of the target: logits behind every token that chooses, and the states of all tokens."""
        early, self._said_early = self._said_early, None
        if early is not None:
            return early
        if self.recorded is not None:
            self.recorded.save()
            made = self.recorded.verify(rows, [drafts.get(row.live.key, NOTHING) for row in rows])
            if made is not None:
                return self._recorded_said(*made)
        ids: list[int] = []
        keep: list[int] = []
        shares = []
        for row in rows:
            live, draft = row.live, drafts.get(row.live.key, NOTHING)
            newest = len(ids) + row.count - 1
            ids += [*live.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(lay_out(row, draft))
        ids_N, keep_M = (torch.tensor(x, dtype=torch.int64, device=self._device) for x in (ids, keep))
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

    def _recorded_said(self, largest_RQ: Tensor, stride: int, *, early: bool = False) -> Said:
        assert self.recorded is not None
        logits_SV, states_SX = self.recorded.logits_SV, self.recorded.states_SX
        return Said(logits_MV=logits_SV, aux_NX=states_SX, largest_RQ=largest_RQ, stride=stride, early=early)

    def _recorded_steps(self, recorder: Recorder) -> RecordedSteps:
        options, most_rows = self.options, min(self.options.max_rows, self.options.token_budget)
        return RecordedSteps(
            lambda ids_N, layout: self._run_target(ids_N, layout, None, self._layer_ids),
            self._model.cache,
            self._drafter,
            recorder=recorder,
            max_rows=most_rows,
            most_tokens=min(options.token_budget, most_rows * (options.max_depth + 1)),
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
                wanted += [self._wanted(row.live, draft.tokens_to(node)) for node in range(-1, len(draft.tokens))]
                places += range(number * said.stride, number * said.stride + 1 + len(draft.tokens))
        if not wanted:
            return []
        if not said.stride:
            chosen: list[int] = choose(said.logits_MV, wanted).tolist()
            return chosen
        token_M = choose(said.logits_MV[torch.tensor(places, device=self._device)], wanted)
        at = dict(zip(places, token_M.tolist(), strict=True))
        return [at.get(place, 0) for place in range(len(offered) * said.stride)]

    def _tell_time(self, rows: Sequence[Row], drafts: Mapping[int, Draft], seconds: float) -> None:
        """The controller learns from passes that only decode; those with prompts in them are another matter."""
        if all(row.count == 1 for row in rows):
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

    # --- the drafter's reading ---------------------------------------------------------------------------------

    def _follows(self, live: Live) -> bool:
        """Whether the drafter reads along."""
        return self._drafter is not None and live.speculates

    def _read(self, lives: Sequence[Live], *, but_last: bool = False) -> None:
        assert self._drafter is not None
        self._drafter.read(lives, but_last=but_last)
        for live in lives:
            self.scheduler.note_read(live, live.target_length - but_last)

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Read prompts, and requests that have not been drafted for in a long while.

        Once one of the latter is due all are read, or as many passes would follow as there are requests. A draft
        begins with reading, so for it a state is left.
        """
        if self._drafter is None:
            return
        behind = [
            (row, row.live.target_length - row.live.drafter_length)
            for row in rows
            if row.live.finished is None and self._follows(row.live)
        ]
        due = [row.live for row, states in behind if row.count > 1 and states >= LUMP]
        if any(states >= self._drafter.patience(len(behind)) for _, states in behind):
            due = [row.live for row, _ in behind]
        if due:
            self._read(due, but_last=True)

    def _wanted(self, live: Live, drafts: Sequence[int]) -> Wanted:
        """How a request's token behind these drafts is chosen."""
        request = live.request
        made = live.new_tokens + len(drafts)
        return Wanted(
            sampling=request.sampling,
            position=len(live.tokens) + len(drafts),
            seed=request.seed,
            before=[*live.tokens, *drafts] if request.sampling.penalises else (),
            prompt_length=live.prompt_length,
            banned=request.stop_ids if made < request.min_new_tokens else frozenset(),
            mask_V=None if live.walk is None else live.walk.mask(live.tokens, drafts),
        )

    def _forget(self, key: int) -> None:
        self._teller.close(key)
        self.controller.forget(key)
        if self._drafter is not None:
            self._drafter.forget(key)
        if self._checkups is not None:
            self._checkups.forget(key)


def _facts(live: Live) -> RowFacts:
    speculation = live.request.speculation
    return RowFacts(
        key=live.key,
        context=len(live.tokens),
        mode=speculation.mode,
        depth=speculation.depth,
        pending=live.target_length - live.drafter_length,
    )
