"""Cells of the depth policy: simulated machines, numbers of users and acceptances, for which speeds are compared.

    host     seven machines without captured passes, four acceptances, 1, 4 and 16 users: 84 cells, each with and
             without a rehearsal
    device   three devices with captured passes and a step in flight, three acceptances, 1, 16, 64 and 256 users
    late     two x86 cores, after a rehearsal that another process slowed down
    short    requests of 32 to 256 tokens with a fresh controller after a rehearsal

A cell's speed is relative to plain decoding, and to the best fixed depth.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean

from engine import simulated as host
from engine import simulated_device as device
from engine.simulated_device import SHAPES, Device, Fixed, serve_on
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.step_report import Rehearsal

MACHINES = {
    "cpu": host.CPU,
    "kind cpu": host.KIND_CPU,
    "gpu": host.GPU,
    "tiled gpu": host.TILED_GPU,
    "small on gpu": host.SMALL_ON_GPU,
    "slow host": host.SLOW_HOST,
    "fast gpu": host.SMALL_ON_FAST_GPU,
}
PROFILES = {"random": host.RANDOM, "poor": host.POOR, "good": host.GOOD, "great": host.GREAT}
STEPS = {1: 1200, 4: 700, 16: 400}
DEVICES = {"135M": device.SMALL, "135M, lean host": device.SMALL_WITH_LEAN_HOST, "8B": device.LARGE}
GOOD, USELESS = [0.73, 0.71, 0.68, 0.66, 0.66, 0.66, 0.66], [0.0] * 7
CHANCES = {"good": GOOD, "poor": [0.3, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25], "useless": USELESS}
LENGTHS = (32, 64, 128, 256)
SHORT_MACHINES = {"cpu": host.CPU, "kind cpu": host.KIND_CPU, "two cores": host.TWO_CORES, "gpu": host.GPU}
USELESS_NAMES = ("random", "useless")

Make = Callable[[], Controller]
new: Make = partial(Controller, 7)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Result of one cell."""

    kind: str
    name: str
    users: int
    acceptance: str
    of_plain: float
    """Speed relative to plain decoding."""
    of_best: float
    """Speed relative to the best fixed depth, plain decoding included."""
    lost: float = 0.0
    """Most plain steps that drafting lost in any run of a short request."""

    @property
    def useless(self) -> bool:
        """Whether no draft is ever accepted."""
        return self.acceptance in USELESS_NAMES

    def __str__(self) -> str:
        lost = f"  lost {self.lost:5.2f}" if self.kind.startswith("short") else ""
        return (
            f"{self.kind:15s} {self.name:16s} {self.users:4d} {self.acceptance:8s} "
            f"plain {self.of_plain:.3f}  best {self.of_best:.3f}{lost}"
        )


def _cell(
    kind: str,
    name: str,
    users: int,
    acceptance: str,
    runs: Sequence[host.Run | device.Served],
    rates: Sequence[float],
    start: int = 0,
) -> Cell:
    """The cell of these runs; `rates` are those of fixed depths, beginning with plain decoding."""
    of_plain = mean(run.rate() for run in runs) / rates[0]
    of_best = mean(run.rate(start) for run in runs) / max(rates)
    return Cell(kind=kind, name=name, users=users, acceptance=acceptance, of_plain=of_plain, of_best=of_best)


def host_cells(make: Make = new, *, rehearsed: bool, seeds: int = 1) -> Iterator[Cell]:
    """Rates relative to the best depth start at step 150, those relative to plain decoding at the first."""
    for (name, machine), (users, steps), (acceptance, profile) in product(
        MACHINES.items(), STEPS.items(), PROFILES.items()
    ):
        rates = host.plain_rate(machine, users), host.best_rate(machine, profile, users=users)
        runs = []
        for seed in range(seeds):
            controller = make()
            if rehearsed:
                controller.rehearse(machine.rehearsal())
            runs.append(host.serve(controller, machine, profile, users=users, steps=steps, seed=seed))
        yield _cell("host rehearsed" if rehearsed else "host", name, users, acceptance, runs, rates, start=150)


def late_cells(make: Make = new, *, seeds: int = 4) -> Iterator[Cell]:
    """The first 320 steps. All steps, plain ones, or those of one user took four times as long when rehearsed."""
    machine = host.TWO_X86_CORES
    rehearsed = machine.rehearsal().steps
    for name, is_late in (
        ("all late", lambda rows, arm: True),
        ("plain late", lambda rows, arm: arm == 0),
        ("few late", lambda rows, arm: rows == 1),
    ):
        steps = {key: seconds * (4 if is_late(*key) else 1) for key, seconds in rehearsed.items()}
        for users, acceptance in product((1, 4, 16), ("random", "good")):
            profile, runs = PROFILES[acceptance], []
            for seed in range(seeds):
                controller = make()
                controller.rehearse(Rehearsal(steps=steps))
                runs.append(host.serve(controller, machine, profile, users=users, steps=320, seed=seed))
            rates = host.plain_rate(machine, users), host.best_rate(machine, profile, users=users)
            yield _cell("late rehearsal", name, users, acceptance, runs, rates)


def on(machine: Device, make: Make = new, *, rehearsed: bool = True) -> Controller:
    """Make a controller for a device."""
    controller = make()
    controller.captures(SHAPES)
    if rehearsed:
        controller.rehearse(machine.rehearsal())
    return controller


