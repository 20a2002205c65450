"""An evaluation counts accepted drafts, and its estimate finds the same rounds in the text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from each import each
from eyas.data.conversations import Conversation, Message, parse_conversation
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.evaluate.decoders import Answer, EngineDecoders
from eyas.evaluate.evaluate import (
    Group,
    corpus_of,
    count_rounds,
    estimate_corpus,
    evaluate,
    looping,
    record_groups,
    summarise,
)
from eyas.evaluate.plot import plot_evaluation
from eyas.evaluate.prompts import PrefixText, Prompt, Questions
from eyas.target.model import Target
from eyas.train.estimate import RoundCounts

DEPTHS = (1, 2, 4)


def prompt(key: int, ids: Iterable[int] = (1, 2), category: str = "qa") -> Prompt:
    return Prompt(
        key=key, ids=tuple(ids), category=category, turn=0, conversation=Conversation(messages=(), where=f"file:{key}")
    )


def answer(key: int, accepted: Sequence[int], tokens: Iterable[int] | None = None, stopped: bool = False) -> Answer:
    made = range(1 + sum(accepted) + len(accepted)) if tokens is None else tokens
    return Answer(key=key, tokens=tuple(made), stopped=stopped, accepted=tuple(accepted))


@each(
    ("tokens", "expected"),
    [
        ([5] * 32, True),
        ([5] * 31, False),  # too short to tell
        ([*range(50), *[1, 2, 3] * 11], True),  # 33 tokens of period 3
        ([*range(50), *[1, 2, 3] * 10], False),  # 30, and what stands before does not fit
        ([*range(64)] * 3, True),
        ([*range(65)] * 4, False),  # a period too long
        ([*range(40)] * 2, False),  # twice is no loop
        ([*range(100), *[*range(40)] * 3][1:], True),
        ([*[7, 8] * 40, 9], False),  # it got out
        ([], False),
    ],
)
def test_a_loop_is_a_tail_that_repeats_three_times_over_32_tokens_or_more(tokens: list[int], expected: bool) -> None:
    assert looping(tokens) is expected
    assert looping(tuple(tokens)) is expected


def test_rounds_are_counted_at_every_depth_they_reached() -> None:
    assert count_rounds([0, 3, 1, 3], 3) == RoundCounts(rounds=4, accepted_at=(3, 2, 2))
    assert count_rounds([], 2) == RoundCounts(rounds=0, accepted_at=(0, 0))


def test_pooled_weighs_rounds_and_the_mean_weighs_answers() -> None:
    found = summarise([answer(0, [2]), answer(1, [0, 0, 0]), answer(2, [])], 2)
    assert found["acceptance_length"] == 1 + 2 / 4
    assert found["mean_by_answer"] == (3 + 1) / 2, "an answer of one token took no round"
    assert found["acceptance_by_depth"] == [1 / 4, 1 / 4]
    assert found["acceptance_by_depth_given_all_before"] == [1 / 4, 1.0]
    assert (found["rounds"], found["answers"]) == (4, 3)


def test_acceptance_of_no_answers_is_none() -> None:
    found = summarise([], 2)
    assert (found["acceptance_length"], found["mean_by_answer"]) == (None, None)
    assert found["acceptance_by_depth"] == [None, None]


def record_of(*measured: Answer, plain: Sequence[Answer] = (), prefix_tokens: int = 0) -> Group:
    prompts = [prompt(0), prompt(1, category="code"), prompt(2)]
    return Group(
        prefix_tokens=prefix_tokens,
        prompts=prompts,
        skipped=0,
        plain={a.key: a for a in plain},
        measured={("d", 2): list(measured)},
    )


def test_the_record_tells_categories_loops_and_identical_answers() -> None:
    loop = answer(2, [2] * 12, tokens=[3] * 37)
    stopped = answer(1, [1, 0], tokens=[*[4] * 32, 0], stopped=True)
    plain = [answer(0, [], tokens=range(3)), answer(1, [], tokens=[4]), answer(2, [], tokens=loop.tokens)]
    (group,) = record_groups([record_of(answer(0, [1]), stopped, loop, plain=plain)])
    (cell,) = group["measured"]
    assert {label: own["rounds"] for label, own in cell["by_category"].items()} == {"code": 2, "qa": 13}
    assert cell["by_category"]["code"]["acceptance_length"] == 1.5
    assert cell["looping"] == 2, "a stop token does not hide a loop"
    assert (cell["without_loops"]["answers"], cell["without_loops"]["acceptance_length"]) == (1, 2.0)
    assert cell["acceptance_length"] == 1 + 26 / 15
    assert cell["identical"] == 2
    assert [own["accepted"] for own in cell["by_answer"]] == [[1], [1, 0], [2] * 12]
    assert group["plain"] == {"answers": 3, "tokens": 41, "looping": 1}
    assert (cell["estimate"], cell["estimate_difference"]) == (None, None)


def test_prefixes_are_compared_over_the_prompts_that_both_answered() -> None:
    short = record_of(answer(0, [2]), answer(1, [0]), answer(2, [2]))
    long = record_of(answer(0, [1]), answer(2, [1]), prefix_tokens=100)
    cells = [group["measured"][0] for group in record_groups([short, long])]
    assert [cell["ratio_to_first_prefix"] for cell in cells] == [1.0, 2 / 3]


def test_the_estimate_is_compared_with_what_was_measured() -> None:
    group = replace(record_of(answer(0, [1, 1])), estimates={"d": {2: RoundCounts(rounds=4, accepted_at=(2, 0))}})
    cell = record_groups([group])[0]["measured"][0]
    assert cell["estimate"]["acceptance_length"] == 1.5
    assert cell["estimate_difference"] == 1.5 / 2 - 1


@pytest.fixture(scope="module")
def eagle3(tiny_target: Target) -> Drafter:
    return tiny.trained_drafter(tiny_target.model, tiny.drafter_config(), steps=30)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pruned(tiny_target: Target) -> Drafter:
    kept = torch.tensor([token for token in range(tiny.VOCAB) if token % 3])
    config = tiny.drafter_config(draft_vocab_size=len(kept), fc_norm=True, norm_output=True, aux_layer_ids=(0, 2, 4))
    return tiny.trained_drafter(tiny_target.model, config, steps=30, kept=kept)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_estimate_equals_decoding_for_every_drafter_at_every_depth(
    tiny_target: Target, tiny_drafter: Drafter, eagle3: Drafter, pruned: Drafter, tiny_eagle1: Drafter
) -> None:
    drafters = {"eagle31": tiny_drafter, "eagle3": eagle3, "pruned": pruned, "eagle1": tiny_eagle1}
    rows = torch.randint(tiny.VOCAB, (10, 12), generator=torch.Generator().manual_seed(5)).tolist()
    prompts = [prompt(i, row[: 3 + i % 9]) for i, row in enumerate(rows)]
    most, deepest = 30, max(DEPTHS)
    room: dict[str, Any] = {"max_num_seqs": 4, "max_depth": deepest, "stop_ids": frozenset()}
    decoders = EngineDecoders(tiny_target, drafters, max_new_tokens=most, **room)
    # The last round may run past what was asked for; let the text go on as far as it may.
    longer = EngineDecoders(tiny_target, drafters, max_new_tokens=most + deepest, **room)
    on = {given.key: given for given in longer.plainly(prompts)}

    for name, drafter in drafters.items():
        for depth in DEPTHS:
            answers = list(decoders.speculatively(name, depth, prompts))
            made = {a.key: 1 + sum(a.accepted) + len(a.accepted) for a in answers}
            plain = {key: replace(given, tokens=given.tokens[: made[key]]) for key, given in on.items()}
            group = Group(prefix_tokens=0, prompts=prompts, skipped=0, plain=plain)
            corpus = corpus_of(group)
            # Small packs, which hold a few documents each.
            alone = estimate_corpus({name: drafter}, tiny_target, corpus, depths=DEPTHS, pack_length=100, chunk=64)
            measured = count_rounds((n for a in answers for n in a.accepted), depth)
            assert alone[name][depth] == measured, (name, depth)
            assert measured.accepted_at[0] > 10
        together = estimate_corpus(drafters, tiny_target, corpus, depths=DEPTHS, pack_length=1000)
        assert together[name] == alone[name], "drafters side by side read what each reads alone"


@dataclass
class ScriptedDecoders:
    """Decoders that answer with the prompt's length."""

    asked: list[tuple[str, int, list[int]]]

    def plainly(self, prompts: Sequence[Prompt]) -> list[Answer]:
        self.asked.append(("", 0, [p.key for p in prompts]))
        return [answer(p.key, [], tokens=[len(p.ids)]) for p in reversed(prompts)]

    def speculatively(self, drafter: str, depth: int, prompts: Sequence[Prompt]) -> list[Answer]:
        self.asked.append((drafter, depth, [p.key for p in prompts]))
        return [answer(p.key, [depth]) for p in prompts]

    def message(self, prompt: Prompt, given: Any) -> Message:
        return {"role": "assistant", "content": f"length {given.tokens[0]}"}


