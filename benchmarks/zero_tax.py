"""What a drafter costs where it cannot help, and gains where it can: every mode against the engine without a drafter.

    python benchmarks/zero_tax.py spec_bench.jsonl --drafter smollm2-eagle3.1 --device cuda --dtype bfloat16

All modes live in one process and answer the same prompts in turn, round after round, each round in another order, so
that a machine's moods fall on all alike. A ratio is of two runs of the same round; figures are medians over rounds with
95 % intervals (bootstrap over rounds). A run counts while all of its users are busy: once the first has nothing more to
ask, fewer and fewer decode, and the longest answer would tell the time. vLLM tells the time of a whole run, so whole
runs are compared with it.

    plain          no drafter is loaded
    depth 0        the drafter is loaded and reads along, and never drafts: what it costs to have one
    auto           as deep as the controller finds right
    auto, cold     the same, its first 200 steps after the drafter was loaded, against plain's first 200 steps
    depth 3        always three deep
    random         a drafter of random weights on auto: the worst that can happen
    vLLM           with --vllm-python: its plain decoding against ours, and its depth 3 against its own plain decoding

A warm-up of every mode comes first and is not counted. Every round is printed as it comes. After each number of users
the picture and the JSON are written to --out. --seconds ends it in time.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from engine_speed import OFF, read_drafter, read_prompts, requests_of
from pairs import Interval, interval, turns
from vllm_process import VLLMProcess, installed, vllm_options

from eyas.cli.arguments import read_chat_format
from eyas.drafter.checkpoint import read_checkpoint, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.target.locate import locate
from eyas.target.model import Target
from eyas.train.journal import versions

Json = dict[str, Any]
Prompts = Sequence[tuple[int, ...]]
PLAIN, VLLM_PLAIN, COLD = "plain", "vLLM plain", "auto, cold"
COLD_STEPS = 200
LEAST_PAIRS = 8
"""Fewer say little about a random drafter, which loses a few per cent at most."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a device answers in a few seconds a run."""

    users: tuple[int, ...]
    least: int
    per_user: int
    max_tokens: int
    cold: int


