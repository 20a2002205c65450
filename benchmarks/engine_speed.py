"""Measures decoding speed without and with a drafter for several numbers of users. Prints a table and JSON.

    python benchmarks/engine_speed.py PROMPTS.jsonl --drafter FOLDER --users 1 --users 4 --users 16

Every mode answers the same prompts in turn, round after round, so that changes of the machine's speed affect all;
figures are medians over rounds. How many answers are those of plain decoding is counted, not assumed.

Two speeds are told apart. `tokens/s` is over all the time, reading prompts included. `decoding` is over the steps that
read no prompt: speculation speeds up only those, and prompts that are long beside their answers hide it.

    plain      the engine without speculation
    auto       with the drafter, as deep as the controller finds right
    depth N    with the drafter, always N deep
    tree DxWxB with the drafter, always trees of depth D, width W and at most B tokens
    suffix     without a drafter, with suffix drafts (--suffix), from each request's own text: the answers of the round
               before would be there otherwise
    both       with the drafter and with suffix drafts, whichever pays
    random     with a drafter of random weights, on auto: the worst that can happen
    generate   transformers' own generate, batches of as many prompts, padded on the left
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch

from eyas.data.files import read_conversations
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.evaluate.evaluate import looping
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.loading import load_drafter_for, load_target
from eyas.sampling import Sampling
from eyas.serve.speculative_config import read_tree
from eyas.target.model import Target
from eyas.train.journal import versions

Tokens = list[tuple[int, ...]]
OFF = Speculation(mode="off")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one mode for all prompts."""

    answers: Tokens
    seconds: float
    decoding_tokens: int
    """Tokens and seconds of decoding steps; zero if steps are not observable."""
    decoding_seconds: float
    acceptance_length: float = 1.0
    tokens_per_pass: float = 1.0

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def decoding_speed(self) -> float:
        """Tokens per second of decoding steps."""
        return self.decoding_tokens / self.decoding_seconds if self.decoding_tokens else nan


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--depth", type=int, action="append", default=[])
    parser.add_argument("--tree", action="append", default=[], help="DEPTHxWIDTHxBUDGET, such as 3x2x6")
    parser.add_argument("--suffix", action="store_true", help="measure suffix drafts too, alone and beside the drafter")
    parser.add_argument("--random", action="store_true", help="measure a random drafter too")
    parser.add_argument("--generate", action="store_true", help="measure transformers.generate too")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--limit", type=int, default=40, help="prompts, evenly spread over the file")
    parser.add_argument("--category", action="append", help="only prompts of this category; may be given again")
    parser.add_argument(
        "--without-loops", action="store_true", help="leave out prompts whose plain answers end in a loop"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto", help="auto, none, int8, int4 or gguf; on a CPU")
    parser.add_argument("--unpacked", action="store_true", help="on a CPU, use torch's own linears")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count what this thread computes instead of what passes meanwhile: for a busy machine, with one thread",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)

    options = {"dtype": arguments.dtype, "device": arguments.device}
    if arguments.unpacked:
        target = Target.load(arguments.target, **options)
    else:
        target = load_target(arguments.target, quantization=arguments.quantization, **options)
    print(f"quantization {target.quantization}")
    prompts = read_prompts(arguments.prompts, target, arguments.limit, arguments.category)
    if arguments.without_loops:
        asked, config = len(prompts), EngineConfig(max_num_seqs=max(arguments.users or [16]), max_model_len=2048)
        prompts = without_loops(Engine(target, config=config), prompts, arguments.max_tokens)
        print(f"{len(prompts)} of {asked} prompts are asked: the answers to the others end in a loop")
    record: dict[str, Any] = {"versions": versions(), "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    record["rows"] = []
    for users in arguments.users or [1, 4, 16]:
        modes = _modes(target, arguments, users)
        record["rows"] += _measure(modes, prompts, users, arguments.rounds)
    for row in record["rows"]:
        decoding = (
            f"{row['decoding_tokens_per_second'] or nan:8.1f} tokens/s  x{row['decoding_against_plain'] or nan:.2f}"
        )
        print(
            f"{row['users']:>5} users  {row['mode']:<11} {row['tokens_per_second']:8.1f} tokens/s"
            f"  x{row['against_plain']:.2f}  decoding {decoding}  length {row['acceptance_length']:.2f}"
            f"  {row['tokens_per_pass']:.2f} tokens/pass  same as plain: {row['same']} of {len(prompts)}"
        )
    text = json.dumps(record, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text)
    else:
        print(text)


Mode = Callable[[Sequence[tuple[int, ...]]], Run]


def _modes(target: Target, arguments: argparse.Namespace, users: int) -> dict[str, Mode]:
    clock = time.thread_time if arguments.cpu_time else time.perf_counter

    def engine(
        drafter: Drafter | None,
        speculation: Speculation,
        tree: Tree | None = None,
        suffix: SuffixConfig | None = None,
    ) -> Mode:
        # One engine for all rounds, as a server would be; the prefix cache would make later rounds easier.
        config = EngineConfig(max_num_seqs=users, max_model_len=2048, tree=tree, suffix=suffix)
        made = Engine(target, drafter, config=config, clock=clock)
        made.capture_graphs()

        def answer(prompts: Sequence[tuple[int, ...]]) -> Run:
            made.block_manager.forget()
            return run_requests(made, requests_of(target, prompts, arguments.max_tokens, speculation), clock)

        return answer

    def drafter(*, random: bool = False) -> Drafter:
        return read_drafter(arguments.drafter, target, random=random, packed=not arguments.unpacked)

    modes, own_text = {"plain": engine(None, OFF)}, SuffixConfig(max_cached_requests=0)
    if arguments.suffix:
        modes["suffix"] = engine(None, Speculation(), suffix=own_text)
    if arguments.drafter is not None:
        modes["auto"] = engine(drafter(), Speculation())
        if arguments.suffix:
            modes["both"] = engine(drafter(), Speculation(), suffix=own_text)
        for depth in arguments.depth:
            modes[f"depth {depth}"] = engine(drafter(), Speculation(mode="fixed", depth=depth))
        for text in arguments.tree:
            tree = read_tree(text, arguments.drafter)
            assert tree is not None
            modes[f"tree {text}"] = engine(drafter(), Speculation(mode="fixed", depth=tree.depth), tree)
        if arguments.random:
            modes["random"] = engine(drafter(random=True), Speculation())
    if arguments.generate:
        modes["generate"] = lambda prompts: _generate(target, prompts, users, arguments.max_tokens)
    return modes


def read_prompts(
    path: Path, target: Target, limit: int, categories: Sequence[str] | None = None
) -> list[tuple[int, ...]]:
    """First turns of a file's conversations as chats, at most `limit`, evenly over the file.

    Only those of some categories, if any are given.
    """
    conversations = [one for one in read_conversations(path) if not categories or one.category in categories]
    if not conversations:
        raise UserError(f"{path} has no conversation of the categories {list(categories or ())}; give others")
    step = max(1, len(conversations) // limit)
    return [
        tuple(target.encode_chat([dict(conversation.messages[0])])) for conversation in conversations[::step][:limit]
    ]


def without_loops(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """Prompts whose plain answers do not end in a loop, which every drafter predicts."""
    stops = engine.target.stop_ids()
    answers = engine.generate(requests_of(engine.target, prompts, max_tokens, OFF))
    told = [[token for token in answer.tokens if token not in stops] for answer in answers]
    kept = [prompt for prompt, tokens in zip(prompts, told, strict=True) if not looping(tokens)]
    if not kept:
        raise UserError(f"all {len(prompts)} answers end in a loop; give other prompts or fewer --max-tokens")
    return kept


def read_drafter(name: str, target: Target, *, random: bool = False, packed: bool = True) -> Drafter:
    """Load a drafter as eyas serves it, optionally with random weights."""
    if packed and not random:
        return load_drafter_for(target, name)
    loaded = load_drafter(name).to(device=target.device, dtype=target.dtype)
    loaded.share_target(*target.tables())
    made = _randomised(loaded) if random else loaded
    if target.device.type == "cpu" and packed:
        pack_linears(made, halve=True)
    return made


def requests_of(
    target: Target, prompts: Sequence[tuple[int, ...]], max_tokens: int, speculation: Speculation
) -> list[Request]:
    """A greedy request for each prompt."""
    return [
        Request(
            prompt=prompt,
            sampling=Sampling(),
            max_new_tokens=max_tokens,
            stop_ids=target.stop_ids(),
            speculation=speculation,
        )
        for prompt in prompts
    ]


def run_requests(engine: Engine, requests: Sequence[Request], clock: Callable[[], float] = time.perf_counter) -> Run:
    """Answer all requests together and time every step."""
    stats = engine.stats
    before = (stats.accepted, stats.drafts, stats.tokens, stats.passes)
    answers: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    total, decoding, decoded = 0.0, 0.0, 0
    while engine.busy:
        scheduler = engine.scheduler
        joins = scheduler.waiting > 0 and len(scheduler.running) < engine.config.max_num_seqs
        reads = joins or any(seq.pending > 1 for seq in scheduler.running)
        started = clock()
        pieces = engine.step()
        seconds = clock() - started
        total += seconds
        for piece in pieces:
            answers[piece.key] += piece.tokens
        if not reads:
            decoding += seconds
            decoded += sum(len(piece.tokens) for piece in pieces)
    after = (stats.accepted, stats.drafts, stats.tokens, stats.passes)
    accepted, drafts, tokens, passes = (b - a for a, b in zip(before, after, strict=True))
    return Run(
        answers=[tuple(tokens) for tokens in answers.values()],
        seconds=total,
        decoding_tokens=decoded,
        decoding_seconds=decoding,
        acceptance_length=1 + accepted / max(1, drafts),
        tokens_per_pass=tokens / passes,
    )


def _measure(
    modes: dict[str, Mode], prompts: Sequence[tuple[int, ...]], users: int, rounds: int
) -> list[dict[str, Any]]:
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for answer in modes.values():
        answer(prompts[: min(users, 4)])  # warm-up
    for _ in range(rounds):
        for mode, answer in modes.items():
            runs[mode].append(run := answer(prompts))
            print(f"{users} users, {mode}: {run.speed:.1f} tokens/s, decoding {run.decoding_speed:.1f}", flush=True)
    plain = runs["plain"]
    return [
        {
            "users": users,
            "mode": mode,
            "tokens_per_second": statistics.median(run.speed for run in these),
            "decoding_tokens_per_second": _median(run.decoding_speed for run in these),
            "against_plain": statistics.median(a.speed / b.speed for a, b in zip(these, plain, strict=True)),
            "decoding_against_plain": _median(
                a.decoding_speed / b.decoding_speed for a, b in zip(these, plain, strict=True)
            ),
            "all": [run.speed for run in these],
            "acceptance_length": these[-1].acceptance_length,
            "tokens_per_pass": these[-1].tokens_per_pass,
            "same": sum(a == b for a, b in zip(these[-1].answers, plain[-1].answers, strict=True)),
        }
        for mode, these in runs.items()
    ]


def _median(figures: Iterable[float]) -> float | None:
    """The median; None without figures, since JSON has no NaN."""
    median = statistics.median(figures)
    return None if isnan(median) else median


def _randomised(drafter: Drafter) -> Drafter:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            of_target = "embed_tokens" in name or (drafter.shares_head and "lm_head" in name)
            if parameter.ndim == 2 and not of_target:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return drafter


def _generate(target: Target, prompts: Sequence[tuple[int, ...]], users: int, max_tokens: int) -> Run:
    """Left-padded batches of prompts; a batch ends with its longest answer."""
    started = time.perf_counter()
    stops = sorted(target.stop_ids())
    answers: Tokens = []
    generate: Any = target.model.generate
    for start in range(0, len(prompts), users):
        batch = prompts[start : start + users]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch], device=target.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            output = generate(
                ids,
                attention_mask=mask.to(target.device),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=stops[0],
            )
        for row in output[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
            answers.append(tuple(row[:end]))
    return Run(answers=answers, seconds=time.perf_counter() - started, decoding_tokens=0, decoding_seconds=0.0)


if __name__ == "__main__":
    main()
