"""The engine's step: schedule, draft, verify, accept, commit.

    schedule  which requests take part, with how many tokens, and how many drafts each may have (`scheduler.py`)
    draft     the proposer queues what makes the drafts (`proposer.py`)
    verify    the target reads newest tokens and drafts in one pass, chunks of prompts in another
    accept    the target's own token behind each position, and drafts that equal it
    commit    tokens, stop conditions, blocks; requests that ended leave

On a GPU a step is launched before the tokens of the one before it have arrived: it is planned by bounds, and the device
knows where requests stand (`runner/round_state.py`). A request that ended with step n takes part in step n + 1 if that
was launched, and what it gets there is dropped; its blocks and its slot are given to others when that step has landed.
On a CPU, or in synchronous mode, every step lands at once: the same passes, with nothing in flight.

Where the host must say what may come (grammars, bad words), the passes are launched as always, and tokens are chosen
when all before them are known.

Each row of each step goes through this code, which decides how many users a device can serve: it is lean before it is
pretty, and rows to which nothing unusual happens take a short way.
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
"""Seconds beyond which an operator is told: such a step captured graphs, or compiled kernels that were not met yet."""


@dataclass(kw_only=True, eq=False)
class Step:
    """A launched step."""

    scheduled: SchedulerOutput
    plan: DraftPlan
    rounds: list[Round] = field(default_factory=list)
    """Requests that decode, then chunks of prompts."""


class EngineCore:
    """Runs steps."""

    runner: RoundRunner
    """Runs passes."""

    def __init__(
        self, scheduler: Scheduler, outputs: OutputProcessor, *, synchronous: bool, clock: Callable[[], float]
    ) -> None:
        self.outputs, self.proposer, self.synchronous = outputs, Proposer(), synchronous
        self._scheduler, self._clock = scheduler, clock
        self._in_flight: Step | None = None
        self._plan: DraftPlan = PLAIN
        self._landed_at: float | None = None
        self._thinking = 0.0
        """Seconds that planning drafts has taken since."""
        self._reports: list[StepReport] = []
        """Of steps that were committed, not yet shown to the proposer."""
        self.last_report: StepReport | None = None
        """Of the step that was committed last."""

    def begin(self, runner: RoundRunner, proposer: Proposer) -> None:
        """Go on with these, with nothing in flight."""
        self.runner, self.proposer = runner, proposer
        self._landed_at, self._thinking = None, 0.0

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return self._in_flight is not None

    def step(self) -> None:
        """Launch a step, if there is anything to do, and commit the one before it; both at once if synchronous."""
        began, graphs = time.perf_counter(), len(self.runner.capture)
        if self.proposer.needs_landing:
            self._commit()
        step = self._schedule()
        for made in step.rounds:
            self.proposer.draft(made, step.plan)
            self.runner.verify(made)
            self.runner.accept(made, self._mask(made))
        if len(self.runner.capture) > graphs and (seconds := time.perf_counter() - began) > SLOW_LAUNCH:
            new = len(self.runner.capture) - graphs
            logger.warning(f"a step took {seconds:.2f} s to launch, all requests waited; {new} CUDA graphs are new")
        self._commit()
        self._in_flight = step if step.rounds else None
        if self.synchronous:
            self._commit()
        if not step.rounds:
            self._landed_at = None
        self._learn()

    @torch.inference_mode()
    def land(self) -> None:
        """Wait until nothing is in flight."""
        self._commit()
        self._learn()

    @torch.inference_mode()
    def abandon(self) -> None:
        """Forget what is in flight, after a step has failed and its requests were cancelled."""
        self._in_flight = self._landed_at = None
        self._reports.clear()
        self.runner.queue.mark().wait()
        self._scheduler.abandon()

    # --- launch ------------------------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        """The next step, with seats for its rows; no rounds where the step in flight must land before."""
        self._plan = PLAIN
        scheduled = self._scheduler.plan(self._draft_slots)
        plan = self._plan
        step = Step(scheduled=scheduled, plan=plan)
        if not scheduled.rows:
            return step
        decoding, reading = self.runner.split(scheduled.rows)
        # Before any request can end.
        self._scheduler.launched(scheduled, deepest=None if plan.tree is None else plan.tree.depth)
        if decoding:
            step.rounds.append(self.runner.begin_round(decoding, tree=plan.tree, drafter_depth=plan.drafter_depth))
        if reading:
            step.rounds.append(self.runner.begin_read(reading))
        return step

    def _draft_slots(self, decoding: Sequence[SequenceState]) -> Mapping[int, int]:
        began = self._clock()
        self._plan = self.proposer.plan(decoding)
        self._thinking += self._clock() - began
        return self._plan.slots

    def _mask(self, made: Round) -> Tensor | None:
        """What the host says may come, once all tokens before are known."""
        if not made.masked:
            return None
        self._commit()
        return mask_of(made, self.runner.model.vocab_size)

    # --- commit ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Write down what the step in flight gave, if there is one, and report it."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        report = StepReport(choice=step.plan.choice, offers=step.plan.offers)
        for made in step.rounds:
            self._commit_round(made, report)
            if not made.of_prompts:
                report.requests, report.depth = len(made.rows), made.depth
                report.catching_up, report.draft_seconds = made.catch_up_seconds(), made.draft_seconds()
        self._scheduler.landed(step.scheduled)
        now = self._clock()
        if self._landed_at is not None and not any(made.of_prompts for made in step.rounds):
            report.seconds, report.thinking = now - self._landed_at, self._thinking
        self._landed_at, self._thinking = now, 0.0
        self._reports.append(report)
        self.last_report = report

    def _learn(self) -> None:
        """Show the proposer what was committed, while the device works on the next step."""
        reports, self._reports = self._reports, []
        began = self._clock()
        for report in reports:
            self.proposer.observe(report)
            for key in report.ended:
                self.proposer.forget(key)
        self._thinking += self._clock() - began

    def _commit_round(self, made: Round, report: StepReport) -> None:
        """Write down what requests got, and let those go whose end that was."""
        results, scheduler, outputs = made.collect(), self._scheduler, self.outputs
        prompt_logprobs, hidden, offers = made.prompt_logprobs(), self.runner.model.kept_states, made.offers
        chains = list[tuple[int, int]]()
        for number, (row, tokens, taken) in enumerate(zip(made.rows, results.tokens, results.accepted, strict=True)):
            seq = row.seq
            if seq.finished is not None:
                continue
            room, piece = seq.limit - len(seq.tokens), None
            of_drafter, by_suffix, offered = _drafted(made, results, number, room, offers.get(seq.key))
            report.suffix_drafted += by_suffix
            drafter_length = made.drafter_read(row, seq.target_length) if made.drafter_reads and seq.followed else 0
            if seq.is_ordinary and 0 < len(tokens) < room and seq.request.stop_ids.isdisjoint(tokens):
                scheduler.commit(seq, row.count + len(tokens) - 1, tokens, drafter_length)
                piece = outputs.add_tokens(seq, tokens, offered, taken, by_suffix)
            else:
                begins, stop = seq.new_tokens == 0, outputs.check_stop(seq, tokens)
                told = begins and seq.request.prompt_logprobs is not None
                seq.prompt_logprobs += prompt_logprobs.get(seq.key, ())
                scheduler.commit(seq, row.count + max(0, len(stop.tokens) - 1), stop.tokens, drafter_length)
                if row.samples:
                    ended = stop.finished is not None
                    piece = outputs.add(
                        seq,
                        stop,
                        drafted=offered,
                        accepted=taken,
                        logprobs=made.logprobs(number, len(stop.tokens)),
                        prompt_logprobs=tuple(seq.prompt_logprobs) if told else None,
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
                chains.append((min(offered, of_drafter), min(taken, of_drafter)))
                continue
            tree = results.trees[number]
            outcome = outcome_of_tree(seq.key, tree.deepest, taken, tokens, tree.candidates)
            report.rounds.append(outcome)
            if piece is not None:
                piece.ranks = tuple(outcome.ranks)
        if not made.of_prompts:
            report.chains = chains


def _drafted(
    made: Round, results: RoundResults, number: int, room: int, offer: RoundOffer | None
) -> tuple[int, int, int]:
    """How many tokens the drafter drafted for a row, how many were looked up, and how many were verified."""
    if not made.depth:
        return 0, 0, 0
    row = made.rows[number]
    most = max(0, min(row.drafts, made.depth, room - 1))
    of_drafter, by_suffix = min(most, made.drafter_depth) if row.seq.followed else 0, 0
    if offer is not None and offer.sent:
        looked_up = [sure == LOOKED_UP for sure in results.confidences[number][:most]]
        by_suffix = sum(looked_up)
        of_drafter = looked_up.index(True) if by_suffix else of_drafter
    offered = of_drafter + by_suffix
    if results.verified is not None:
        offered = min(row.drafts, results.verified[number])
    return of_drafter, by_suffix, offered
