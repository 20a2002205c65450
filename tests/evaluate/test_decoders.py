"""Answers and rounds of an evaluation equal those of the reference decoder, whose rounds are always complete."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.data.conversations import Conversation
from eyas.drafter.model import Drafter
from eyas.engine.output import RequestOutput, SpecDecodeStats
from eyas.engine.request import FinishReason
from eyas.evaluate.decoders import Answer, EngineDecoders, cut
from eyas.evaluate.prompts import Prompt
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from tiny import VOCAB, drafter_config, language, trained_drafter

NEW_TOKENS = 14


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Twelve prompts of 3 to 14 tokens."""
    rows = language(12, 14, torch.Generator().manual_seed(21)).tolist()
    return [
        Prompt(
            key=7 * i,
            ids=tuple(row[: 3 + i]),
            category="qa",
            turn=0,
            conversation=Conversation(messages=(), where=f"file:{i}"),
        )
        for i, row in enumerate(rows)
    ]


def plain(target: Target, prompt: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> tuple[int, ...]:
    dense = DenseTarget(target, drafter_config())
    return decode_plainly(dense, prompt, draws=SeededDraws(0), max_new_tokens=NEW_TOKENS, stop_ids=stop_ids)


@pytest.fixture(scope="module")
def stop_ids(tiny_target: Target, prompts: list[Prompt]) -> frozenset[int]:
    """A token that occurs in some answers, never first, and not in others."""
    answers = [plain(tiny_target, prompt.ids) for prompt in prompts]
    for token in range(VOCAB):
        holding = sum(token in answer for answer in answers)
        if 3 <= holding <= 9 and not any(answer[0] == token for answer in answers):
            return frozenset({token, VOCAB + 5})
    raise AssertionError("no such token")


def decoders(target: Target, drafters: dict[str, Drafter], **changes: Any) -> EngineDecoders:
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "max_depth": 4, "max_num_seqs": 3}
    return EngineDecoders(target, drafters, **{**options, **changes})


def by_key(answers: Iterable[Answer], prompts: Sequence[Prompt]) -> list[Answer]:
    found = sorted(answers, key=lambda answer: answer.key)
    assert [answer.key for answer in found] == [prompt.key for prompt in prompts], "each once"
    return found


def test_plain_answers_equal_the_reference(
    tiny_target: Target, tiny_drafter: Drafter, prompts: list[Prompt], stop_ids: frozenset[int]
) -> None:
    asked = decoders(tiny_target, {"d": tiny_drafter}, stop_ids=stop_ids)
    answers = by_key(asked.plainly(prompts), prompts)
    expected = [plain(tiny_target, prompt.ids, stop_ids) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.stopped for answer in answers] == [tokens[-1] in stop_ids for tokens in expected]
    assert {answer.stopped for answer in answers} == {True, False}
    assert all(answer.accepted == () for answer in answers)


@pytest.fixture(scope="module")
def eagle3(tiny_target: Target) -> Drafter:
    return trained_drafter(tiny_target.model, drafter_config(), steps=60)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pruned(tiny_target: Target) -> Drafter:
    kept = torch.tensor([token for token in range(VOCAB) if token % 3])
    config = drafter_config(draft_vocab_size=len(kept), fc_norm=True, norm_output=True, num_hidden_layers=2)
    return trained_drafter(tiny_target.model, config, steps=60, kept=kept)  # type: ignore[arg-type]


def test_speculative_answers_equal_the_reference_in_tokens_and_in_every_round(
    tiny_target: Target,
    tiny_drafter: Drafter,
    eagle3: Drafter,
    pruned: Drafter,
    prompts: list[Prompt],
    stop_ids: frozenset[int],
) -> None:
    drafters = {"eagle31": tiny_drafter, "eagle3": eagle3, "pruned": pruned}
    asked = decoders(tiny_target, drafters, stop_ids=stop_ids)
    list(asked.plainly(prompts[:3]))  # all of them by one engine, unless prompts are longer
    for name, depth in (("eagle31", 1), ("eagle31", 4), ("eagle3", 3), ("pruned", 3)):
        answers = by_key(asked.speculatively(name, depth, prompts[::2]), prompts[::2])
        dense, draft = DenseTarget(tiny_target, drafters[name].config), EagleDraft(drafters[name])
        for answer, prompt in zip(answers, prompts[::2], strict=True):
            theirs = decode_speculatively(
                dense,
                draft,
                prompt.ids,
                shape=Chain(depth=depth),
                draws=SeededDraws(0),
                max_new_tokens=NEW_TOKENS,
                stop_ids=stop_ids,
            )
            assert answer.tokens == theirs.tokens
            assert answer.accepted == tuple(r.accepted for r in theirs.rounds)
            assert answer.stopped == (theirs.tokens[-1] in stop_ids)
        assert sum(map(sum, (answer.accepted for answer in answers))) > 10, "both paths are walked"


