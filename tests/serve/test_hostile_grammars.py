"""Grammars of strangers over HTTP: refused by name, in time, and without harm to anybody else."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.grammar import compile as compile_module
from eyas.serve.grammar import structured_outputs
from eyas.serve.grammar.gate import GrammarVerdict
from serve.test_structured import schema_format

INTEGERS = {"type": "array", "items": {"type": "integer"}}
SLOW = {"allOf": [{"type": "integer", "multipleOf": step} for step in (997, 991)]}
DEEP = '{"items": ' * 5000 + "{}" + "}" * 5000


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "abcabc", "max_tokens": 8, "temperature": 0} | fields


@each(
    ("fields", "parts"),
    [
        (
            schema_format(INTEGERS | {"minItems": 1_000_000_000}),
            ["schema", "minItems is 1,000,000,000", "10,000", "lower"],
        ),
        ({"guided_json": INTEGERS | {"maxItems": 2_000_000}}, ["guided_json", "maxItems is 2,000,000", "10,000"]),
        ({"guided_json": INTEGERS | {"maxItems": 2_000_001}}, ["maxItems is 2,000,001"]),
        ({"guided_json": {"$defs": {"a": INTEGERS | {"minItems": 10**9}}, "$ref": "#/$defs/a"}}, ["minItems"]),
        ({"guided_json": {"type": "string", "minLength": 10**9}}, ["minLength", "1,000,000"]),
        ({"guided_json": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, ["1,000,000 times"]),
        ({"guided_regex": "(a{1000}){1000}"}, ["guided_regex", "1,000,000 times", "100,000"]),
        ({"guided_regex": "x" * 3_500_000}, ["guided_regex", "3,500,000 characters", "131,072"]),
        ({"guided_grammar": 'start: %json {"type": "array", "maxItems": 2000000}'}, ["guided_grammar", "maxItems"]),
        ({"guided_grammar": 'root ::= "a"{5000000}'}, ["5,000,000 times"]),
        ({"guided_choice": [str(n) for n in range(6000)]}, ["6,000 choices", "5,000"]),
        ({"guided_json": {"$ref": "#"}}, ["no text satisfies it"]),
        ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, ["no text satisfies it"]),
        ({"guided_json": {"$ref": "http://169.254.169.254/schema"}}, ["169.254.169.254"]),
        ({"guided_json": DEEP}, ["64 levels"]),
        ({"guided_json": '{"maxItems": 1, "maxItems": 900000}'}, ["maxItems is 900,000"]),
        ({"guided_json": '{"\\u006d\\u0061xItems": 900000}'}, ["maxItems is 900,000"]),
    ],
)
def test_sizes_are_refused_by_name_at_once(client: Any, fields: Any, parts: list[str]) -> None:
    started = time.monotonic()
    client.complete(**fields).assert_refused(400, *parts)
    assert time.monotonic() - started < 8, "on a busy machine; a few milliseconds on an idle one"
    client.all_back()


def test_tools_are_bounded_too(new_server: Any) -> None:
    with new_server(tool_parser="hermes") as client:
        reply = client.chat(**tool({"type": "object", "properties": {"a": INTEGERS | {"maxItems": 2_000_000}}}))
    if "does not mention tools" not in reply.text:  # the template decides first
        reply.assert_refused(400, "tools", "maxItems is 2,000,000")


@each("name", ["guided_json", "response_format"])
def test_a_body_nested_too_deeply_is_no_bug(client: Any, name: str) -> None:
    raw = json.dumps(body({})).removesuffix("}") + f', "{name}": {DEEP}}}'
    reply = client.post("/v1/completions", content=raw.encode(), headers={"content-type": "application/json"})
    assert reply.status == 400, reply.text


@pytest.mark.slow
def test_slow_grammars_get_a_400_while_others_answer(client: Any) -> None:
    async def main() -> tuple[list[Any], list[float], Any]:
        loop = asyncio.get_running_loop()
        slow = [
            asyncio.create_task(client.send("POST", "/v1/completions", json=body({"guided_json": SLOW, "seed": n})))
            for n in range(3)
        ]
        pauses = []
        while not all(task.done() for task in slow):
            started = loop.time()
            assert (await client.send("GET", "/health")).status == 200
            pauses.append(loop.time() - started)
            await asyncio.sleep(0.02)
        quick = await client.send("POST", "/v1/completions", json=body({"guided_regex": "[xyz]{3}"}))
        return [await task for task in slow], pauses, quick

    before = resident_bytes()
    slow, pauses, quick = asyncio.run(main())
    for reply in slow:
        reply.assert_refused(400, "guided_json", "2 s of processor time", "simplify")
        assert reply.json["error"]["code"] == "grammar_too_complex"
    assert quick.status == 200
    assert sorted(pauses)[int(len(pauses) * 0.9)] < 1
    assert resident_bytes() - before < 256 * 2**20


def test_a_busy_compiler_gives_503_with_retry_after(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> Future[GrammarVerdict]:
        verdict: Future[GrammarVerdict] = Future()
        verdict.set_result(GrammarVerdict(outcome="busy"))
        return verdict

    assert client.complete(guided_regex="kept[a-c]").status == 200
    monkeypatch.setattr(client.application.context.compiler.gate, "check", busy)
    reply = client.complete(guided_regex="never seen before")
    reply.assert_refused(503, "guided_regex", "busy", "try again")
    assert int(reply.headers["retry-after"]) >= 1
    assert client.complete(guided_regex="kept[a-c]").status == 200, "what is cached waits for nobody"


def test_the_same_grammar_at_once_is_compiled_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = client.application.context.compiler.gate
    check, checked = gate.check, list[str]()

    def counted(client: str, kind: Any, text: str) -> Any:
        checked.append(text)
        return check(client, kind, text)

    monkeypatch.setattr(gate, "check", counted)

    async def main() -> list[Any]:
        asked = [client.send("POST", "/v1/completions", json=body({"guided_regex": "to[g-h]ether"})) for _ in range(4)]
        return await asyncio.gather(*asked)

    assert [reply.status for reply in asyncio.run(main())] == [200] * 4
    assert checked == ["to[g-h]ether"]


def test_a_finished_grammar_is_not_compiled_again_before_it_is_cached(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, checked = client.application.context.compiler, list[str]()

    def at_once(client: str, kind: Any, text: str) -> Future[GrammarVerdict]:
        checked.append(text)
        verdict: Future[GrammarVerdict] = Future()
        verdict.set_result(GrammarVerdict(outcome="ok", taken=1))
        return verdict

    monkeypatch.setattr(compiler.gate, "check", at_once)
    monkeypatch.setattr(compiler._threads, "submit", lambda compile_, taken: compile_(taken))

    async def main() -> list[Any]:
        spec = structured_outputs.GrammarSpec(field="guided_regex", kind="regex", text="at[o-p]once")
        return await asyncio.gather(*(compiler.compile(spec) for _ in range(3)))

    first, *others = asyncio.run(main())
    assert all(other is first for other in others)
    assert (checked, compiler._compiling) == (["at[o-p]once"], {})


def test_unused_grammars_are_dropped(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = client.application.context.compiler
    assert client.complete(guided_regex="dropp?ed").status == 200
    assert ("regex", "dropp?ed") in compiler._cache
    monkeypatch.setattr(structured_outputs, "UNUSED_SECONDS", -1.0)
    compiler._drop_unused()
    assert not compiler._cache


def test_a_grammar_that_grows_too_large_on_the_way_ends_its_own_request(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's limits are llguidance's own here, the server's so low that the lexer is full after some letters."""
    growing = "(.*[a-m].{4}[n-z]){9}.{200,900}"
    monkeypatch.setitem(compile_module.PARSER_LIMITS, "max_lexer_states", 40)

    async def main() -> tuple[Any, Any]:
        asked = [
            body({"guided_regex": growing, "max_tokens": 200, "temperature": 1.0, "seed": 3}),
            body({"max_tokens": 60, "ignore_eos": True}),
        ]
        return tuple(await asyncio.gather(*(client.send("POST", "/v1/completions", json=one) for one in asked)))

    failed, beside = asyncio.run(main())
    failed.assert_refused(400, "too complex", "simplify")
    assert failed.json["error"]["code"] == "grammar_too_complex"
    assert beside.json["choices"] == client.complete(max_tokens=60, ignore_eos=True).json["choices"]
    client.application.context.compiler._drop_unused()
    assert ("regex", growing) not in client.application.context.compiler._cache
    client.all_back()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
