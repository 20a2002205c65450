"""Checks that chat templates of GGUF files render as in llama.cpp, character by character.

    python benchmarks/gguf_templates.py --llama-server build/bin/llama-server model.gguf [--templates FOLDER]

Every conversation is rendered here as `eyas serve` does it, and by llama-server's `/apply-template`. The file's own
template comes first, then every *.jinja of the folder in its place (`--chat-template-file`). llama.cpp tells templates
what nobody asked it to (to think, to keep earlier thoughts, the date). Here eyas is told the same; with --as-served
both are told what a request says. A conversation that both refuse counts as the same. What differs is told with the
letters around the first difference; the reasons that are known are in docs/engine.md.
"""

import argparse
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from chat_templates import ANSWER, CALL, THOUGHT, USER, WEATHER
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eyas.data.chat_encoder import message_forms
from eyas.target.chat_template import TEMPLATE_ERRORS, ChatTemplateOptions, render_chat
from eyas.target.gguf_file import GgufFile
from eyas.target.gguf_tokenizer import write_tokenizer

ANY_SIZE = 2**31
"""Config of a vocabulary without embeddings."""
AROUND = 40
"""Characters shown around a difference."""
START_SECONDS = 120

MORE = {"role": "user", "content": "And of  Italy?\n\n  (Größe — 日本 🦅)"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "call_1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A conversation to be rendered with the generation prompt."""

    messages: list[dict[str, Any]]
    tools: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "one turn": Case(messages=[USER]),
    "system": Case(messages=[SYSTEM, USER]),
    "several turns": Case(messages=[SYSTEM, USER, ANSWER, MORE, ANSWER, USER]),
    "no system, two turns": Case(messages=[USER, ANSWER, MORE]),
    "tools": Case(messages=[SYSTEM, USER], tools=True),
    "tools without a system prompt": Case(messages=[USER], tools=True),
    "a call and its result": Case(messages=[USER, CALLING, RESULT], tools=True),
    "calls in earlier turns": Case(messages=[SYSTEM, USER, CALLING, RESULT, ANSWER, MORE], tools=True),
    "two calls": Case(
        messages=[
            USER,
            {**CALLING, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
            RESULT,
            {**RESULT, "tool_call_id": "call_2"},
        ],
        tools=True,
    ),
    "thinking in an earlier answer": Case(messages=[USER, {**ANSWER, "reasoning_content": THOUGHT}, MORE]),
    "thinking before a call": Case(messages=[USER, {**CALLING, "reasoning_content": THOUGHT}, RESULT], tools=True),
    "enable_thinking true": Case(messages=[USER], variables={"enable_thinking": True}),
    "enable_thinking false": Case(messages=[USER], variables={"enable_thinking": False}),
}


def told_both(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a request; thinking is set, because llama.cpp otherwise infers it from the template."""
    thinks = variables.get("enable_thinking", True)
    return {"enable_thinking": thinks, "thinking": thinks, **variables}


def set_by_llama() -> dict[str, Any]:
    """Variables that llama.cpp sets and transformers and vLLM do not: keep all thoughts, the date."""
    now = datetime.now()
    return {
        "preserve_thinking": True,
        "clear_thinking": False,
        "truncate_history_thinking": False,
        "drop_thinking": False,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
    }


def main() -> None:
    """Compare, and exit with 1 if any conversation differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="GGUF")
    parser.add_argument("--llama-server", required=True, help="llama.cpp's program")
    parser.add_argument("--templates", type=Path, help="a folder of *.jinja files")
    parser.add_argument("--as-served", action="store_true", help="tell both only what a request says")
    parser.add_argument("--only", default="", help="templates whose name contains this")
    options = parser.parse_args()
    paths = sorted(options.templates.glob("*.jinja")) if options.templates else []
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(GgufFile(options.model), Path(folder), vocab_size=ANY_SIZE, max_length=ANY_SIZE)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    for path in (None, *paths):
        if options.only in (path or options.model).name:
            differ += compare(options.model, path, tokenizer, options.llama_server, as_served=options.as_served)
    raise SystemExit(1 if differ else 0)


def compare(
    model: Path, template: Path | None, tokenizer: PreTrainedTokenizerBase, program: str, *, as_served: bool = False
) -> int:
    """Print how many conversations agree; return how many differ."""
    name, differ, refused = (template or model).name, 0, 0
    if template is not None:
        tokenizer.chat_template = template.read_text()
    with started(model, template, program) as (address, failure):
        if failure:
            print(f"{name}: llama.cpp does not start with it: {failure}", flush=True)
            return 1
        for case_name, case in CASES.items():
            asked = case if as_served else replace(case, variables=told_both(case.variables))
            more = {} if as_served else set_by_llama()
            ours = rendered(tokenizer, replace(asked, variables={**more, **asked.variables}))
            theirs = rendered_by_llama(address, asked)
            if ours is None and theirs is None:
                refused += 1
            elif ours != theirs:
                differ += 1
                print(f"{name}: {case_name}: {difference(ours, theirs)}", flush=True)
    same = len(CASES) - differ
    print(f"{name}: {same} of {len(CASES)} conversations are the same, {refused} of them refused by both", flush=True)
    return differ


def rendered(tokenizer: PreTrainedTokenizerBase, case: Case) -> str | None:
    """Render as the server does; None if the template refuses."""
    try:
        options = ChatTemplateOptions(variables=case.variables)
        return render_chat(tokenizer, next(message_forms(case.messages)), [WEATHER] if case.tools else None, options)
    except TEMPLATE_ERRORS:
        return None


def rendered_by_llama(address: str, case: Case) -> str | None:
    """Render by llama-server; None if it refuses."""
    body: dict[str, Any] = {"messages": case.messages, "chat_template_kwargs": dict(case.variables)}
    if case.tools:
        body["tools"] = [WEATHER]
    asked = urllib.request.Request(
        f"{address}/apply-template", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return str(json.load(answer)["prompt"])
    except urllib.error.HTTPError:
        return None


def difference(ours: str | None, theirs: str | None) -> str:
    """The first difference of two texts, one of which may be missing."""
    if ours is None or theirs is None:
        return f"{'eyas' if ours is None else 'llama.cpp'} refuses it"
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    begin = max(0, at - AROUND)
    return f"{ours[begin : at + AROUND]!r}, llama.cpp {theirs[begin : at + AROUND]!r}"


@contextmanager
def started(model: Path, template: Path | None, program: str) -> Iterator[tuple[str, str]]:
    """Run llama-server; yield its address, or the reason why it did not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [program, "-m", str(model), "--jinja", "--host", "127.0.0.1", "--port", str(port), "-c", "512"]
    command += [] if template is None else ["--chat-template-file", str(template)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--no-warmup", "-t", "1"], stdout=log, stderr=subprocess.STDOUT)
        try:
            ready = _ready(process, address)
            log.seek(0)
            yield address, "" if ready else (log.read().strip().splitlines() or ["no reason given"])[-1]
        finally:
            process.terminate()
            process.wait()


def _ready(process: "subprocess.Popen[bytes]", address: str) -> bool:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
