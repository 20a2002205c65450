"""The engine: many requests, one target, one drafter.

`core.py` runs the steps. This module manages what surrounds them: requests, swaps of drafters, and warm-up.

Losslessness: a request's token at position t depends only on the target's distribution there and on the request's own
noise at t (`slot_sampling.py`). Drafts, depths, batching and preemption change when it is computed, never which token
it is, up to rounding of near-ties.
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
from eyas.target.attention import settle_rope
from eyas.target.model import Target

logger = logging.getLogger(__name__)
Name = TypeVar("Name")
REHEARSED_PROMPT = (0,) * 4
REHEARSED_STEPS = 3
"""Steps timed per size; the first is discarded because it allocates."""
REHEARSED_ROWS, REHEARSED_DEPTHS = (1, 4, 16), (0, 1, 3, 7)
"""Numbers of requests and draft depths to time; times of other sizes are interpolated."""
REHEARSED_TOKENS = 64
"""Most target tokens of a rehearsed step: larger steps delay start-up and are rarely chosen."""
REHEARSAL_SECONDS = 1.0
"""Seconds after which no larger number of requests is rehearsed."""
MOST_PROMPT_LOGITS = 2**24
"""Prompt logits that a step computes for requests with prompt logprobs: 64 MiB in float32."""


class Engine:
    """Serves requests step by step. Not thread-safe; `async_engine.py` serves many callers."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        device: RoundDevice | None = None,
    ) -> None:
        """`device` overrides how passes are launched on the target's device."""
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
        """Whether graphs are captured and steps timed ahead; if so, a swapped-in drafter is warmed up too."""
        self._drafting: DrafterRunner | None = None
        self._set_drafter(None if drafter is None else self._drafter_runner(drafter, self._new_cache()))
        if config.capture_ahead:
            self.capture_graphs()

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Add a request and return its key, which every delta carries."""
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
        self.scheduler.add(seq)  # may refuse it, so this comes before the proposer and the outputs
        self.proposer.admit(seq)
        self.core.outputs.open(key, request)
        return key

    def _require_drafts(self, speculation: Speculation) -> None:
        """Refuse speculation that this engine does not offer."""
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
        """Cancel a request and free what it holds. False if it has ended already."""
        if not self.scheduler.cancel(key):
            return False
        self.core.outputs.drop(key)
        self.proposer.forget(key)
        return True

    def abandon_step(self) -> None:
        """Drop what a failed step left in flight. Its requests must have been cancelled."""
        self.core.abandon()

    def stats_of(self, key: int) -> SpecDecodeStats:
        """Speculation statistics of a running request; the object is updated live."""
        return self.core.outputs.stats_of(key)

    @property
    def stats(self) -> SpecDecodeStats:
        """Speculation statistics of all requests together."""
        return self.core.outputs.stats

    @property
    def busy(self) -> bool:
        """Whether there is anything left to step for."""
        return bool(self.core.busy or self.scheduler.waiting or self.scheduler.running or self.core.outputs.behind)

    def generate(
        self, requests: Iterable[Request], *, on_piece: Callable[[OutputDelta], None] | None = None
    ) -> list[RequestOutput]:
        """Complete requests as one batch, outputs in their order. If one is refused or a step fails, cancel all."""
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
        """Complete requests from `pull`, at most `max_num_seqs` or `at_once` at a time; yields outputs as they finish.

        `pull` returns a request with a name of the caller's choice, or None if there is none right now. It is called
        again after every output, since an answer may lead to the next request. The loop ends when `pull` returns None
        and nothing is running. If a request is refused, a step fails or the caller stops iterating, all running
        requests are cancelled. If `enough` returns True for a delta, its request is cancelled after that delta.
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
                for delta in self.step():
                    if delta.key in under_way and delta.key not in ended:
                        name, _, deltas = under_way[delta.key]
                        if enough is not None and enough(name, delta) and delta.finished is None:
                            self.cancel(delta.key)
                            delta = replace(delta, finished=FinishReason.CANCELLED)
                        deltas.append(delta)
                        ended += [] if delta.finished is None else [delta.key]
                    if on_piece is not None:
                        on_piece(delta)
                for key in ended:
                    name, stats, deltas = under_way.pop(key)
                    yield name, RequestOutput.of(deltas, stats)
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
        return self.core.proposer

    @property
    def lookups_by_requests(self) -> dict[int, dict[str, Any]]:
        """Statistics of suffix look-ups by number of requests in a round."""
        return {} if self._suffix is None else self._suffix.gate.report()

    def swap_drafter(self, drafter: Drafter | None, *, in_place: bool = False, or_refuse: bool = False) -> bool:
        """Replace or remove the drafter, between steps. If the new one is refused, nothing has changed.

        With `in_place` the weights of the running drafter may be overwritten, if the new one differs in weights only
        (returns True). Requests keep running, captured graphs stay valid, and the given drafter is no longer needed.
        To go back, swap in a copy of the old weights. Running requests keep drafter entries of the old weights, which
        may cost them accepted drafts but never changes a token; later requests do not reuse those entries.

        With `or_refuse`, a drafter that cannot be swapped in place is refused. Otherwise it replaces the old one, which
        stays unchanged (returns False): running requests are preempted and read their tokens again, and graphs are
        captured again if they were captured ahead.
        """
        self.core.land()
        if drafter is not None:
            require_fit(drafter, self.target)
            if in_place and self._drafting is not None:
                self._device.queue.mark().wait()  # work may be queued behind the tokens that landed
                try:
                    self._drafting.take_weights(drafter, self.target.facts)
                except UnlikeError as why:
                    if or_refuse:
                        raise UserError(
                            f"the drafter cannot take the place of the running one: {why}; use one like it"
                        ) from None
                    logger.info(f"the drafter is replaced, its weights are not overwritten in place: {why}")
                else:
                    self.scheduler.note_new_weights()
                    # Step times stay valid; acceptance was measured with other weights and is discarded.
                    self._set_policies(self.core.runner, self._drafting, self.controller)
                    return True
        if or_refuse:
            raise UserError("there is no drafter to replace in place; swap it without or_refuse")
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
        self.scheduler.preempt_all(drafter=drafter is not None)
        self._set_drafter(runner)
        if self._warms_up:
            self.capture_graphs()
        return False

    def _drafter_runner(self, drafter: Drafter, cache: KVCache) -> DrafterRunner:
        config = self.config
        return DrafterRunner(drafter, cache, window=config.drafter_window, sinks=config.drafter_sinks)

    def _set_drafter(self, drafter: DrafterRunner | None) -> None:
        """Build the passes and policies for this drafter, or none."""
        self._drafting = drafter
        vars(self.core).pop("runner", None)  # frees its graphs and buffers before new ones are made
        self.core.proposer = Proposer()
        device = self._device = self._device.without_graphs()
        room = self.config.room(self.target.device, self.max_model_len)
        self._set_policies(RoundRunner(self.model_runner, drafter, device, room, tree=self.config.tree), drafter, None)

    def _set_policies(self, rounds: RoundRunner, drafter: DrafterRunner | None, before: Controller | None) -> None:
        """Install policies with fresh acceptance estimates, and the step times of `before`, if given."""
        config = self.config
        self.drift = DriftAlarm(config.max_depth)
        """Tells how deep the drafter is still reliable; `report()` is for metrics."""
        recorded = None if drafter is None else drafter.model.recorded_acceptance
        self.controller = controller = Controller(
            max_depth=config.max_depth,
            drift=self.drift,
            recorded=() if recorded is None else recorded.by_depth(),
            costs=None if before is None else before.costs,
        )
        # No trees unless graphs are captured ahead: capturing each shape on first use would delay a step.
        known = None if before is None else before.shapes
        controller.captures(known or replace(rounds.shapes, trees=()))
        proposer = Proposer()
        if drafter is not None:
            probe = DriftProbe(
                drafter, self.drift, share=config.drift_share, draw=_make_draw(rounds, drafter), clock=self._clock
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
        """Capture CUDA graphs of common steps and time them; returns the number of graphs. Repeated after a swap."""
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
        """Time steps of dummy requests, to seed the controller's step times."""
        if self._drafting is None or self.scheduler.requests:
            return
        core, outputs, began, steps = self.core, self.core.outputs, self._clock(), dict[tuple[int, Arm], float]()
        core.outputs = OutputProcessor(self.target.decoder())
        self._set_policies(core.runner, self._drafting, None)
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
            # Discard everything else that was learned from dummy requests.
            self._set_policies(core.runner, self._drafting, None)
            self.controller.captures(core.runner.shapes)
        self.controller.rehearse(Rehearsal(steps=steps))

    def _rehearse_steps(self, rows: int, depth: int) -> float | None:
        """Measured seconds of a step with so many requests and drafts; None if they do not fit."""
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
            if number:  # the first allocates
                seconds = min(seconds, self._clock() - began)
        for key in keys:
            self.cancel(key)
        return seconds

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Run one step and return the deltas of all requests."""
        self.core.step()
        return self.core.outputs.process()


def _make_draw(rounds: RoundRunner, drafter: DrafterRunner) -> Callable[[SequenceState, Tensor, int], Tensor]:
    """Make a function that draws a request's draft outside of rounds, with the noise that rounds use."""

    def draw(seq: SequenceState, logits_1W: Tensor, position: int) -> Tensor:
        slot_1 = torch.tensor([slot_of(seq)], device=logits_1W.device)
        position_1, needs = torch.full_like(slot_1, position), rounds.sampling.needs([seq])
        return drafter.token_W[rounds.sampling.draw(logits_1W, slot_1, position_1, drafter.token_W, needs)]

    return draw
