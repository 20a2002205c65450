"""Breaks down the time of a decoding step on a CPU, without and with drafts.

    python benchmarks/pass_times.py                          the default target; 1, 4, 16 requests, depth 0 and 3
    python benchmarks/pass_times.py --users 1 --depth 0 --depth 3 --steps 300

Milliseconds of a step, medians over steps:

    products, head, attention, norms, gates   in compiled code; attention includes rotating queries and keys
    other      of a pass besides: metadata, memory, the call itself
    sampling   choosing tokens and accepting drafts
    Python     all else of a step
    waiting    for other threads at the end of products; it is part of the lines above
"""

import argparse
import ctypes
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from engine_speed import read_drafter
from first_requests import QUESTIONS

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.kernels.llama.cpu import PHASES, Layers
from eyas.kernels.native import THREADS, load_native
from eyas.loading import load_target
from eyas.sampling import Sampling

Times = dict[str, float]


class Clocks:
    """Seconds by part of the current step."""

    def __init__(self, engine: Engine) -> None:
        pool, _ = load_native(THREADS)
        assert pool is not None
        self._waited = pool.nanoseconds_waited
        self._waited.restype = ctypes.c_int64
        self._layers = {"verify": self._counted(target=True), "draft": self._counted(target=False)}
        self._spent: Times = defaultdict(float)
        core = engine.core
        core.proposer.draft = self._timed("draft", core.proposer.draft)  # type: ignore[method-assign]
        core.runner.verify = self._timed("verify", core.runner.verify)  # type: ignore[method-assign]
        core.runner.accept = self._timed("sampling", core.runner.accept)  # type: ignore[method-assign]

    @staticmethod
    def _counted(*, target: bool) -> list[Any]:
        found = [x for x in gc.get_objects() if isinstance(x, Layers) and (x.ends is not None) == target]
        for layers in found:
            layers.spent = (ctypes.c_double * len(PHASES))()
        return [layers.spent for layers in found]

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            result = call(*given)
            self._spent[name] += time.perf_counter() - began
            return result

        return timed

    def step(self, engine: Engine) -> Times:
        """Times of one step by part."""
        self._spent.clear()
        waited = self._waited()
        for each in (*self._layers["verify"], *self._layers["draft"]):
            ctypes.memset(each, 0, ctypes.sizeof(each))
        began = time.perf_counter()
        engine.step()
        whole, told = time.perf_counter() - began, dict[str, float]()
        for part, counted in self._layers.items():
            for number, phase in enumerate(PHASES):
                told[f"{part}: {phase}"] = sum(each[number] for each in counted)
            told[f"{part}: other"] = self._spent[part] - sum(sum(each) for each in counted)
        told["sampling"] = self._spent["sampling"]
        told["Python"] = whole - sum(self._spent.values())
        told["a step"] = whole
        told["waiting"] = (self._waited() - waited) * 1e-9
        return told


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--steps", type=int, default=200)
    wanted = parser.parse_args()
    target = load_target(wanted.target, dtype=wanted.dtype, device="cpu", quantization="auto")
    engine = Engine(target, read_drafter(wanted.drafter, target), config=EngineConfig(capture_ahead=True))
    clocks = Clocks(engine)
    cells = [(users, depth) for users in wanted.users or (1, 4, 16) for depth in wanted.depth or (0, 3)]
    seen: dict[tuple[int, int], list[Times]] = {cell: [] for cell in cells}
    while any(len(times) < wanted.steps for times in seen.values()):
        for users, depth in cells:
            seen[users, depth] += _some_steps(engine, clocks, users, depth)
    print(f"{'ms, requests x depth':22s}" + "".join(f"{f'{users} x {depth}':>10s}" for users, depth in cells))
    for name in seen[cells[0]][0]:
        print(f"{name:22s}" + "".join(f"{1e3 * median(step[name] for step in seen[cell]):10.2f}" for cell in cells))


def _some_steps(engine: Engine, clocks: Clocks, users: int, depth: int) -> list[Times]:
    """Steps of decoding requests."""
    how = Speculation(mode="fixed", depth=depth)
    keys = []
    for number in range(users):
        prompt = tuple(engine.target.encode_chat([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]))
        asked = Request(prompt=prompt, sampling=Sampling(), max_new_tokens=200, seed=number, speculation=how)
        keys.append(engine.submit(asked))
    while any(seq.new_tokens == 0 for seq in engine.scheduler.requests):
        engine.step()
    times = list[Times]()
    while len(engine.scheduler.requests) == users and len(times) < 20:
        times.append(clocks.step(engine))
    for key in keys:
        engine.cancel(key)
    while engine.busy:
        engine.step()
    return times[2:]


if __name__ == "__main__":
    main()
