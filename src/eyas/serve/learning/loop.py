"""The learning loop: decides when to adapt the drafter, when to serve the new one, and when to roll back.

    collect   until there are enough new answers, or the drift alarm asks for an adaptation (then fewer are enough)
    adapt     `eyas adapt` beside the server, on its share of the device (`learner.py`); its gate judges on the newest
              answers, which were held out
    swap      if the new drafter is better beyond the interval, made from the drafter in service, for the served target,
              and of the same shape: weights are copied between two steps. It gets a number and a folder (`shelf.py`)
    watch     compares real acceptance before and after the swap (`watch.py`). If it is worse beyond the interval, or a
              new alarm is raised, the previous drafter is swapped back, and this one is never used again

Answers cannot change by this (docs/lossless.md). A failure only ends the attempt: the reason is in the log and in
/status, the next attempt waits longer, and serving continues. Times between attempts are by the monotonic clock.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.drafter.checkpoint import fingerprint_drafter
from eyas.errors import UserError
from eyas.serve.drafter_swaps import DrafterChangedError, DrafterSwaps
from eyas.serve.engine_client import EngineClient, EngineSnapshot
from eyas.serve.learning.attempt_schedule import AskedBy, AttemptSchedule
from eyas.serve.learning.collector import AnswerCollector
from eyas.serve.learning.learner import LEAST_ANSWERS, AttemptResult, Learner, LearnerSettings
from eyas.serve.learning.round_tally import RoundLog, RoundTally
from eyas.serve.learning.shelf import DrafterShelf, ServiceStory
from eyas.serve.learning.watch import LAST_LOOK, LengthEstimate, SwapWatch, lengths_of
from eyas.serve.monitoring.drafter_changes import ChangeKind
from eyas.serve.monitoring.metrics import ServerMetrics

logger = logging.getLogger(__name__)
TICK_SECONDS = 1.0
BASELINE_REQUESTS = 16
"""Requests with drafts of the old drafter that a swap waits for, as a baseline. If it is hardly used, there may never
be that many; then the swap relies on the gate alone."""
UNDRAFTED_REQUESTS = 512
"""Requests after which the old drafter counts as hardly used."""
MOST_BASELINE = 256
"""The latest requests that count. As the suffix index learns answers it takes the easy positions and leaves the harder
ones to the drafter, so old requests are no baseline."""


class LearningLoop:
    """Runs as a task of the server's event loop. Call `close` at the end."""

    def __init__(
        self,
        settings: LearnerSettings,
        folder: Path,
        *,
        fingerprint: str,
        collector: AnswerCollector,
        swaps: DrafterSwaps,
        engine_client: EngineClient,
        name: str,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint` is that of the target, `name` that of the server's first drafter."""
        self._settings, self._fingerprint, self._name = settings, fingerprint, name
        self._collector, self._swaps, self._engine, self._metrics = collector, swaps, engine_client, metrics
        self._shelf = DrafterShelf(folder / "drafters")
        self._learner = Learner(folder, fingerprint=fingerprint, command=settings.command, clock=clock)
        self.rounds = RoundLog()
        """The tallies of requests with the drafter in service."""
        self._root_source = self._source = swaps.slot.source
        self._root = ""
        self._service: ServiceStory | None = None
        """The learnt drafter in service; None if it is the server's first one or an operator's choice."""
        self._watch: SwapWatch | None = None
        self._condemned: str | None = None
        """The reason for a rollback that is due; it is retried until it succeeds."""
        self._swapped_at = 0.0
        self._raised_before: frozenset[str] = frozenset()
        self._candidate: AttemptResult | None = None
        self._unlearnt = self._learner.count_new()
        self._collected_before = self._collected_at_start = 0
        self._schedule = AttemptSchedule(settings.interval, metrics, clock)
        metrics.learn_new_answers.set_function(lambda: self.new_answers)
        metrics.learn_running.set_function(lambda: self._learner.running)
        metrics.learn_drafter.set_function(lambda: self._number)

    # --- status ------------------------------------------------------------------------------------------------

    @property
    def new_answers(self) -> int:
        return self._unlearnt + self._collector.status.collected - self._collected_before

    @property
    def _number(self) -> int:
        return 0 if self._service is None else self._service.number

    @property
    def state(self) -> str:
        """The current state, in a word."""
        if self._source is None:
            return "no_drafter"
        if self._watch is not None:
            return "watching"
        if self._candidate is not None:
            return "ready"
        if self._learner.running:
            return "adapting"
        return "backing_off" if self._schedule.backing_off else "collecting"

    def status(self) -> dict[str, Any]:
        """The state for /status, which every key may read: no folders, no texts."""
        story, watch, schedule = self._service, self._watch, self._schedule
        return {
            "state": self.state,
            "share": self._settings.share,
            "new_answers": self.new_answers,
            "needed_answers": self._settings.answers,
            "not_before_seconds": round(schedule.wait, 1),
            "attempts": schedule.attempts,
            "failures": schedule.failures,
            "last": schedule.last,
            "drafter": {"number": self._number}
            | ({} if story is None else story.model_dump(include={"parent", "swapped_at", "state", "reason", "watch"})),
            "watch": None
            if watch is None
            else {"passes": self.rounds.passes, "next_look": watch.next_look, "last_look": LAST_LOOK},
        }

    # --- the loop ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self.take_up()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self.tick()
            except Exception as error:
                logger.error("a bug in eyas ended an attempt to learn; serving goes on", exc_info=error)
                await asyncio.to_thread(self._learner.stop)
                self._candidate = None
                self._schedule.settle("failed", "a bug in eyas; see the log")

    def close(self) -> None:
        """End a running adaptation. Call it when the task has ended."""
        self._learner.stop()

    async def take_up(self) -> None:
        """Load the last good drafter of the folder, if there is one, and resume its watch."""
        if self._root_source is None:
            return
        try:
            self._root = await asyncio.to_thread(fingerprint_drafter, self._root_source)
        except (OSError, UserError) as error:
            logger.warning(f"it is not known which drafters of this folder came from {self._name}: {error}")
            return
        found = await asyncio.to_thread(self._shelf.good, root=self._root, target_fingerprint=self._fingerprint)
        if found and not self._settings.resume:
            logger.warning(f"drafter {found[0].number} was learnt here before and is left aside (--no-learn-resume)")
            return
        for story in found:
            try:
                await asyncio.to_thread(self._shelf.require_whole, story)
                before = [LengthEstimate.from_json(one) for one in story.before]
                await self._put_to_work(story, only_in_place=True, reason="learnt here before, and taken up again")
            except DrafterChangedError as error:
                logger.warning(f"drafter {story.number} is not taken up: {error}")
                return
            except Exception as error:  # for any error of loading
                why = error if isinstance(error, UserError | OSError) else type(error).__name__
                logger.warning(f"drafter {story.number}, learnt here before, cannot be taken up: {why}")
                continue
            logger.warning(f"drafter {story.number}, learnt from this folder's answers, is taken up ({story.state})")
            if story.state == "watching":
                self._begin_watch(before)
            return

    async def tick(self) -> None:
        """Take the steps that are due."""
        snapshot = await self._engine.snapshot()
        if self._swaps.busy:
            return
        if self._swaps.slot.source != self._source:
            await self._follow_operator()
        if self._watch is not None:
            await self._keep_watch(self._watch, snapshot)
        elif self._candidate is not None:
            await self._swap_in(self._candidate, snapshot)
        elif self._learner.running:
            await self._await_attempt()
        elif (asked_by := self._asked_by(snapshot)) is not None:
            await self._begin_attempt(asked_by)

    def _asked_by(self, snapshot: EngineSnapshot) -> AskedBy | None:
        """The reason for an adaptation that may begin now, if any."""
        if self._source is None or self._schedule.wait > 0:
            return None
        if self.new_answers >= self._settings.answers:
            return "answers"
        return "alarm" if _raised(snapshot) and self.new_answers >= LEAST_ANSWERS else None

    # --- adapt -------------------------------------------------------------------------------------------------

    async def _begin_attempt(self, asked_by: AskedBy) -> None:
        assert self._source is not None
        collected = self._collector.status.collected
        self._unlearnt, self._collected_before = await asyncio.to_thread(self._learner.count_new), collected
        if self.new_answers < (self._settings.answers if asked_by == "answers" else LEAST_ANSWERS):
            return  # some were deleted
        if self._service is not None and not self._shelf.place(self._service.number).is_dir():
            logger.warning(f"drafter {self._number} was deleted while it served; learning begins anew")
            await self._put_to_work(self._root_source, kind="rollback", reason="it was deleted while it served")
            assert self._source is not None
        number = self._schedule.begin(asked_by)
        self._collected_at_start = self._collector.status.collected
        asked = f"{self.new_answers} new answers" if asked_by == "answers" else "an alarm about the drafter asks for it"
        try:
            await asyncio.to_thread(self._learner.start, self._source)
        except (OSError, UserError) as error:
            logger.warning(f"an adaptation could not begin: {error}")
            words = error.strerror if isinstance(error, OSError) else None
            self._schedule.settle("failed", words or "it could not begin; see the log")
            return
        logger.warning(f"adaptation {number} begins: {asked}; drafter {self._number} is in service")

    async def _await_attempt(self) -> None:
        result = await asyncio.to_thread(self._learner.poll)
        if result is None:
            return
        objection = None
        if result.outcome == "better":
            assert result.record is not None
            assert result.made is not None
            assert self._source is not None
            try:
                start = await asyncio.to_thread(fingerprint_drafter, self._source)
                objection = await asyncio.to_thread(
                    result.record.objection, result.made, start=start, target=self._fingerprint
                )
            except (OSError, UserError) as error:
                logger.warning(f"what an adaptation made cannot be read: {error}")
                objection = "what it made cannot be read"
        if result.outcome == "better" and objection is None:
            self._candidate = result
        else:  # before its end is visible
            await asyncio.to_thread(self._learner.clear)
        if objection is not None:
            self._schedule.settle("refused", objection, result)
        else:
            self._schedule.settle(result.outcome, result.reason, result)
        if result.outcome == "not_better":
            await self._note_learnt()

    async def _note_learnt(self) -> None:
        self._unlearnt, self._collected_before = 0, self._collected_at_start
        await asyncio.to_thread(self._learner.note_learnt)

    # --- swap --------------------------------------------------------------------------------------------------

    async def _swap_in(self, candidate: AttemptResult, snapshot: EngineSnapshot) -> None:
        """Swap in the new drafter, as soon as there is a baseline for it."""
        tallies = self.rounds.tallies
        before = lengths_of(_latest_drafted(tallies))
        known = bool(before) and before[0].requests >= BASELINE_REQUESTS
        if not known and not snapshot.collapsed and len(tallies) < UNDRAFTED_REQUESTS:
            return
        assert candidate.made is not None
        assert candidate.record is not None
        named = candidate.record.drafter
        assert named is not None, "its record was looked at"
        self._candidate = None
        story = ServiceStory(
            number=await asyncio.to_thread(lambda: self._shelf.next_number),
            parent=None if self._service is None else self._service.number,
            root=self._root,
            target_fingerprint=self._fingerprint,
            fingerprint=named.fingerprint,
            swapped_at=datetime.now(UTC).isoformat(timespec="seconds"),
            state="watching",
            before=[one.as_json() for one in before],
        )
        try:
            needed = {self._number, story.number}
            await asyncio.to_thread(self._shelf.add, candidate.made, story, needed=needed)
        except (OSError, UserError, ValueError) as error:
            logger.warning(f"a better drafter could not be kept and is dropped: {error}")
            words = error.strerror if isinstance(error, OSError) else None
            self._schedule.settle("failed", f"it could not be kept ({words or 'see the log'})", candidate)
            return
        finally:
            await asyncio.to_thread(self._learner.clear)
        raised = _raised(snapshot)
        try:
            await self._put_to_work(story, only_in_place=True, reason=candidate.reason)
        except Exception as error:  # for any error of loading: the old one keeps serving
            words = str(error) if isinstance(error, UserError) else f"it cannot be loaded ({type(error).__name__})"
            logger.warning(f"drafter {story.number} does not come to work: {error}")
            if str(self._shelf.folder) in words:
                words = "it cannot be loaded; see the log"
            await self._amend(story.model_copy(update={"state": "rejected", "reason": words}))
            self._schedule.settle("refused", words, candidate)
            return
        await self._note_learnt()
        self._begin_watch(before, raised)
        self._tell("swap", candidate.reason)

    async def _put_to_work(
        self, drafter: ServiceStory | str | None, *, reason: str, only_in_place: bool = False, kind: ChangeKind = "swap"
    ) -> None:
        """Swap in a drafter of the shelf, the server's first one, or none."""
        story, source, name = None, drafter, None if drafter is None else self._name
        if isinstance(drafter, ServiceStory):
            story, source = drafter, str(self._shelf.place(drafter.number))
            name = f"{self._name}-learnt-{drafter.number:04d}"
        assert not isinstance(source, ServiceStory)
        await self._swaps.swap(
            source, name=name, only_in_place=only_in_place, kind=kind, reason=reason, instead_of=self._source
        )
        self._source, self._service = source, story
        self.rounds.begin_anew()

    async def _follow_operator(self) -> None:
        """Reset after an operator changed the drafter: running attempts concern another one."""
        logger.warning("the drafter was changed by a request; learning begins anew from it")
        if self._learner.running or self._candidate is not None:
            self._schedule.settle("superseded", "the drafter was changed by a request", self._candidate)
        await asyncio.to_thread(self._learner.stop)
        self._service, self._watch, self._candidate, self._condemned = None, None, None, None
        self._source = self._root_source = source = self._swaps.slot.source
        self.rounds.begin_anew()
        if source is not None:
            self._name, self._root = Path(source).name, ""
            try:
                self._root = await asyncio.to_thread(fingerprint_drafter, source)
            except (UserError, OSError) as error:
                logger.warning(f"what is learnt from {self._name} will not be taken up at the next start: {error}")

    # --- watch -------------------------------------------------------------------------------------------------

    def _begin_watch(self, before: list[LengthEstimate], raised: frozenset[str] = frozenset()) -> None:
        """Begin a watch, given the alarms that were raised before."""
        self._watch, self._swapped_at, self._raised_before = SwapWatch(before), time.monotonic(), raised

    async def _keep_watch(self, watch: SwapWatch, snapshot: EngineSnapshot) -> None:
        """Look at real acceptance if that is due, and roll back if it is worse."""
        assert self._service is not None
        if self._condemned is not None:
            await self._roll_back(self._condemned)
            return
        raised = _raised(snapshot) - self._raised_before
        if raised and snapshot.at > self._swapped_at:
            await self._roll_back(f"the alarm {' and '.join(sorted(raised))} was raised, which was silent before")
            return
        if not watch.due(self.rounds.passes):
            return
        tallies, passes = self.rounds.tallies, self.rounds.passes
        seen = watch.look(tallies, passes)
        if seen is None:
            if (words := watch.given_up(tallies, passes)) is not None:
                await self._roll_back(words)
            elif watch.over:
                await self._confirm(self._service, "nothing was known of the one before, and no alarm was raised")
            return
        self._swaps.changes.note_seen(seen.before.acceptance_length, seen.after.acceptance_length)
        if seen.verdict == "worse":
            await self._roll_back(f"worse: {seen.words}")
            return
        story = self._service.model_copy(update={"watch": seen.as_json()})
        if watch.over:
            await self._confirm(story, f"{'better' if seen.verdict == 'better' else 'not worse'}: {seen.words}")
        else:
            self._service = story
            await self._amend(story)

    async def _confirm(self, story: ServiceStory, reason: str) -> None:
        """End the watch: the drafter is confirmed."""
        self._watch = None
        self._service = story = story.model_copy(update={"state": "confirmed", "reason": reason})
        logger.warning(f"drafter {story.number} is confirmed, {reason}")
        await self._amend(story)

    async def _roll_back(self, reason: str) -> None:
        """Swap the previous drafter back; if it was deleted, the first one, or none."""
        rejected, watch, self._condemned = self._service, self._watch, reason
        assert rejected is not None
        assert watch is not None
        stories = {story.number: story for story in await asyncio.to_thread(self._shelf.stories)}
        parent = None if rejected.parent is None else stories.get(rejected.parent)
        for way in [parent, self._root_source, None] if parent is not None else [self._root_source, None]:
            try:
                await self._put_to_work(way, kind="rollback", reason=reason)
                break
            except Exception as error:  # of any kind: the next one may work
                logger.error(f"a drafter to go back to cannot be loaded: {type(error).__name__}: {error}")
        else:
            return
        self._watch = self._condemned = None
        self._schedule.back_off()
        seen = None if watch.last is None else watch.last.as_json()
        await self._amend(rejected.model_copy(update={"state": "rejected", "reason": reason, "watch": seen}))
        self._tell("rollback", reason)
        logger.warning(f"drafter {rejected.number} is rejected and never taken up again")

    def _tell(self, kind: ChangeKind, reason: str) -> None:
        self._metrics.learn_swaps.labels(kind).inc()
        logger.warning(f"{kind}: drafter {self._number} serves from now on: {reason}")

    async def _amend(self, story: ServiceStory) -> None:
        await asyncio.to_thread(self._shelf.amend, story)


def _latest_drafted(tallies: Sequence[RoundTally]) -> Sequence[RoundTally]:
    """The latest tallies that include the wanted number with drafts."""
    drafted = [number for number, tally in enumerate(tallies) if tally.tries[0]]
    return tallies[drafted[-MOST_BASELINE] :] if len(drafted) > MOST_BASELINE else tallies


def _raised(snapshot: EngineSnapshot) -> frozenset[str]:
    """The raised alarms about the drafter."""
    drifts = snapshot.drift is not None and snapshot.drift.firing
    return frozenset(name for name, raised in (("drift", drifts), ("collapsed", snapshot.collapsed)) if raised)
