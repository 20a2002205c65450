"""The user turn is found in the template, and unusable prompts are left out."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AddedToken, PreTrainedTokenizerBase

from chat_targets import FAMILIES, LETTERS
from chat_tokenizer import letter_tokenizer
from each import each
from eyas.data.conversations import Sample, parse_conversation
from eyas.data.files import read_conversations
from eyas.data.overlap import PromptIndex
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.data.user_turn import VERBATIM, PromptCounts, UserTurn, ask_for_prompts
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat, ChatTemplateOptions, render_chat

SPECIAL = FAMILIES["qwen3"].special
TURN = UserTurn(opening="<|im_start|>user\n", end="<|im_end|>")
ARGUMENTS = {"target": "scripted", "seed": 0}


def tokenizer_of(template: str | None, special: tuple[str, ...] = SPECIAL) -> PreTrainedTokenizerBase:
    tokenizer = letter_tokenizer(template or "", special, LETTERS)
    if template is None:
        tokenizer.chat_template = None
    return tokenizer


def turn_of(template: str | None, *, system: str | None = None, special: tuple[str, ...] = SPECIAL) -> UserTurn:
    return UserTurn.of(tokenizer_of(template, special), "t", ChatFormat(), system)


@each(
    ("family", "system", "opening", "end"),
    [
        ("qwen3", None, "<|im_start|>user\n", "<|im_end|>"),
        ("qwen3", "be brief", "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        ("gpt-oss", None, "<|start|>system<|message|>be kind<|end|><|start|>user<|message|>", "<|end|>"),
        ("mistral", None, "<s>[INST]", "[/INST]"),
    ],
)
def test_the_user_turn_is_found_in_the_template(family: str, system: str | None, opening: str, end: str) -> None:
    chosen = FAMILIES[family]
    assert turn_of(chosen.template, system=system, special=chosen.special) == UserTurn(opening=opening, end=end)


def test_a_turn_without_special_tokens_ends_with_what_opens_the_answer() -> None:
    template = "{% for m in messages %}USER: {{ m.content }}\n\n{% endfor %}ASSISTANT:\nhm"
    assert turn_of(template) == UserTurn(opening="USER: ", end="ASSISTANT:")
    assert turn_of("say: {{ messages[0].content }}\n") == UserTurn(opening="say: ", end="")


def test_an_added_token_ends_a_turn_even_if_it_is_not_special() -> None:
    tokenizer = tokenizer_of("<user>{{ messages[0].content }}<answer><think>")
    tokenizer.add_tokens([AddedToken("<answer>", special=False)])
    assert UserTurn.of(tokenizer, "t", ChatFormat(), None) == UserTurn(opening="<user>", end="<answer>")


def test_an_opening_is_rendered_verbatim() -> None:
    tokenizer = tokenizer_of(VERBATIM.template)
    asked = [{"role": "user", "content": TURN.opening}]
    assert render_chat(tokenizer, asked, None, ChatTemplateOptions()) == TURN.opening


@each(
    ("template", "system", "told"),
    [
        (None, None, "t has no chat template"),
        ("{{ messages[0].content }}", None, "writes nothing before a user's words"),
        ("hello", None, "writes nothing before a user's words"),
        ("{% if messages|length > 1 %}{{ raise_exception('no system') }}{% endif %}x", "s", "no system.*--system"),
    ],
)
def test_a_template_without_a_user_turn_is_refused(template: str | None, system: str | None, told: str) -> None:
    with pytest.raises(UserError, match=told):
        turn_of(template, system=system)


class Script:
    """Answers by a script, the last first; None fails, and a line that ends in ... is cut."""

    def __init__(self, *lines: str | None) -> None:
        self.lines = lines
        self.asked: list[int] = []

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        questions = []
        while (question := pull()) is not None:
            assert [m["content"] for m in question.messages] == [TURN.opening]
            questions.append(question)
        for question in reversed(questions):
            self.asked.append(question.id)
            line = self.lines[question.id]
            if line is None:
                yield Reply(id=question.id, sample=None, missing="failed")
                continue
            yield Reply(
                id=question.id,
                sample=Sample(prompt_ids=(1,), answer_ids=(2, 3)),
                message={"role": "assistant", "content": line},
                finished=not line.endswith("..."),
            )


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def asked_for(out: Path, script: Script, count: int, seed: int = 0) -> PromptCounts:
    return ask_for_prompts(
        TURN,
        count,
        script,
        out,
        tokenizer=tokenizer_of(FAMILIES["qwen3"].template),
        evaluation=PromptIndex([parse_conversation({"prompt": text}, "f") for text in ("What?", LONG)]),
        arguments={**ARGUMENTS, "seed": seed},
        on_progress=lambda _: None,
    )


def test_unusable_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "prompts.jsonl"
    script = Script("Why é?\n", "and then...", " ?! ", "a <think> b", "half \N{REPLACEMENT CHARACTER}", "why É", None)
    script.lines += ("what", f"count: {LONG.upper()}, and on")
    counts = asked_for(out, script, 9)
    assert counts == PromptCounts(
        asked=9, earlier=0, written=1, cut=1, unfit=3, evaluated=2, duplicate=1, failed=1, tokens=16
    )
    assert counts.done == 9
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == [{"id": 5, "prompt": "why É"}]
    (read,) = read_conversations(out)
    assert read.messages == ({"role": "user", "content": "why É"},)


def test_a_second_run_adds_missing_prompts(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    assert asked_for(out, Script("one", None, "two\N{LINE SEPARATOR}lines"), 3).failed == 1
    with out.open("ab") as file:
        file.write(b'{"id": 1, "pro')  # a kill
    script = Script("one", "Two lines!", "two", "three")
    counts = asked_for(out, script, 4)
    assert script.asked == [3, 1]
    assert counts == PromptCounts(asked=4, earlier=2, written=1, duplicate=1, tokens=4)
    assert sorted(json.loads(line)["id"] for line in out.read_bytes().splitlines()) == [0, 2, 3]
    with pytest.raises(UserError, match="was begun with seed 0 and this run has 1"):
        asked_for(out, Script(), 4, seed=1)