def never_parting(prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> None:
    """No differences."""


def words(conversation: Conversation) -> list[int]:
    """One token per character."""
    return [ord(c) for message in conversation.messages for c in message["content"]]


def conversations(*turns: list[str]) -> list[Conversation]:
    return [parse_conversation({"turns": own}, f"dir/asked.jsonl:{i + 1}") for i, own in enumerate(turns)]


def test_a_next_turn_is_asked_behind_the_targets_own_answer() -> None:
    questions = Questions(conversations(["a", "b", "c"], ["d"], ["long" * 99]), words, turns=2, longest=20)
    prompts, skipped = questions.first()
    assert ([p.key for p in prompts], skipped) == ([0, 2], 1)
    assert {p.category for p in prompts} == {"asked"}, "the file's name where a record has no category"
    group = Group(prefix_tokens=0, prompts=prompts, skipped=skipped)
    decoders = ScriptedDecoders([])
    evaluate(
        [group],
        questions,
        decoders,
        drafters=["d"],
        depths=[3, 5],
        turns=2,
        find_parting=never_parting,
        follow=lambda name, answers, total: answers,
    )
    assert decoders.asked == [("", 0, [0, 2]), ("", 0, [1]), ("d", 3, [0, 2, 1]), ("d", 5, [0, 2, 1])]
    assert [message["content"] for message in group.prompts[-1].conversation.messages] == ["a", "length 1", "b"]


def test_prompts_hold_only_the_system_prompt_and_questions() -> None:
    record = {
        "messages": [
            {"role": role, "content": text}
            for role, text in [("system", "S"), ("user", "Q"), ("assistant", "old"), ("user", "R")]
        ]
    }
    questions = Questions([parse_conversation(record, "f:1")], words, turns=1, longest=9)
    ((first,), _) = questions.first()
    assert [m["content"] for m in first.conversation.messages] == ["S", "Q"]
    assert questions.following({first.key: {"role": "assistant", "content": "x"}}, [first]) == ([], 0)


def test_tools_and_template_arguments_apply_to_all_turns() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    record = {"turns": ["a", "b"], "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    seen: list[Conversation] = []

    def encode(conversation: Conversation) -> list[int]:
        seen.append(conversation)
        return words(conversation)

    questions = Questions([parse_conversation(record, "f:1")], encode, turns=2, longest=9)
    first, _ = questions.first()
    questions.following({0: {"role": "assistant", "content": "x"}}, first)
    assert [len(one.messages) for one in seen] == [1, 3]
    assert all(one.tools == (tool,) and one.chat_template_kwargs == {"enable_thinking": False} for one in seen)


def test_an_interrupted_evaluation_keeps_its_results() -> None:
    questions = Questions(conversations(["a"], ["b"]), words, turns=1, longest=9)
    group = Group(prefix_tokens=0, prompts=questions.first()[0], skipped=0)

    def follow(name: str, answers: Iterable[Any], total: int) -> Iterable[Any]:
        for number, given in enumerate(answers):
            if name.startswith("d, depth 5") and number == 1:
                raise KeyboardInterrupt
            yield given

    with pytest.raises(KeyboardInterrupt):
        evaluate(
            *([group], questions, ScriptedDecoders([])),
            drafters=["d"],
            depths=[3, 5],
            find_parting=never_parting,
            follow=follow,
        )
    cells = record_groups([group])[0]["measured"]
    assert [(cell["depth"], cell["answers"]) for cell in cells] == [(3, 2), (5, 1)]


def test_prefixes_differ_between_questions_and_are_reproducible(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + i % 90) for i in range(1000)))
    source: Any = SimpleNamespace(tokenizer=chat_tokenizer(CHATML))
    prefix = PrefixText(text, source)
    questions = Questions(conversations(["a"], ["b"], ["c"]), words, turns=1, longest=60, prefix=prefix)
    contents = [p.conversation.messages[-1]["content"] for p in questions.first(50)[0]]
    assert [content[50:] for content in contents] == ["\n\na", "\n\nb", "\n\nc"]
    assert len({content[:50] for content in contents}) == 3
    assert all(content[:50] in text.read_text() for content in contents)
    assert contents == [p.conversation.messages[-1]["content"] for p in questions.first(50)[0]]
    with pytest.raises(UserError, match=r"all 3 prompts have more than 60 tokens behind 80 tokens"):
        questions.first(80)
    with pytest.raises(UserError, match=r"--prefix-tokens 1001 is above the 1000 tokens of .*text.txt"):
        prefix.check(1001)
    with pytest.raises(UserError, match=r"cannot read .*none.txt"):
        PrefixText(tmp_path / "none.txt", source)


def test_a_record_is_plotted(tmp_path: Path) -> None:
    short = record_of(answer(0, [2]), answer(1, [0]))
    long = record_of(answer(0, [1]), prefix_tokens=100)
    plot_evaluation({"groups": record_groups([short, long])}, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    plot_evaluation({"groups": record_groups([replace(short, measured={})])}, tmp_path / "empty.png")
