"""Steps with one in flight: a step is launched before the tokens of the one before it have arrived.

    launch   which requests take part and how deep is planned by bounds, since the step in flight may still give each of
             them one token or many; where they stand the device knows (`runner/round_state.py`)
    land     the tokens of the step before: stop conditions, blocks, ended requests
    learn    lessons for the controller, when nobody waits for the host; text follows (`engine.py`)

What the host finds out late costs a row that computed in vain, and never shows: a request that ended with step n takes
part in step n + 1 if that was launched, and what it gets there is dropped. Its blocks and its slot are given to others
only when that step has landed (`scheduler.py`).

Some things need the host before tokens can be chosen. Where a grammar or bad words say what may come, the step's
passes are launched as always, and its sampler when the tokens before are known and the masks are made; the device works
meanwhile. Prompts whose logprobs are asked for, and looks for drift, wait for the step in flight.

What is done for every row of every step decides how many users a device can serve: such code is lean before it is
pretty, and rows to which nothing unusual happens take a short way.

In `synchronous` mode every step lands at once. It is the oracle of the other: the same passes, with nothing in flight.

Shapes: R rows, Q tokens of a row, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eyas.engine.output import OutputDelta, OutputProcessor
from eyas.engine.proposer import Proposes
from eyas.engine.request import SequenceState
from eyas.engine.runner.launched_round import LaunchedRound
from eyas.engine.runner.round_runner import RoundRunner
from eyas.engine.runner.round_state import SentOffer
from eyas.engine.runner.sampling_needs import needs_mask
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.observations import CatchUpTiming, ChainOutcomes, DraftTiming, TargetTiming
from eyas.engine.speculation.step_report import RepeatedStep, StepReport
from eyas.engine.speculation.suffix_acceptance import RoundOffer
from eyas.engine.verify import outcome_of_tree, sampling_metadata
from eyas.kernels.round_offers import LOOKED_UP
from eyas.plan.shapes import CHAIN

logger = logging.getLogger(__name__)
SLOW_LAUNCH = 0.25
"""Seconds beyond which an operator is told: such a step captured graphs, or compiled kernels that were not met yet."""


@dataclass(kw_only=True, eq=False)
class StepInFlight:
    """A launched step."""

    scheduled: SchedulerOutput
    rounds: list[LaunchedRound] = field(default_factory=list)
    choice: Choice | None
    """What it follows, if it was chosen for."""
    repeated: Choice | None
    """What it is like, if its time as a whole tells something."""
    only_decodes: bool
    timed: bool
    """Whether somebody learns from what its passes take."""
    looked_up: bool
    """Whether the host looked for drafts in its requests' texts."""
    offers: Mapping[int, RoundOffer]
    """What it found, by request."""

    @property
    def has_offers(self) -> bool:
        """Whether some of that was sent: then it may have taken longer than a step that is like it otherwise."""
        return any(offer.sent for offer in self.offers.values())


