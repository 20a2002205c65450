"""Every conversation is answered once, by the target alone, whatever interrupts the run."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.data.conversations import Conversation, Sample, parse_conversation
from eyas.data.files import read_conversations
from eyas.data.regenerate import ChatPrompt, Progress, Reply, regenerate
from eyas.errors import UserError

ARGUMENTS = {"target": "scripted", "seed": 0}
AUTHOR = {"target": "scripted", "target_fingerprint": "cafe"}


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Echo:
    """Answers two at a time, the later first, with the last message in capitals; records the questions."""

    def __init__(self, *, dies_after: int | None = None, lucky: bool = True) -> None:
        self.asked: list[ChatPrompt] = []
        self.lucky = lucky
        self._left = dies_after

    def reply(self, question: ChatPrompt) -> Reply:
        text = str(question.messages[-1]["content"])
        if text == "long":
            return Reply(id=question.id, sample=None)
        if text == "unclear":
            return Reply(id=question.id, sample=None, missing="inexact")
        if text == "unlucky" and not self.lucky:
            return Reply(id=question.id, sample=None, missing="failed")
        said = " " if text == "silent" else text.upper()
        prompt = "".join(str(message["content"]) for message in question.messages)
        return Reply(
            id=question.id,
            sample=Sample(prompt_ids=ids(prompt), answer_ids=ids(said)),
            message={"role": "assistant", "content": said},
            finished=text not in ("ramble", "ponder"),
            thinking_tokens={"ponder": len(said), "think": 2}.get(text, 0),
        )

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        held: list[ChatPrompt] = []
        while True:
            while len(held) < 2 and (question := pull()) is not None:
                held.append(question)
            if not held:
                return
            if self._left is not None:
                if self._left == 0:
                    raise KeyboardInterrupt
                self._left -= 1
            question = held.pop()
            self.asked.append(question)
            yield self.reply(question)


def conversation(*turns: str, category: str | None = None) -> Conversation:
    """User turns; with the prefix `a:` an assistant's, `s:` a system prompt, `t:` a tool's."""
    roles = {"a:": "assistant", "s:": "system", "t:": "tool"}
    messages = tuple({"role": roles.get(t[:2], "user"), "content": t[2:] if t[:2] in roles else t} for t in turns)
    return Conversation(messages=messages, where="f", category=category)


def rows(out: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in found}) == len(found), "each once"
    return {row["id"]: row for row in found}


def texts(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_answers_are_regenerated_turn_by_turn_after_the_new_ones(tmp_path: Path) -> None:
    out, echo = tmp_path / "deep" / "out.jsonl", Echo()
    given = [conversation("s:Be kind.", "hi", "a:old", "more é", "a:older", category="chat"), conversation("one")]
    progress = regenerate(given, echo, out, arguments=ARGUMENTS, author=AUTHOR)
    found = rows(out)
    assert texts(found[0]) == ["Be kind.", "hi", "HI", "more é", "MORE É"]
    assert [m["role"] for m in found[0]["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert (found[0]["category"], found[0]["finished"], found[1]["category"]) == ("chat", True, None)
    second = next(q for q in echo.asked if q.id == 0 and len(q.messages) > 2)
    assert [m["content"] for m in second.messages] == ["Be kind.", "hi", "HI", "more é"]
    assert progress == Progress(total=2, earlier=0, written=2, tokens=2 + 6 + 3, longest=24)
    assert [c.finished for c in read_conversations(out)] == [True, True]


def test_bare_turns_are_answered_in_order_up_to_the_limit(tmp_path: Path) -> None:
    regenerate([conversation("a", "b", "c")], Echo(), tmp_path / "all", arguments=ARGUMENTS, author=AUTHOR)
    regenerate([conversation("a", "b", "c")], Echo(), tmp_path / "two", arguments=ARGUMENTS, author=AUTHOR, turns=2)
    assert texts(rows(tmp_path / "all")[0]) == ["a", "A", "b", "B", "c", "C"]
    assert texts(rows(tmp_path / "two")[0]) == ["a", "A", "b", "B"]


def test_an_answer_cut_by_a_length_limit_is_kept_as_unfinished_and_ends_the_conversation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    progress = regenerate([conversation("hi", "ramble", "more")], Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
    row = rows(out)[0]
    assert texts(row) == ["hi", "HI", "ramble", "RAMBLE"]
    assert row["finished"] is False
    assert (progress.written, progress.cut_answer, progress.cut_thinking) == (1, 1, 0)
    assert [c.finished for c in read_conversations(out)] == [False]


def test_records_keep_token_ids_of_each_turn_and_the_author(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tool = {"type": "function", "function": {"name": "f"}}
    given = replace(
        conversation("think", "é", "ponder", "more"), tools=(tool,), chat_template_kwargs={"enable_thinking": True}
    )
    echo = Echo()
    progress = regenerate([given], echo, out, arguments=ARGUMENTS, author=AUTHOR)
    assert all(q.conversation == replace(given, messages=q.messages) for q in echo.asked)
    (read,) = read_conversations(out)
    assert read.samples == (
        Sample(prompt_ids=ids("think"), answer_ids=ids("THINK")),
        Sample(prompt_ids=ids("thinkTHINKé"), answer_ids=ids("É")),
        Sample(prompt_ids=ids("thinkTHINKéÉponder"), answer_ids=ids("PONDER")),
    )
    assert (read.author, read.author_fingerprint, read.finished) == ("scripted", "cafe", False)
    assert (read.tools, read.chat_template_kwargs) == ((tool,), {"enable_thinking": True})
    assert (progress.cut_thinking, progress.cut_answer, progress.thinking_tokens) == (1, 0, 2 + 6)
    assert progress.longest == len("thinkTHINKéÉponderPONDER")


def test_a_tool_call_ends_a_conversation(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    class Caller(Echo):
        def reply(self, question: ChatPrompt) -> Reply:
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return replace(super().reply(question), message=message)

    regenerate([conversation("look", "more")], Caller(), tmp_path / "out", arguments=ARGUMENTS, author=AUTHOR)
    assert [m["role"] for m in rows(tmp_path / "out")[0]["messages"]] == ["user", "assistant"]
    assert rows(tmp_path / "out")[0]["messages"][1]["tool_calls"] == [call]


def test_unfit_and_empty_answers_are_counted_and_earlier_answers_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = [
        conversation("long"),
        conversation("silent"),
        conversation("hi", "long"),
        conversation("s:Be.", "ho", "silent", "more"),
        conversation("s:nobody asks"),
        conversation("look it up", "a:call", "t:result", "thanks"),
    ]
    progress = regenerate(given, Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
    assert {number: texts(row) for number, row in rows(out).items()} == {
        2: ["hi", "HI"],
        3: ["Be.", "ho", "HO"],
        5: ["look it up", "LOOK IT UP"],
    }
    assert all(row["finished"] for row in rows(out).values())
    assert (progress.unfit, progress.empty, progress.unanswerable, progress.written) == (1, 1, 1, 3)
    assert progress.done == progress.total == 6


GIVEN = [conversation(f"one {i}", f"two {i}") for i in range(9)]


@each("dies_after", [0, 1, 7, 17])
@each("torn", [0, 1, 30])
def test_an_interrupted_run_continues_without_losing_or_repeating_an_answer(
    tmp_path: Path, dies_after: int, torn: int
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    regenerate(GIVEN, Echo(), whole, arguments=ARGUMENTS, author=AUTHOR)
    with pytest.raises(KeyboardInterrupt):
        regenerate(GIVEN, Echo(dies_after=dies_after), out, arguments=ARGUMENTS, author=AUTHOR)
    before = out.read_bytes()
    out.write_bytes(before[: len(before) - torn])
    left = out.read_bytes()
    kept = left.count(b"\n")
    again = Echo()
    seen: list[Progress] = []
    progress = regenerate(GIVEN, again, out, arguments=ARGUMENTS, author=AUTHOR, on_progress=seen.append)
    assert rows(out) == rows(whole)
    assert out.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
    assert (progress.earlier, progress.written) == (kept, 9 - kept)
    assert len({q.id for q in again.asked}) == 9 - kept
    assert seen[-1] == progress
    # And once all is there, nothing is asked.
    idle = Echo()
    assert regenerate(GIVEN, idle, out, arguments=ARGUMENTS, author=AUTHOR).written == 0
    assert idle.asked == []


def test_a_longer_input_continues_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    regenerate(GIVEN[:4], Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
    assert regenerate(GIVEN, Echo(), out, arguments=ARGUMENTS, author=AUTHOR).earlier == 4
    assert sorted(rows(out)) == list(range(9))
    assert regenerate(GIVEN[:2], Echo(), out, arguments=ARGUMENTS, author=AUTHOR).earlier == 2


def test_other_arguments_are_refused_by_name_and_nothing_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    regenerate(GIVEN, Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
    out.write_bytes(out.read_bytes() + b'{"torn')
    before = out.read_bytes()
    with pytest.raises(UserError, match="begun with seed 0 and this run has 1"):
        regenerate(GIVEN, Echo(), out, arguments={**ARGUMENTS, "seed": 1}, author=AUTHOR)
    with pytest.raises(UserError, match=r"begun with top_p None and this run has 0\.5"):
        regenerate(GIVEN, Echo(), out, arguments={**ARGUMENTS, "top_p": 0.5}, author=AUTHOR)
    assert out.read_bytes() == before
    (tmp_path / "out.json").unlink()
    with pytest.raises(UserError, match="does not say how they were made"):
        regenerate(GIVEN, Echo(), out, arguments=ARGUMENTS, author=AUTHOR)


def test_other_arguments_may_replace_a_run_that_wrote_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        regenerate(GIVEN, Echo(dies_after=0), out, arguments=ARGUMENTS, author=AUTHOR)
    regenerate(GIVEN, Echo(), out, arguments={"target": "other"}, author=AUTHOR)
    assert json.loads((tmp_path / "out.json").read_text()) == {"target": "other"}


@each(
    ("line", "reason"),
    [("nonsense", "out:1 is not JSON"), ('{"a": 1}', "out:1 has no id"), ('{"id": 1}\n{"id": 1}', "out:2 holds id 1")],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    out = tmp_path / "out"
    out.write_text(line + "\n")
    with pytest.raises(UserError, match=reason):
        regenerate(GIVEN, Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
    assert out.read_text() == line + "\n"


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def answer_while_another_starts(pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        with pytest.raises(UserError, match="another run is writing"):
            regenerate(GIVEN, Echo(), out, arguments=ARGUMENTS, author=AUTHOR)
        yield from Echo()(pull)

    regenerate(GIVEN, answer_while_another_starts, out, arguments=ARGUMENTS, author=AUTHOR)
    assert sorted(rows(out)) == list(range(9))


def test_finished_must_be_true_or_false() -> None:
    assert parse_conversation({"prompt": "Hi"}, "f:1").finished
    assert parse_conversation({"prompt": "Hi", "finished": None}, "f:1").finished
    assert not parse_conversation({"prompt": "Hi", "finished": False}, "f:1").finished
    with pytest.raises(UserError, match="f:1: finished is 'no'; give true"):
        parse_conversation({"prompt": "Hi", "finished": "no"}, "f:1")


def test_failed_conversations_are_asked_again_by_the_next_run(tmp_path: Path) -> None:
    asked = [conversation("a"), conversation("b", "unlucky"), conversation("unclear"), conversation("c", "unclear")]
    out = tmp_path / "out"
    first = regenerate(asked, Echo(lucky=False), out, arguments=ARGUMENTS, author=AUTHOR)
    assert (first.written, first.failed, first.inexact, first.done) == (2, 1, 1, 4)
    assert sorted(rows(out)) == [0, 3]
    assert len(rows(out)[3]["samples"]) == 1
    again = Echo()
    second = regenerate(asked, again, out, arguments=ARGUMENTS, author=AUTHOR)
    assert (second.earlier, second.written, second.failed) == (2, 1, 0)
    assert {question.id for question in again.asked} == {1, 2}
    assert len(rows(out)[1]["samples"]) == 2
