"""Answers in the formats that vendors publish for their models, and what is in them. All of our own making."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eyas.serve.protocol.completions import Tool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One answer to one parser."""

    format: str
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    max_calls: int | None = None


TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in (
        {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "unit": {"$ref": "#/$defs/unit"},
                    "where": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"type": ["string", "null"]},
                    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
                "required": ["city"],
                "$defs": {"unit": {"enum": ["C", "F"]}},
            },
        },
        {"name": "now"},
    )
]

HERMES = [
    Case(
        format="hermes",
        text='Sure. <b>\n<tool_call>\n{"name": "f", "arguments": {"x": "a } \\" ]b", "y": [1, {"z": null}]}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        content="Sure. <b>",
        calls=[("f", '{"x": "a } \\" ]b", "y": [1, {"z": null}]}'), ("g", "{}")],
    ),
    Case(format="hermes", text="1 < 2 <tool", content="1 < 2 <tool"),
    Case(
        format="hermes",
        text='<tool_call>{"nom": 1}</tool_call> rest',
        content='<tool_call>{"nom": 1}</tool_call> rest',
    ),
    Case(format="hermes", text='<tool_call>{"name": "f", "arguments": {"a": 1', calls=[("f", '{"a": 1')]),
    Case(format="hermes", text='<tool_call>{"na', content='<tool_call>{"na'),
    Case(format="hermes", text="<tool_call>no JSON</tool_call>", content="<tool_call>no JSON</tool_call>"),
    Case(
        format="hermes",
        text='<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=[("f", '{"a": 1}')],
    ),
    Case(format="hermes", text='<tool_call>\n{"name": "f"}\n</tool_call>', calls=[("f", "{}")]),
    Case(
        format="hermes",
        text='<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"a',
        calls=[("f", "{}")],
        max_calls=1,
    ),
    Case(
        format="hermes",
        text='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🦅"}}\n</tool_call>\nDone. ',
        content="Done. ",
        calls=[("get_weather", '{"city": "Zürich 🦅"}')],
    ),
    Case(
        format="hermes",
        text='<tool_call>{"name": "\\ud83d", "arguments": "\\ud83d\\ude00 \\ude00"}</tool_call>',
        calls=[("\ufffd", "😀 \ufffd")],
    ),
]
LLAMA3_JSON = [
    Case(
        format="llama3_json",
        text='{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        calls=[("f", '{"a": 1}'), ("g", "{}")],
    ),
    Case(format="llama3_json", text='{"answer": 3} is it', content='{"answer": 3} is it'),
    Case(format="llama3_json", text='It is {"name": "f"}', content='It is {"name": "f"}'),
    Case(format="llama3_json", text=" \n hello ", content=" \n hello "),
]
MISTRAL = [
    Case(
        format="mistral",
        text='[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]',
        calls=[("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    Case(format="mistral", text="no [TOOL] calls", content="no [TOOL] calls"),
]
QWEN3_CODER = [
    Case(
        format="qwen3_coder",
        text="I will look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
        content="I will look.",
        calls=[("get_weather", '{"city": "São Paulo", "days": 3, "exact": true}')],
    ),
    Case(
        format="qwen3_coder",
        text='<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\nline "2" \\ <b>\n\n</parameter>\n'
        '<parameter=where>\n{"lat": 1.5,\n "at": [1, {"z": null}]}\n</parameter>\n<parameter=tags>\n["a", "b"]\n'
        "</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[
            (
                "get_weather",
                '{"city": "line 1\\nline \\"2\\" \\\\ <b>\\n", "where": {"lat": 1.5,\n "at": [1, {"z": null}]}, '
                '"tags": ["a", "b"]}',
            ),
            ("now", "{}"),
        ],
    ),
    Case(  # a string that looks like a number stays one; text that is no number stays text
        format="qwen3_coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\n007\n</parameter>\n<parameter=days>\nmany\n"
        "</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=other>\n1\n"
        "</parameter>\n"
        "</function>\n</tool_call>",
        calls=[("get_weather", '{"city": "007", "days": "many", "note": null, "limit": null, "other": "1"}')],
    ),
    Case(  # no opening around the function, no end of a parameter, a parameter twice
        format="qwen3_coder",
        text="<function=get_weather>\n<parameter=city>\nRome\n<parameter=unit>\nC\n</parameter>\n<parameter=city>"
        "\nOslo\n"
        "</parameter>\n</function>\n</tool_call>",
        calls=[("get_weather", '{"city": "Rome", "unit": "C"}')],
    ),
    Case(
        format="qwen3_coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
        calls=[("get_weather", '{"city": "Ro')],
    ),
    Case(
        format="qwen3_coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n",
        calls=[("get_weather", '{"city": "Rome"}')],
    ),
    Case(format="qwen3_coder", text="<tool_call>\nHm.</tool_call>", content="<tool_call>\nHm.</tool_call>"),
    Case(format="qwen3_coder", text="if a<function=b c>d", content="if a<function=b c>d"),
    Case(format="qwen3_coder", text="<tool_call>\n<function=", content="<tool_call>\n<function="),
    Case(
        format="qwen3_coder",
        text="<tool_call><function=now></function></tool_call><tool_call><function=now></function></tool_call>",
        calls=[("now", "{}")],
        max_calls=1,
    ),
]
GLM45 = [
    Case(
        format="glm45",
        text='Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京 "x"\n y</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"a": '
        "[1]}</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        content="Let me see.",
        calls=[("get_weather", '{"city": "北京 \\"x\\"\\n y", "days": 2, "where": {"a": [1]}}'), ("now", "{}")],
    ),
    Case(  # without newlines, as 4.7 has it
        format="glm45",
        text="<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value></tool_call>",
        calls=[("get_weather", '{"city": "5"}')],
    ),
    Case(format="glm45", text="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_va", calls=[("get_weather", "")]),
    Case(
        format="glm45",
        text="<tool_call>get_weather\n<arg_key>days</arg_key></tool_call> more",
        content="more",
        calls=[("get_weather", "{}")],
    ),
    Case(format="glm45", text="<tool_call>not a name</tool_call>", content="<tool_call>not a name</tool_call>"),
    Case(format="glm45", text="<tool_call>now", content="<tool_call>now"),
]
_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK = [
    Case(
        format="deepseek_v3",
        text=f"Looking.\n{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}get_weather\n```json\n"
        f'{{"city": "Köln", "code": "```py\\n```"}}\n```{_DS_CALL_END}\n{_DS_CALL}function{_DS_SEP}now\n```json\n'
        f"{{}}\n```"
        f"{_DS_CALL_END}{_DS_END}",
        content="Looking.",
        calls=[("get_weather", '{"city": "Köln", "code": "```py\\n```"}'), ("now", "{}")],
    ),
    Case(
        format="deepseek_v3",
        text=f'{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}f\n```json\n{{"a": 1',
        calls=[("f", '{"a": 1')],
    ),
    Case(
        format="deepseek_v3",
        text=f"{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}f{_DS_CALL_END}{_DS_END}",
        calls=[("f", "{}")],
    ),
    Case(format="deepseek_v3", text=f"a {_DS_BEGIN}{_DS_CALL}function{_DS_END} b", content="afunction b"),
    Case(format="deepseek_v3", text="plain <｜tool", content="plain <｜tool"),
    Case(
        format="deepseek_v31",
        text=f'{_DS_BEGIN}{_DS_CALL}get_weather{_DS_SEP}{{"city": "a\\nb", "where": {{"x": [1, 2]}}}}{_DS_CALL_END}'
        f"{_DS_CALL}now{_DS_SEP}{{}}{_DS_CALL_END}{_DS_END}",
        calls=[("get_weather", '{"city": "a\\nb", "where": {"x": [1, 2]}}'), ("now", "{}")],
    ),
    Case(  # the end of the first call is missing, and nothing is said of the second's arguments
        format="deepseek_v31",
        text=f"{_DS_BEGIN}{_DS_CALL}f{_DS_SEP}{{ }} {_DS_CALL}g{_DS_SEP}{_DS_CALL_END}",
        calls=[("f", "{ }"), ("g", "{}")],
    ),
    Case(format="deepseek_v31", text=f"{_DS_CALL}no name here{_DS_SEP}{{}}{_DS_CALL_END}", content="no name here{}"),
]
KIMI_K2 = [
    Case(
        format="kimi_k2",
        text="I check.<|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "東京", "tags": ["a\\"b"]}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        content="I check.",
        calls=[("get_weather", '{"city": "東京", "tags": ["a\\"b"]}'), ("now", "{}")],
    ),
    Case(
        format="kimi_k2",
        text="<|tool_calls_section_begin|>\n<|tool_call_begin|> functions.f:12 <|tool_call_argument_begin|> "
        '{"a": 1} \n',
        calls=[("f", '{"a": 1}')],
    ),
    Case(
        format="kimi_k2",
        text="<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        content="f{}",
    ),
]
PYTHONIC = [
    Case(
        format="pythonic",
        text="[get_weather(city='Łódź \"x\"', days=-3, exact=True, where={'a': [1, None, 2.5]}), now()]",
        calls=[
            ("get_weather", '{"city": "Łódź \\"x\\"", "days": -3, "exact": true, "where": {"a": [1, null, 2.5]}}'),
            ("now", "{}"),
        ],
    ),
    Case(
        format="pythonic",
        text='\n[send.mail(to="a, b)]", from=\'it\\\'s\', body="""two "quoted"\nlines""", on=true, x=(1, 2),), '
        "now( ) ,]\n",
        calls=[
            (
                "send.mail",
                '{"to": "a, b)]", "from": "it\'s", "body": "two \\"quoted\\"\\nlines", "on": true, "x": [1, 2]}',
            ),
            ("now", "{}"),
        ],
    ),
    Case(format="pythonic", text="[f(a=1)] and more", content="and more", calls=[("f", '{"a": 1}')]),
    Case(format="pythonic", text="[1, 2, 3] is a list", content="[1, 2, 3] is a list"),
    Case(format="pythonic", text="[f(x) is f(y)]", content="[f(x) is f(y)]"),
    Case(format="pythonic", text="[f(a=1) is true]", content="[f(a=1) is true]"),
    Case(format="pythonic", text="[f(a=g(1))]", content="[f(a=g(1))]"),
    Case(format="pythonic", text="[f(a=1e999)]", content="[f(a=1e999)]"),
    Case(format="pythonic", text="[f(a='x", content="[f(a='x"),
    Case(format="pythonic", text="[f(a=[1)]", content="[f(a=[1)]"),
    Case(format="pythonic", text="[f(a=1), g(b)]", content=", g(b)]", calls=[("f", '{"a": 1}')]),
    Case(format="pythonic", text="See [f(a=1)]", content="See [f(a=1)]"),
    Case(format="pythonic", text=" []", content=" []"),
    Case(format="pythonic", text="[f(a='\\ud83d\\ude00', b='\\d')]", calls=[("f", '{"a": "😀", "b": "\\\\d"}')]),
    Case(format="pythonic", text="[f(), g()]", calls=[("f", "{}")], max_calls=1),
]
HARMONY = [
    Case(
        format="openai",
        text="<|channel|>analysis<|message|>Think ö.<|end|><|start|>assistant<|channel|>final<|message|>Hi \n"
        "<|return|>",
        reasoning="Think ö.",
        content="Hi \n",
    ),
    Case(
        format="openai",
        text="<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I call.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Bern", "where": {"a": [1]}} <|call|>',
        reasoning="A",
        content="I call.",
        calls=[("get_weather", '{"city": "Bern", "where": {"a": [1]}}')],
    ),
    Case(  # the recipient in front of the channel, no arguments, two of them
        format="openai",
        text=" to=functions.now<|channel|>commentary json<|message|><|call|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        calls=[("now", "{}"), ("now", "{}")],
    ),
    Case(  # two messages of reasoning; a tool that nobody offered is no answer
        format="openai",
        text="<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>1+1"
        "<|call|><|start|>assistant<|channel|>final<|message|>2",
        reasoning="A\n1+1",
        content="2",
    ),
    Case(format="openai", text="<|channel|>analysis<|message|>cut wh", reasoning="cut wh"),
    Case(format="openai", text="<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>fin", reasoning="A"),
    Case(format="openai", text="no channels at all", content="no channels at all"),
    Case(format="openai", text="", content=""),
]
CASES = [
    *(HERMES + LLAMA3_JSON + MISTRAL + QWEN3_CODER + GLM45 + DEEPSEEK + KIMI_K2 + PYTHONIC + HARMONY),
]

