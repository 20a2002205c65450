"""How fast the engine decodes, plainly and with a drafter, for several numbers of users. Prints a table and JSON.

    python benchmarks/engine_speed.py PROMPTS.jsonl --drafter FOLDER --users 1 --users 4 --users 16

Every mode answers the same prompts in turn, round after round, so that a machine's moods fall on all of them alike;
figures are medians over rounds. How many answers are those of plain decoding is counted, not assumed.

    plain      the engine without speculation
    auto       with the drafter, as deep as the controller finds right
    depth N    with the drafter, always N deep
    random     with a drafter of random weights, on auto: the worst that can happen
    generate   transformers' own generate, batches of as many prompts, padded on the left
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.options import EngineOptions
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.target.model import Target
from eyas.target.packed_linear import pack_linears
from eyas.train.conversations import read_conversations
from eyas.train.journal import versions

Tokens = list[tuple[int, ...]]
OFF = Speculation(mode="off")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--depth", type=int, action="append", default=[])
    parser.add_argument("--random", action="store_true", help="measure a random drafter too")
    parser.add_argument("--generate", action="store_true", help="measure transformers.generate too")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--limit", type=int, default=40, help="prompts, evenly spread over the file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--unpacked", action="store_true", help="on a CPU, use torch's own linears")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target = Target.load(arguments.target, dtype=arguments.dtype, device=arguments.device)
    conversations = list(read_conversations(arguments.prompts))
    step = max(1, len(conversations) // arguments.limit)
    prompts = [
        tuple(target.encode_chat([dict(conversation.messages[0])]))
        for conversation in conversations[::step][: arguments.limit]
    ]
    if target.device.type == "cpu" and not arguments.unpacked:
        print(pack_linears(target.model).words)
    record: dict[str, Any] = {"versions": versions(), "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    record["rows"] = []
    for users in arguments.users or [1, 4, 16]:
        modes = _modes(target, arguments, users)
        record["rows"] += _measure(modes, prompts, users, arguments.rounds)
    for row in record["rows"]:
        print(
            f"{row['users']:>5} users  {row['mode']:<10} {row['tokens_per_second']:8.1f} tokens/s"
            f"  x{row['against_plain']:.2f}  length {row['acceptance_length']:.2f}"
            f"  {row['tokens_per_pass']:.2f} tokens/pass  same as plain: {row['same']} of {len(prompts)}"
        )
    text = json.dumps(record, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text)
    else:
        print(text)


Mode = Callable[[Sequence[tuple[int, ...]]], tuple[Tokens, float, float]]
"""Answers prompts: tokens, acceptance length, tokens per pass."""


def _modes(target: Target, arguments: argparse.Namespace, users: int) -> dict[str, Mode]:
    options = EngineOptions(max_rows=users, max_length=2048)

    def engine(drafter: Drafter | None, speculation: Speculation) -> Mode:
        # One engine for all rounds, as a server would be; the prefix cache would make later rounds easier.
        made = Engine(target, drafter, options=options)

        def answer(prompts: Sequence[tuple[int, ...]]) -> tuple[Tokens, float, float]:
            made.pool.forget()
            before = (made.tally.accepted, made.tally.drafts, made.tally.tokens, made.tally.passes)
            answers = made.generate(
                Request(
                    prompt=prompt,
                    sampling=Sampling(),
                    max_new_tokens=arguments.max_tokens,
                    stop_ids=target.stop_ids(),
                    speculation=speculation,
                )
                for prompt in prompts
            )
            after = (made.tally.accepted, made.tally.drafts, made.tally.tokens, made.tally.passes)
            accepted, drafts, tokens, passes = (b - a for a, b in zip(before, after, strict=True))
            return [one.tokens for one in answers], 1 + accepted / max(1, drafts), tokens / passes

        return answer

    def drafter(*, random: bool = False) -> Drafter:
        loaded = _load(arguments.drafter, target)
        made = _randomised(loaded) if random else loaded
        if target.device.type == "cpu" and not arguments.unpacked:
            pack_linears(made)
        return made

    modes = {"plain": engine(None, OFF)}
    if arguments.drafter is not None:
        modes["auto"] = engine(drafter(), Speculation())
        for depth in arguments.depth:
            modes[f"depth {depth}"] = engine(drafter(), Speculation(mode="fixed", depth=depth))
        if arguments.random:
            modes["random"] = engine(drafter(random=True), Speculation())
    if arguments.generate:
        modes["generate"] = lambda prompts: (_generate(target, prompts, users, arguments.max_tokens), 1.0, 1.0)
    return modes


def _measure(
    modes: dict[str, Mode], prompts: Sequence[tuple[int, ...]], users: int, rounds: int
) -> list[dict[str, Any]]:
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    rows: dict[str, dict[str, Any]] = {}
    for answer in modes.values():
        answer(prompts[: min(users, 4)])  # warm-up
    for _ in range(rounds):
        plain: Tokens = []
        for mode, answer in modes.items():
            started = time.perf_counter()
            tokens, length, per_pass = answer(prompts)
            speeds[mode].append(sum(map(len, tokens)) / (time.perf_counter() - started))
            plain = plain or tokens
            same = sum(a == b for a, b in zip(tokens, plain, strict=True))
            rows[mode] = {"acceptance_length": length, "tokens_per_pass": per_pass, "same": same}
            print(f"{users} users, {mode}: {speeds[mode][-1]:.1f} tokens/s", flush=True)
    ratios = {
        mode: statistics.median(a / b for a, b in zip(speeds[mode], speeds["plain"], strict=True)) for mode in modes
    }
    return [
        {
            "users": users,
            "mode": mode,
            "tokens_per_second": statistics.median(speeds[mode]),
            "all": speeds[mode],
            "against_plain": ratios[mode],
            **rows[mode],
        }
        for mode in modes
    ]


def _load(source: str, target: Target) -> Drafter:
    drafter = load_drafter(source).to(device=target.device, dtype=target.dtype)
    return drafter.share_target(target.embedding(), target.head())


def _randomised(drafter: Drafter) -> Drafter:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            of_target = "embed_tokens" in name or (drafter.shares_head and "lm_head" in name)
            if parameter.ndim == 2 and not of_target:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return drafter


def _generate(target: Target, prompts: Sequence[tuple[int, ...]], users: int, max_tokens: int) -> Tokens:
    """Batches of prompts, padded on the left; a batch ends with its longest answer."""
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
    return answers


if __name__ == "__main__":
    main()
