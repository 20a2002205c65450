"""Measures decoding behind long contexts on a GPU: memory, and growth of step times with the cache.

    python benchmarks/long_context.py --shape 8b --out long-context.json

The target and the drafter are random, the target's rotation is scaled, the drafter sees a window and the first tokens
(sinks), and acceptance is tossed (`tossed_engine.py`). There is one engine for each context, for as many users as it
is measured with at most. Prompts are read once, by requests for a few tokens; all that decode behind them find them in
the prefix cache, so that all users begin at the same time. Figures of a number of users at a depth:

    ms/step   the median time from step to step, while all of them decode
    floor     what a step takes if it only reads weights, keys and values, at the bandwidth measured at the start
    growth    how much longer a step takes than at the shortest context with as many users, as a multiple of what the
              added bytes of the caches take to be read: 1 is as fast as the memory
    held      all that is taken on the device, and what `eyas plan` says of it, runtime, weights and blocks included
    peak      the most that was held at any time, what torch kept for later included

and what of a step captured kernels take: medians of draft, verify and sample. Times are of one GPU that nobody else
uses. Every cell is printed and written to --out when it is done; --seconds ends the run in time.
`--device cpu --shape tiny --contexts 256:2` tries all of it without a GPU.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cells import device_parts, number, table
from memory_floor import bandwidth, step_bytes
from random_models import LONGEST, SHAPES, random_drafter, random_target
from tossed_engine import TossedEngine

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.request import Request, Speculation
from eyas.errors import UserError
from eyas.plan.decoder import read_decoder
from eyas.plan.footprint import DrafterShape, Room, default_batched_tokens, footprint
from eyas.plan.kv_cache_dtype import KV_CACHE_DTYPES, KVCacheKind, read_kv_cache_dtype
from eyas.plan.memory import Footprint, blocks_of
from eyas.plan.quantisation import parse_quantisation
from eyas.sampling import Sampling
from eyas.target.model import Target
from eyas.train.journal import versions

Json = dict[str, Any]
CONTEXTS = ("1024:1,4,8", "32768:1,8", "131072:1,4")
WARM_UPS = 8
"""Decoding steps before timing, in which passes are captured."""
ROUND_OFF = 4
"""Extra steps, so that no answer ends during timing."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Prompt tokens, and numbers of users in ascending order."""

    tokens: int
    users: tuple[int, ...]

    @classmethod
    def parse(cls, words: str) -> "Context":
        """Parse TOKENS:USERS,USERS."""
        tokens, _, users = words.partition(":")
        try:
            made = cls(tokens=int(tokens), users=tuple(sorted({int(count) for count in users.split(",")})))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{words!r} is not TOKENS:USERS,USERS such as 32768:1,8") from None
        if made.tokens < 1 or made.users[0] < 1:
            raise argparse.ArgumentTypeError(f"{words!r}: tokens and users must be 1 or more")
        return made

    def longest(self, answer: int) -> int:
        """Tokens of prompt and answers, so that older answers in the prefix cache fit as well."""
        return self.tokens + len(self.users) * answer


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--contexts",
        type=Context.parse,
        nargs="+",
        default=[Context.parse(words) for words in CONTEXTS],
        metavar="TOKENS:USERS,USERS",
        help=f"default {' '.join(CONTEXTS)}",
    )
    parser.add_argument("--depth", type=int, default=3, help="of drafts; plain decoding is measured beside it")
    parser.add_argument("--length", type=float, default=3.0, help="mean acceptance length, tossed")
    parser.add_argument("--drafter-window", type=int, default=4096, help="tokens that the drafter sees; 0: all of them")
    parser.add_argument("--drafter-sinks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48, help="steps that are timed")
    parser.add_argument("--seconds", type=float, help="begin no cell after so long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="default bfloat16, on a CPU float32")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    try:
        print(table(Benchmark(arguments).run(), line_of))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


class Benchmark:
    """Measure all cells; each is written at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.device = torch.device(arguments.device)
        # One of each kind: plain, with drafts, and of the request that reads the prompt.
        self.answer = (WARM_UPS + arguments.steps + ROUND_OFF) * (2 + arguments.depth) + 2 + arguments.depth
        longest = max(context.longest(self.answer) for context in arguments.contexts)
        dtype = getattr(torch, arguments.dtype)
        self.target = random_target(arguments.shape, dtype, self.device, max(LONGEST, longest))
        self.drafter = random_drafter(arguments.shape, self.target)
        self.bandwidth = bandwidth(self.device)
        self._release()
        gc.freeze()  # as `eyas serve` does: a collector that went through the libraries would hold up a step
        self.rows: list[Json] = []
        self.notes: list[str] = []
        self._say(f"memory gives {self.bandwidth / 1e12:.3f} TB/s")

    def run(self) -> Json:
        """Measure all contexts; return the record."""
        for context in self.arguments.contexts:
            if self._is_over(f"context {context.tokens}"):
                continue
            try:
                self._measure(context)
            except (UserError, torch.cuda.OutOfMemoryError) as error:
                self._note(f"context {context.tokens}: {error}")
            self._release()
        return self._record()

    def _measure(self, context: Context) -> None:
        """Measure all numbers of users at one context, in one engine."""
        ours = LongEngine(self.target, self.drafter, context, self.answer, self.arguments)
        for users in context.users:
            cell = f"context {context.tokens}, {users} users"
            if self._is_over(cell):
                continue
            speed = ours.read(users)
            self._say(f"{cell}: prompts are read, {speed:,.0f} tokens/s")
            for depth in sorted({0, self.arguments.depth}):
                row = ours.decode(users, depth)
                seen = context.tokens + row.pop("answered") / 2
                floor = step_bytes(
                    *(self.target, self.drafter),
                    users=users,
                    context=seen,
                    depth=depth,
                    drafter_context=ours.drafter_context,
                    kv_cache_dtype=read_kv_cache_dtype(self.arguments.kv_cache_dtype),
                )
                row = {"context": context.tokens, "prompt_tokens_per_second": speed} | row
                self.rows.append(row | {"floor_ms": 1000 * floor / self.bandwidth} | ours.memory())
                print(line_of(with_growth(self.rows)[-1]), flush=True)
                if row["missed_blocks"]:
                    self._note(f"{cell}, depth {depth}: {row['missed_blocks']} blocks of prompts were read again")
                if self.arguments.out is not None:
                    self.arguments.out.write_text(json.dumps(self._record(), indent=1))

    def _record(self) -> Json:
        return {
            "versions": versions(),
            "arguments": {key: str(value) for key, value in vars(self.arguments).items()},
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "bytes_per_second": self.bandwidth,
            "seconds": self._elapsed,
            "notes": self.notes,
            "rows": with_growth(self.rows),
        }

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self.began

    def _is_over(self, what: str) -> bool:
        seconds = self.arguments.seconds
        over = seconds is not None and self._elapsed > seconds
        if over:
            self._note(f"{what}: left out, --seconds {seconds:g} are over")
        return over

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
            torch.cuda.reset_peak_memory_stats(self.device)


class LongEngine:
    """An engine for a context, with just enough memory."""

    def __init__(
        self, target: Target, drafter: Drafter, context: Context, answer: int, arguments: argparse.Namespace
    ) -> None:
        self._device, self._context, self._steps = target.device, context, arguments.steps
        self._vocab_size, self._depth = target.facts.vocab_size, arguments.depth
        window = arguments.drafter_window or None
        self.drafter_context = None if window is None else window + arguments.drafter_sinks
        users, longest = context.users[-1], context.longest(answer)
        kept = read_kv_cache_dtype(arguments.kv_cache_dtype)
        self.planned = planned(target, drafter, arguments.dtype, kept, users=users, max_model_len=longest)
        size = EngineConfig.block_size
        options = EngineConfig(
            max_num_seqs=users,
            max_model_len=longest,
            memory=users * blocks_of(longest, size) * size * self.planned.per_token,
            drafter_window=window,
            drafter_sinks=arguments.drafter_sinks,
            kv_cache_dtype=arguments.kv_cache_dtype,
        )
        self.engine = TossedEngine(
            target, drafter, config=options, length=arguments.length, depth=max(1, arguments.depth)
        )
        self.engine.proposer.warm_up()  # as `eyas serve` does: the first look for drift takes longer than others
        self._prompts: list[tuple[int, ...]] = []

    def read(self, users: int) -> float:
        """Prefill the prompts of these users that are not cached yet; return tokens per second."""
        chance = random.Random(users)
        more = users - len(self._prompts)
        new = [tuple(chance.choices(range(3, self._vocab_size), k=self._context.tokens)) for _ in range(more)]
        self._prompts += new
        started = time.perf_counter()
        for prompt in new:  # each for itself: one that is ready would go on decoding while others are read
            self._submit(prompt, self._depth, 2 + self._depth)  # one draft, before which the drafter reads it too
            self._finish()
        return more * self._context.tokens / (time.perf_counter() - started)

    def decode(self, users: int, depth: int) -> Json:
        """Time users that decode together."""
        engine, stats = self.engine, self.engine.stats
        answer = (WARM_UPS + self._steps + ROUND_OFF) * (1 + depth)
        asked, found = engine.block_manager.lookups, engine.block_manager.hits
        begun = dict.fromkeys([self._submit(prompt, depth, answer) for prompt in self._prompts[:users]], 0)
        while not all(begun.values()):
            self._step(begun)
        missed = engine.block_manager.lookups - asked - (engine.block_manager.hits - found)
        for _ in range(WARM_UPS):
            self._step(begun)
        engine.capture.events.clear()
        accepted, drafts, gaps = stats.accepted, stats.drafts, list[float]()
        before, last = sum(begun.values()), time.perf_counter()
        for _ in range(self._steps):
            self._step(begun)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        made, capture = stats.drafts - drafts, engine.capture
        row = {
            "users": users,
            "depth": depth,
            "ms_per_step": 1000 * statistics.median(gaps),
            "tokens_per_second": (sum(begun.values()) - before) / sum(gaps),
            "answered": (sum(begun.values()) + before) / users,
            "missed_blocks": missed,
            "acceptance_length": 1 + (stats.accepted - accepted) / max(1, made),
            "device_ms": {kind: capture.milliseconds(kind) for kind in list(capture.events)},
            "graphs": len(capture),
            "graph_mebibytes": capture.bytes >> 20,
        }
        for key in begun:
            engine.cancel(key)
        self._finish()
        return row

    def memory(self) -> Json:
        """Bytes on the device now, at the peak, and as planned; None on a CPU."""
        together = self.planned.beside_blocks + self.engine.budget.bytes
        if self._device.type != "cuda":
            return {"planned_bytes": together, "held_bytes": None, "peak_bytes": None}
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device)
        peak = total - free - kept + torch.cuda.max_memory_reserved(self._device)
        return {"planned_bytes": together, "held_bytes": total - free, "peak_bytes": peak}

    def _submit(self, prompt: tuple[int, ...], depth: int, answer: int) -> int:
        speculation = Speculation(mode="fixed", depth=depth) if depth else Speculation(mode="off")
        return self.engine.submit(
            Request(
                prompt=prompt,
                sampling=Sampling(temperature=0.0),
                max_new_tokens=answer,
                speculation=speculation,
                detokenize=False,
            )
        )

    def _step(self, counts: dict[int, int]) -> None:
        for piece in self.engine.step():
            counts[piece.key] += len(piece.tokens)

    def _finish(self) -> None:
        while self.engine.busy:
            self.engine.step()


def planned(
    target: Target, drafter: Drafter, dtype: str, kv_cache_dtype: KVCacheKind, *, users: int, max_model_len: int
) -> Footprint:
    """The plan of `eyas plan` for such an engine, from configurations alone."""
    decoder = read_decoder(target.model.config.to_dict(), target.facts.source)
    shape = DrafterShape(name="random", config=drafter.config, own_embedding=False, own_head=True)
    on_gpu = target.device.type != "cpu"
    room = Room(
        max_num_seqs=users,
        max_model_len=max_model_len,
        max_num_batched_tokens=default_batched_tokens(on_gpu=on_gpu, max_num_seqs=users),
    )
    quantisation, device = parse_quantisation(dtype), target.device.type
    return footprint(decoder, shape, quantisation, room=room, device=device, kv_cache_dtype=kv_cache_dtype)


def with_growth(rows: Sequence[Json]) -> list[Json]:
    """Add shares of the floor and of planned memory, and growth against short contexts."""
    grown = []
    for row in rows:
        alike = [other for other in rows if (other["users"], other["depth"]) == (row["users"], row["depth"])]
        base = min(alike, key=lambda other: other["context"])
        more_ms, more_floor_ms = (row[name] - base[name] for name in ("ms_per_step", "floor_ms"))
        grown.append(
            row
            | {
                "floor_share": row["floor_ms"] / row["ms_per_step"],
                "held_ratio": None if row["held_bytes"] is None else row["held_bytes"] / row["planned_bytes"],
                "growth": more_ms / more_floor_ms if base["context"] < row["context"] else None,
            }
        )
    return grown


def _gibibytes(count: int | None) -> str:
    return number(None if count is None else count / 2**30, ".2f")


def line_of(row: Json) -> str:
    """A cell as two lines of text."""
    return (
        f"{row['context']:>7} context {row['users']:>3} users  depth {row['depth']}"
        f"  ms/step {row['ms_per_step']:>8.3f}  floor {row['floor_ms']:>7.3f}: {row['floor_share']:.0%}"
        f"  growth {number(row['growth'], '.2f'):>5}"
        f"  held {_gibibytes(row['held_bytes'])} GiB, planned {_gibibytes(row['planned_bytes'])}:"
        f" {number(row['held_ratio'], '.3f')}, peak {_gibibytes(row['peak_bytes'])}"
        f"\n        tokens/s {row['tokens_per_second']:.1f}; {device_parts(row)}"
    )


if __name__ == "__main__":
    main()