def device_cells(make: Make = new, *, seeds: int = 2) -> Iterator[Cell]:
    """Rates from the first step on. Answers end at random lengths, so runs of equal depth differ a little."""
    for (name, machine), users, (acceptance, chances) in product(DEVICES.items(), (1, 16, 64, 256), CHANCES.items()):
        rates = [_fixed(machine, chances, users, depth) for depth in (0, 1, 2, 3, 5, 7)]
        runs = [
            serve_on(on(machine, make), machine, _always(chances), users=users, steps=300, seed=seed)
            for seed in range(seeds if users < 64 else 1)
        ]
        yield _cell("device", name, users, acceptance, runs, rates)


def short_cells(make: Callable[[Sequence[float]], Controller] | None = None, *, seeds: int = 10) -> Iterator[Cell]:
    """One request with a fresh controller after a rehearsal, for drafters with and without a recorded acceptance."""
    make = make or (lambda recorded: Controller(7, recorded=recorded))
    for name, machine in SHORT_MACHINES.items():
        for kind, record in (("short", ()), ("short recorded", GOOD)):
            for acceptance, profile in (("random", host.RANDOM), ("good", host.GOOD)):
                for length in LENGTHS:
                    plain, spent, lost = host.plain_rate(machine, 1), 0.0, 0.0
                    for seed in range(seeds):
                        controller = make(record)
                        controller.rehearse(machine.rehearsal())
                        run = host.serve(controller, machine, profile, users=1, steps=length, length=100_000, seed=seed)
                        end = next(at for at, tokens in enumerate(run.tokens) if tokens >= length)
                        spent += run.seconds[end] / run.tokens[end] / seeds
                        lost = max(lost, (run.seconds[end] - run.reading[end]) * plain - run.tokens[end])
                    best = max(plain, host.best_rate(machine, profile, users=1))
                    yield Cell(
                        kind=kind,
                        name=f"{name}, {length}",
                        users=1,
                        acceptance=acceptance,
                        of_plain=1 / spent / plain,
                        of_best=1 / spent / best,
                        lost=lost,
                    )


def tree_cells(make: Make = new, *, trees: bool = True, seeds: int = 4) -> Iterator[Cell]:
    """Few users of a large target. The drafter's further candidates are often right, or never."""
    middling = [0.6, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5]
    for acceptance, siblings in (("siblings", (0.4, 0.15, 0.08)), ("none", ())):
        for users in (1, 4):
            rates = [_fixed(device.LARGE, middling, users, depth) for depth in (0, 1, 2, 3, 5, 7)]
            runs = []
            for seed in range(seeds):
                controller = on(device.LARGE, make)
                if trees:
                    controller.captures(device.WITH_TREES)
                how = {"users": users, "steps": 400, "seed": seed}
                runs.append(serve_on(controller, device.LARGE, _always(middling), siblings=siblings, **how))
            yield _cell("trees", "8B", users, acceptance, runs, rates)


def changing_cells(make: Make = new, *, seeds: int = 3) -> Iterator[Cell]:
    """Answers that turn from hard to easy and back, a drafter that collapses and recovers, a machine that was busy."""

    def turning(step: int) -> Sequence[float]:
        return [0.1 if step % 200 < 100 else 0.99] * 7

    def collapsing(step: int) -> Sequence[float]:
        return USELESS if 150 <= step < 400 else GOOD

    for name, machine, chances, steps, users in (
        ("135M, lean host", device.SMALL_WITH_LEAN_HOST, turning, 1000, 1),
        ("135M, lean host", device.SMALL_WITH_LEAN_HOST, turning, 1000, 16),
        ("8B", device.LARGE, collapsing, 700, 1),
        ("8B", device.LARGE, collapsing, 700, 16),
    ):
        rates = [serve_on(Fixed(at), machine, chances, users=users, steps=steps).rate() for at in (0, 1, 3, 7)]
        runs = [
            serve_on(on(machine, make), machine, chances, users=users, steps=steps, seed=seed) for seed in range(seeds)
        ]
        yield _cell("changing", name, users, chances.__name__, runs, rates)
    # A probe after a rest takes nearly two plain steps, and every fourth answer is hard.
    plain = host.plain_rate(host.SMALL_ON_FAST_GPU, 1)
    for name, profile, length in (
        ("rested", lambda request, step: [0.78 if request % 4 else 0.1] * 7, 127),
        ("busy spell", host.GOOD, 200),
    ):
        machine_of = {"rested": host.SMALL_ON_FAST_GPU, "busy spell": busy_spell()}[name]
        plain = host.plain_rate(replace(machine_of, verify=host.GPU.verify) if name == "busy spell" else machine_of, 1)
        run = host.serve(make(), machine_of, profile, users=1, steps=4000, length=length)
        yield Cell(
            kind="changing", name=name, users=1, acceptance="mixed", of_plain=run.rate(3000) / plain, of_best=1.0
        )


def busy_spell() -> host.Machine:
    """A GPU on which another process makes verification expensive for 2,000 passes."""
    left = iter(range(2000))

    def verify(tokens: int) -> float:
        return 4.9e-3 * (1 + (0.9 if next(left, None) is not None else 0.0) * (tokens - 1))

    return replace(host.GPU, verify=verify)


_rates: dict[tuple[int, int, int, int], float] = {}


def _fixed(machine: Device, chances: Sequence[float], users: int, depth: int) -> float:
    key = id(machine), id(chances), users, depth
    if key not in _rates:
        _rates[key] = serve_on(Fixed(depth), machine, _always(chances), users=users, steps=120).rate()
    return _rates[key]


def _always(chances: Sequence[float]) -> Callable[[int], Sequence[float]]:
    return lambda step: chances