THINKING: list[tuple[str, str, str, str, str]] = [
    # parser, end of the prompt, answer, reasoning, content
    ("deepseek_r1", "<｜Assistant｜><think>\n", "I add.\n</think>\n\n4", "I add.\n", "\n\n4"),
    ("deepseek_r1", "<｜Assistant｜>", "I add.</think>4", "I add.", "4"),
    ("deepseek_r1", "<｜Assistant｜>", "<think>I add.</think>4", "I add.", "4"),
    ("deepseek_r1", "<｜Assistant｜><think></think>", "4 <think> 5", "", "4 <think> 5"),
    ("qwen3", "<|im_start|>assistant\n", "<think>\nHm ö <b>\n</think>\n\nHi", "\nHm ö <b>\n", "\n\nHi"),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm</think>Hi </think>", "Hm", "Hi </think>"),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "\n<think>Hm</think>\n</think>Hi", "Hm", "Hi"),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi", "", "Hi"),
    ("qwen3", "<|im_start|>assistant\n", "Hi, no thoughts", "", "Hi, no thoughts"),
    ("qwen3", "<|im_start|>assistant\n", "<think>cut wh", "cut wh", ""),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "cut </thin", "cut </thin", ""),
    ("glm45", "<|assistant|>", "\n<think>Ja.</think>\nHallo", "Ja.", "\nHallo"),
    ("glm45", "<|assistant|>\n<think></think>", "\nHallo", "", "\nHallo"),
    ("glm45", "<|assistant|><think>", "<think></think>", "", ""),
    ("mistral", "[/INST]", "[THINK]Hm </think>[/THINK]Hi", "Hm </think>", "Hi"),
    ("mistral", "[/INST]", "<think>Hi", "", "<think>Hi"),
    ("gemma4", "<start_of_turn>model\n", "<|channel>thought\nHm\n<channel|>Hi", "\nHm\n", "Hi"),
    ("gemma4", "model\n<|channel>thought\n<channel|>", "Hi", "", "Hi"),
    ("seed_oss", "<seed:bos>assistant\n", "<seed:think>Hm</seed:think>Hi", "Hm", "Hi"),
    ("minimax_m3", "<mm:think>\n", "Hm</mm:think>Hi", "Hm", "Hi"),
]


def offered() -> list[dict[str, Any]]:
    """The tools as a request has them."""
    return [tool.model_dump(exclude_none=True) for tool in TOOLS]