class RoundLoop:
    """The steps of an engine whose rounds live on the device."""

    def __init__(
        self,
        runner: RoundRunner,
        scheduler: Scheduler,
        proposer: Proposes,
        controller: Controller,
        outputs: OutputProcessor,
        *,
        read_on_host: Callable[[Sequence[ScheduledRow]], None],
        synchronous: bool,
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self._scheduler, self._proposer, self._controller, self._outputs = scheduler, proposer, controller, outputs
        self._read_on_host, self.synchronous, self._clock = read_on_host, synchronous, clock
        self._flight: StepInFlight | None = None
        self._landed_at: float | None = None
        self._thinking = 0.0
        """Seconds that the controller has taken since."""
        self._reports: list[StepReport] = []
        """Of steps that have landed."""
        self._by_host: set[int] = set()
        """Requests that ask for the logprobs of their prompts."""
        self._masked: set[int] = set()
        """Those for which the host says what may come."""

    def submit(self, seq: SequenceState) -> None:
        """Take note of a request that came."""
        if seq.lacks_prompt_logprobs:
            self._by_host.add(seq.key)
        if needs_mask(seq):
            self._masked.add(seq.key)

    def forget(self, key: int) -> None:
        """Take note of one that left."""
        self._by_host.discard(key)
        self._masked.discard(key)

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return self._flight is not None

    def step(self) -> None:
        """Launch a step, if there is anything to do, and land the one before it."""
        began, graphs = time.perf_counter(), len(self.runner.capture)
        launched = self._launch()
        if (seconds := time.perf_counter() - began) > SLOW_LAUNCH:
            new = len(self.runner.capture) - graphs
            logger.warning(f"a step took the host {seconds:.2f} s to launch, all requests waited; {new} graphs are new")
        landing, self._flight = self._flight, launched
        if landing is not None:
            self._land(landing)
        if launched is None:
            self._landed_at = None
            self._learn()
            return
        self._flight = None  # the step before has landed
        for waiting in launched.rounds:
            self._finish(waiting)
        self._flight = launched
        if self.synchronous:
            self._wait()
        self._learn()

    @torch.inference_mode()
    def land(self) -> None:
        """Wait until nothing is in flight."""
        self._wait()
        self._learn()

    def _wait(self) -> None:
        landing, self._flight = self._flight, None
        if landing is not None:
            self._land(landing)

    @torch.inference_mode()
    def abandon(self) -> None:
        """Forget what is in flight, after a step has failed and its requests were cancelled."""
        self._flight = self._landed_at = None
        self._reports.clear()
        self._by_host.clear()
        self._masked.clear()
        self.runner.queue.mark().wait()
        self._scheduler.abandon()

    # --- launch ------------------------------------------------------------------------------------------------

    def _launch(self) -> StepInFlight | None:
        if self._by_host or self._proposer.drift_due():
            self._wait()
        scheduled = self._scheduled()
        rows: Sequence[ScheduledRow] = scheduled.rows
        if self._flight is None:
            self._proposer.probe_drift(rows, self.runner.states_of)
        by_host = [row for row in rows if row.seq.lacks_prompt_logprobs] if self._by_host else []
        if by_host:
            self._read_on_host(by_host)
            self._by_host -= {row.seq.key for row in by_host if not row.seq.lacks_prompt_logprobs}
            rows = [row for row in rows if row not in by_host]
            scheduled = replace(scheduled, rows=tuple(rows))
        if not rows:
            return None
        decoding, reading = self.runner.split(rows)
        step = StepInFlight(
            scheduled=scheduled,
            choice=self._proposer.chosen,
            repeated=self._proposer.repeated,
            only_decodes=not reading and not by_host,
            timed=self._proposer.timed,
            looked_up=self._proposer.looks_up,
            offers=self._proposer.round_offers,
        )
        tree = self._proposer.round_tree
        # Before any request can end.
        self._scheduler.launched(scheduled, deepest=None if tree is None else tree.depth)
        if decoding:
            budget = self._proposer.budget
            calibration = () if budget is None else self._controller.acceptance.calibration()
            masked = self._is_masked(decoding)
            step.rounds.append(
                self.runner.launch_round(
                    decoding,
                    masked=masked,
                    budget=budget,
                    calibration=calibration,
                    tree=tree,
                    offers=_sent(decoding, step.offers) if step.offers else (),
                    drafter_depth=self._proposer.drafter_depth,
                )
            )
        if decoding and reading:
            self._finish(step.rounds[0])  # both leave their logits in the same memory
        if reading:
            step.rounds.append(self.runner.launch_read(reading, masked=self._is_masked(reading)))
        return step

    def _finish(self, waiting: LaunchedRound) -> None:
        """Launch the sampler of a round that waits for a mask."""
        if waiting.landed is None:
            self._wait()
            waiting.sample(self._mask(waiting))

    def _scheduled(self) -> SchedulerOutput:
        """Rows of the next step; none where the step in flight must land before more can be planned."""
        scheduled = self._scheduler.plan(self._draft_slots)
        for seq in scheduled.preempted:
            self._proposer.forget(seq.key, ended=False)
        for seq in self._proposer.take_released():
            self.runner.release(seq)
        return scheduled

    def _draft_slots(self, decoding: Sequence[SequenceState]) -> dict[int, int]:
        began = self._clock()
        slots = self._proposer.draft_slots(decoding)
        if self._proposer.chosen is not None:  # what every step takes is its price
            self._thinking += self._clock() - began
        return slots

    def _mask(self, waiting: LaunchedRound) -> Tensor:
        """Which tokens may come behind every position of a round [R * Q, V], now that all before it is known."""
        drafts: Sequence[Sequence[int]] = [[] for _ in waiting.rows]
        if waiting.drafted is not None and waiting.drafts_RK is not None:
            waiting.drafted.wait()
            drafts = waiting.drafts_RK.tolist()
        width = 1 + waiting.line.depth
        mask_NV = torch.ones(waiting.bucket * width, self.runner.vocab_size, dtype=torch.bool)
        for number, (row, made) in enumerate(zip(waiting.rows, drafts, strict=True)):
            if row.samples and row.seq.finished is None and needs_mask(row.seq):
                for depth in range(1 + min(row.drafts, waiting.line.depth)):
                    wanted = sampling_metadata(row.seq, made[:depth])
                    line_V = mask_NV[number * width + depth]
                    if wanted.mask_V is not None:
                        line_V &= wanted.mask_V
                    line_V[list(wanted.banned)] = False
        return mask_NV

    def _is_masked(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the host must say what may come behind some of these rows."""
        return bool(self._masked) and any(row.samples and row.seq.key in self._masked for row in rows)

    # --- land --------------------------------------------------------------------------------------------------

    def _land(self, step: StepInFlight) -> None:
        report = StepReport(choice=step.choice)
        tokens = 0
        for launched in step.rounds:
            tokens += self._commit(launched, report, step.offers)
            if step.only_decodes and step.timed:
                self._note_times(launched, report)
        for key in report.ended:
            self.forget(key)
            self._proposer.forget(key)
        self._scheduler.landed(step.scheduled)
        now = self._clock()
        if step.only_decodes and self._landed_at is not None:
            seconds = now - self._landed_at
            if step.choice is not None:
                report.seconds, report.thinking = seconds, self._thinking
            elif step.repeated is not None and step.repeated.under_way is not None and not step.has_offers:
                like, requests = step.repeated.under_way, len(step.scheduled.rows)
                report.repeated = RepeatedStep(like, requests, seconds, thinking=self._thinking)
            rows = len(step.scheduled.rows)
            self._proposer.learn_round(rows, looked_up=step.looked_up, tokens=tokens, seconds=seconds)
        self._landed_at, self._thinking = now, 0.0
        self._reports.append(report)

    def _learn(self) -> None:
        """Let the controller take in what landed."""
        reports, self._reports = self._reports, []
        began = self._clock()
        for report in reports:
            self._controller.observe(report)
        if reports:
            self._controller.think()
        self._thinking += self._clock() - began

    def _commit(self, launched: LaunchedRound, report: StepReport, offers: Mapping[int, RoundOffer]) -> int:
        """Write down what requests got, let those go whose end that was, and say how many tokens it was."""
        results, scheduler, outputs = launched.collect(), self._scheduler, self._outputs
        depth, reads, follows = launched.line.depth, launched.drafter_reads, self._proposer.follows
        of_trees = results.trees is not None
        seqs, numbers, pieces = list[SequenceState](), list[int](), list[OutputDelta | None]()
        made, drafted, accepted = list[int](), list[int](), list[int]()
        given = 0
        columns = zip(launched.rows, results.tokens, results.accepted, strict=True)
        for number, (row, tokens, taken) in enumerate(columns):
            seq = row.seq
            if seq.finished is not None:
                continue
            given += len(tokens)
            piece: OutputDelta | None = None
            room = seq.limit - len(seq.tokens)
            most = max(0, min(row.drafts, depth, room - 1)) if depth else 0
            offer = offers.get(seq.key) if offers else None
            of_drafter, by_suffix = min(most, launched.drafter_depth) if follows(seq) else 0, 0
            if offer is not None and offer.sent and depth:
                looked_up = [sure == LOOKED_UP for sure in results.confidences[number][:most]]
                by_suffix = sum(looked_up)
                of_drafter = looked_up.index(True) if by_suffix else of_drafter
            offered = of_drafter + by_suffix
            if results.verified is not None:
                offered = min(row.drafts if of_trees else of_drafter, results.verified[number])
            drafter_length = launched.drafter_read(row, seq.target_length) if reads and follows(seq) else 0
            if seq.is_ordinary and 0 < len(tokens) < room and seq.request.stop_ids.isdisjoint(tokens):
                scheduler.commit(seq, row.count + len(tokens) - 1, tokens, drafter_length)
                piece = outputs.add_tokens(seq, tokens, offered, taken, by_suffix)
            else:
                begins, stop = seq.new_tokens == 0, outputs.check_stop(seq, tokens, seq.limit)
                scheduler.commit(seq, row.count + max(0, len(stop.tokens) - 1), stop.tokens, drafter_length)
                if row.samples:
                    told = begins and seq.request.prompt_logprobs is not None
                    piece = outputs.add(
                        seq,
                        stop,
                        drafted=offered,
                        accepted=taken,
                        logprobs=launched.logprobs(number, len(stop.tokens)),
                        prompt_logprobs=tuple(seq.prompt_logprobs) if told else None,
                        suffix_drafted=by_suffix,
                    )
                if stop.finished is not None:
                    scheduler.finish(seq, stop.finished)
                    outputs.close(seq.key)
                    report.ended.append(seq.key)
            if offer is not None:
                self._proposer.learn_offer(seq, offer)
            if of_drafter:
                seqs.append(seq)
                numbers.append(number)
                if of_trees:
                    pieces.append(piece)
                made.append(of_drafter)
                drafted.append(min(offered, of_drafter))
                accepted.append(min(taken, of_drafter) if by_suffix else taken)
        if seqs and results.trees is not None:
            grown = [results.trees[number] for number in numbers]
            for seq, tree, number, taken, piece in zip(seqs, grown, numbers, accepted, pieces, strict=True):
                outcome = outcome_of_tree(seq.key, tree.deepest, taken, results.tokens[number], tree.candidates)
                report.rounds.append(outcome)
                if piece is not None:
                    piece.ranks = tuple(outcome.ranks)
            self._proposer.follow_drift(seqs, (), ())
        elif seqs:
            sure = results.confidences
            report.chains = ChainOutcomes(
                keys=[seq.key for seq in seqs],
                drafted=drafted,
                accepted=accepted,
                confidences=lambda at: sure[numbers[at]][: made[at]],
            )
            self._proposer.follow_drift(seqs, drafted, accepted)
        return given

    def _note_times(self, launched: LaunchedRound, report: StepReport) -> None:
        rows = len(launched.rows)
        if launched.caught_up is not None:
            report.catch_up = CatchUpTiming(requests=rows, seconds=launched.catch_up_seconds)
        tree = launched.line.tree
        if launched.by_drafter:
            deeper = launched.drafter_depth - 1
            report.draft = DraftTiming(
                passes=1 + deeper,
                tokens=launched.bucket * (launched.reads + deeper * (1 if tree is None else tree.width)),
                seconds=launched.draft_seconds,
                trees=tree is not None,
                rows=launched.bucket,
                shape=CHAIN if tree is None else tree.shape,
            )
        context = sum([row.start for row in launched.rows])
        report.target = TargetTiming(
            tokens=launched.tokens, context=context, seconds=launched.target_seconds, rows=launched.bucket
        )


def _sent(rows: Sequence[ScheduledRow], offers: Mapping[int, RoundOffer]) -> list[SentOffer | None]:
    """Of each row what is sent to the device."""
    made: list[SentOffer | None] = []
    for row in rows:
        offer = offers.get(row.seq.key)
        if offer is None or not offer.sent:
            made.append(None)
        else:
            made.append(SentOffer(offer.known, offer.offer.tokens, offer.confirmed))
    return made
