"""Every format is parsed into the same conversation; errors name the line."""

import json
from pathlib import Path

import pytest

from each import each
from eyas.data.bad_records import RecordError
from eyas.data.conversations import Sample, parse_conversation
from eyas.data.files import read_conversations
from eyas.errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_thinking_and_tool_calls_stay_with_their_turn() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "Hm."}
    (message,) = parse_conversation({"messages": [turn]}, "f:1").messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1"}],
        "reasoning_content": "Hm.",
    }


def test_records_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"messages": MESSAGES}, "", {"messages": MESSAGES, "category": "c"}, "[")
    records = read_conversations(path)
    assert [(c.where, c.category) for c in (next(records), next(records))] == [(f"{path}:1", None), (f"{path}:3", "c")]
    with pytest.raises(UserError, match=r"data\.jsonl:4: it is not JSON .*mend or remove"):
        next(records)


@each("name", ["missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot read"):
        list(read_conversations(tmp_path / name))


def test_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.parquet").write_text("no parquet")
    for name, words in (("empty.jsonl", "no conversations"), ("binary.jsonl", "UTF-8"), ("text.parquet", "Parquet")):
        with pytest.raises(UserError, match=words):
            list(read_conversations(tmp_path / name))


def test_a_record_keeps_tokens_tools_and_template_arguments() -> None:
    row = {
        "prompt": "hi",
        "tools": '[{"type": "function"}]',
        "chat_template_kwargs": {"enable_thinking": False},
        "samples": [{"prompt_token_ids": [1, 2], "token_ids": [3]}],
        "target": "smollm2",
    }
    read = parse_conversation(row, "x:1")
    assert read.tools == ({"type": "function"},)
    assert read.chat_template_kwargs == {"enable_thinking": False}
    assert read.samples == (Sample(prompt_ids=(1, 2), answer_ids=(3,)),)
    assert read.author == "smollm2"


HI = [("user", "Hi"), ("assistant", "Hello")]


@each(
    ("row", "expected"),
    [
        ({"messages": MESSAGES}, [("system", "Be brief."), *HI]),
        ({"prompt": "Why?"}, [("user", "Why?")]),
        ({"turns": ["Why?", "How?"]}, [("user", "Why?"), ("user", "How?")]),
        ({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, HI),
        ({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, HI),
        ({"conversation": [{"role": "Human", "content": "Hi"}, {"role": "GPT", "content": "Hello"}]}, HI),
        ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'}, HI),
        ({"turns": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, HI),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, HI),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, [("user", "Add\n\n1, 2"), ("assistant", "3")]),
        ({"instruction": "Sum up", "context": "A", "response": "B"}, [("user", "Sum up\n\nA"), ("assistant", "B")]),
        (
            {"instruction": "Hi", "output": "Hello", "system": "Brief.", "history": [["A", "B"]]},
            [("system", "Brief."), ("user", "A"), ("assistant", "B"), *HI],
        ),
        ({"prompt": "Hi", "response": "Hello"}, HI),
        ({"prompt": "Hi", "completion": "Hello"}, HI),
        ({"question": "Hi", "answer": "Hello"}, HI),
        (
            {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]},
            HI,
        ),
        ({"instruction": "Hi", "input": None, "output": ""}, HI[:1]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Brief."},
                    {"from": "gpt", "value": "... and so on."},
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            [("system", "Brief."), *HI],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
            HI[:1],
        ),
        (
            {"system": "Brief.", "conversations": [{"from": "human", "value": "Hi"}]},
            [("system", "Brief."), *HI[:1]],
        ),
        (
            {
                "system": "Other.",
                "messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}],
            },
            [("system", "Own."), *HI[:1]],
        ),
    ],
)
def test_every_known_record_reads_as_turns(row: dict[str, object], expected: list[tuple[str, str]]) -> None:
    conversation = parse_conversation(row, "f:1")
    assert [(m["role"], m["content"]) for m in conversation.messages] == expected
    assert conversation.answered == ("assistant" in dict(expected))


@each(
    ("row", "reason", "words"),
    [
        ([1], "no object", ["list", "object"]),
        ({"text": "x"}, "none of the known formats", ["text", "conversations (ShareGPT)"]),
        ({"messages": []}, "no turns", ["[]", "at least one"]),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "unknown role 'asistant'", ["'assistant'?"]),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role ['user']", ["'user'?"]),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'", []),
        ({"messages": [{"content": "x"}]}, "a turn without role", ["'role'"]),
        ({"messages": [{"role": "user", "content": 3}]}, "content that is no text", ["3", "give text"]),
        ({"conversations": [{"from": "human"}]}, "content that is no text", ["None", "give text"]),
        ({"prompt": ""}, "a prompt that is no text", ["''", "give text"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "a content part of type 'image_url'",
            ["holds a part of type 'image_url'"],
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content that is no text", []),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character", []),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": "\udfff"}]}, "half a character", []),
        ({"messages": "[{"}, "wrong turns", []),
        ({"instruction": "Hi", "history": ["A"]}, "wrong history", []),
        ({"instruction": "Hi", "output": 3}, "content that is no text", []),
        ({"prompt": "hi", "tools": "nothing"}, "wrong tools", []),
        ({"prompt": "hi", "tools": [1]}, "wrong tools", []),
        ({"prompt": "hi", "chat_template_kwargs": []}, "wrong chat_template_kwargs", []),
        ({"prompt": "hi", "samples": [{"prompt_token_ids": [1]}]}, "wrong samples", [" token_ids"]),
        (
            {"prompt": "hi", "samples": [{"prompt_token_ids": [1], "token_ids": [True]}]},
            "wrong samples",
            [" token_ids"],
        ),
        (
            {"prompt": "hi", "samples": [{"prompt_token_ids": [], "token_ids": [1]}]},
            "wrong samples",
            ["prompt_token_ids"],
        ),
        ({"messages": [["x" * 10_000]]}, "a turn without role", ["xxx..."]),
    ],
)
def test_bad_records_have_a_reason_and_a_message(row: object, reason: str, words: list[str]) -> None:
    with pytest.raises(RecordError) as refused:
        parse_conversation(row, "f:7")
    message = str(refused.value)
    assert refused.value.reason == reason
    assert message.startswith("f:7: ")
    assert all(part in message for part in words)
    assert len(message) < 300
