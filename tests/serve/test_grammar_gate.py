"""The grammar worker: no grammar takes more than its share of memory and time, nobody is shut out, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.grammar.llguidance import tokenizer_data
from eyas.serve.grammar.gate import GrammarGate
from eyas.serve.grammar.worker import JOB_BYTES

SLOW = json.dumps({"allOf": [{"type": "integer", "multipleOf": step} for step in (997, 991)]})
"""Passes the bounds, and takes as long as it is given."""
SECONDS = 60
"""The longest that a verdict may take on a busy machine; each is due within 2 s of processor time."""


@pytest.fixture(scope="module")
def gate() -> Iterator[GrammarGate]:
    gate = GrammarGate(lambda: tokenizer_data(letter_tokenizer(), 96))
    gate.start()
    yield gate
    gate.close()


def any_of(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """Definitions each of which has the next one twice."""
    defs: dict[str, Any] = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": defs | {f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def objects(prefix: str, count: int) -> list[Any]:
    return [
        any_of(*({"type": "object", "properties": {f"{prefix}{n}{side}": {}}} for side in "ab")) for n in range(count)
    ]


ATTACKS: dict[str, tuple[Any, Any]] = {
    "minItems": ("json", {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000}),
    "maxItems": ("json", {"type": "array", "items": {"type": "integer"}, "maxItems": 2_000_000}),
    "maxItems in Lark": ("lark", 'start: %json {"type": "array", "maxItems": 100000000}'),
    "maxItems in products": (
        "json",
        {"items": {"items": {"items": {"maxItems": 9000}, "maxItems": 9000}, "maxItems": 9000}},
    ),
    "maxItems hidden in a quote": ("grammar", 'start: /["]/ %json {"type": "array", "maxItems": 100000000} /["]/'),
    "multipleOf": ("json", SLOW),
    "merges": ("json", {"allOf": objects("p", 16)}),
    "allOf doubling": ("json", doubling("allOf", 40)),
    "anyOf doubling": ("json", doubling("anyOf", 40)),
    "oneOf": ("json", {"oneOf": [{"type": "string", "pattern": f"^v{n}x*$"} for n in range(2000)]}),
    "oneOf coerced": (
        "json",
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"pattern": f"^v{n}.*x{n}.*$"} for n in range(1000)]},
    ),
    "patternProperties": ("json", {"patternProperties": {f"^.*{n}.*x*$": {} for n in range(100)}}),
    "patterns together": ("json", {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}b.*$"} for n in range(30)]}),
    "pattern": ("json", {"type": "string", "pattern": "^((a{40}){40}){40}$"}),
    "optional properties": (
        "json",
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}},
    ),
    "intersections": ("lark", "start: A\nA: /.*a.{300}/ & /.*b.{299}/ & /(.*c){100}/"),
    "complement": ("lark", "start: A\nA: ~/((.*a.{300}){30}b)/"),
    "terminals doubling": (
        "lark",
        "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "x"',
    ),
    "rules doubling": ("lark", "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(60)) + 'a60: "x"'),
    "ambiguity": ("lark", 'start: s\ns: s s s | "a" |'),
    "a long sequence": ("lark", "start: " + " ".join(f'"w{n}"' for n in range(12_000))),
    "groups": ("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "exploding automaton": ("regex", "(a|b)*c(a|b){30}"),
    "counted groups": ("regex", "(.{0,300}a){0,300}"),
    "forced text": ("regex", "a{99999}"),
    "alternatives": ("regex", "|".join(f".*w{n}.*" for n in range(9000))),
    "classes": ("regex", r"(\p{L}{0,99}\P{L}){0,999}" * 2000),
}


@pytest.mark.slow
@each("name", ATTACKS)
def test_an_attack_has_a_verdict_in_time_and_the_next_grammar_passes(gate: GrammarGate, name: str) -> None:
    kind, grammar = ATTACKS[name]
    verdict = gate.check("attacker", kind, grammar if isinstance(grammar, str) else json.dumps(grammar)).result(SECONDS)
    assert verdict.outcome in ("ok", "invalid", "time", "memory"), verdict
    if verdict.outcome == "invalid":
        assert 5 < len(verdict.reason) <= 2000
        assert "panic" not in verdict.reason
    started = time.monotonic()
    assert gate.check("honest", "regex", "[a-z]+").result(SECONDS).outcome == "ok"
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_limits_of_time_and_memory_are_told_apart(gate: GrammarGate) -> None:
    assert gate.check("a", "json", SLOW).result(SECONDS).outcome == "time"
    kind, large = ATTACKS["classes"]
    assert gate.check("a", kind, large).result(SECONDS).outcome == "memory"
    assert gate.check("a", "json", '{"type": "objekt"}').result(SECONDS).reason.count("objekt") == 1


@pytest.mark.slow
def test_forks_end_and_the_worker_stays_small(gate: GrammarGate) -> None:
    gate.check("a", "json", SLOW).result(SECONDS)
    assert gate.pid is not None
    assert children_of(gate.pid) == []
    assert resident_bytes(gate.pid) < JOB_BYTES


@pytest.mark.slow
def test_one_clients_slow_grammars_do_not_shut_out_others(gate: GrammarGate) -> None:
    flood = [gate.check("attacker", "json", SLOW.replace("991", str(991 - 2 * n))) for n in range(40)]
    started = time.monotonic()
    honest = [gate.check(f"honest {n}", "json", json.dumps({"const": f"bird {n}"})) for n in range(4)]
    assert [one.result(SECONDS).outcome for one in honest] == ["ok"] * 4
    assert time.monotonic() - started < 15
    assert sum(one.done() for one in flood) < len(flood), "they did wait for nobody"
    outcomes = {one.result(SECONDS).outcome for one in flood}
    assert "busy" in outcomes
    assert outcomes <= {"busy", "time", "invalid"}


def test_a_worker_that_is_lost_is_replaced(gate: GrammarGate) -> None:
    assert gate.check("a", "regex", "a").result(SECONDS).outcome == "ok"
    assert gate.pid is not None
    lost, pending = gate.pid, gate.check("a", "json", SLOW)
    os.kill(lost, signal.SIGKILL)
    assert pending.result(SECONDS).outcome == "busy"
    assert gate.check("a", "regex", "b").result(SECONDS).outcome == "ok"
    assert gate.pid != lost


def test_the_worker_imports_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'numpy')"
    command = f"import sys, eyas.serve.grammar.worker; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_no_worker_outlives_a_server_that_was_killed() -> None:
    command = (
        f"import sys, time, json; sys.path[:] = {sys.path!r}\n"
        "from chat_tokenizer import letter_tokenizer\n"
        "from eyas.grammar.compile import TokenizerData\n"
        "from eyas.serve.grammar.gate import GrammarGate\n"
        "text = letter_tokenizer().backend_tokenizer.to_str()\n"
        "gate = GrammarGate(lambda: TokenizerData(text=text, n_vocab=96, eos_token=1))\n"
        "assert gate.check('a', 'regex', 'a').result(60).outcome == 'ok'\n"
        f"gate.check('a', 'json', {SLOW!r})\n"
        "time.sleep(0.3)\n"
        "print(gate.pid, flush=True); time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    worker = int(server.stdout.readline())
    forks = children_of(worker)
    assert is_alive(worker)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 20
    while any(map(is_alive, [worker, *forks])):
        assert time.monotonic() < deadline, "something was left"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
