"""Measures the cost of a drafter where it cannot help and the gain where it can, relative to no drafter.

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
    suffix         with --suffix: no drafter, suffix drafts from each request's own text
    both           with --suffix: the drafter and suffix drafts, whichever pays; against auto as well
    vLLM           with --vllm-python: its plain decoding against ours, and its depth 3 against its own plain decoding

A warm-up of every mode comes first and is not counted. Every round is printed as it comes. After each number of users
the picture and the JSON are written to --out. --seconds ends it in time.

With --suffix, what the index of a text of 100,000 tokens takes is told too. Suffix drafts alone, never below:

    python benchmarks/zero_tax.py spec_bench.jsonl --suffix --users 1 --users 4 --users 16 --cold 0 \\
        --without "depth 0" --without "depth 3" --without random --seconds 140 --device cuda --dtype bfloat16

Where text repeats, `repeating.jsonl` by repeating_workloads.py, with --category rewrite --without-loops.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import suffix_index
import torch
from engine_speed import OFF, read_drafter, read_prompts, requests_of, without_loops
from pairs import turns
from ratio_table import AUTO, BOTH, PLAIN, SUFFIX, VLLM_PLAIN, Json, Outcome, draw, rows_of, table
from vllm_process import VLLMProcess, installed, vllm_options

from eyas.drafter.checkpoint import read_checkpoint, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.loading import load_target
from eyas.target.chat_template import read_chat_format
from eyas.target.locate import locate
from eyas.train.journal import versions

Prompts = Sequence[tuple[int, ...]]
COLD_STEPS = 200
LONG_TEXT = 100_000
"""Length of the text for which the suffix index is measured."""
LEAST_PAIRS = 8
"""Minimum number of tokens for a random drafter, which loses only a few per cent."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Tokens that a device answers in a few seconds."""

    users: tuple[int, ...]
    least: int
    per_user: int
    max_tokens: int
    cold: int


DEFAULTS = {
    "cpu": Defaults(users=(1, 4, 16), least=4, per_user=1, max_tokens=64, cold=1),
    "cuda": Defaults(users=(1, 4, 16, 64, 256), least=16, per_user=2, max_tokens=128, cold=3),
}


Mode = Callable[[Prompts, int], Outcome]
"""Answers prompts, at most `users` at a time."""


