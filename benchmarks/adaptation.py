"""Measures what `eyas adapt` gains on new traffic and loses elsewhere, by real decoding.

    python benchmarks/adaptation.py --general spec_bench.jsonl --out runs/adaptation
    python benchmarks/adaptation.py --general spec_bench.jsonl --out runs/adaptation --requests 60 --held-out 16 \\
        --general-limit 16 --max-tokens 60 --minutes 1
    python benchmarks/adaptation.py --general spec_bench.jsonl --out runs/adaptation --replay-prompts prompts.jsonl \\
        --variant "--lr 1e-3 --anchor 0" --variant "--lr 3e-4 --replay REPLAY"

Tickets of `adaptation_traffic.py` are answered by the target on the engine, the drafter is adapted to these answers,
and `eyas eval` decodes tickets that were not trained on, and the general prompts, with the old drafter and the new one.
Each `--variant` is an adaptation of its own with these options; REPLAY in it is the file of answers to
`--replay-prompts`. What is in `--out` already is not done again.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from adaptation_traffic import make_requests

from eyas.train.adaptation.judge import AcceptanceChange, compare, interval_of

TRAFFIC = "tickets"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", type=Path, help="prompts of another kind, such as Spec-Bench")
    parser.add_argument("--general-limit", type=int, default=480)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--requests", type=int, default=2000, help="tickets that are answered and adapted to")
    parser.add_argument("--held-out", type=int, default=200, help="further tickets that are decoded")
    parser.add_argument("--max-tokens", type=int, default=150, help="of an answer")
    parser.add_argument("--depth", type=int, action="append", help="of drafts; 3, 5 and 7 if left out")
    parser.add_argument("--minutes", type=float, help="of training at most, for every variant")
    parser.add_argument("--variant", action="append", help="options of `eyas adapt`; repeat for several")
    parser.add_argument("--replay-prompts", type=Path, help="general prompts whose answers are REPLAY")
    parser.add_argument("--replay-limit", type=int, default=500)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    prompts = _prompts(arguments)
    answers = _answered(arguments, prompts["traffic"], "answers", seconds)
    replay = _answered(arguments, prompts["replay"], "replay-answers", seconds) if "replay" in prompts else None
    drafters, adaptations = {"before": arguments.drafter}, dict[str, Any]()
    for number, words in enumerate(arguments.variant or [""], start=1):
        name = f"after {words}".strip()
        drafters[name], adaptations[name] = _adapted(arguments, answers, replay, words, number, seconds)
    depths = arguments.depth or [3, 5, 7]
    decoded = _decoded(arguments, prompts, drafters, depths, seconds)
    rows = [
        {"variant": name, "depth": depth, "on": kind, **change.as_json()}
        for name in adaptations
        for depth in depths
        for kind, change in changes_of(decoded, drafters["before"], drafters[name], depth).items()
    ]
    record = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "adaptations": adaptations,
        "decoded": rows,
        "versions": decoded["versions"],
    }
    (arguments.out / "adaptation.json").write_text(json.dumps(record, indent=1))
    _print(record, adaptations)


def _prompts(arguments: argparse.Namespace) -> dict[str, Path]:
    """Write the files of prompts: traffic, held-out traffic, general ones."""
    made = make_requests(arguments.requests + arguments.held_out, seed=0)
    lines = {"traffic": made[: arguments.requests], "held-out": made[arguments.requests :]}
    for name, given, limit in (
        ("general", arguments.general, arguments.general_limit),
        ("replay", arguments.replay_prompts, arguments.replay_limit),
    ):
        if given is not None:
            lines_of = given.read_text(encoding="utf-8").split("\n")  # texts may contain other separators
            records = [json.loads(line) for line in lines_of if line.strip()]
            step = max(1, len(records) // limit)  # evenly over the file, which is sorted by category
            lines[name] = records[::step][:limit]
    files = {name: arguments.out / f"{name}.jsonl" for name in lines}
    for name, file in files.items():
        file.write_text("".join(json.dumps(line) + "\n" for line in lines[name]), encoding="utf-8")
    return files


def _answered(arguments: argparse.Namespace, file: Path, name: str, seconds: dict[str, float]) -> Path:
    answers: Path = arguments.out / f"{name}.jsonl"
    words = ["data", "answer", file, "--out", answers, "--target", arguments.target]
    _eyas(name, seconds, *words, "--max-tokens", arguments.max_tokens, "--turns", 1, "--device", arguments.device)
    return answers


def _adapted(
    arguments: argparse.Namespace,
    answers: Path,
    replay: Path | None,
    words: str,
    number: int,
    seconds: dict[str, float],
) -> tuple[str, dict[str, Any]]:
    """The adapted drafter, accepted or not, and its record."""
    folder = arguments.out / f"adapted-{number}"
    if not (folder / "record.json").exists():
        given = [str(replay) if word == "REPLAY" else word for word in shlex.split(words)]
        given += ["--target", arguments.target, "--out", str(folder), "--device", arguments.device]
        given += ["--resume"] if (folder / "training" / "checkpoints").exists() else []
        given += [] if arguments.minutes is None else ["--minutes", str(arguments.minutes)]
        _eyas(f"adapt {words}".strip(), seconds, "adapt", arguments.drafter, answers, *given, allowed=(0, 1))
    record = json.loads((folder / "record.json").read_text())
    drafter = folder / "drafter" if record["kept"] else folder / "training" / "drafter"
    names = ("kept", "verdict", "doctor", "steps", "seconds", "changes", "from", "versions")
    told = {name: record[name] for name in names}
    return str(drafter), told


def _decoded(
    arguments: argparse.Namespace,
    prompts: dict[str, Path],
    drafters: dict[str, str],
    depths: list[int],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Decode the held-out prompts with every drafter at every depth."""
    files = [prompts[name] for name in ("held-out", "general") if name in prompts]
    words: list[object] = ["eval", *files, "--target", arguments.target, "--max-tokens", arguments.max_tokens]
    words += [word for drafter in drafters.values() for word in ("--drafter", drafter)]
    words += [word for depth in depths for word in ("--depth", depth)]
    _eyas("eval", seconds, *words, "--no-estimate", "--device", arguments.device, "--out", arguments.out / "eval")
    record: dict[str, Any] = json.loads((arguments.out / "eval" / "eval.json").read_text())
    return record


