"""Measures decoding on a CPU, quiet and beside other processes: plain, depth 3, auto; optionally llama.cpp.

    python benchmarks/cpu_speed.py                                     the default target
    python benchmarks/cpu_speed.py --llama BUILD --rounds 5            llama-batched-bench of a build of llama.cpp, too
    python benchmarks/cpu_speed.py --target model.gguf --drafter none  another file, without a drafter

The engines take turns of a quarter of a second (`first_requests.py`); llama.cpp, a process of its own, runs in turn
with whole rounds of them; both read prompts of 128 tokens. Tokens per second of all users together: medians over
rounds, with the lowest and the highest, in parts of plain decoding and of the first condition measured:

    quiet     nothing else is started here
    loop      one process that computes in pure Python
    loops     two of them
    copier    one process that copies 64 MiB of memory over and over
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from engine_speed import read_drafter
from first_requests import Server

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.loading import load_target
from eyas.sampling import Sampling
from eyas.target.locate import gguf_of
from eyas.target.model import Target

LOOP = "while True: pass"
COPIER = "a, b = bytearray(1 << 26), bytearray(1 << 26)\nwhile True: a[:] = b"
BESIDE = {"quiet": (), "loop": (LOOP,), "loops": (LOOP, LOOP), "copier": (COPIER,)}
PROMPT, ANSWER = 128, 96
"""Prompt and answer tokens of llama.cpp."""
Speeds = defaultdict[tuple[str, int, str], list[float]]
"""Tokens per second by condition, users and mode."""


@contextmanager
def beside(condition: str) -> Iterator[None]:
    """Run other processes until the block ends."""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for script in BESIDE[condition]]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ours(target: Target, drafter: Drafter | None, users: int, tokens: int) -> dict[str, float]:
    """Tokens per second of each mode, measured in turns."""
    ways = {"plain": Speculation(mode="off")}
    if drafter is not None:
        ways |= {"three deep": Speculation(mode="fixed", depth=3), "auto": Speculation()}
    servers = {
        way: Server(target, drafter if way != "plain" else None, how, users=users, count=max(4, users), tokens=tokens)
        for way, how in ways.items()
    }
    waiting = list(servers.values())
    while waiting:
        waiting = [server for server in waiting if server.take_turn()]
    return {way: server.run(tokens // 2).speed for way, server in servers.items()} | {
        "plain, prompts": prompts(target, users)
    }


def prompts(target: Target, users: int, times: int = 5) -> float:
    """Prefill speed of new prompts, tokens per second."""
    engine, seconds = Engine(target, config=EngineConfig(capture_ahead=True)), list[float]()
    for _ in range(times):
        asked = torch.randint(target.facts.vocab_size, (users, PROMPT)).tolist()
        began = time.perf_counter()
        for prompt in asked:
            engine.submit(Request(prompt=tuple(prompt), sampling=Sampling(), max_new_tokens=1))
        while engine.busy:
            engine.step()
        seconds.append(time.perf_counter() - began)
    return users * PROMPT / median(seconds)


def theirs(build: Path, model: Path, users: int) -> dict[str, float]:
    """Decoding and prefill speed of llama.cpp."""
    command = [build / "bin" / "llama-batched-bench", "-m", model, "-npp", PROMPT, "-ntg", ANSWER, "-npl", users]
    command += ["-c", users * (PROMPT + ANSWER), "-t", torch.get_num_threads(), "--output-format", "jsonl"]
    said = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
    record = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    return {"llama.cpp": record["speed_tg"], "llama.cpp, prompts": record["speed_pp"]}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--llama", type=Path, help="a build of llama.cpp")
    parser.add_argument("--users", type=int, action="append")
    parser.add_argument("--beside", choices=BESIDE, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    wanted = parser.parse_args()
    target = load_target(wanted.target, dtype="auto", device="cpu")
    drafter = None if wanted.drafter == "none" else read_drafter(wanted.drafter, target)
    file, seen = gguf_of(wanted.target), Speeds(list)
    if wanted.llama is not None and file is None:
        raise SystemExit(f"llama.cpp reads GGUF files, and {wanted.target} is none; leave --llama out")
    for _ in range(wanted.rounds):
        for users in wanted.users or (1, 4, 16):
            for condition in wanted.beside or BESIDE:
                with beside(condition):
                    speeds = ours(target, drafter, users, wanted.tokens)
                    if wanted.llama is not None and file is not None:
                        speeds |= theirs(wanted.llama, file, users)
                for who, speed in speeds.items():
                    seen[condition, users, who].append(speed)
    print(f"{'beside':8s} users  {'who':18s} {'tokens/s':>9s}  {'lowest to highest':18s} of plain  of the first")
    first = next(iter(seen))[0]
    for (condition, users, who), found in sorted(seen.items(), key=lambda item: item[0][1]):
        plain, quiet = (median(seen[key]) for key in ((condition, users, "plain"), (first, users, who)))
        speed, spread = median(found), f"{min(found):.1f} to {max(found):.1f}"
        parts = f"{speed / plain:8.3f}  {speed / quiet:8.3f}"
        print(f"{condition:8s} {users:5d}  {who:18s} {speed:9.1f}  {spread:18s} {parts}")


if __name__ == "__main__":
    main()
