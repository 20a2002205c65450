"""Experiment: warm-up, then every load by every mode, repetition after repetition.

Modes alternate within a repetition, and their order reverses in the next, so that changes of the machine's speed affect
all alike. If the experiment ends early, `runs` holds what was measured until then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.bench.client import Client, ServerGoneError
from eyas.bench.counters import Counters
from eyas.bench.load import ClientOverhead, Load, run_load
from eyas.bench.requests import RequestOptions, converse
from eyas.bench.stream import StreamedAnswer
from eyas.bench.variants import Variant
from eyas.bench.workload import Task, Workload

PREFILL_USERS = 4


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Modes, loads and requests of an experiment."""

    variants: tuple[Variant, ...]
    loads: tuple[Load, ...]
    workload: Workload
    options: RequestOptions
    repetitions: int = 3
    warmup: int | None = None
    """Unmeasured requests before each mode and load; None is one for each user."""
    prefill: bool = True
    """Send every prompt once beforehand, for one token, so that all modes meet the same prefix cache."""
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One repetition of one mode under one load."""

    variant: Variant
    load: Load
    repetition: int
    answers: tuple[StreamedAnswer, ...]
    seconds: float
    """From the first request to the last token."""
    whole: bool
    """False if it was interrupted."""
    counters: Counters | None
    """Increase of the server's counters during the run."""
    client_cpu_share: float
    client_late: tuple[float, ...]

    @property
    def good(self) -> list[StreamedAnswer]:
        return [answer for answer in self.answers if answer.error is None]


Step = Callable[[str, int, int], None]
"""Progress callback: current step, steps done, steps in all."""


class Experiment:
    """Measures every mode under every load."""

    def __init__(self, config: ExperimentConfig, *, step: Step, measured: Callable[[], None]) -> None:
        self.config = config
        self.runs: list[Run] = []
        self.problems: list[str] = []
        self.whole = False
        """Complete for every server."""
        self._step, self._measured = step, measured
        self._gone: set[str] = set()

    async def run(self) -> None:
        """Run all; a server that is gone is left out from then on."""
        config = self.config
        await self._prefill()
        for load in config.loads:
            for variant in config.variants:
                count = config.warmup if config.warmup is not None else (load.users or PREFILL_USERS)
                if count and not self._is_gone(variant):
                    tasks = [replace(task, turns=task.turns[:1]) for task in config.workload.tasks[:count]]
                    await self._send_unmeasured(variant, load, tasks, config.options, "warm-up")
        total = config.repetitions * len(config.loads) * len(config.variants)
        for repetition in range(config.repetitions):
            order = config.variants if repetition % 2 == 0 else config.variants[::-1]
            for load in config.loads:
                for variant in order:
                    if not self._is_gone(variant):
                        self._step(f"{variant.name}, {variant.mode}, {load.label}", len(self.runs), total)
                        await self._measure(variant, load, repetition)
        self._step("measured", len(self.runs), total)
        self.whole = not self._gone

    async def _prefill(self) -> None:
        config = self.config
        if not config.prefill:
            return
        one = replace(config.options, max_tokens=1)
        tasks = [replace(task, turns=task.turns[:1]) for task in config.workload.tasks]
        seen: set[str] = set()
        for variant in config.variants:
            if variant.server.address.url not in seen:
                seen.add(variant.server.address.url)
                await self._send_unmeasured(variant, Load(users=PREFILL_USERS), tasks, one, "prompts")

    async def _send_unmeasured(
        self, variant: Variant, load: Load, tasks: Sequence[Task], options: RequestOptions, what: str
    ) -> None:
        """Send requests that are not measured; give the server up if none succeeds."""
        self._step(f"{variant.name}, {variant.mode}, {load.label}: {what}", 0, 0)
        answers: list[StreamedAnswer] = []
        try:
            async with Client(variant.server.address, timeout=self.config.timeout) as client:
                await run_load(load, tasks, self._conversation(client, variant, options, answers), seed=options.seed)
        except ServerGoneError as error:
            self._give_up(variant, f"is gone during {what}: {error}")
            return
        if answers and all(answer.error for answer in answers):
            self._give_up(variant, f"answered none of {len(answers)} requests: {answers[0].error}")

    async def _measure(self, variant: Variant, load: Load, repetition: int) -> None:
        config = self.config
        answers: list[StreamedAnswer] = []
        overhead, before, after, whole, lost = ClientOverhead(), None, None, False, ""
        try:
            async with Client(variant.server.address, timeout=config.timeout) as client:
                before = await client.counters()
                async with overhead:
                    client.begin()
                    talk = self._conversation(client, variant, config.options, answers)
                    await run_load(load, config.workload.tasks, talk, seed=config.options.seed + repetition)
                after = await client.counters()
                whole = True
        except ServerGoneError as error:
            lost = f"died at {load.label} in repetition {repetition + 1}, after {len(answers)} answers: {error}"
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
                    client_cpu_share=overhead.cpu_share,
                    client_late=tuple(overhead.late),
                )
                self.runs.append(run)
        if lost:
            self._give_up(variant, lost)
        elif not good:
            self._give_up(variant, f"answered none of {len(answers)} requests: {answers[0].error}")
        self._measured()

    def _conversation(
        self, client: Client, variant: Variant, options: RequestOptions, answers: list[StreamedAnswer]
    ) -> Callable[[Task, int], Any]:
        places = {task.key: place for place, task in enumerate(self.config.workload.tasks)}
        own = replace(options, extra={**options.extra, **variant.extra})

        async def talk(task: Task, turns: int) -> None:
            await converse(client, own, variant.server.model, task, places[task.key], turns, answers)

        return talk

    def _give_up(self, variant: Variant, what: str) -> None:
        self._gone.add(variant.server.address.url)
        self.problems.append(f"{variant.name} ({variant.mode}, {variant.server.address.url}) {what}")

    def _is_gone(self, variant: Variant) -> bool:
        return variant.server.address.url in self._gone
