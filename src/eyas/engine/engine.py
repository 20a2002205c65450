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
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.answer import Answer, Piece, Tally
from eyas.engine.controller import Controller, RowFacts
from eyas.engine.draft import LUMP, Draft, PagedDrafter
from eyas.engine.lean import lean_pass
from eyas.engine.options import EngineOptions, choose_length, plan_budget
from eyas.engine.paged import Layout, PageCache
from eyas.engine.paged import Row as PassRow
from eyas.engine.paged_attention import PagedAttention
from eyas.engine.paged_target import PagedTarget
from eyas.engine.pages import PagePool
from eyas.engine.request import FinishReason, Live, Request
from eyas.engine.scheduler import Row, Scheduler, StepPlan
from eyas.engine.text import TextStream
from eyas.engine.verify import TokenLogprobs, Wanted, accept_tree, choose, log_probabilities
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
        self._model = PagedTarget(target, PageCache(pages=self.budget.pages, page_size=options.page_size))
        self._lean = lean_pass(target, report)
        self._drafter: PagedDrafter | None = None
        self._layer_ids: tuple[int, ...] = ()
        if drafter is not None:
            self._layer_ids = drafter.config.aux_layer_ids or target.facts.default_aux_layer_ids()
            cache = PageCache(pages=self.budget.pages, page_size=options.page_size)
            window, sinks = options.drafter_window, options.drafter_sinks
            self._drafter = PagedDrafter(drafter, cache, window=window, sinks=sinks)
        self.pool = PagePool(self.budget.pages, options.page_size, prefix_cache=options.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=options.max_rows,
            token_budget=options.token_budget,
            max_length=self.max_length,
            prefill_chunk=None,
            drafter=drafter is not None,
        )
        self.controller = Controller(max_depth=options.max_depth)
        self.tally = Tally()
        self._clock = clock
        self._keys = 0
        self._texts: dict[int, TextStream] = {}
        self._tallies: dict[int, Tally] = {}

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
        key, self._keys = self._keys, self._keys + 1
        self.scheduler.add(Live(key=key, arrival=key, request=request))
        self._texts[key] = TextStream(self.target.decode, request.stop_strings)
        self._tallies[key] = Tally()
        return key

    def cancel(self, key: int) -> bool:
        """Drop a request, wherever it is, and all that it held; False if it has ended already."""
        if not self.scheduler.cancel(key):
            return False
        self._forget(key)
        return True

    def tally_of(self, key: int) -> Tally:
        """How speculation goes for a request that is under way; the object goes on counting."""
        return self._tallies[key]

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def generate(self, requests: Iterable[Request], *, on_piece: Callable[[Piece], None] | None = None) -> list[Answer]:
        """Answer requests, all together, in their order. If one is refused or a step fails, none is left behind."""
        tallies: dict[int, Tally] = {}
        pieces: dict[int, list[Piece]] = {}
        try:
            for request in requests:
                key = self.submit(request)
                tallies[key], pieces[key] = self._tallies[key], []
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

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Go once through the algorithm; what it gave to whom."""
        plan = self._schedule()
        if not plan.rows:
            return []
        drafts = self._draft(plan)
        started = self._clock()
        logits_MV, aux_NX = self._verify(plan.rows, drafts)
        verdicts = self._accept(plan.rows, drafts, logits_MV)
        self._tell_time(plan.rows, drafts, self._clock() - started)
        pieces = [self._commit(verdict, logits_MV, aux_NX) for verdict in verdicts]
        self._catch_up(plan.rows)
        return [piece for piece in pieces if piece is not None]

    def _schedule(self) -> StepPlan:
        """Rows of this step; requests that lost their pages to it start anew later."""
        wanted: dict[int, int] = {}
        decoding = [live for live in self.scheduler.running if live.pending == 1]
        if self._drafter is not None and decoding:
            choice = self.controller.choose([_facts(live) for live in decoding])
            tree = self.options.tree
            for live, limit in zip(decoding, choice.limits, strict=True):
                wanted[live.key] = tree.slots if tree is not None and limit else limit
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
        reads = sum(live.target_length - live.drafter_length for live in lives)
        self._read(lives)
        if self.options.tree is None:
            limits = [row.drafts for row in rows]
            drafts = self._drafter.chain(lives, limits, self._wanted, self.controller.goes_on)
            kept = self.controller.keeps([live.key for live in lives], [draft.confidences for draft in drafts])
        else:
            shapes = [self.options.tree.within(row.drafts) for row in rows]
            drafts = self._drafter.tree(lives, shapes, self._wanted)
            kept = [len(draft.tokens) for draft in drafts]
        deepest = max(draft.depth for draft in drafts)
        deeper = sum(draft.depth - 1 for draft in drafts)  # the first draft comes of the reading itself
        self.controller.observe_draft(deepest, reads + deeper, self._clock() - started)
        return {live.key: draft.cut(count) for live, draft, count in zip(lives, drafts, kept, strict=True)}

    def _verify(self, rows: Sequence[Row], drafts: Mapping[int, Draft]) -> tuple[Tensor, Tensor | None]:
        """One pass of the target: logits behind every token that chooses, and the states of all tokens."""
        ids: list[int] = []
        keep: list[int] = []
        shares = []
        for row in rows:
            live, draft = row.live, drafts.get(row.live.key, NOTHING)
            newest = len(ids) + row.count - 1
            ids += [*live.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(_lay_out(row, draft))
        ids_N, keep_M = (torch.tensor(x, dtype=torch.int64, device=self._device) for x in (ids, keep))
        layout = Layout.of(shares, page_size=self.options.page_size, device=self._device)
        layer_ids = self._layer_ids if any(self._follows(row.live) for row in rows) else ()
        if self._lean is not None:
            return self._lean.forward(ids_N, PagedAttention(self._model.cache, layout), keep_M, layer_ids)
        if not layer_ids:
            return self._model.forward(ids_N, layout, keep_M), None
        with capture(self.target.model, layer_ids) as captured:
            logits_MV = self._model.forward(ids_N, layout, keep_M)
        return logits_MV, captured.aux_hidden()[0]

    def _accept(self, rows: Sequence[Row], drafts: Mapping[int, Draft], logits_MV: Tensor) -> list["_Verdict"]:
        """The target's own token behind every position, along the drafts as far as they equal it."""
        offered = [(row, drafts.get(row.live.key, NOTHING)) for row in rows]
        wanted = [
            self._wanted(row.live, draft.tokens_to(node))
            for row, draft in offered
            if row.samples
            for node in range(-1, len(draft.tokens))
        ]
        own_M: list[int] = choose(logits_MV, wanted).tolist() if wanted else []
        verdicts, first_n, first_m = [], 0, 0
        for row, draft in offered:
            own = own_M[first_m : first_m + 1 + len(draft.tokens)] if row.samples else []
            nodes = accept_tree(draft.parents, draft.tokens, own) if row.samples else []
            verdicts.append(
                _Verdict(
                    row=row,
                    draft=draft,
                    nodes=nodes,
                    tokens=[own[1 + node] for node in (-1, *nodes)] if row.samples else [],
                    token_at=first_n,
                    logits_at=first_m,
                )
            )
            first_n += row.count + len(draft.tokens)
            first_m += len(own)
        return verdicts

    def _tell_time(self, rows: Sequence[Row], drafts: Mapping[int, Draft], seconds: float) -> None:
        """The controller learns from passes that only decode; those with prompts in them are another matter."""
        if all(row.count == 1 for row in rows):
            tokens = len(rows) + sum(len(draft.tokens) for draft in drafts.values())
            self.controller.observe_target(tokens, sum(row.start for row in rows), seconds)

    def _commit(self, verdict: "_Verdict", logits_MV: Tensor, aux_NX: Tensor | None) -> Piece | None:
        """Write down what a request got, and let it go if that was its end."""
        row, draft, live = verdict.row, verdict.draft, verdict.row.live
        texts, finished = self._say(live, verdict.tokens)
        count = len(texts)
        tokens = verdict.tokens[:count]
        nodes = verdict.nodes[: max(0, count - 1)]
        if self._follows(live) and aux_NX is not None and self._drafter is not None:
            first = verdict.token_at
            places = [*range(first, first + row.count), *(first + row.count + node for node in nodes)]
            contiguous = places[-1] - places[0] == len(places) - 1
            self._drafter.take(live, aux_NX[first : places[-1] + 1] if contiguous else aux_NX[places])
        moved = [(node, depth) for depth, node in enumerate(nodes) if node != depth]
        if moved:
            behind = row.start + row.count
            self._move(live, [behind + node for node, _ in moved], [behind + depth for _, depth in moved])
        self.scheduler.commit(live, read=row.count + len(nodes), new_tokens=tokens)
        if not row.samples:
            return None
        sure = draft.confidences if draft.is_chain else ()
        self.controller.observe_round(live.key, draft.depth, len(verdict.nodes), sure)
        for tally in (self.tally, self._tallies[live.key]):
            tally.count(drafted=len(draft.tokens), accepted=len(verdict.nodes), tokens=count)
        piece = Piece(
            key=live.key,
            tokens=tuple(tokens),
            texts=tuple(texts),
            depths=(*range(1, len(verdict.nodes) + 1), 0)[:count],
            logprobs=self._logprobs(live, tokens, logits_MV, verdict),
            finished=finished,
        )
        if finished is not None:
            self.scheduler.finish(live, finished)
            self._forget(live.key)
        return piece

    def _move(self, live: Live, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Put the accepted path of a tree side by side, as if it had been a chain."""
        size = self.options.page_size
        places = [[live.pages[slot // size] * size + slot % size for slot in slots] for slots in (from_slots, to_slots)]
        self._model.cache.move(*torch.tensor(places, device=self._device))

    def _say(self, live: Live, tokens: Sequence[int]) -> tuple[list[str], FinishReason | None]:
        """The text of each new token that still belongs to the answer, and whether it ends with them."""
        request, stream = live.request, self._texts[live.key]
        texts: list[str] = []
        for made, token in enumerate(tokens, live.new_tokens + 1):
            if token in request.stop_ids and made > request.min_new_tokens:
                return [*texts, stream.finish()], FinishReason.STOP
            texts.append(stream.push(token))
            if stream.stopped:
                return texts, FinishReason.STOP
            if live.prompt_length + made >= self.scheduler.limit(live):
                texts[-1] += stream.finish()
                return texts, FinishReason.LENGTH
        return texts, None

    def _logprobs(
        self, live: Live, tokens: Sequence[int], logits_MV: Tensor, verdict: "_Verdict"
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

    def _read(self, lives: Sequence[Live]) -> None:
        assert self._drafter is not None
        self._drafter.read(lives)
        for live in lives:
            self.scheduler.note_read(live, live.target_length)

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Read where much has gathered: prompts, and requests that have not been drafted for in a while.

        Once one is due all are read, or as many passes would follow as there are requests.
        """
        lives = [row.live for row in rows if row.live.finished is None and self._follows(row.live)]
        if any(live.target_length - live.drafter_length >= LUMP for live in lives):
            self._read(lives)

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
        )

    def _forget(self, key: int) -> None:
        self._texts.pop(key, None)
        self._tallies.pop(key, None)
        self.controller.forget(key)
        if self._drafter is not None:
            self._drafter.forget(key)


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What the target said about one row."""

    row: Row
    draft: Draft
    nodes: list[int]
    """Accepted drafts."""
    tokens: list[int]
    """New tokens: the accepted drafts and one of the target's own; none for a chunk in the middle of a prompt."""
    token_at: int
    """Where the row begins among the tokens of the pass."""
    logits_at: int
    """Where its logits begin among those asked for."""


def _facts(live: Live) -> RowFacts:
    speculation = live.request.speculation
    return RowFacts(
        key=live.key,
        context=len(live.tokens),
        mode=speculation.mode,
        depth=speculation.depth,
        pending=live.target_length - live.drafter_length,
    )


def _lay_out(row: Row, draft: Draft) -> PassRow:
    """A row in the target's pass: its tokens, then its drafts, each seeing the way to itself."""
    count = row.count + len(draft.tokens)
    if draft.is_chain:
        return PassRow(pages=row.live.pages, base=row.start, count=count)
    assert row.count == 1, "only decoding rows carry drafts"
    paths = [set(draft.path(node)) for node in range(len(draft.tokens))]
    ancestors = torch.zeros(count, count, dtype=torch.bool)
    ancestors[:, 0] = True
    for node, path in enumerate(paths):
        ancestors[1 + node, [1 + other for other in path]] = True
    return PassRow(pages=row.live.pages, base=row.start, count=count, ancestors=ancestors)
