"""Every format reads as the same conversation; what is wrong is said with its line."""

import json
from pathlib import Path

import pytest

from each import each
from eyas.data.bad_records import RecordError
from eyas.data.conversations import Conversation, Sample, parse_conversation
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


def test_openai_and_sharegpt_records_read_as_the_same_conversation() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    ours = parse_conversation({"messages": MESSAGES}, "f:1")
    theirs = parse_conversation({"conversations": turns}, "f:1")
    assert ours.messages == theirs.messages == tuple(MESSAGES)
    assert ours.answered


@each(("row", "texts"), [({"prompt": "Why?"}, ["Why?"]), ({"turns": ["Why?", "How?"]}, ["Why?", "How?"])])
def test_prompts_are_user_turns_without_an_answer(row: dict[str, object], texts: list[str]) -> None:
    conversation = parse_conversation(row, "f:1")
    assert [message["content"] for message in conversation.messages] == texts
    assert {message["role"] for message in conversation.messages} == {"user"}
    assert not conversation.answered


def test_thinking_and_tool_calls_stay_with_their_turn() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "Hm."}
    (message,) = parse_conversation({"messages": [turn]}, "f:1").messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1"}],
        "reasoning_content": "Hm.",
    }


def test_json_lines_and_parquet_read_alike(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"messages": MESSAGES, "category": "chat"}, {"messages": MESSAGES[1:], "category": "other"}]
    lines = write(tmp_path / "data.jsonl", rows[0], "", rows[1])
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")

    def contents(path: Path) -> list[tuple[object, ...]]:
        return [(c.messages, c.category) for c in read_conversations(path)]

    assert contents(lines) == contents(tmp_path / "data.parquet")
    assert [c.where.rpartition(":")[2] for c in read_conversations(lines)] == ["1", "3"]


@each(
    ("row", "said"),
    [
        ('{"messages": [', ("data.jsonl:2", "not JSON", "mend or remove")),
        ("[1]", ("data.jsonl:2", "list", "object")),
        ({"text": "x"}, ("data.jsonl:2", "text", "conversations (ShareGPT)")),
        ({"messages": []}, ("data.jsonl:2", "[]", "at least one")),
        ({"messages": [{"role": "asistant", "content": "x"}]}, ("data.jsonl:2", "'asistant'", "'assistant'?")),
        ({"messages": [{"role": ["user"], "content": "x"}]}, ("data.jsonl:2", "['user']", "'user'?")),
        ({"messages": [{"content": "x"}]}, ("data.jsonl:2", "'role'")),
        ({"messages": [{"role": "user", "content": 3}]}, ("data.jsonl:2", "3", "give text")),
        ({"conversations": [{"from": "human"}]}, ("data.jsonl:2", "None", "give text")),
        ({"prompt": ""}, ("data.jsonl:2", "''", "give text")),
    ],
)
def test_a_broken_record_is_named_with_its_line(tmp_path: Path, row: object, said: tuple[str, ...]) -> None:
    path = write(tmp_path / "data.jsonl", {"messages": MESSAGES}, row)
    records = read_conversations(path)
    assert isinstance(next(records), Conversation)
    with pytest.raises(UserError) as error:
        next(records)
    for words in said:
        assert words in str(error.value)


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


@each(
    ("fields", "named"),
    [
        ({"tools": "nothing"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"samples": [{"prompt_token_ids": [1]}]}, "token_ids"),
        ({"samples": [{"prompt_token_ids": [1], "token_ids": [True]}]}, "token_ids"),
        ({"samples": [{"prompt_token_ids": [], "token_ids": [1]}]}, "prompt_token_ids"),
    ],
)
def test_wrong_tokens_tools_and_arguments_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_conversation({"prompt": "hi", **fields}, "x:1")


def said(row: dict[str, object]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in parse_conversation(row, "f:1").messages]


HI = [("user", "Hi"), ("assistant", "Hello")]


@each(
    ("row", "expected"),
    [
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
    assert said(row) == expected


@each(
    ("row", "reason"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "a content part of type 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content that is no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": "\udfff"}]}, "half a character"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": "[{"}, "wrong turns"),
        ({"instruction": "Hi", "history": ["A"]}, "wrong history"),
        ({"instruction": "Hi", "output": 3}, "content that is no text"),
    ],
)
def test_what_is_bad_has_a_reason_to_be_counted_by(row: dict[str, object], reason: str) -> None:
    with pytest.raises(RecordError) as refused:
        parse_conversation(row, "f:7")
    assert refused.value.reason == reason
    assert str(refused.value).startswith("f:7: ")


def test_a_wrong_value_is_shown_in_part() -> None:
    with pytest.raises(RecordError) as refused:
        parse_conversation({"messages": [["x" * 10_000]]}, "f:7")
    assert len(str(refused.value)) < 300