def main() -> None:
    """Run the benchmark and print its table."""
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
    parser.add_argument("--suffix", action="store_true", help="measure suffix drafts, alone and beside the drafter")
    parser.add_argument("--category", action="append", help="only prompts of this category; may be given again")
    parser.add_argument(
        "--without-loops", action="store_true", help="leave out prompts whose plain answers end in a loop"
    )
    parser.add_argument("--quantization", default="none", help="of the target: none, or as for `eyas serve`")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count what this thread computes instead of what passes meanwhile: for a busy machine, with one thread",
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
    """All modes, loaded once, with their measurements."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.notes: list[str] = []
        self.rows: list[Json] = []
        self.index: Json = {}
        """Measurements of the suffix index on a long text."""
        self.controllers: Json = {}
        """State of the depth policy after each number of users, and counts of look-ups."""
        if arguments.pairs < LEAST_PAIRS:
            self._note(f"{arguments.pairs} pairs say little about a random drafter; give --pairs {LEAST_PAIRS} or more")
        self.vllm_version = installed(arguments.vllm_python)
        if self.vllm_version is None:
            self._note("vLLM is not measured: no --vllm-python is given")
        chat_format = read_chat_format(arguments.chat_template, None, raw=False)
        self.clock = time.thread_time if arguments.cpu_time else time.perf_counter
        if arguments.cpu_time:
            torch.set_num_threads(1)
        self.target = load_target(
            arguments.target,
            dtype=arguments.dtype,
            device=arguments.device,
            quantization=arguments.quantization,
            chat_format=chat_format,
        )
        self.most_prompts = max(self._count(users) for users in arguments.users)
        read = read_prompts(arguments.prompts, self.target, self.most_prompts, arguments.category)
        if arguments.without_loops:
            read = self._without_loops(read)
        self.prompts = list(islice(cycle(read), self.most_prompts))
        self.max_model_len = max(map(len, self.prompts)) + arguments.max_tokens
        self.modes: dict[str, Mode] = {}
        self.with_suffix: dict[str, Engine] = {}
        self._start_vllm(stack)  # before ours, which takes a part of what is left
        self._start_engines()

    def _start_engines(self) -> None:
        name, depth = self.arguments.drafter, self.arguments.depth
        self.plain = self._new_engine(None)
        theirs, self.modes = self.modes, {PLAIN: self._mode(self.plain, OFF)}
        drafter = read_drafter(name, self.target)
        self.auto = self._new_engine(drafter)
        self.reload = lambda: self.auto.swap_drafter(drafter)
        self.modes[AUTO] = self._mode(self.auto, Speculation())
        if self.arguments.suffix:
            own_text = SuffixConfig(max_cached_requests=0)  # or the answers of the round before would be there
            for mode, beside in ((SUFFIX, None), (BOTH, read_drafter(name, self.target))):
                self.with_suffix[mode] = self._new_engine(beside, own_text)
                self.modes[mode] = self._mode(self.with_suffix[mode], Speculation())
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

    def _without_loops(self, prompts: Prompts) -> Prompts:
        engine = self._new_engine(None, max_model_len=max(map(len, prompts)) + self.arguments.max_tokens)
        kept = without_loops(engine, prompts, self.arguments.max_tokens)
        self._note(f"{len(kept)} of {len(prompts)} prompts are asked: the answers to the others end in a loop")
        return kept

    def _new_engine(
        self, drafter: Drafter | None, suffix: SuffixConfig | None = None, *, max_model_len: int | None = None
    ) -> Engine:
        config = EngineConfig(
            max_num_seqs=max(self.arguments.users),
            max_model_len=max_model_len or self.max_model_len,
            max_depth=max(7, self.arguments.depth),
            suffix=suffix,
        )
        engine = Engine(self.target, drafter, config=config, clock=self.clock)
        engine.capture_graphs()
        self._say("an engine is ready")
        return engine

    def _engine(self, drafter: Drafter | None, speculation: Speculation) -> Mode:
        return self._mode(self._new_engine(drafter), speculation)

    def _mode(self, engine: Engine, speculation: Speculation) -> Mode:
        def answer(prompts: Prompts, users: int) -> Outcome:
            asked = requests_of(self.target, prompts, self.arguments.max_tokens, speculation)
            return closed_loop(engine, asked, users, clock=self.clock)

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
        """Measure all numbers of users."""
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
            self.controllers[str(users)] = self.auto.controller.report() | {
                mode: {"lookups_by_requests": engine.lookups_by_requests} for mode, engine in self.with_suffix.items()
            }
            self._write()
        if arguments.suffix:
            text = suffix_index.quoting_text(LONG_TEXT, seed=0)
            cost = suffix_index.measure("index", text, answer=2000)
            self.index = asdict(cost)
            self._note(str(cost).strip())
            self._write()
        print(table(self._record()), flush=True)

    def _rounds(self, users: int, prompts: Prompts, until: float | None) -> Iterator[dict[str, Outcome]]:
        """Run all modes in turn until there are enough pairs or the time is over."""
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
        """The first steps of a fresh controller, and as many of plain decoding."""
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
            "index": self.index,
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


def closed_loop(
    engine: Engine,
    requests: Sequence[Request],
    users: int,
    *,
    steps: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Answer requests, at most `users` at a time, or only for `steps` steps."""
    engine.block_manager.forget()  # a cache of prefixes would make later rounds easier
    stats = engine.stats
    before = (stats.accepted, stats.drafts)
    waiting, under_way, tokens, done = deque(requests), set[int](), 0, 0
    busy: tuple[int, float, int] | None = None
    started = clock()
    while steps is None or done < steps:
        while waiting and len(under_way) < users:
            under_way.add(engine.submit(waiting.popleft()))
        if busy is None and done and len(under_way) < users:
            busy = tokens, clock() - started, done
        if not under_way:
            break
        for piece in engine.step():
            tokens += len(piece.tokens)
            if piece.finished is not None:
                under_way.discard(piece.key)
        done += 1
    seconds = clock() - started
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


if __name__ == "__main__":
    main()
