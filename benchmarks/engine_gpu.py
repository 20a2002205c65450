"""Compares decoding speed of the engine and vLLM on a GPU, with random models and a forced acceptance length.

    python benchmarks/engine_gpu.py --shape 8b --length 3.0 --vllm-python .venv-vllm/bin/python --out gpu-8b.json

Speed does not depend on what weights say, acceptance does. So the target and the drafter are random, and how many
drafts of a round are accepted is tossed to a given mean acceptance length (`tossed_engine.py`; vLLM calls it synthetic
acceptance). With --vllm-python both engines answer the same prompts in turn, round after round, each in its process;
vLLM is started once for plain decoding and once for drafts. Every round tosses other coins, since one user may be lucky
with one of them. Figures are medians over rounds:

    tokens/s   from the first prompt token to the last answer
    ratio      ours / vLLM, the median of the rounds' ratios
    ms/step    the median time from step to step, as a caller sees it
    floor      what a step takes if it only reads weights, keys and values, at the bandwidth measured at the start

and for ours what of a step that only decodes captured kernels take: medians of draft, verify and sample. What is left
of ms/step is the host, where it is slower than the device.

Every cell is printed and written to --out when it is done; --seconds ends the run in time. Times are of one GPU that
nobody else uses, or they are worth little.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from cells import device_parts, number, table
from memory_floor import bandwidth, step_bytes
from random_models import SHAPES, random_drafter, random_target, write_configs
from tossed_engine import TossedEngine
from vllm_process import VLLMProcess, installed, vllm_options

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.request import Request, Speculation
from eyas.errors import UserError
from eyas.plan.kv_cache_dtype import KV_CACHE_DTYPES, read_kv_cache_dtype
from eyas.sampling import Sampling
from eyas.serve.speculative_config import read_tree
from eyas.target.model import Target
from eyas.target.quantise import ON_THE_FLY
from eyas.train.journal import versions

Json = dict[str, Any]
TOSSED_FOR_AUTO = 3
"""Depth at which the coin gives the mean acceptance length if the policy chooses the depth."""


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--users", type=int, action="append", help="default 1, 4, 16, 64, 256, 512")
    parser.add_argument(
        "--depth", type=int, action="append", help="0 decodes plainly, -1 leaves it to the policy; default 0 and 3"
    )
    parser.add_argument(
        "--tree", help="DEPTHxWIDTHxBUDGET: ours grows such trees where it drafts; first candidates are tossed"
    )
    parser.add_argument("--length", type=float, default=2.5, help="mean acceptance length, tossed")
    parser.add_argument("--temperature", type=float, default=0.0, help="of ours; vLLM decodes greedily")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="begin no cell after so long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quantization", choices=("none", *ON_THE_FLY), default="none", help="of the target's linears; vLLM has none"
    )
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of both engines")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, both engines")
    parser.add_argument("--no-async-scheduling", action="store_true", help="ours without a step in flight")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="vLLM's share of the GPU's memory")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.users = arguments.users or [1, 4, 16, 64, 256, 512]
    try:
        print(table(Benchmark(arguments).run(), line_of))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


class Benchmark:
    """Measure all cells; each is written at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.vllm_version = installed(arguments.vllm_python)
        if self.vllm_version is None:
            print("vLLM is not measured: no --vllm-python is given", flush=True)
        self.device = torch.device(arguments.device)
        self.target = random_target(
            *(arguments.shape, getattr(torch, arguments.dtype), self.device), quantization=arguments.quantization
        )
        self.drafter = random_drafter(arguments.shape, self.target)
        self.bandwidth = bandwidth(self.device)
        self._release()
        gc.freeze()  # as `eyas serve` does: a collector that went through the libraries would hold up a step
        self.rows: list[Json] = []
        self.notes: list[str] = []
        self._say(f"memory gives {self.bandwidth / 1e12:.3f} TB/s")

    def run(self) -> Json:
        """Measure all depths and numbers of users; return the record."""
        for depth in self.arguments.depth or [0, 3]:
            with ExitStack() as stack:
                vllm = self._start_vllm(depth, stack)
                for users in self.arguments.users:
                    if self.arguments.seconds is not None and self._elapsed > self.arguments.seconds:
                        self._note(
                            f"depth {depth}, {users} users: left out, --seconds {self.arguments.seconds:g} are over"
                        )
                        continue
                    self._cell(users, depth, vllm)
        return self._record()

    def _start_vllm(self, depth: int, stack: ExitStack) -> VLLMProcess | None:
        """vLLM for this depth; if it cannot do this, note the reason."""
        arguments = self.arguments
        if self.vllm_version is None:
            return None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "vllm.log" if arguments.out is None else arguments.out.with_suffix(f".vllm-{depth}.log")
        target, drafter = write_configs(
            arguments.shape, self.target.facts.default_aux_layer_ids(), arguments.dtype, folder
        )
        options = vllm_options(
            target,
            users=arguments.users,
            max_model_len=arguments.prompt + arguments.new + 16,
            memory_share=arguments.vllm_memory,
            dtype=arguments.dtype,
            random_weights=True,
            drafter=drafter,
            depth=depth,
            length=arguments.length if depth else None,
            eager=arguments.eager,
            kv_cache_dtype=arguments.kv_cache_dtype,
        )
        self._say(f"vLLM {self.vllm_version} starts for depth {depth}; a first start takes minutes")
        try:
            vllm = stack.enter_context(VLLMProcess(arguments.vllm_python, options, log))
            vllm.answer(self._prompts(1), users=1, max_tokens=2 + depth)  # some refusals come with the first step
        except UserError as error:
            self._note(f"vLLM at depth {depth} is not measured: {error}")
            return None
        self._say(f"vLLM is ready after {vllm.start_seconds:.0f} s")
        return vllm

    def _cell(self, users: int, depth: int, vllm: VLLMProcess | None) -> None:
        """Measure one number of users at one depth: warm up both engines, then take turns."""
        arguments = self.arguments
        try:
            ours = OurEngine(self.target, self.drafter if depth else None, users, depth, arguments)
        except (UserError, torch.cuda.OutOfMemoryError) as error:
            self._note(f"depth {depth}, {users} users: ours does not start: {error}")
            return
        for _ in range(arguments.warm_ups):
            ours.answer(self._prompts(users))
        if vllm is not None:
            vllm.answer(self._prompts(users), users=users, max_tokens=min(arguments.new, 32))
        ours.begin()
        runs: list[Json] = []
        others: list[Json] = []
        for coins in range(arguments.rounds):
            prompts = self._prompts(users)
            runs.append(ours.answer(prompts, first_seed=coins * users))
            if vllm is not None:
                others.append(vllm.answer(prompts, users=users, max_tokens=arguments.new))
        context = arguments.prompt + arguments.new / 2
        kept = read_kv_cache_dtype(arguments.kv_cache_dtype)
        read = step_bytes(
            self.target, self.drafter, users=users, context=context, depth=max(0, depth), kv_cache_dtype=kept
        )
        floor = read / self.bandwidth
        row = row_of(users, depth, runs, others, 1000 * floor) | ours.parts()
        self.rows.append(row)
        print(f"{line_of(row)}\n      {device_parts(row)}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(self._record(), indent=1))
        del ours
        self._release()

    def _prompts(self, users: int) -> list[tuple[int, ...]]:
        vocab, chance = self.target.facts.vocab_size, random.Random(users)
        return [tuple(chance.randrange(3, vocab) for _ in range(self.arguments.prompt)) for _ in range(users)]

    def _record(self) -> Json:
        return {
            "versions": versions() | {"vllm": self.vllm_version},
            "arguments": {key: str(value) for key, value in vars(self.arguments).items()},
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "bytes_per_second": self.bandwidth,
            "seconds": self._elapsed,
            "notes": self.notes,
            "rows": self.rows,
        }

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self.began

    def _note(self, words: str) -> None:
        self.notes.append(words)
        self._say(words)

    def _say(self, words: str) -> None:
        print(f"{self._elapsed:5.0f} s  {words}", flush=True)

    def _release(self) -> None:
        """Free the memory of an engine for the next one."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class OurEngine:
    """An engine for this number of users."""

    def __init__(
        self, target: Target, drafter: Drafter | None, users: int, depth: int, arguments: argparse.Namespace
    ) -> None:
        options = EngineConfig(
            max_num_seqs=users,
            max_model_len=arguments.prompt + arguments.new + 16,
            max_num_batched_tokens=max(8192, users * 8),
            graphs=not arguments.eager,
            async_scheduling=not arguments.no_async_scheduling,
            prefix_cache=False,
            kv_cache_dtype=arguments.kv_cache_dtype,
            tree=read_tree(arguments.tree, "random") if depth else None,
        )
        auto = depth < 0
        self.engine = TossedEngine(
            target, drafter, config=options, length=arguments.length, depth=TOSSED_FOR_AUTO if auto else depth
        )
        if auto:
            self.engine.capture_graphs()
        self.engine.proposer.warm_up()  # as `eyas serve` does: the first look for drift takes much longer than others
        fixed = Speculation(mode="fixed", depth=depth) if depth > 0 else Speculation(mode="off")
        self._speculation = Speculation() if auto else fixed
        self._sampling, self._new = Sampling(temperature=arguments.temperature), arguments.new
        self._before = (0, 0)

    def answer(self, prompts: Sequence[tuple[int, ...]], *, first_seed: int = 0) -> Json:
        """The same figures as `vllm_worker.answer`; the seeds also decide acceptance."""
        engine, tokens, gaps = self.engine, 0, []
        asked = [
            Request(
                prompt=prompt,
                sampling=self._sampling,
                max_new_tokens=self._new,
                speculation=self._speculation,
                seed=first_seed + user,
                detokenize=False,  # as vLLM is asked
            )
            for user, prompt in enumerate(prompts)
        ]
        started = last = time.perf_counter()
        for request in asked:
            engine.submit(request)
        while engine.busy:
            tokens += sum(len(piece.tokens) for piece in engine.step())
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        return {
            "tokens": tokens,
            "seconds": last - started,
            "steps": len(gaps),
            "ms_per_step": 1000 * statistics.median(gaps),
        }

    def begin(self) -> None:
        """Reset the counters."""
        self.engine.capture.events.clear()
        self._before = (self.engine.stats.accepted, self.engine.stats.drafts)

    def parts(self) -> Json:
        """Acceptance and kernel times since `begin`."""
        engine, capture = self.engine, self.engine.capture
        drafts = engine.stats.drafts - self._before[1]
        return {
            "acceptance_length": 1 + (engine.stats.accepted - self._before[0]) / max(1, drafts),
            "graphs": len(capture),
            "graph_mebibytes": capture.bytes >> 20,
            "device_ms": {kind: capture.milliseconds(kind) for kind in list(capture.events)},
        }


def row_of(users: int, depth: int, runs: Sequence[Json], others: Sequence[Json], floor_ms: float) -> Json:
    """A cell of runs made in turn; `others` is empty without vLLM."""
    speeds = [run["tokens"] / run["seconds"] for run in runs]
    theirs = [run["tokens"] / run["seconds"] for run in others]
    ratios = [own / other for own, other in zip(speeds, theirs, strict=True)] if theirs else []
    own_ms = statistics.median(run["ms_per_step"] for run in runs)
    other_ms = statistics.median(run["ms_per_step"] for run in others) if others else None
    return {
        "users": users,
        "depth": depth,
        "tokens_per_second": statistics.median(speeds),
        "all": speeds,
        "vllm_tokens_per_second": statistics.median(theirs) if theirs else None,
        "vllm_all": theirs,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
        "ms_per_step": own_ms,
        "vllm_ms_per_step": other_ms,
        "steps": [run["steps"] for run in runs],
        "vllm_steps": [run["steps"] for run in others],
        "floor_ms": floor_ms,
        "floor_share": floor_ms / own_ms,
        "vllm_floor_share": floor_ms / other_ms if other_ms else None,
    }


def line_of(row: Json) -> str:
    """A cell as a line of text."""
    return (
        f"{row['users']:>5} users  depth {row['depth']}"
        f"  tokens/s {row['tokens_per_second']:>9.1f}  vLLM {number(row['vllm_tokens_per_second'], '.1f'):>9}"
        f"  ratio {number(row['ratio'], '.3f'):>6}"
        f"  ms/step {row['ms_per_step']:>8.3f}  vLLM {number(row['vllm_ms_per_step'], '.3f'):>8}"
        f"  floor {row['floor_ms']:.3f}: {row['floor_share']:.0%}, vLLM {number(row['vllm_floor_share'], '.0%')}"
    )


if __name__ == "__main__":
    main()
