"""How fast the engine decodes on a GPU, whatever the weights: random targets, acceptance decided by a coin.

    python benchmarks/engine_gpu.py --shape 8b --users 1 --users 64 --depth 3 --length 3.0

Speed does not depend on what weights say, acceptance does. So the target and the drafter are random, and how many
drafts of a round are accepted is tossed, to a given mean acceptance length, by a class of this file that stands in for
the engine's own comparison; everything else is the engine's. Prints a table and JSON: tokens per second from the first
prompt token to the last answer, and where a step's time goes.

    launch    until a pass is under way; where drafts are looked at first, until they are on the host
    collect   until the target's tokens are on the host and compared
    rest      schedule, commit, text
    device    the part in which captured kernels ran, medians

Times are of one GPU that nobody else uses, or they are worth little.
"""

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner.graph_capture import CapturedGraph, Function, GraphCapture
from eyas.sampling import Sampling
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.train.journal import versions

SHAPES = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--depth", type=int, action="append", help="0 decodes plainly; default 0 and 3")
    parser.add_argument("--length", type=float, default=2.5, help="mean acceptance length, tossed")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    target = random_target(arguments.shape, dtype, device)
    drafter = random_drafter(target)
    rows = []
    for users in arguments.users or [1, 4, 16, 64, 256]:
        for depth in arguments.depth or [0, 3]:
            row = measure(target, drafter if depth else None, users, depth, arguments)
            rows.append(row)
            print(
                f"{arguments.shape} {users:>4} users depth {depth} length {row['acceptance_length']:.2f}: "
                f"{row['tokens_per_second']:9.1f} tokens/s  {row['ms_per_step']:7.3f} ms/step = "
                f"launch {row['launch_ms']:.3f} + collect {row['collect_ms']:.3f} + rest {row['rest_ms']:.3f}; device: "
                f"draft {row['draft_device_ms']:.3f}, verify {row['verify_device_ms']:.3f}, "
                f"both {row['both_device_ms']:.3f}  "
                f"[{row['graphs']} graphs, {row['graph_mebibytes']} MiB]",
                flush=True,
            )
    record = {"versions": versions(), "arguments": {k: str(v) for k, v in vars(arguments).items()}, "rows": rows}
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)
    text = json.dumps(record, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text)
    else:
        print(text)


def random_target(shape: str, dtype: torch.dtype, device: torch.device) -> Target:
    """A Llama of this shape that knows nothing."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=shape != "8b", bos_token_id=0, eos_token_id=1
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "x" * len(ids))
    return Target(facts=facts_of(model.config, shape), model=model, tokenizer=tokenizer)


def random_drafter(target: Target) -> Drafter:
    """An EAGLE-3.1 drafter for it, one layer of the target's shape."""
    model: Any = target.model.config
    config = DrafterConfig(
        vocab_size=model.vocab_size,
        draft_vocab_size=min(32000, model.vocab_size),
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        aux_layer_ids=target.facts.default_aux_layer_ids(),
        max_position_embeddings=8192,
        fc_norm=True,
        norm_output=True,
    )
    with target.device:
        drafter = Drafter(config, own_head=True).to(target.device, target.dtype).eval().requires_grad_(False)
    return drafter.share_target(target.embedding(), target.head())


