"""Open-loop load on `eyas serve` and `vllm serve`: requests arrive at a fixed rate, whatever was answered so far.

    python benchmarks/arrivals.py spec_bench.jsonl --rate 1 --rate 4 --vllm-python .venv-vllm/bin/python

Prompts arrive as a Poisson process while others are being answered, which is what a closed batch never shows: the wait
for the first token (median and 99th percentile), the pause between tokens (99th percentile) and tokens per second, at
every rate. The client is `vllm bench serve` where there is a vLLM, else `eyas bench --rate`; both servers get the same
one. Servers run side by side and are asked in turn, after a warm-up that is not counted; no prompt comes twice, so
prefix caches help neither.

A rate takes prompts / rate seconds for each server, and the start of the servers comes first; rows are printed and
written to --out as they come.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_process import installed

from eyas.bench.process import running_server
from eyas.bench.workload import read_workload
from eyas.drafter.checkpoint import read_checkpoint, write_checkpoint
from eyas.drafter.shipped import choose_drafter
from eyas.errors import UserError
from eyas.target.locate import locate
from eyas.train.journal import versions

Json = dict[str, Any]
MODEL = "target"
WARM_UP = 8
COLUMNS = ("first_ms_p50", "first_ms_p99", "gap_ms_p99", "tokens_per_second")


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rate", type=float, action="append", help="requests per second; default 1 and 4")
    parser.add_argument("--limit", type=int, default=64, help="prompts at each rate, evenly over categories")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--depth", type=int, default=0, help="of vLLM's drafts, with the same drafter; 0 is plain")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eyas-options", default="", help="further options of eyas serve")
    parser.add_argument("--vllm-options", default="", help="further options of vllm serve")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--start-seconds", type=float, default=600.0)
    parser.add_argument(
        "--out", type=Path, default=Path("arrivals"), help="folder for arrivals.json and the clients' own"
    )
    arguments = parser.parse_args()
    arguments.rate = arguments.rate or [1.0, 4.0]
    try:
        asyncio.run(measure(arguments))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


async def measure(arguments: argparse.Namespace) -> None:
    """Start the servers and measure them in turn at every rate."""
    began, out, vllm = time.perf_counter(), arguments.out, installed(arguments.vllm_python)
    out.mkdir(parents=True, exist_ok=True)
    warm, *by_rate = prompt_files(arguments)
    record: Json = {
        "versions": versions() | {"vllm": vllm},
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "notes": [] if vllm else ["vLLM is not measured: no --vllm-python is given; the client is eyas bench"],
        "rows": [],
    }
    print(*record["notes"], sep="\n", flush=True)
    async with AsyncExitStack() as stack:
        urls = {}
        for name, command in commands(arguments, vllm is not None).items():
            started = running_server(command, api_key=None, seconds=arguments.start_seconds)
            urls[name] = (await stack.enter_async_context(started)).url
            _client(own_client(urls[name], warm, out / f"warm-{name}", ["--users", "4"], arguments.max_tokens))
            print(f"{time.perf_counter() - began:5.0f} s  {name} serves and is warm", flush=True)
        print(heading(), flush=True)
        for rate, prompts in zip(arguments.rate, by_rate, strict=True):
            for name, url in urls.items():
                row = ask(name, url, rate, prompts, arguments, with_vllm=vllm is not None)
                record["rows"].append(row)
                record["seconds"] = time.perf_counter() - began
                print(line_of(row), flush=True)
                (out / "arrivals.json").write_text(json.dumps(record, indent=1))


def prompt_files(arguments: argparse.Namespace) -> list[Path]:
    """Files of prompts for the warm-up and each rate, all distinct, so that no prefix cache helps."""
    counts = [WARM_UP, *[arguments.limit] * len(arguments.rate)]
    tasks = iter(read_workload([arguments.prompts], limit=sum(counts), turns=1, seed=0).tasks)
    files = []
    for place, count in enumerate(counts):
        lines = [json.dumps({"prompt": task.turns[0]}) + "\n" for task in islice(tasks, count)]
        if len(lines) < count:
            raise UserError(
                f"{arguments.prompts} has fewer than {sum(counts)} prompts, which {len(counts) - 1} rates of "
                f"--limit {arguments.limit} and a warm-up of {WARM_UP} need; lower --limit"
            )
        files.append(arguments.out / f"prompts-{place}.jsonl")
        files[-1].write_text("".join(lines))
    return files


def commands(arguments: argparse.Namespace, with_vllm: bool) -> dict[str, str]:
    """The command line of each server."""
    same = (
        f"--served-model-name {MODEL} --max-num-seqs {arguments.max_num_seqs} "
        f"--max-model-len {arguments.max_model_len} --dtype {arguments.dtype}"
    )
    found = {
        "eyas": f"{shlex.quote(sys.executable)} -m eyas serve {shlex.quote(arguments.target)} {same} "
        f"--device {arguments.device} {arguments.eyas_options}".strip()
    }
    if with_vllm:
        command = (
            f"VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 {shlex.quote(arguments.vllm_python)} -m vllm.entrypoints.cli.main "
            f"serve {shlex.quote(str(locate(arguments.target)))} {same}"
        )
        if arguments.depth:
            drafter, folder = choose_drafter(None, arguments.target), arguments.out / "drafter"
            if drafter is None:
                raise UserError(
                    f"no drafter comes with eyas for {arguments.target}; leave --depth {arguments.depth} out"
                )
            write_checkpoint(read_checkpoint(drafter), folder, layout="vllm", replace=True)
            config = {"model": str(folder), "method": "eagle3", "num_speculative_tokens": arguments.depth}
            command += f" --speculative-config {shlex.quote(json.dumps(config))}"
        found["vllm"] = f"{command} {arguments.vllm_options}".strip()
    return found


def ask(name: str, url: str, rate: float, prompts: Path, arguments: argparse.Namespace, *, with_vllm: bool) -> Json:
    """Measure one server at one rate."""
    if not with_vllm:
        folder = arguments.out / f"{name}-{rate:g}"
        _client(own_client(url, prompts, folder, ["--rate", f"{rate:g}"], arguments.max_tokens))
        return row_of_eyas(name, json.loads((folder / "bench.json").read_text()))
    file = arguments.out / f"{name}-{rate:g}.json"
    _client(vllm_client(url, rate, prompts, file, arguments))
    return row_of_vllm(name, rate, json.loads(file.read_text()))


def own_client(url: str, prompts: Path, folder: Path, load: Sequence[str], max_tokens: int) -> list[str]:
    """The `eyas bench` command: every prompt once, as served."""
    words = [sys.executable, "-m", "eyas", "bench", "--url", url, "--workload", str(prompts), "--limit", "0", *load]
    words += ["--max-tokens", str(max_tokens), "--repetitions", "1", "--warmup", "0", "--no-prefill", "--no-baseline"]
    return [*words, "--out", str(folder)]


def vllm_client(url: str, rate: float, prompts: Path, file: Path, arguments: argparse.Namespace) -> list[str]:
    """The `vllm bench serve` command for the same prompts."""
    words = [arguments.vllm_python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", url]
    words += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", MODEL]
    words += ["--tokenizer", str(locate(arguments.target)), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    words += ["--custom-output-len", str(arguments.max_tokens), "--skip-chat-template", "--disable-shuffle"]
    words += ["--num-prompts", str(arguments.limit), "--request-rate", f"{rate:g}", "--temperature", "0", "--seed", "0"]
    words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--save-result"]
    return [*words, "--result-dir", str(file.parent), "--result-filename", file.name]


def _client(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "; ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        raise UserError(f"{shlex.join(words)} ended with {done.returncode}: {last}")


def row_of_eyas(name: str, record: Mapping[str, Any]) -> Json:
    """A row from the record of `eyas bench`."""
    (row,) = record["rows"]
    return {
        "server": name,
        "client": "eyas bench",
        "rate": row["rate"],
        "requests": row["requests"],
        "failed": row["failed"],
        "first_ms_p50": row["time_to_first_token_ms"]["p50"],
        "first_ms_p99": row["time_to_first_token_ms"]["p99"],
        "gap_ms_p99": row["inter_token_latency_ms"]["p99"],
        "tokens_per_second": row["tokens_per_second"] and row["tokens_per_second"]["median"],
    }


def row_of_vllm(name: str, rate: float, result: Mapping[str, Any]) -> Json:
    """A row from the result of `vllm bench serve`."""
    return {
        "server": name,
        "client": "vllm bench serve",
        "rate": rate,
        "requests": result["completed"],
        "failed": result.get("failed", 0),
        "first_ms_p50": result["median_ttft_ms"],
        "first_ms_p99": result["p99_ttft_ms"],
        "gap_ms_p99": result["p99_itl_ms"],
        "tokens_per_second": result["output_throughput"],
    }


def heading() -> str:
    """Names of the columns of `line_of`."""
    heads = ("first token p50 ms", "p99 ms", "between tokens p99 ms", "tokens/s", "answered", "failed")
    return f"{'server':<8}{'rate':>8}" + "".join(f"{head:>23}" for head in heads)


def line_of(row: Mapping[str, Any]) -> str:
    """A row as text."""
    figures = ["-" if row[key] is None else f"{row[key]:.1f}" for key in COLUMNS]
    cells = [*figures, str(row["requests"]), str(row["failed"])]
    return f"{row['server']:<8}{row['rate']:>8g}" + "".join(f"{cell:>23}" for cell in cells)


if __name__ == "__main__":
    main()