def changes_of(record: dict[str, Any], before: str, after: str, depth: int) -> dict[str, AcceptanceChange]:
    """Changes on the traffic and on general prompts, with and without looping answers."""
    (group,) = record["groups"]
    kinds = {one["key"]: "traffic" if one["category"] == TRAFFIC else "general" for one in group["asked"]}
    names = {source: name for name, source in record["drafters"].items()}
    cells = {cell["drafter"]: cell["by_answer"] for cell in group["measured"] if cell["depth"] == depth}
    pairs: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for old, new in zip(cells[names[before]], cells[names[after]], strict=True):
        assert old["key"] == new["key"]
        if old["accepted"] and new["accepted"]:
            counts = _counts(old["accepted"], depth), _counts(new["accepted"], depth)
            pairs[kinds[old["key"]]].append(counts)
            if not old["looping"] and not new["looping"]:
                pairs[f"{kinds[old['key']]}, no loops"].append(counts)
    return {kind: compare(*(np.array(side) for side in zip(*own, strict=True))) for kind, own in sorted(pairs.items())}


def _counts(accepted: list[int], depth: int) -> list[int]:
    return [len(accepted), *(sum(drafts > k for drafts in accepted) for k in range(depth))]


def _eyas(name: str, seconds: dict[str, float], *words: object, allowed: tuple[int, ...] = (0,)) -> None:
    started = time.perf_counter()
    line = [sys.executable, "-m", "eyas", *map(str, words)]
    print(f"$ {shlex.join(['eyas', *map(str, words)])}", file=sys.stderr, flush=True)
    code = subprocess.run(line, check=False, stdout=sys.stderr).returncode
    if code not in allowed:
        raise SystemExit(f"eyas {words[0]} ended with code {code}")
    seconds[name] = time.perf_counter() - started


def _print(record: dict[str, Any], adaptations: dict[str, Any]) -> None:
    headings = ["variant", "depth", "on", "prompts", "before", "after", "change", "95 % interval"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for row in record["decoded"]:
        gain = argparse.Namespace(**row["gain"])
        cells = [row["variant"], row["depth"], row["on"], row["conversations"]]
        cells += [f"{row[when]['acceptance_length']:.3f}" for when in ("before", "after")]
        print(f"| {' | '.join(map(str, cells))} | {gain.value:+.1%} | {interval_of(gain)} |")
    for name, told in adaptations.items():
        spent = told["seconds"]
        print(
            f"{name}: kept {told['kept']}; {told['steps']} steps, {spent['training'] / 60:.2f} minutes of training, "
            f"{spent['total'] / 60:.2f} in all on {told['versions']['device']}; "
            f"doctor: {told['doctor'].get('text', told['doctor'])}"
        )
    print(", ".join(f"{name} {value:.0f} s" for name, value in record["seconds"].items()))


if __name__ == "__main__":
    main()
