"""Measures the memory of `eyas serve` beyond Python and torch: at start, after one answer, after twenty.

    python benchmarks/server_memory.py [options of eyas serve]

Figures are MiB of the server's process, less those of a process that has imported torch and nothing else: resident
(Rss; files that are mapped count, as all of torch's code), and private and written to (Private_Dirty). Its helper for
grammars is a process of its own and stands apart. Libraries are what importing transformers and the server's modules
takes, as the server imports them. After answers, memory grows by the keys and values of their tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PORT = 8791
URL = f"http://127.0.0.1:{PORT}"
READY_SECONDS = 300.0
FIELDS = ("Rss", "Private_Dirty")
LIBRARIES = (
    "from eyas.cli.libraries import import_libraries; import_libraries(lean=True); "
    "import eyas.loading, eyas.engine.engine, eyas.serve.app, eyas.cli.serve; "
    "from transformers import AutoTokenizer, LlamaForCausalLM"
)
ANSWERS, TOKENS = 20, 64


def memory(pid: int) -> dict[str, float]:
    """MiB of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    words = {line.partition(":")[0]: line.split() for line in lines}
    return {field: int(words[field][1]) / 1024 for field in FIELDS}


def children(pid: int) -> list[int]:
    """Processes that it started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def of_imports(statement: str) -> dict[str, float]:
    """Memory of a process that imports only this."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{statement}\nprint(flush=True)\nimport time\ntime.sleep(600)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        return memory(process.pid)
    finally:
        process.kill()
        process.wait()


def until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the server."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5).read()
            time.sleep(5.0)  # its helper still reads the tokenizer
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)


def answer(number: int) -> None:
    """Ask a new question."""
    question = f"Tell me {number + 3} things about the number {number}, one in each line."
    body = json.dumps({"messages": [{"role": "user", "content": question}], "max_tokens": TOKENS}).encode()
    request = urllib.request.Request(f"{URL}/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=300).read()


def main() -> None:
    """Measure and print a line for each stage."""
    baseline = of_imports("import torch")

    def show(name: str, now: dict[str, float], less: dict[str, float] | None = None) -> None:
        print(f"{name:<28}" + "".join(f"{now[field] - (less or {}).get(field, 0):>15.0f}" for field in FIELDS))

    print(f"{'MiB':<28}" + "".join(f"{field:>15}" for field in FIELDS))
    show("python and torch", baseline)
    show("libraries", of_imports(LIBRARIES), baseline)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "eyas", "serve", *sys.argv[1:], "--port", str(PORT)]
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)
        try:
            until_ready(process, log)
            show("ready", memory(process.pid), baseline)
            for child in children(process.pid):
                show("  process for grammars", memory(child))
            for number in range(ANSWERS):
                answer(number)
                if number == 0:
                    show("after one answer", memory(process.pid), baseline)
            show(f"after {ANSWERS} answers", memory(process.pid), baseline)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
