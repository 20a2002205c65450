"""The engine: many requests, one target, one drafter.

It answers step by step: `host_loop.py` has what a step is, and `round_loop.py` the same for a GPU, where the next one
is launched before its tokens have arrived. Here is what steps are made for and of: requests come and go, one drafter
takes the place of another, and graphs are captured ahead.

The law: a request's token at position t is a function of the target's distribution there and of the request's own
noise at t (`sampler.py`). Drafts, depths, the batch around it and preemptions change when it is computed, never
which it is, up to rounding of near-ties.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig, choose_length, plan_budget, require_fit, require_kv_cache_dtype
from eyas.engine.drift_probe import DriftProbe
from eyas.engine.host_loop import HostLoop
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.kv_cache.cache import KVCache, reserve_cache
from eyas.engine.kv_cache.hidden_states import HiddenStateCache
from eyas.engine.output import OutputDelta, OutputProcessor, RequestOutput, SpecDecodeStats
from eyas.engine.proposer import NoProposer, Proposer, Proposes
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.round_loop import RoundLoop
from eyas.engine.runner.device_queue import CUDAStreamQueue, DeviceQueue
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.round_runner import RoundRunner
from eyas.engine.runner.weight_copy import UnlikeError
from eyas.engine.scheduler import ScheduledRow, Scheduler
from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.drift import DriftAlarm
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.suffix.drafts import SuffixDrafts
from eyas.engine.suffix.proposer import SuffixProposer
from eyas.engine.verify import sampling_metadata
from eyas.errors import UserError
from eyas.kernels.attention.choose import has_triton
from eyas.sampling import Sampling
from eyas.target.capture import check_aux_layer_ids
from eyas.target.model import Target
from eyas.target.rope import settle_rope

logger = logging.getLogger(__name__)
Name = TypeVar("Name")
REHEARSED_PROMPT = (0,) * 16
REHEARSED_STEPS = 4
"""Of each depth: the first of a size tells nothing, since it takes longer than the others."""
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
    ) -> None:
        self.config = config = config or EngineConfig()
        self.target = target
        self.max_model_len = choose_length(config.max_model_len, target)
        require_kv_cache_dtype(config, target.device)
        settle_rope(target.model, self.max_model_len)
        self.budget = plan_budget(target, drafter, config, self.max_model_len)
        self._clock = clock
        self.runner = ModelRunner(target, self._new_cache())
        self.block_manager = BlockManager(self.budget.blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(target.device),
            max_model_len=self.max_model_len,
            max_prompt_logits=max(1, MOST_PROMPT_LOGITS // target.facts.vocab_size),
            drafter=drafter is not None,
        )
        self._hidden: HiddenStateCache | None = None
        if config.hidden_state_layers:
            kept = check_aux_layer_ids(config.hidden_state_layers, target.facts.num_hidden_layers)
            self._hidden = HiddenStateCache(
                blocks=self.budget.blocks,
                block_size=config.block_size,
                width=len(kept) * target.facts.hidden_size,
                dtype=target.dtype,
                device=target.device,
            )
            self.runner.kept_layer_ids = kept
        self._outputs = OutputProcessor(target.decoder())
        self._suffix = None if config.suffix is None else SuffixDrafts(config.suffix, clock)
        self._keys = 0
        self.rounds: RoundLoop | None = None
        """Steps whose rounds live on the device; None where the host takes part in each (`host_loop`)."""
        self._captures_ahead = False
        """Whether usual steps were captured and timed before they were met; then that is done for every drafter."""
        self._begin_to_learn(None if drafter is None else self._drafter_runner(drafter, self._new_cache()))
        if config.rounds and target.device.type == "cuda" and has_triton():
            capture = GraphCapture(device=target.device, enabled=config.graphs)
            self.use_rounds(capture, CUDAStreamQueue(), synchronous=not config.async_scheduling)
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
        if self.rounds is not None:
            self.rounds.submit(seq)
        self._outputs.open(key, request)
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
        self._outputs.drop(key)
        self._forget(key)
        return True

    def abandon_step(self) -> None:
        """Give up on what a failed step left in flight, once the requests that ran in it are cancelled."""
        if self.rounds is not None:
            self.rounds.abandon()

    def stats_of(self, key: int) -> SpecDecodeStats:
        """How speculation goes for a request that is under way; the object goes on counting."""
        return self._outputs.stats_of(key)

    @property
    def stats(self) -> SpecDecodeStats:
        """How speculation went for all requests together."""
        return self._outputs.stats

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        in_flight = self.rounds is not None and self.rounds.busy
        return bool(in_flight or self.scheduler.waiting or self.scheduler.running or self._outputs.behind)

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
    def suffix_bytes(self) -> int:
        """Memory that the texts kept for suffix drafts can take."""
        return 0 if self._suffix is None else self._suffix.bytes

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
        if self.rounds is not None:
            self.rounds.land()
        if drafter is not None:
            require_fit(drafter, self.target)
            if in_place and self._drafting is not None:
                reason = self._copy_weights(drafter, self._drafting.drafter)
                if reason is None:
                    return True
                if or_refuse:
                    raise UserError(f"the drafter cannot take the place of the one at work: {reason}; use one like it")
                logger.info(f"the drafter is replaced, not overwritten: {reason}")
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
        rounds, self.rounds = self.rounds, None
        self._begin_to_learn(runner)
        self.block_manager.forget_drafts()
        self.scheduler.begin_anew(drafter=drafter is not None)
        if rounds is not None:
            fresh = replace(rounds.runner.capture, bytes=0, refused=set(), _made={}, _pool=None)
            queue, synchronous, chance = rounds.runner.queue, rounds.synchronous, rounds.runner.chance
            del rounds  # its graphs and buffers make room for the new ones
            self.use_rounds(fresh, queue, synchronous=synchronous, chance=chance)
        if self._captures_ahead:
            self.capture_graphs()
        return False

    def _copy_weights(self, drafter: Drafter, runner: DrafterRunner) -> str | None:
        """Let the drafter at work have the weights of another; why not, if that is not possible.

        What passes take is still known. Of acceptance, nothing that was learnt of other weights is believed.
        """
        if self.rounds is not None:
            self.rounds.runner.queue.mark().wait()  # what follows the tokens of a step that has landed
        try:
            runner.take_weights(drafter, self.target.facts)
        except UnlikeError as reason:
            return str(reason)
        self.scheduler.note_new_weights()
        costs = self.controller.costs
        self._begin_to_learn(runner, costs)
        if self.rounds is not None:
            assert costs.shapes is not None, "rounds come in captured shapes"
            self._use_loop(self.rounds.runner, costs.shapes, synchronous=self.rounds.synchronous)
        return None

    def _drafter_runner(self, drafter: Drafter, cache: KVCache) -> DrafterRunner:
        config = self.config
        return DrafterRunner(drafter, cache, window=config.drafter_window, sinks=config.drafter_sinks)

    def _begin_to_learn(self, runner: DrafterRunner | None, costs: CostModel | None = None) -> None:
        """Draft by this one, of which nothing is known, but perhaps what passes take."""
        config = self.config
        self.drift = DriftAlarm(config.max_depth)
        """Whether the drafter holds as deep as it is served; `report()` is for metrics."""
        recorded = None if runner is None else runner.model.recorded_acceptance
        self.controller = Controller(
            max_depth=config.max_depth,
            drift=self.drift,
            trees=True,
            recorded=() if recorded is None else recorded.by_depth(),
            costs=costs,
        )
        self._drafting = self._drafter_proposer(runner)
        """The proposer of the drafter, if there is one."""
        inner = self._drafting or NoProposer()
        self.proposer: Proposes = inner
        if self._suffix is not None:
            self.proposer = SuffixProposer(inner, self._suffix, self.controller)
        self.runner.layer_ids = self.proposer.layer_ids
        self.host_loop = HostLoop(
            self.runner,
            self.scheduler,
            self.proposer,
            self.controller,
            self._outputs,
            hidden=self._hidden,
            clock=self._clock,
        )

    def _drafter_proposer(self, runner: DrafterRunner | None) -> Proposer | None:
        if runner is None:
            return None
        config = self.config
        layer_ids = runner.model.config.layers_read(self.target.facts)
        return Proposer(
            runner,
            self.controller,
            self.scheduler,
            layer_ids=layer_ids,
            drift_probe=DriftProbe(
                runner, self.drift, share=config.drift_share, sampling_metadata=sampling_metadata, clock=self._clock
            ),
            tree=config.tree,
            clock=self._clock,
        )

    def _new_cache(self) -> KVCache:
        config = self.config
        return KVCache(blocks=self.budget.blocks, block_size=config.block_size, dtype=config.kv_cache_type)

    # --- rounds on the device ----------------------------------------------------------------------------------

    def use_rounds(
        self,
        capture: GraphCapture,
        queue: DeviceQueue,
        *,
        synchronous: bool = False,
        chance: float | None = None,
    ) -> None:
        """Let rounds live on the device, one step in flight, captured as shapes are met.

        With a chance, a coin accepts drafts instead of the law: to measure at an acceptance of one's choice.
        """
        config, runner, drafting = self.config, self.runner, self._drafting
        room = config.room(self.target.device, self.max_model_len)
        rounds = RoundRunner(
            lambda ids_N, metadata, keep_M, out_MV, states: runner.run(
                ids_N, metadata, keep_M, runner.layer_ids if states else (), out_MV
            ),
            runner.cache,
            None if drafting is None else drafting.drafter,
            capture=capture,
            queue=queue,
            max_num_seqs=room.recorded_rows,
            most_tokens=room.recorded_tokens,
            longest_chunk=room.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_depth=room.max_depth,
            tree=config.tree,
            vocab_size=self.target.facts.vocab_size,
            dtype=self.target.dtype,
            logits_dtype=runner.logits_dtype,
            chance=chance,
            max_offers=room.max_offers,
        )
        # Flat passes and trees: where they are not captured ahead, each shape would hold up a step when it is met.
        self._use_loop(rounds, replace(rounds.shapes, flat=False, trees=()), synchronous=synchronous)

    def _use_loop(self, rounds: RoundRunner, shapes: CapturedShapes, *, synchronous: bool) -> None:
        """Let steps be such rounds, by the proposer and the controller of now; these shapes are captured."""
        if self._drafting is not None:
            self._drafting.rounds = True
        if isinstance(self.proposer, SuffixProposer):
            self.proposer.shapes = rounds.shapes
        self.rounds = RoundLoop(
            rounds,
            self.scheduler,
            self.proposer,
            self.controller,
            self._outputs,
            read_on_host=self._read_on_host,
            synchronous=synchronous,
            clock=self._clock,
        )
        for seq in self.scheduler.requests:
            self.rounds.submit(seq)
        self.controller.runs_graphs()
        self.controller.captures(shapes)
        if not synchronous:
            self.controller.overlaps()

    def _read_on_host(self, rows: Sequence[ScheduledRow]) -> None:
        """Read prompts whose logprobs are asked for, apart from rounds; then let them decode in rounds."""
        assert self.rounds is not None
        for result in self.host_loop.run(rows, StepReport()):
            seq = result.row.seq
            if seq.finished is not None:
                continue
            samples, aux_TX = result.row.samples, None
            if self._drafting is not None and self._drafting.follows(seq):
                self._drafting.read([seq], but_last=samples)
                if samples:
                    (aux_TX,) = self._drafting.drafter.states.take(seq)
            if samples:
                self.rounds.runner.seat(seq, aux_TX)

    @torch.inference_mode()
    def capture_graphs(self) -> int:
        """Capture and time the usual steps now instead of when they are first met; how many graphs there are.

        After a swap it is done again.
        """
        self._captures_ahead = True
        if self.rounds is None:
            self._rehearse()
            return 0
        started = self._clock()
        captured = self.rounds.runner.graphs.capture_ahead()
        self.controller.captures(self.rounds.runner.shapes)
        self.proposer.rehearse()
        if self.rounds is not None and (self.drafts or self._suffix is not None):
            self.controller.rehearse(self.rounds.runner.graphs.rehearse())
            captured = len(self.rounds.runner.capture)
        logger.info(f"captured  {captured} kinds of steps as CUDA graphs in {self._clock() - started:.0f} s")
        return captured

    def _rehearse(self) -> None:
        """Time steps for a request that nobody made, so that the first choice of a depth is an informed one."""
        if self._drafting is None or self.scheduler.requests:
            return
        outputs = self._outputs
        self._outputs = self.host_loop.outputs = OutputProcessor(self.target.decoder())
        longest = self.max_model_len - len(REHEARSED_PROMPT)
        depths = sorted({min(depth, self.config.max_depth) for depth in (0, 1, 3, 7)})
        for depth in depths if longest > 0 else ():
            # On auto, steps are plain as long as no time is known, and each is timed.
            speculation = Speculation(mode="fixed", depth=depth) if depth else Speculation(method="eagle3")
            request = Request(
                prompt=REHEARSED_PROMPT,
                sampling=Sampling(),
                max_new_tokens=min(longest, REHEARSED_STEPS * (1 + depth)),
                speculation=speculation,
            )
            key = self.submit(request)
            for _ in range(1 + REHEARSED_STEPS):
                self.step()
            self.cancel(key)
        self._outputs = outputs
        # All else that was learnt is of what nobody asked.
        self._begin_to_learn(self._drafting.drafter, self.controller.costs)

    # --- the step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Go once through the algorithm; what it gave to whom."""
        if self.rounds is not None:
            self.rounds.step()
        else:
            self.host_loop.step()
        self._outputs.process()
        return self._outputs.take()

    def _forget(self, key: int) -> None:
        if self.rounds is not None:
            self.rounds.forget(key)
        self._outputs.close(key)
        self.controller.forget(key)
        self.proposer.forget(key)
