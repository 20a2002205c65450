"""Answers in a form: JSON by schema, regular expressions, grammars and choices, over HTTP and OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from each import each
from eyas.grammar.compile import MOST_CHARACTERS
from eyas.serve.grammar.structured_outputs import GrammarCompiler, GrammarSpec
from serve.test_sockets import running

BIRD = {
    "type": "object",
    "properties": {"kind": {"enum": ["owl", "kite"]}, "eggs": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["kind", "eggs"],
    "additionalProperties": False,
}
NUMBERED = "start: /[a-c]+/ DIGIT\nDIGIT: /[0-9]/"
GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "bird", "schema": schema} | more}}


def is_bird(text: str) -> bool:
    bird = json.loads(text)
    return set(bird) == {"kind", "eggs"} and bird["kind"] in ("owl", "kite") and 1 <= bird["eggs"] <= 9


FORMS: list[tuple[dict[str, Any], Any]] = [
    (schema_format(BIRD), is_bird),
    (schema_format(BIRD, strict=True, description="a bird"), is_bird),
    ({"structured_outputs": {"json": BIRD}}, is_bird),
    ({"structured_outputs": {"json": json.dumps(BIRD)}}, is_bird),
    ({"guided_json": BIRD}, is_bird),
    ({"guided_json": json.dumps(BIRD)}, is_bird),
    ({"structured_outputs": {"regex": "[xyz]{3,5}!"}}, re.compile("[xyz]{3,5}!").fullmatch),
    ({"guided_regex": "[xyz]{3,5}!"}, re.compile("[xyz]{3,5}!").fullmatch),
    ({"structured_outputs": {"choice": ["north", "south", "no"]}}, {"north", "south", "no"}.__contains__),
    ({"guided_choice": ['a "quoted" one', "back\\slash"]}, {'a "quoted" one', "back\\slash"}.__contains__),
    ({"structured_outputs": {"grammar": NUMBERED}}, re.compile("[a-c]+[0-9]").fullmatch),
    ({"guided_grammar": GBNF}, re.compile("yes|no[0-9]").fullmatch),
]


@each(("fields", "fits"), FORMS)
def test_every_answer_follows_its_grammar_with_any_field_and_drafting(client: Any, fields: Any, fits: Any) -> None:
    endless = fields == {"structured_outputs": {"grammar": NUMBERED}}  # letters may go on for as long as they like
    told = set()
    for speculative in ({"mode": "off"}, {"mode": "fixed", "depth": 3}, {"mode": "auto"}):
        asked = {"temperature": 1.2, "seed": 4, "max_tokens": 60, "speculative": speculative}
        choice = client.complete(**fields, **asked).json["choices"][0]
        told.add(choice["text"])
        assert fits(choice["text"]) if choice["finish_reason"] == "stop" else endless, choice
    assert len(told) == 1
    choice = client.chat(**fields, max_tokens=60).json["choices"][0]
    assert fits(choice["message"]["content"]) if choice["finish_reason"] == "stop" else endless, choice
    client.all_back()


def test_a_json_object_that_is_cut_is_a_prefix_of_json(client: Any) -> None:
    for wish in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        choices = client.chat(**wish, temperature=1, n=4, seed=1, max_tokens=100).json["choices"]
        for choice in choices:
            assert choice["message"]["content"].startswith("{")
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert client.chat(response_format={"type": "text"}).json["choices"] == client.chat().json["choices"]


def test_a_grammar_that_is_cut_off_ends_with_length(client: Any) -> None:
    choice = client.complete(**schema_format(BIRD), max_tokens=3).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith('{"k')


def test_streams_follow_grammars_beside_free_answers(client: Any) -> None:
    async def main() -> list[Any]:
        asked = [{**schema_format(BIRD), "stream": True}, {}, {"guided_regex": "[0-9]{4}"}, {"ignore_eos": True}]
        body = {"prompt": "abcabc", "max_tokens": 60, "temperature": 0}
        return await asyncio.gather(*(client.send("POST", "/v1/completions", json=body | one) for one in asked))

    streamed, plain, digits, _ = asyncio.run(main())
    assert is_bird("".join(event["choices"][0]["text"] for event in streamed.events))
    assert plain.json["choices"] == client.complete(max_tokens=60).json["choices"]
    assert re.fullmatch("[0-9]{4}", digits.json["choices"][0]["text"])
    client.all_back()


@each(
    ("fields", "parts"),
    [
        (schema_format({"type": "objekt"}), ["response_format.json_schema.schema", "objekt"]),
        (schema_format({"type": "array", "uniqueItems": True}), ["uniqueItems"]),
        (schema_format({"not": {"type": "integer"}}), ["not"]),
        ({"guided_json": "{"}, ["guided_json", "EOF"]),
        ({"guided_json": 7}, ["guided_json", "a JSON schema"]),
        ({"guided_regex": "(a"}, ["guided_regex", "unclosed group"]),
        ({"guided_regex": "a(?=b)"}, ["guided_regex", "look-around"]),
        ({"guided_regex": "x" * (MOST_CHARACTERS + 1)}, ["guided_regex", f"{MOST_CHARACTERS:,}"]),
        ({"guided_grammar": "start: nobody"}, ["guided_grammar", "nobody"]),
        ({"guided_grammar": "((("}, ["guided_grammar"]),
        ({"guided_choice": []}, ["guided_choice", "at least 1"]),
        ({"structured_outputs": {}}, ["structured_outputs", "json, regex, choice"]),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, ["structured_outputs.regex", "choice", "give one"]),
        ({"structured_outputs": {"yaml": "a"}}, ["structured_outputs.yaml"]),
        ({"structured_outputs": {"choice": "a"}}, ["structured_outputs"]),
        ({"guided_regex": "a", **schema_format(BIRD)}, ["guided_regex", "response_format", "give one"]),
        ({"response_format": {"type": "xml"}}, ["response_format.type", "xml", "json_schema"]),
        ({"response_format": {"type": "json_schema"}}, ["response_format", "json_schema", "needs it"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ["json_schema.schema", "missing"]),
        ({"guided_regex": "a+", "ignore_eos": True}, ["stop token", "ignore_eos"]),
        ({"guided_regex": "a+", "min_tokens": 3}, ["min_new_tokens", "3"]),
    ],
)
def test_an_unsatisfiable_grammar_is_refused_by_name(client: Any, fields: Any, parts: list[str]) -> None:
    for stream in (False, True):
        client.complete(**fields, stream=stream).assert_refused(400, *parts)
    client.all_back()


class Bird(BaseModel):
    kind: Literal["owl", "kite"]
    eggs: int = Field(ge=1, le=9)
    colours: list[Literal["red", "grey"]] = Field(min_length=1, max_model_len=2)


def test_the_openai_client_parses_structured_output(new_server: Any) -> None:
    with new_server() as client, running(client) as server:
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "A bird!"}]
        answer = asking.chat.completions.parse(
            model="tiny", messages=messages, response_format=Bird, max_tokens=80, temperature=1, seed=2
        )
        assert isinstance(answer.choices[0].message.parsed, Bird)
        with asking.chat.completions.stream(
            model="tiny", messages=messages, response_format=Bird, max_tokens=80, temperature=1, seed=2
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed
        with pytest.raises(openai.BadRequestError, match="unclosed group"):
            asking.completions.create(model="tiny", prompt="a", extra_body={"guided_regex": "(a"})


@each("at_start", [False, True])
def test_the_tokenizer_for_grammars_is_read_at_the_start_or_when_one_comes(client: Any, at_start: bool) -> None:
    served = client.application.context.compiler
    assert not served._read_at_start, "on a processor it may never be needed"
    compiler = GrammarCompiler(served._target, read_at_start=at_start)
    compiler.start()
    try:
        assert (compiler._guidance is not None) == at_start
        grammar = asyncio.run(compiler.compile(GrammarSpec(kind="regex", text="[xyz]+", field="guided_regex")))
        assert grammar is not None
        assert compiler._guidance is not None
    finally:
        compiler.close()
