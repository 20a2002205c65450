"""The engine's step: schedule, draft, verify, accept, commit.

    schedule  pick the requests of the step, their token counts and their draft slots (`scheduler.py`)
    draft     queue the passes that produce draft tokens (`proposer.py`)
    verify    run the target over newest tokens and drafts in one pass, and over prompt chunks in another
    accept    choose the target's own token at each position; drafts that equal it are accepted
    commit    append tokens, check stop conditions, free blocks of finished requests

On a GPU, step n + 1 is launched before the tokens of step n have arrived. It is planned with lower and upper bounds of
each request's length; the exact lengths are on the device (`runner/round_state.py`). A request that finishes in step n
may still take part in step n + 1. Its tokens from there are dropped, and its blocks and slot are reused only after that
step has landed. On a CPU, or in synchronous mode, each step lands before the next is launched.

Where the host computes token masks (grammars, bad words), the passes are launched as usual, and sampling waits until
all earlier tokens are known.

This code runs for every row of every step, so it limits how many users a device can serve. Rows without special options
take a fast path.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.engine.masks import mask_of
from eyas.engine.output import OutputProcessor
from eyas.engine.proposer import PLAIN, DraftPlan, Proposer
from eyas.engine.request import SequenceState
from eyas.engine.runner.round import Round, RoundResults
from eyas.engine.runner.round_runner import RoundRunner
from eyas.engine.scheduler import Scheduler, SchedulerOutput
from eyas.engine.speculation.step_report import StepReport, outcome_of_tree
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.kernels.round_offers import LOOKED_UP

logger = logging.getLogger(__name__)
SLOW_LAUNCH = 0.25
"""Launches longer than this many seconds are logged: they captured CUDA graphs or compiled new kernels."""


@dataclass(kw_only=True, eq=False)
class Step:
    """A launched step."""

    scheduled: SchedulerOutput
    plan: DraftPlan
    rounds: list[Round] = field(default_factory=list)
    """The round of decoding requests, then the round of prompt chunks."""


class EngineCore:
    """Schedules, launches and commits steps."""

    runner: RoundRunner

    def __init__(
        self, scheduler: Scheduler, outputs: OutputProcessor, *, synchronous: bool, clock: Callable[[], float]
    ) -> None:
        self.outputs, self.proposer, self.synchronous = outputs, Proposer(), synchronous
        self._scheduler, self._clock = scheduler, clock
        self._in_flight: Step | None = None
        self._plan: DraftPlan = PLAIN
        self._landed_at: float | None = None
        self._planning_seconds = 0.0
        """Seconds spent on planning drafts since the last step landed."""
        self._reports: list[StepReport] = []
        """Reports of committed steps that the proposer has not seen yet."""
        self.last_report: StepReport | None = None
        """The report of the latest committed step."""

    def begin(self, runner: RoundRunner, proposer: Proposer) -> None:
        """Switch to this runner and proposer; nothing may be in flight."""
        self.runner, self.proposer = runner, proposer
        self._landed_at, self._planning_seconds = None, 0.0

    @property
    def busy(self) -> bool:
        return self._in_flight is not None

    def step(self) -> None:
        """Launch the next step, if there is work, then commit the previous one; synchronous mode commits both."""
        began, graphs = time.perf_counter(), len(self.runner.capture)
        if self.proposer.needs_landing:
            self._commit()
        step = self._schedule()
        for round_ in step.rounds:
            self.proposer.draft(round_, step.plan)
            self.runner.verify(round_)
            self.runner.accept(round_, self._mask(round_))
        if len(self.runner.capture) > graphs and (seconds := time.perf_counter() - began) > SLOW_LAUNCH:
            new = len(self.runner.capture) - graphs
            logger.warning(f"launching a step took {seconds:.2f} s and delayed all requests; {new} CUDA graphs are new")
        self._commit()
        self._in_flight = step if step.rounds else None
        if self.synchronous:
            self._commit()
        if not step.rounds:
            self._landed_at = None
        self._learn()

    @torch.inference_mode()
    def land(self) -> None:
        """Commit the step in flight, if any."""
        self._commit()
        self._learn()

    @torch.inference_mode()
    def abandon(self) -> None:
        """Drop the step in flight after a failure. Its requests must have been cancelled."""
        self._in_flight = self._landed_at = None
        self._reports.clear()
        self.runner.queue.mark().wait()
        self._scheduler.abandon()

    # --- launch ------------------------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        """Plan the next step. It has no rounds if the step in flight must land first."""
        self._plan = PLAIN
        scheduled = self._scheduler.plan(self._draft_slots)
        plan = self._plan
        step = Step(scheduled=scheduled, plan=plan)
        if not scheduled.rows:
            return step
        decoding, reading = self.runner.split(scheduled.rows)
        # Must be called before any request can finish.
        self._scheduler.launched(scheduled, deepest=None if plan.tree is None else plan.tree.depth)
        if decoding:
            step.rounds.append(self.runner.begin_round(decoding, tree=plan.tree, drafter_depth=plan.drafter_depth))
        if reading:
            step.rounds.append(self.runner.begin_read(reading))
        return step

    def _draft_slots(self, decoding: Sequence[SequenceState]) -> Mapping[int, int]:
        began = self._clock()
        self._plan = self.proposer.plan(decoding)
        self._planning_seconds += self._clock() - began
        return self._plan.slots

    def _mask(self, round_: Round) -> Tensor | None:
        """Compute the mask of allowed tokens; commits the step in flight first, because masks depend on its tokens."""
        if not round_.masked:
            return None
        self._commit()
        return mask_of(round_, self.runner.model.vocab_size)

    # --- commit ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Commit the results of the step in flight, if any, and make its report."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        report = StepReport(choice=step.plan.choice, offers=step.plan.offers)
        for round_ in step.rounds:
            self._commit_round(round_, report)
            if not round_.of_prompts:
                report.requests, report.depth = len(round_.rows), round_.depth
                report.catching_up, report.draft_seconds = round_.catch_up_seconds(), round_.draft_seconds()
        self._scheduler.landed(step.scheduled)
        now = self._clock()
        if self._landed_at is not None and not any(round_.of_prompts for round_ in step.rounds):
            report.seconds, report.planning = now - self._landed_at, self._planning_seconds
        self._landed_at, self._planning_seconds = now, 0.0
        self._reports.append(report)
        self.last_report = report

    def _learn(self) -> None:
        """Pass new reports to the proposer, while the device runs the next step."""
        reports, self._reports = self._reports, []
        began = self._clock()
        for report in reports:
            self.proposer.observe(report)
            for key in report.ended:
                self.proposer.forget(key)
        self._planning_seconds += self._clock() - began

    def _commit_round(self, round_: Round, report: StepReport) -> None:
        """Commit each row's tokens, and finish requests that end."""
        results, scheduler, outputs = round_.collect(), self._scheduler, self.outputs
        prompt_logprobs, hidden, offers = round_.prompt_logprobs(), self.runner.model.kept_states, round_.offers
        chains = list[tuple[int, int]]()
        for index, (row, tokens, accepted) in enumerate(
            zip(round_.rows, results.tokens, results.accepted, strict=True)
        ):
            seq = row.seq
            if seq.finished is not None:
                continue
            room, delta = seq.limit - len(seq.tokens), None
            of_drafter, by_suffix, offered = _drafted(round_, results, index, room, offers.get(seq.key))
            report.suffix_drafted += by_suffix
            drafter_length = round_.drafter_read(row, seq.target_length) if round_.drafter_reads and seq.followed else 0
            if seq.is_ordinary and 0 < len(tokens) < room and seq.request.stop_ids.isdisjoint(tokens):
                scheduler.commit(seq, row.count + len(tokens) - 1, tokens, drafter_length)
                delta = outputs.add_tokens(seq, tokens, offered, accepted, by_suffix)
            else:
                is_first, stop = seq.new_tokens == 0, outputs.check_stop(seq, tokens)
                with_prompt_logprobs = is_first and seq.request.prompt_logprobs is not None
                seq.prompt_logprobs += prompt_logprobs.get(seq.key, ())
                scheduler.commit(seq, row.count + max(0, len(stop.tokens) - 1), stop.tokens, drafter_length)
                if row.samples:
                    ended = stop.finished is not None
                    delta = outputs.add(
                        seq,
                        stop,
                        drafted=offered,
                        accepted=accepted,
                        logprobs=round_.logprobs(index, len(stop.tokens)),
                        prompt_logprobs=tuple(seq.prompt_logprobs) if with_prompt_logprobs else None,
                        hidden_TX=hidden.read(seq.blocks, seq.target_length) if hidden is not None and ended else None,
                        suffix_drafted=by_suffix,
                    )
                if stop.finished is not None:
                    scheduler.finish(seq, stop.finished)
                    outputs.close(seq.key)
                    report.ended.append(seq.key)
            if not of_drafter:
                continue
            if results.trees is None:
                chains.append((min(offered, of_drafter), min(accepted, of_drafter)))
                continue
            tree = results.trees[index]
            outcome = outcome_of_tree(seq.key, tree.deepest, accepted, tokens, tree.candidates)
            report.rounds.append(outcome)
            if delta is not None:
                delta.ranks = tuple(outcome.ranks)
        if not round_.of_prompts:
            report.chains = chains


def _drafted(
    round_: Round, results: RoundResults, index: int, room: int, offer: RoundOffer | None
) -> tuple[int, int, int]:
    """Count a row's drafts: from the drafter, from the suffix index, and verified in total."""
    if not round_.depth:
        return 0, 0, 0
    row = round_.rows[index]
    most = max(0, min(row.drafts, round_.depth, room - 1))
    of_drafter, by_suffix = min(most, round_.drafter_depth) if row.seq.followed else 0, 0
    if offer is not None and offer.sent:
        looked_up = [sure == LOOKED_UP for sure in results.confidences[index][:most]]
        by_suffix = sum(looked_up)
        of_drafter = looked_up.index(True) if by_suffix else of_drafter
    offered = of_drafter + by_suffix
    if results.verified is not None:
        offered = min(row.drafts, results.verified[index])
    return of_drafter, by_suffix, offered