def test_a_stop_string_ends_an_answer_and_is_not_sent_back(tiny_target: Target, prompts: list[Prompt]) -> None:
    whole = by_key(decoders(tiny_target, {}, stop_ids=frozenset()).plainly(prompts), prompts)
    stop = tiny_target.decode(whole[0].tokens[4:6])
    stopping = decoders(tiny_target, {}, stop_ids=frozenset(), stop_strings=[stop])
    for prompt, answer, own in zip(prompts, by_key(stopping.plainly(prompts), prompts), whole, strict=True):
        ends = [i for i in range(1, NEW_TOKENS + 1) if stop in tiny_target.decode(own.tokens[:i])]
        assert answer.tokens == own.tokens[: min(ends, default=NEW_TOKENS)]
        assert answer.stopped == bool(ends)
        assert stop not in stopping.message(prompt, answer)["content"]
    assert by_key(stopping.plainly(prompts), prompts)[0].stopped


def test_the_reader_gets_an_answer_without_its_stop_token(tiny_target: Target, prompts: list[Prompt]) -> None:
    def read(prompt: Prompt, text: str) -> dict[str, str]:
        return {"content": f"{prompt.key}: {text}"}

    stopping = decoders(tiny_target, {}, stop_ids={7}, read_answer=read)
    for tokens in ((5, 1, 6), (5, 1, 6, 7)):
        answer = Answer(key=0, tokens=tokens, stopped=False)
        text = tiny_target.decode((5, 1, 6), skip_special_tokens=False)
        assert stopping.message(prompts[0], answer) == {"content": f"0: {text}"}


def output(
    tokens: Sequence[int], accepted: Sequence[int], starts: Sequence[int], finished: FinishReason = FinishReason.STOP
) -> RequestOutput:
    return RequestOutput(
        key=0,
        tokens=tuple(tokens),
        text="",
        finished=finished,
        depths=(0,) * len(tokens),
        stats=SpecDecodeStats(),
        accepted=tuple(accepted),
        round_starts=tuple(starts),
    )


def test_tokens_are_cut_but_rounds_are_not() -> None:
    given = output(range(10, 20), accepted=[3, 1, 2, 0], starts=[1, 5, 7, 9])
    expected = {10: (3, 1, 2, 0), 9: (3, 1, 2), 8: (3, 1, 2), 7: (3, 1), 6: (3, 1), 5: (3,), 2: (3,), 1: ()}
    for length, accepted in expected.items():
        answer = cut(4, given, max_new_tokens=length)
        assert answer == Answer(key=4, tokens=tuple(range(10, 10 + length)), stopped=length == 10, accepted=accepted), (
            "what stopped it ends an answer, and does not if the answer is cut before"
        )
    # The last token of the prompt may be read by a round.
    assert cut(4, output([5, 6, 7], [1, 0], [0, 2]), max_new_tokens=2).accepted == (1,)
    assert not cut(4, output([5], [], [], FinishReason.LENGTH), max_new_tokens=1).stopped


def test_at_the_end_of_the_targets_context_the_last_round_is_short(
    tiny_target: Target, tiny_drafter: Drafter, prompts: list[Prompt]
) -> None:
    prompt, answers = prompts[-1], []
    for room in (0, 4):
        facts = replace(tiny_target.facts, max_position_embeddings=len(prompt.ids) + NEW_TOKENS + room)
        asked = decoders(replace(tiny_target, facts=facts), {"d": tiny_drafter})
        answers += asked.speculatively("d", 4, [prompt])
    short, whole = answers
    assert short.tokens == whole.tokens
    *before, last = short.accepted
    assert tuple(before) == whole.accepted[: len(before)]
    assert last <= whole.accepted[len(before)]
