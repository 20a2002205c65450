"""First differences between answers, and the target's logit margin there."""

import pytest
import torch

from each import each
from evaluate.test_evaluate import ScriptedDecoders, conversations, words
from eyas.evaluate.evaluate import Group, evaluate, record_groups
from eyas.evaluate.partings import Parting, find_parting, first_difference
from eyas.evaluate.prompts import Questions
from eyas.target.model import Target


@each(
    ("plain", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], None),
        ([4], [5, 4], 0),
        ([], [], None),
    ],
)
def test_the_first_difference_is_a_token_of_both(plain: list[int], other: list[int], expected: int | None) -> None:
    assert first_difference(plain, other) == expected


def test_the_margin_is_between_the_targets_logits_of_the_two_tokens(tiny_target: Target) -> None:
    prompt, plain, other = [3, 1, 4, 1], [5, 9, 2, 6], [5, 9, 7, 6]
    ids_BT = torch.tensor([[*prompt, 5, 9]])
    logits_V = tiny_target.forward(ids_BT, [0]).logits_BTV[0, -1]
    parting = find_parting(tiny_target, prompt, plain, other)
    assert parting is not None
    assert parting.at == 2
    assert parting.margin == pytest.approx(float(logits_V[2] - logits_V[7]), abs=1e-5)
    turned = find_parting(tiny_target, prompt, other, plain)
    assert turned is not None
    assert turned.margin == -parting.margin
    assert find_parting(tiny_target, prompt, plain, plain) is None


def test_the_record_has_first_differences_and_the_largest_margin() -> None:
    questions = Questions(conversations(["a"], ["bcd"], ["ef"]), words, turns=1, longest=9)
    group = Group(prefix_tokens=0, prompts=questions.first()[0], skipped=0)
    asked: list[tuple[int, ...]] = []

    def find(prompt: object, plain: object, other: object) -> Parting | None:
        assert isinstance(prompt, tuple)
        asked.append(prompt)
        return {1: None, 3: Parting(at=0, margin=-0.5), 2: Parting(at=0, margin=0.25)}[len(prompt)]

    evaluate(
        [group],
        questions,
        ScriptedDecoders([]),
        drafters=["d"],
        depths=[3],
        find_parting=find,
        follow=lambda name, answers, total: answers,
    )
    (cell,) = record_groups([group])[0]["measured"]
    assert len(asked) == 3
    assert cell["largest_margin"] == 0.5
    assert [own["parting"] for own in cell["by_answer"]] == [None, {"at": 0, "margin": -0.5}, {"at": 0, "margin": 0.25}]
    group.partings.clear()
    assert record_groups([group])[0]["measured"][0]["largest_margin"] is None
