"""Everything in order: warm up, then every load by every mode in turn, repetition after repetition.

Modes alternate within a repetition, and their order from one to the next, so that a machine's moods fall on all alike.
What was measured stays measured: whatever ends the experiment early, `runs` holds what there was until then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.bench.answer import Answer
from eyas.bench.asking import Asking, converse
from eyas.bench.client import Client, ServerGoneError
from eyas.bench.counters import Counters
from eyas.bench.load import Load, drive
from eyas.bench.strain import Strain
from eyas.bench.variants import Variant
from eyas.bench.workload import Task, Workload

PREFILL_USERS = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    variants: tuple[Variant, ...]
    loads: tuple[Load, ...]
    workload: Workload
    asking: Asking
    repetitions: int = 3
    warmup: int | None = None
    """Requests before each mode and load is measured; None is one for each user."""
    prefill: bool = True
    """Whether every prompt is asked once for a single token beforehand, so that prefix caches find all modes alike."""
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One mode under one load, once."""

    variant: Variant
    load: Load
    repetition: int
    answers: tuple[Answer, ...]
    seconds: float
    """From the first request to the last token."""
    whole: bool
    """False where it was broken off."""
    counters: Counters | None
    """What the server counted meanwhile."""
    client_share: float
    client_late: tuple[float, ...]


Step = Callable[[str, int, int], None]
"""Is told what is done, and how much of how much."""


class Experiment:
    """Runs a plan."""

    def __init__(self, plan: Plan, *, step: Step, measured: Callable[[], None]) -> None:
        self.plan = plan
        self.runs: list[Run] = []
        self.problems: list[str] = []
        """What went wrong with servers, in words."""
        self.whole = False
        """Whether it came to its end with every server."""
        self._step, self._measured = step, measured
        self._gone: set[str] = set()

    async def run(self) -> None:
        """From warm-up to the last repetition. A server that is gone is left out from then on."""
        plan = self.plan
        await self._prefill()
        for load in plan.loads:
            for variant in plan.variants:
                count = plan.warmup if plan.warmup is not None else (load.users or PREFILL_USERS)
                if count and not self._is_gone(variant):
                    tasks = [replace(task, turns=task.turns[:1]) for task in plan.workload.tasks[:count]]
                    await self._guarded(variant, load, tasks, plan.asking, "warm-up")
        total = plan.repetitions * len(plan.loads) * len(plan.variants)
        for repetition in range(plan.repetitions):
            order = plan.variants if repetition % 2 == 0 else plan.variants[::-1]
            for load in plan.loads:
                for variant in order:
                    if not self._is_gone(variant):
                        self._step(f"{variant.name}, {variant.mode}, {load.words}", len(self.runs), total)
                        await self._measure(variant, load, repetition)
        self._step("measured", len(self.runs), total)
        self.whole = not self._gone

    async def _prefill(self) -> None:
        plan = self.plan
        if not plan.prefill:
            return
        one = replace(plan.asking, max_tokens=1)
        tasks = [replace(task, turns=task.turns[:1]) for task in plan.workload.tasks]
        seen: set[str] = set()
        for variant in plan.variants:
            if variant.server.address.url not in seen:
                seen.add(variant.server.address.url)
                await self._guarded(variant, Load(users=PREFILL_USERS), tasks, one, "prompts")

    async def _guarded(self, variant: Variant, load: Load, tasks: Sequence[Task], asking: Asking, what: str) -> None:
        """Unmeasured requests. Where none succeeds, measuring would be in vain."""
        self._step(f"{variant.name}, {variant.mode}, {load.words}: {what}", 0, 0)
        answers: list[Answer] = []
        try:
            async with Client(variant.server.address, timeout=self.plan.timeout) as client:
                await drive(load, tasks, self._conversation(client, variant, asking, answers), seed=asking.seed)
        except ServerGoneError as error:
            self._lose(variant, f"is gone during {what}: {error}")
            return
        if answers and all(answer.error for answer in answers):
            self._lose(variant, f"answered none of {len(answers)} requests: {answers[0].error}")

    async def _measure(self, variant: Variant, load: Load, repetition: int) -> None:
        plan = self.plan
        answers: list[Answer] = []
        strain, before, after, whole, lost = Strain(), None, None, False, ""
        try:
            async with Client(variant.server.address, timeout=plan.timeout) as client:
                before = await client.counters()
                async with strain:
                    client.begin()
                    talk = self._conversation(client, variant, plan.asking, answers)
                    await drive(load, plan.workload.tasks, talk, seed=plan.asking.seed + repetition)
                after = await client.counters()
                whole = True
        except ServerGoneError as error:
            lost = f"died at {load.words} in repetition {repetition + 1}, after {len(answers)} answers: {error}"
        finally:
            good = [answer for answer in answers if answer.error is None]
            if whole or good:
                run = Run(
                    variant=variant,
                    load=load,
                    repetition=repetition,
                    answers=tuple(answers),
                    seconds=max((a.sent + a.seconds for a in good), default=0.0)
                    - min((a.sent for a in good), default=0.0),
                    whole=whole,
                    counters=after.since(before) if after is not None and before is not None else None,
                    client_share=strain.share,
                    client_late=tuple(strain.late),
                )
                self.runs.append(run)
        if lost:
            self._lose(variant, lost)
        elif not good:
            self._lose(variant, f"answered none of {len(answers)} requests: {answers[0].error}")
        self._measured()

    def _conversation(
        self, client: Client, variant: Variant, asking: Asking, answers: list[Answer]
    ) -> Callable[[Task, int], Any]:
        places = {task.key: place for place, task in enumerate(self.plan.workload.tasks)}
        own = replace(asking, extra={**asking.extra, **variant.extra})

        async def talk(task: Task, turns: int) -> None:
            await converse(client, own, variant.server.model, task, places[task.key], turns, answers)

        return talk

    def _lose(self, variant: Variant, what: str) -> None:
        self._gone.add(variant.server.address.url)
        self.problems.append(f"{variant.name} ({variant.mode}, {variant.server.address.url}) {what}")

    def _is_gone(self, variant: Variant) -> bool:
        return variant.server.address.url in self._gone
