"""The engine: many requests, one target, one drafter.

`core.py` has what a step is. Here is what steps are made for and of: requests come and go, one drafter takes the place
of another, and passes are run before they are needed.

The law: a request's token at position t is a function of the target's distribution there and of the request's own
noise at t (`slot_sampling.py`). Drafts, depths, the batch around it and preemptions change when it is computed, never
which it is, up to rounding of near-ties.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.drafter.weight_copy import UnlikeError
from eyas.engine.config import EngineConfig, choose_length, plan_budget, require_fit, require_kv_cache_dtype
from eyas.engine.core import EngineCore
from eyas.engine.drafter_proposer import DrafterProposer
from eyas.engine.drift_probe import DriftProbe
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.kv_cache.cache import KVCache, reserve_cache
from eyas.engine.kv_cache.hidden_states import HiddenStateCache
from eyas.engine.output import OutputDelta, OutputProcessor, RequestOutput, SpecDecodeStats
from eyas.engine.proposer import Proposer
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.runner.device_queue import RoundDevice
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.round_runner import RoundRunner, slot_of
from eyas.engine.scheduler import Scheduler
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.drift import DriftAlarm
from eyas.engine.speculation.step_report import Arm, Rehearsal
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.engine.suffix.proposer import SuffixProposer
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target
from eyas.target.rope import settle_rope

logger = logging.getLogger(__name__)
Name = TypeVar("Name")
REHEARSED_PROMPT = (0,) * 4
REHEARSED_STEPS = 3
"""Of each size: the first of them tells nothing, since it takes longer than the others."""
REHEARSED_ROWS, REHEARSED_DEPTHS = (1, 4, 16), (0, 1, 3, 7)
"""Requests, and how deep they draft; steps of other sizes lie between these, or on the line through them."""
REHEARSED_TOKENS = 64
"""Most that the target reads in a rehearsed step: larger ones keep everybody waiting for long, and seldom pay."""
REHEARSAL_SECONDS = 1.0
"""Time after which no more requests are rehearsed than were."""
MOST_PROMPT_LOGITS = 2**24
"""Logits of prompt tokens that a step computes, 64 MiB in float32, for requests that ask for their logprobs."""


class Engine:
    """Serves requests step by step. One thread at a time may use it; `async_engine.py` serves many."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        device: RoundDevice | None = None,
    ) -> None:
        """`device` is how passes come to the target's device, if not as the config says."""
        self.config = config = config or EngineConfig()
        self.target = target
        self.max_model_len = choose_length(config.max_model_len, target)
        require_kv_cache_dtype(config, target.device)
        settle_rope(target.model, self.max_model_len)
        self.budget = plan_budget(target, drafter, config, self.max_model_len)
        self._clock = clock
        cache = self._new_cache()
        layers = config.hidden_state_layers
        self.model_runner = ModelRunner(target, cache, HiddenStateCache(layers, cache, target) if layers else None)
        self.block_manager = BlockManager(self.budget.blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(target.device),
            max_model_len=self.max_model_len,
            max_prompt_logits=max(1, MOST_PROMPT_LOGITS // target.facts.vocab_size),
            drafter=drafter is not None,
        )
        self._device = device or RoundDevice.of(
            target.device, graphs=config.graphs, overlap=config.async_scheduling, clock=clock
        )
        self.core = EngineCore(
            self.scheduler, OutputProcessor(target.decoder()), synchronous=self._device.synchronous, clock=clock
        )
        self._suffix = None if config.suffix is None else SuffixDrafts(config.suffix, clock)
        self._keys = 0
        self._warms_up = False
        """Whether usual steps were captured and timed before they were met; then that is done for every drafter."""
        self._drafting: DrafterRunner | None = None
        self._draft_by(None if drafter is None else self._drafter_runner(drafter, self._new_cache()))
        if config.capture_ahead:
            self.capture_graphs()

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Take a request on; its key comes back with every piece."""
        self._require_drafts(request.speculation)
        vocab_size = self.target.facts.vocab_size
        request.sampling.require_vocabulary(vocab_size)
        allowed = request.sampling.allowed_tokens
        if request.min_new_tokens and allowed is not None and allowed <= request.stop_ids:
            raise UserError("allowed_tokens holds stop tokens only, which min_new_tokens forbids; allow another token")
        ends = {word[-1] for word in request.bad_words} | (request.stop_ids if request.min_new_tokens else set())
        if request.bad_words and len(ends) >= vocab_size:
            raise UserError(f"bad_words may ban all {vocab_size} tokens of the target; leave some")
        if max(request.prompt) >= vocab_size:
            raise UserError(f"the prompt holds token {max(request.prompt)}; the target knows 0 to {vocab_size - 1}")
        if request.grammar is not None and request.grammar.vocab_size != vocab_size:
            raise UserError(
                f"the grammar is for {request.grammar.vocab_size} tokens, not the target's {vocab_size}; make another"
            )
        key, self._keys = self._keys, self._keys + 1
        seq = SequenceState(key=key, arrival=key, request=request)
        self.scheduler.add(seq)  # which may refuse it, before anybody else knows of it
        self.proposer.admit(seq)
        self.core.outputs.open(key, request)
        return key

    def _require_drafts(self, speculation: Speculation) -> None:
        """Refuse what asks for drafts that nobody makes here."""
        depth, suffix = speculation.depth, self.config.suffix
        if speculation.method == "suffix" and suffix is None:
            raise UserError("suffix drafts were asked for, and the engine makes none; use method auto or turn them on")
        if speculation.method == "eagle3" and speculation.by_drafter and not self.drafts:
            raise UserError("method eagle3 was asked for, but there is no drafter; load one or use method auto")
        if depth is None:
            return
        if speculation.method == "suffix" and suffix is not None:
            if depth > suffix.deepest:
                raise UserError(f"depth {depth} is above the {suffix.deepest} suffix drafts of a step; lower it")
        elif not self.drafts:
            ways = "use mode auto" if suffix is None else "use mode auto, or use method suffix"
            raise UserError(f"depth {depth} was asked for, but there is no drafter; load one or {ways}")
        elif depth > self.config.max_depth:
            raise UserError(f"depth {depth} is above the engine's max_depth {self.config.max_depth}; lower it")

    def cancel(self, key: int) -> bool:
        """Drop a request, wherever it is, and all that it held; False if it has ended already."""
        if not self.scheduler.cancel(key):
            return False
        self.core.outputs.drop(key)
        self.proposer.forget(key)
        return True

    def abandon_step(self) -> None:
        """Give up on what a failed step left in flight, once the requests that ran in it are cancelled."""
        self.core.abandon()

    def stats_of(self, key: int) -> SpecDecodeStats:
        """How speculation goes for a request that is under way; the object goes on counting."""
        return self.core.outputs.stats_of(key)

    @property
    def stats(self) -> SpecDecodeStats:
        """How speculation went for all requests together."""
        return self.core.outputs.stats

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.core.busy or self.scheduler.waiting or self.scheduler.running or self.core.outputs.behind)

    def generate(
        self, requests: Iterable[Request], *, on_piece: Callable[[OutputDelta], None] | None = None
    ) -> list[RequestOutput]:
        """Answer requests, all together, in their order. If one is refused or a step fails, none is left behind."""
        numbered = list(enumerate(requests))
        waiting = iter(numbered)
        outputs = dict(self.serve(lambda: next(waiting, None), at_once=len(numbered), on_piece=on_piece))
        return [outputs[number] for number, _ in numbered]

    def serve(
        self,
        pull: Callable[[], tuple[Name, Request] | None],
        *,
        at_once: int | None = None,
        on_piece: Callable[[OutputDelta], None] | None = None,
        enough: Callable[[Name, OutputDelta], bool] | None = None,
    ) -> Iterator[tuple[Name, RequestOutput]]:
        """Answer what `pull` gives, up to `max_num_seqs` or `at_once` requests together; answers come as they end.

        `pull` gives a request under a name of the caller's own, which comes back with the answer; or None if there is
        none right now. It is asked again after every answer, since an answer may lead to the next request. All ends
        when it gives None and nothing is under way. If a request is refused, a step fails or the caller takes no more
        answers, none is left behind. `enough` is asked about every piece; where it says so, an answer ends with that
        piece, as cancelled.
        """
        most = self.config.max_num_seqs if at_once is None else at_once
        under_way: dict[int, tuple[Name, SpecDecodeStats, list[OutputDelta]]] = {}
        try:
            while True:
                while len(under_way) < most and (pulled := pull()) is not None:
                    name, request = pulled
                    key = self.submit(request)
                    under_way[key] = name, self.stats_of(key), []
                if not under_way:
                    return
                ended = []
                for piece in self.step():
                    if piece.key in under_way and piece.key not in ended:
                        name, _, pieces = under_way[piece.key]
                        if enough is not None and enough(name, piece) and piece.finished is None:
                            self.cancel(piece.key)
                            piece = replace(piece, finished=FinishReason.CANCELLED)
                        pieces.append(piece)
                        ended += [] if piece.finished is None else [piece.key]
                    if on_piece is not None:
                        on_piece(piece)
                for key in ended:
                    name, stats, pieces = under_way.pop(key)
                    yield name, RequestOutput.of(pieces, stats)
        finally:
            for key in under_way:
                self.cancel(key)

    # --- the drafter -------------------------------------------------------------------------------------------

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter."""
        return self._drafting is not None

    @property
    def proposer(self) -> Proposer:
        """Who drafts."""
        return self.core.proposer

    @property
    def lookups_by_requests(self) -> dict[int, dict[str, Any]]:
        """By requests of a round whether they are looked up for suffix drafts, and why."""
        return {} if self._suffix is None else self._suffix.gate.report()

    def swap_drafter(self, drafter: Drafter | None, *, in_place: bool = False, or_refuse: bool = False) -> bool:
        """Go on with another drafter, or none; to be called between steps. If it is refused, nothing has changed.

        `in_place` gives leave to overwrite the drafter that served so far. Then the weights of one that differs in
        nothing else are copied over it and all that was made of it (True comes back): no request starts again, nothing
        is captured again, and the drafter given is not needed any longer. To go back, swap in the old weights, of
        which the caller has kept a copy or knows where they lie.

        With `or_refuse` that is the only way: a drafter of another shape is refused.

        Of requests under way the drafter has read their text with the old weights, and goes on from there: that can
        cost them accepted drafts, never a token. What it has read is not found by later requests, who are read afresh.

        Any other drafter takes the place of the old one, which stays as it is (False): requests under way wait for
        their turn again, and read what they have so far once more. Where the engine captured ahead, it does so again,
        and they wait for that, too.
        """
        self.core.land()
        if drafter is not None:
            require_fit(drafter, self.target)
            if in_place and self._drafting is not None:
                self._device.queue.mark().wait()  # what follows the tokens of a step that has landed
                try:
                    self._drafting.take_weights(drafter, self.target.facts)
                except UnlikeError as why:
                    if or_refuse:
                        raise UserError(
                            f"the drafter cannot take the place of the one at work: {why}; use one like it"
                        ) from None
                    logger.info(f"the drafter is replaced, not overwritten: {why}")
                else:
                    self.scheduler.note_new_weights()
                    # Times of passes are still known. Of acceptance, nothing learnt of other weights is believed.
                    self._take_core(self.core.runner, self._drafting, self.controller)
                    return True
        if or_refuse:
            raise UserError("there is no drafter whose place another could take; swap it without or_refuse")
        runner = None
        if drafter is not None:
            cache = reserve_cache(
                drafter,
                blocks=self.budget.blocks,
                block_size=self.config.block_size,
                dtype=self.config.kv_cache_type,
            )
            runner = self._drafter_runner(drafter, cache)
        self.block_manager.forget_drafts()
        self.scheduler.begin_anew(drafter=drafter is not None)
        self._draft_by(runner)
        if self._warms_up:
            self.capture_graphs()
        return False

    def _drafter_runner(self, drafter: Drafter, cache: KVCache) -> DrafterRunner:
        config = self.config
        return DrafterRunner(drafter, cache, window=config.drafter_window, sinks=config.drafter_sinks)

    def _draft_by(self, drafter: DrafterRunner | None) -> None:
        """Take steps with this drafter, or none, from now on: its passes, and what decides about them."""
        self._drafting = drafter
        vars(self.core).pop("runner", None)  # its graphs and buffers make room for the new ones
        self.core.proposer = Proposer()
        device = self._device = self._device.anew()
        room = self.config.room(self.target.device, self.max_model_len)
        self._take_core(RoundRunner(self.model_runner, drafter, device, room, tree=self.config.tree), drafter, None)

    def _take_core(self, rounds: RoundRunner, drafter: DrafterRunner | None, before: Controller | None) -> None:
        """Draft by this one, of which nothing is known; of what steps take, perhaps what was learnt before."""
        config = self.config
        self.drift = DriftAlarm(config.max_depth)
        """Whether the drafter holds as deep as it is served; `report()` is for metrics."""
        recorded = None if drafter is None else drafter.model.recorded_acceptance
        self.controller = controller = Controller(
            max_depth=config.max_depth,
            drift=self.drift,
            recorded=() if recorded is None else recorded.by_depth(),
            costs=None if before is None else before.costs,
        )
        # Trees: where they are not captured ahead, each shape would hold up a step when it is met.
        known = None if before is None else before.shapes
        controller.captures(known or replace(rounds.shapes, trees=()))
        proposer = Proposer()
        if drafter is not None:
            probe = DriftProbe(
                drafter, self.drift, share=config.drift_share, draw=_drawing(rounds, drafter), clock=self._clock
            )
            layer_ids = drafter.model.config.layers_read(self.target.facts)
            proposer = DrafterProposer(rounds, controller, layer_ids=layer_ids, drift_probe=probe, tree=config.tree)
        if self._suffix is not None:
            proposer = SuffixProposer(proposer, self._suffix, controller, rounds)
        self.model_runner.layer_ids = proposer.layer_ids
        self.core.begin(rounds, proposer)

    def _new_cache(self) -> KVCache:
        config = self.config
        return KVCache(blocks=self.budget.blocks, block_size=config.block_size, dtype=config.kv_cache_type)

    # --- warm-up -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_graphs(self) -> int:
        """Capture and time the usual steps now instead of when they are first met; how many graphs there are.

        After a swap it is done again.
        """
        self._warms_up = True
        started, rounds = self._clock(), self.core.runner
        self.controller.captures(rounds.shapes)
        captured = rounds.graphs.capture_ahead()
        self.proposer.warm_up()
        if self._drafting is None and self._suffix is None:
            return captured
        if rounds.graphs.exact:
            self._rehearse()
        else:
            self.controller.rehearse(rounds.graphs.rehearse())
            captured = len(rounds.capture)
            logger.info(f"captured  {captured} kinds of steps as CUDA graphs in {self._clock() - started:.0f} s")
        return captured

    def _rehearse(self) -> None:
        """Time steps for requests that nobody made, so that the first choice of a depth is an informed one."""
        if self._drafting is None or self.scheduler.requests:
            return
        core, outputs, began, steps = self.core, self.core.outputs, self._clock(), dict[tuple[int, Arm], float]()
        core.outputs = OutputProcessor(self.target.decoder())
        self._take_core(core.runner, self._drafting, None)
        try:
            for rows in REHEARSED_ROWS:
                if rows > self.config.max_num_seqs or self._clock() - began > REHEARSAL_SECONDS:
                    break
                for depth in sorted({min(depth, self.config.max_depth) for depth in REHEARSED_DEPTHS}):
                    fits = rows * (1 + depth) <= REHEARSED_TOKENS
                    if fits and (seconds := self._rehearse_steps(rows, depth)) is not None:
                        steps[rows, depth] = seconds
        finally:
            for seq in self.scheduler.requests:  # of a step that failed
                self.cancel(seq.key)
            core.abandon()
            core.outputs = outputs
            # All else that was learnt is of what nobody asked.
            self._take_core(core.runner, self._drafting, None)
            self.controller.captures(core.runner.shapes)
        self.controller.rehearse(Rehearsal(steps=steps))

    def _rehearse_steps(self, rows: int, depth: int) -> float | None:
        """Seconds of a step of so many requests that draft so deep, once everything is warm; None where none fits."""
        room = self.max_model_len - len(REHEARSED_PROMPT)
        most, speculation = REHEARSED_STEPS * (1 + depth) + 1, Speculation(mode="fixed", depth=depth, method="eagle3")
        if room < most or rows * (len(REHEARSED_PROMPT) + most) > self.block_manager.blocks * self.config.block_size:
            return None
        request = Request(prompt=REHEARSED_PROMPT, sampling=Sampling(), max_new_tokens=most, speculation=speculation)
        keys, seconds = [self.submit(request) for _ in range(rows)], inf
        while any(seq.new_tokens == 0 for seq in self.scheduler.requests):
            self.step()
        for number in range(REHEARSED_STEPS):
            began = self._clock()
            self.step()
            if number:  # the first of a size allocates
                seconds = min(seconds, self._clock() - began)
        for key in keys:
            self.cancel(key)
        return seconds

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Go once through the algorithm; what it gave to whom."""
        self.core.step()
        return self.core.outputs.process()


def _drawing(rounds: RoundRunner, drafter: DrafterRunner) -> Callable[[SequenceState, Tensor, int], Tensor]:
    """How requests under way draw a draft outside of rounds, as they do in them."""

    def draw(seq: SequenceState, logits_1W: Tensor, position: int) -> Tensor:
        slot_1 = torch.tensor([slot_of(seq)], device=logits_1W.device)
        position_1, needs = torch.full_like(slot_1, position), rounds.sampling.needs([seq])
        return drafter.token_W[rounds.sampling.draw(logits_1W, slot_1, position_1, drafter.token_W, needs)]

    return draw