DEFAULTS = {
    "cpu": Defaults(users=(1, 4, 16), least=4, per_user=1, max_tokens=64, cold=1),
    "cuda": Defaults(users=(1, 4, 16, 64, 256), least=16, per_user=2, max_tokens=128, cold=3),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one mode, while all users were busy."""

    tokens: int
    seconds: float
    steps: int
    acceptance_length: float | None = None
    whole_speed: float
    """Tokens per second up to the last answer's end."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Mode = Callable[[Prompts, int], Outcome]
"""Answers prompts, so many at a time."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--chat-template", help="a Jinja file, for a target that has no template of its own")
    parser.add_argument("--users", type=int, action="append", help="default 1, 4, 16, on a GPU also 64 and 256")
    parser.add_argument("--depth", type=int, default=3, help="the fixed depth")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="MODE",
        help='leave out "depth 0", the fixed depth ("depth 3") or "random"; may be given again',
    )
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, help="rounds for each number of users")
    parser.add_argument("--cold", type=int, help="pairs of the first 200 steps, 0 for none; default 1, on a GPU 3")
    parser.add_argument("--least", type=int, help="prompts of a run at least; default 4, on a GPU 16")
    parser.add_argument("--per-user", type=int, help="prompts of a run for each user; default 1, on a GPU 2")
    parser.add_argument("--max-tokens", type=int, help="default 64, on a GPU 128")
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no round after so long; what engines leave of it is shared by the numbers of users",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument(
        "--vllm-memory", type=float, default=0.15, help="share of the GPU's memory of each vLLM, of two"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="without CUDA graphs and compilation in vLLM")
    parser.add_argument("--out", type=Path, default=Path("zero-tax"), help="folder for zero-tax.json and .png")
    arguments = parser.parse_args()
    optional = ["depth 0", f"depth {arguments.depth}", "random"]
    if strange := set(arguments.without) - set(optional):
        parser.error(f"--without {sorted(strange)[0]!r} is no mode that can be left out; these can: {optional}")
    usual = DEFAULTS["cuda" if arguments.device.startswith("cuda") else "cpu"]
    arguments.users = arguments.users or list(usual.users)
    for name in ("least", "per_user", "max_tokens", "cold"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(usual, name))
    try:
        with ExitStack() as stack:
            ZeroTax(arguments, stack).run()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


class ZeroTax:
    """All modes, loaded once, and what was measured of them."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.notes: list[str] = []
        self.rows: list[Json] = []
        self.controllers: Json = {}
        """What auto has learnt and chosen, after each number of users."""
        if arguments.pairs < LEAST_PAIRS:
            self._note(f"{arguments.pairs} pairs say little about a random drafter; give --pairs {LEAST_PAIRS} or more")
        self.vllm_version = installed(arguments.vllm_python)
        if self.vllm_version is None:
            self._note("vLLM is not measured: no --vllm-python is given")
        chat_format = read_chat_format(arguments.chat_template, None, raw=False)
        self.target = Target.load(
            arguments.target, dtype=arguments.dtype, device=arguments.device, chat_format=chat_format
        )
        self.most_prompts = max(self._count(users) for users in arguments.users)
        read = read_prompts(arguments.prompts, self.target, self.most_prompts)
        self.prompts = list(islice(cycle(read), self.most_prompts))
        self.max_model_len = max(map(len, self.prompts)) + arguments.max_tokens
        self.modes: dict[str, Mode] = {}
        self._start_vllm(stack)  # before ours, which takes a part of what is left
        if self.target.device.type == "cpu":
            self._say(pack_linears(self.target.model, widen=arguments.dtype == "auto").words)
        self._start_engines()

    def _start_engines(self) -> None:
        name, depth = self.arguments.drafter, self.arguments.depth
        self.plain = self._new_engine(None)
        theirs, self.modes = self.modes, {PLAIN: self._mode(self.plain, OFF)}
        drafter = read_drafter(name, self.target)
        self.auto = self._new_engine(drafter)
        self.reload = lambda: self.auto.swap_drafter(drafter)
        self.modes["auto"] = self._mode(self.auto, Speculation())
        for at in (0, depth):
            if f"depth {at}" not in self.arguments.without:
                fixed = Speculation(mode="fixed", depth=at)
                self.modes[f"depth {at}"] = self._engine(read_drafter(name, self.target), fixed)
        if "random" not in self.arguments.without:
            self.modes["random"] = self._engine(read_drafter(name, self.target, random=True), Speculation())
        self.modes |= theirs
        # As `eyas serve` does: a collector that went through all that is loaded would hold up a step for 0.3 s.
        gc.collect()
        gc.freeze()

    def _new_engine(self, drafter: Drafter | None) -> Engine:
        config = EngineConfig(
            max_num_seqs=max(self.arguments.users),
            max_model_len=self.max_model_len,
            max_depth=max(7, self.arguments.depth),
        )
        engine = Engine(self.target, drafter, config=config)
        engine.capture_graphs()
        self._say("an engine is ready")
        return engine

    def _engine(self, drafter: Drafter | None, speculation: Speculation) -> Mode:
        return self._mode(self._new_engine(drafter), speculation)

    def _mode(self, engine: Engine, speculation: Speculation) -> Mode:
        def answer(prompts: Prompts, users: int) -> Outcome:
            asked = requests_of(self.target, prompts, self.arguments.max_tokens, speculation)
            return closed_loop(engine, asked, users)

        return answer

    def _start_vllm(self, stack: ExitStack) -> None:
        arguments = self.arguments
        if self.vllm_version is None:
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(read_checkpoint(arguments.drafter), folder / "drafter", layout="vllm")
        arguments.out.mkdir(parents=True, exist_ok=True)
        for depth, name in ((0, VLLM_PLAIN), (arguments.depth, f"vLLM depth {arguments.depth}")):
            options = vllm_options(
                locate(arguments.target),
                users=arguments.users,
                max_model_len=self.max_model_len,
                memory_share=arguments.vllm_memory,
                dtype=str(self.target.dtype).removeprefix("torch."),
                drafter=folder / "drafter",
                depth=depth,
                eager=arguments.vllm_eager,
            )
            self._say(f"vLLM {self.vllm_version} starts for depth {depth}; a first start takes minutes")
            try:
                process = VLLMProcess(arguments.vllm_python, options, arguments.out / f"vllm-{depth}.log")
                self.modes[name] = self._vllm_mode(stack.enter_context(process))
            except UserError as error:
                self._note(f"{name} is not measured: {error}")

    def _vllm_mode(self, process: VLLMProcess) -> Mode:
        stops = sorted(self.target.stop_ids())

        def answer(prompts: Prompts, users: int) -> Outcome:
            told = process.answer(prompts, users=users, max_tokens=self.arguments.max_tokens, stop_ids=stops)
            tokens, seconds = told["tokens"], told["seconds"]
            return Outcome(tokens=tokens, seconds=seconds, steps=told["steps"], whole_speed=tokens / seconds)

        return answer

    def run(self) -> None:
        """Measure every number of users."""
        arguments, ready = self.arguments, time.perf_counter()
        left = arguments.seconds and max(0.0, self.began + arguments.seconds - ready)
        for place, users in enumerate(arguments.users, start=1):
            until = None if left is None else ready + left * place / len(arguments.users)
            started = time.perf_counter()
            prompts = self.prompts[: self._count(users)]
            for answer in self.modes.values():
                answer(prompts, users)
            warm = time.perf_counter() - started
            self._say(f"{users} users: warm after {warm:.0f} s; {arguments.pairs} rounds take about as long each")
            cold = list(self._cold_pairs(users, prompts, until))
            if cold:
                self.modes["auto"](prompts, users)  # it has forgotten what the warm-up taught it
            rounds = list(self._rounds(users, prompts, until))
            self.rows += rows_of(users, rounds, cold)
            self.controllers[str(users)] = self.auto.controller.report()
            self._write()
        print(table(self._record()), flush=True)

    def _rounds(self, users: int, prompts: Prompts, until: float | None) -> Iterator[dict[str, Outcome]]:
        """Every mode once, in turn, as often as there are pairs or there is time."""
        for number in range(self.arguments.pairs):
            if number and until and time.perf_counter() > until:
                self._note(f"{users} users: {number} of {self.arguments.pairs} pairs, --seconds are over")
                return
            outcomes = {mode: self.modes[mode](prompts, users) for mode in turns(list(self.modes), number)}
            plain = outcomes[PLAIN].speed
            told = ", ".join(f"{mode} {outcomes[mode].speed / plain:.3f}" for mode in self.modes if mode != PLAIN)
            self._say(f"{users} users, round {number + 1}: plain {plain:.1f} tokens/s; {told}")
            yield outcomes

    def _cold_pairs(self, users: int, prompts: Prompts, until: float | None) -> Iterator[tuple[Outcome, Outcome]]:
        """The first steps of a controller that has just begun, and as many of plain decoding."""
        for number in range(self.arguments.cold):
            if until and time.perf_counter() > until:
                return
            self.reload()
            asked = list(islice(cycle(prompts), COLD_STEPS * users // 2 + users))
            own = requests_of(self.target, asked, self.arguments.max_tokens, Speculation())
            plain = requests_of(self.target, asked, self.arguments.max_tokens, OFF)
            pair = (
                closed_loop(self.auto, own, users, steps=COLD_STEPS),
                closed_loop(self.plain, plain, users, steps=COLD_STEPS),
            )
            self._say(f"{users} users, cold {number + 1}: {pair[0].speed / pair[1].speed:.3f}")
            yield pair

    def _count(self, users: int) -> int:
        return max(self.arguments.least, self.arguments.per_user * users)

    def _record(self) -> Json:
        device = self.target.device
        return {
            "versions": versions() | {"vllm": self.vllm_version},
            "arguments": {key: str(value) for key, value in vars(self.arguments).items()},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "seconds": time.perf_counter() - self.began,
            "notes": self.notes,
            "rows": self.rows,
            "controllers": self.controllers,
        }

    def _write(self) -> None:
        out, record = self.arguments.out, self._record()
        out.mkdir(parents=True, exist_ok=True)
        (out / "zero-tax.json").write_text(json.dumps(record, indent=1))
        draw(record, out / "zero-tax.png")

    def _note(self, words: str) -> None:
        self.notes.append(words)
        self._say(words)

    def _say(self, words: str) -> None:
        print(f"{time.perf_counter() - self.began:5.0f} s  {words}", flush=True)


def closed_loop(engine: Engine, requests: Sequence[Request], users: int, *, steps: int | None = None) -> Outcome:
    """Answer requests, so many at a time, or as far as that many steps get."""
    engine.block_manager.forget()  # a cache of prefixes would make later rounds easier
    stats = engine.stats
    before = (stats.accepted, stats.drafts)
    waiting, under_way, tokens, done = deque(requests), set[int](), 0, 0
    busy: tuple[int, float, int] | None = None
    started = time.perf_counter()
    while steps is None or done < steps:
        while waiting and len(under_way) < users:
            under_way.add(engine.submit(waiting.popleft()))
        if busy is None and done and len(under_way) < users:
            busy = tokens, time.perf_counter() - started, done
        if not under_way:
            break
        for piece in engine.step():
            tokens += len(piece.tokens)
            if piece.finished is not None:
                under_way.discard(piece.key)
        done += 1
    seconds = time.perf_counter() - started
    for key in under_way:
        engine.cancel(key)
    while engine.busy:  # what the last step left to tell
        engine.step()
    drafts = stats.drafts - before[1]
    length = 1 + (stats.accepted - before[0]) / drafts if drafts else None
    counted, counted_seconds, counted_steps = busy or (tokens, seconds, done)
    return Outcome(
        tokens=counted,
        seconds=counted_seconds,
        steps=counted_steps,
        acceptance_length=length,
        whole_speed=tokens / seconds,
    )


def rows_of(users: int, rounds: Sequence[dict[str, Outcome]], cold: Sequence[tuple[Outcome, Outcome]]) -> list[Json]:
    """A row for each mode: its speed, and its ratio to plain decoding in the same round."""
    rows = []
    for mode in rounds[0]:
        against = VLLM_PLAIN if mode.startswith("vLLM depth") and VLLM_PLAIN in rounds[0] else PLAIN
        whole = VLLM_PLAIN in (mode, against)
        pairs = [(outcomes[mode], outcomes[against]) for outcomes in rounds]
        ratios = [a.whole_speed / b.whole_speed if whole else a.speed / b.speed for a, b in pairs]
        rows.append(_row(users, mode, against, [outcomes[mode] for outcomes in rounds], ratios))
    if cold:
        ratios = [own.speed / plain.speed for own, plain in cold]
        rows.append(_row(users, COLD, "plain, as many steps", [own for own, _ in cold], ratios))
    order = [PLAIN, "depth 0", "auto", COLD]
    rows.sort(key=lambda row: (row["mode"].startswith("vLLM"), order.index(row["mode"]) if row["mode"] in order else 9))
    return rows


def _row(users: int, mode: str, against: str, outcomes: Sequence[Outcome], ratios: Sequence[float]) -> Json:
    return {
        "users": users,
        "mode": mode,
        "against": against,
        "tokens_per_second": statistics.median(outcome.speed for outcome in outcomes),
        "ratio": asdict(interval(ratios)),
        "ratios": list(ratios),
        "acceptance_length": outcomes[-1].acceptance_length,
        "runs": [asdict(outcome) for outcome in outcomes],
    }


def table(record: Json) -> str:
    """A line for each mode, a column for each number of users; then what is missing."""
    users = list(dict.fromkeys(row["users"] for row in record["rows"]))
    modes = list(dict.fromkeys((row["mode"], row["against"]) for row in record["rows"]))
    found = {(row["mode"], row["users"]): row for row in record["rows"]}
    lines = [
        f"\n{record['arguments']['target']} with {record['arguments']['drafter']}, {record['device']}, "
        f"{record['dtype']}; ratios of tokens/s with 95 % intervals; {record['seconds']:.0f} s in all",
        f"{'users':<34}" + "".join(f"{count:>24}" for count in users),
    ]
    speeds = [found.get((PLAIN, count)) for count in users]
    lines.append(
        f"{'plain, tokens/s':<34}" + "".join(f"{row['tokens_per_second'] if row else 0:>24.1f}" for row in speeds)
    )
    for mode, against in modes:
        if mode == PLAIN:
            continue
        cells = [found.get((mode, count)) for count in users]
        shown = "".join(f"{str(Interval(**row['ratio'])) if row else '-':>24}" for row in cells)
        lines.append(f"{f'{mode} / {against}':<34}" + shown)
    return "\n".join([*lines, *(f"note: {words}" for words in record["notes"])])


def draw(record: Json, picture: Path) -> None:
    """Ratios by number of users, with their intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    users = list(dict.fromkeys(row["users"] for row in record["rows"]))
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in record["rows"]) if mode != PLAIN]
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(1.0, color="grey", lw=1)
    for place, mode in enumerate(modes):
        rows = [row for row in record["rows"] if row["mode"] == mode]
        middle = [row["ratio"]["median"] for row in rows]
        low = [m - (row["ratio"]["low"] or m) for m, row in zip(middle, rows, strict=True)]
        high = [(row["ratio"]["high"] or m) - m for m, row in zip(middle, rows, strict=True)]
        across = [users.index(row["users"]) + 0.06 * (place - len(modes) / 2) for row in rows]
        axes.errorbar(
            across, middle, yerr=[low, high], fmt="o-", ms=4, capsize=3, label=f"{mode} / {rows[0]['against']}"
        )
    axes.set_xticks(range(len(users)), [str(count) for count in users])
    axes.set_xlabel("users")
    axes.set_ylabel("tokens per second, ratio (95 % intervals)")
    axes.set_title(f"{record['arguments']['target']}, {record['device']}, {record['dtype']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