class TossedEngine(Engine):
    """Accepts drafts by a coin; times its parts."""

    def __init__(self, *arguments: Any, length: float, depth: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._chance, self._coin = chance_of(length, depth), random.Random(0)
        self.seconds = {"launch": 0.0, "collect": 0.0, "all": 0.0}
        self.steps = 0
        if self.graphs is not None:
            self.graphs.capture = TimedCapture(device=self.target.device)

    def step(self) -> Any:
        """Time steps that only decode, and capture nothing."""
        running = self.scheduler.running
        decodes = not self.scheduler.waiting and all(seq.pending == 1 for seq in running)
        before, started = dict(self.seconds), time.perf_counter()
        graphs = self._graphs()
        pieces = super().step()
        if decodes and graphs == self._graphs():
            self.steps += 1
            self.seconds["all"] += time.perf_counter() - started
        else:
            self.seconds = before
        return pieces

    def _graphs(self) -> int:
        return 0 if self.graphs is None else len(self.graphs.capture)

    def _launch(self, *given: Any) -> Any:
        return self._timed("launch", super()._launch, *given)

    def _collect(self, *given: Any) -> Any:
        results, output = self._timed("collect", super()._collect, *given)
        return [self._toss(result) if result.draft.tokens else result for result in results], output

    def _toss(self, result: Any) -> Any:
        drafts, accepted = result.draft.tokens, 0
        while accepted < len(drafts) and self._coin.random() < self._chance:
            accepted += 1
        return replace(result, nodes=list(range(accepted)), tokens=[*drafts[:accepted], result.tokens[-1]])

    def _timed(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        self.seconds[part] += time.perf_counter() - started
        return result


class TimedCapture(GraphCapture):
    """Brackets replays by events."""

    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events = defaultdict(list)

    def get(
        self,
        kind: str,
        bucket: tuple[int, ...],
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        function: Function,
        keep: Tensor | None = None,
    ) -> CapturedGraph | None:
        """The same, timed."""
        graph = super().get(kind, bucket, shapes, function, keep)
        if graph is None:
            return None

        def timed() -> Tensor:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            output = graph.run()
            pair[1].record()
            self.events[kind].append(pair)
            return output

        return replace(graph, run=timed)

    def milliseconds(self, kind: str) -> float:
        """The median replay so far."""
        torch.cuda.synchronize()
        times = [first.elapsed_time(last) for first, last in self.events[kind]]
        return statistics.median(times) if times else 0.0


def chance_of(length: float, depth: int) -> float:
    """The chance of each draft by which 1 + p + p^2 + ... + p^depth is the mean length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < length else (low, middle)
    return low


def measure(
    target: Target, drafter: Drafter | None, users: int, depth: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Answer as many prompts as there are users, several times."""
    longest = arguments.prompt + arguments.new
    options = EngineConfig(
        max_num_seqs=users,
        max_model_len=longest + 16,
        max_num_batched_tokens=max(8192, users * 8),
        graphs=not arguments.eager,
        prefix_cache=False,
    )
    engine = TossedEngine(target, drafter, config=options, length=arguments.length, depth=depth)
    chance = random.Random(users)
    speculation = Speculation(mode="fixed", depth=depth) if depth else Speculation(mode="off")

    def requests() -> Sequence[Request]:
        vocab = target.facts.vocab_size
        return [
            Request(
                prompt=tuple(chance.randrange(vocab) for _ in range(arguments.prompt)),
                sampling=Sampling(temperature=arguments.temperature),
                max_new_tokens=arguments.new,
                speculation=speculation,
                seed=user,
            )
            for user in range(users)
        ]

    for _ in range(2):
        engine.generate(requests())  # records what is to be recorded
    capture = engine.graphs.capture if engine.graphs is not None else None
    if isinstance(capture, TimedCapture):
        capture.events.clear()
    engine.steps, engine.seconds = 0, dict.fromkeys(engine.seconds, 0.0)
    before = (engine.stats.accepted, engine.stats.drafts)
    speeds = []
    for _ in range(arguments.rounds):
        asked = requests()
        started = time.perf_counter()
        answers = engine.generate(asked)
        speeds.append(sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - started))
    per_step = {part: 1000 * seconds / max(1, engine.steps) for part, seconds in engine.seconds.items()}
    drafts = engine.stats.drafts - before[1]
    timed = isinstance(capture, TimedCapture)
    return {
        "users": users,
        "depth": depth,
        "acceptance_length": 1 + (engine.stats.accepted - before[0]) / max(1, drafts),
        "tokens_per_second": statistics.median(speeds),
        "all": speeds,
        "steps": engine.steps,
        "ms_per_step": per_step["all"],
        "launch_ms": per_step["launch"],
        "collect_ms": per_step["collect"],
        "rest_ms": per_step["all"] - per_step["launch"] - per_step["collect"],
        "draft_device_ms": capture.milliseconds("draft") if timed else 0.0,
        "both_device_ms": capture.milliseconds("draft and verify") if timed else 0.0,
        "verify_device_ms": capture.milliseconds("verify") if timed else 0.0,
        "graphs": len(capture) if capture is not None else 0,
        "graph_mebibytes": engine.graphs.bytes >> 20 if engine.graphs is not None else 0,
    }


if __name__ == "__main__":
    main()
