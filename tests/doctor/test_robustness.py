"""Conditions do what they say, give a reason when they are left out, and keep to the time."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer, with_bos
from each import each
from eyas.data.conversations import Conversation
from eyas.data.encode_prompt import encode_prompt
from eyas.doctor.candidate import Subject
from eyas.doctor.conditions import Filler, long_prompts, prompt_formats, quantised
from eyas.doctor.robustness import Case, Conditions, Robustness, compare
from eyas.doctor.transcripts import Answering, Asked, Transcriber, Transcript
from eyas.target.chat_template import ChatFormat, apply_format
from eyas.target.facts import facts_of
from eyas.target.model import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eyas.kernels.linear.quantised_linear import Bits

SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
ASKED = {
    key: Conversation(messages=({"role": "user", "content": text},), where=f"file:{key}")
    for key, text in enumerate(("Say hi.", "Count to 3.", "Why?"))
}
FILLER = "The quick brown fox jumps over the lazy dog. " * 8


def target_with(tokenizer: Any) -> Target:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.target_config(vocab_size=264, max_position_embeddings=2048)).eval()
    return Target(facts=facts_of(model.config, "chatty"), model=model.requires_grad_(False), tokenizer=tokenizer)


def bos_tokenizer(template: str | None) -> Any:
    """With a BOS; without a template, prompts are raw text."""
    tokenizer = with_bos(chat_tokenizer(template or "", bos="<s>"))
    if template is None:
        apply_format(tokenizer, ChatFormat(raw=True))
    return tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return target_with(chat_tokenizer(SYSTEM + CHATML))


@pytest.fixture(scope="module")
def subject(target: Target) -> Subject:
    config = tiny.drafter_config(vocab_size=264, draft_vocab_size=264, fc_norm=True, norm_output=True)
    return Subject(name="one", drafter=tiny.random_drafter(config), layer_ids=tiny.AUX_IDS)


@pytest.fixture(scope="module")
def base(target: Target) -> list[Transcript]:
    asked = [Asked(key=key, ids=tuple(encode_prompt(target, one))) for key, one in ASKED.items()]
    transcripts = Transcriber(target, tiny.AUX_IDS).answer(asked, Answering(max_new_tokens=10, overshoot=6))
    return sorted(transcripts, key=lambda one: one.key)


def conditions(**changes: object) -> Conditions:
    options: dict[str, object] = {"prompts": 2, "max_new_tokens": 6, "depths": (1, 3), "lengths": (60, 120, 4000)}
    return Conditions(**{**options, "context_tokens": 4, **changes})  # type: ignore[arg-type]


def matrix(
    target: Target, subject: Subject, base: list[Transcript], left: Callable[[], float] = lambda: 1e9
) -> list[Case]:
    transcriber = Transcriber(target, tiny.AUX_IDS)
    tried = Robustness(transcriber, [subject], base, ASKED, conditions(), filler=FILLER, left=left)
    return list(tried.cases())


@pytest.mark.slow
def test_every_condition_is_measured_or_says_why_not(target: Target, subject: Subject, base: list[Transcript]) -> None:
    cases = {case.name: case for case in matrix(target, subject, base)}
    for name in ("noise 1", "no template", "no system prompt", "long system prompt", "Llama-3 template", "German"):
        assert cases[name].cells["one"].keys() == {1, 3}, cases[name]
    for name in ("code", "tool traffic", "temperature 1", "4-bit target", "60 tokens, end", "120 tokens, middle"):
        assert cases[name].prompts >= 1, cases[name]
    assert "own rendering" in str(cases["ChatML template"].left_out)
    assert "context is 2048 tokens" in str(cases["4000 tokens"].left_out)
    assert {case.group for case in cases.values()} == {"noise", "template", "text", "sampling", "weights", "context"}


@pytest.mark.slow
def test_prompts_that_do_not_fit_in_the_targets_context_are_left_out(
    target: Target, subject: Subject, base: list[Transcript]
) -> None:
    short = replace(target, facts=replace(target.facts, max_position_embeddings=1024))
    cases = {case.name: case for case in matrix(short, subject, base)}
    assert cases["long system prompt"].left_out == "the target's context is 1024 tokens"
    assert cases["no system prompt"].prompts == 2


def test_no_cached_states_survive_a_change_of_weights(
    target: Target, subject: Subject, base: list[Transcript], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Asked(key=one.key, ids=one.ids[: one.prompt_length]) for one in base]
    how = Answering(max_new_tokens=8, overshoot=3)

    def states(transcriber: Transcriber) -> dict[int, torch.Tensor]:
        return {one.key: one.aux_TX for one in transcriber.answer(asked, how)}

    shared = Transcriber(target, tiny.AUX_IDS)
    tried = Robustness(shared, [subject], base, ASKED, conditions(), filler=FILLER, left=lambda: 1e9)
    before, seen = states(shared), list[Transcript]()
    answer = shared.answer

    def note(prompts: Sequence[Asked], how: Answering) -> Iterator[Transcript]:
        for one in answer(prompts, how):
            seen.append(one)
            yield one

    with monkeypatch.context() as patched:
        patched.setattr(shared, "answer", note)
        tried._quantised(4)
    with quantised(target, 4):
        (rounded,) = Transcriber(target, tiny.AUX_IDS).answer(asked[:1], conditions().answering())
    (found,) = [one for one in seen if one.key == asked[0].key]
    torch.testing.assert_close(found.aux_TX, rounded.aux_TX, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found.aux_TX[:10], before[asked[0].key][:10], rtol=1e-3, atol=1e-3)
    after = states(shared)
    assert all(torch.equal(after[key], before[key]) for key in before)


@each("bits", [8, 4])
def test_a_target_in_half_precision_can_be_quantised(target: Target, bits: Bits) -> None:
    """Compiled products are in float32: the model's own code hands them what they read, and a fused pass would not."""
    half = replace(target, model=deepcopy(target.model).bfloat16())
    asked, how = [Asked(key=0, ids=tuple(range(2, 12)))], conditions().answering()
    (before,) = Transcriber(half, tiny.AUX_IDS).answer(asked, how)
    with quantised(half, bits):
        (rounded,) = Transcriber(half, tiny.AUX_IDS).answer(asked, how)
    apart = (rounded.aux_TX[:10] - before.aux_TX[:10]).float().norm() / before.aux_TX[:10].float().norm()
    assert 0 < apart < 0.3


def test_no_case_starts_without_time(target: Target, subject: Subject, base: list[Transcript]) -> None:
    for case in matrix(target, subject, base, left=lambda: 0.0):
        assert case.group == "noise" or case.left_out, case


def test_equal_rounds_keep_the_whole_length(subject: Subject, base: list[Transcript]) -> None:
    rounds = subject.rounds(base, 3)
    cell = compare(rounds, rounds, 3)
    assert cell.length == cell.reference
    assert cell.kept.value == cell.kept.low == cell.kept.high == 1.0


def test_renderings_change_the_prompt(target: Target) -> None:
    own = target.tokenizer.decode(encode_prompt(target, ASKED[0]))
    made = {one.name: one.render(ASKED[0]) for one in prompt_formats(target)}
    texts = {name: target.tokenizer.decode(list(ids)) for name, ids in made.items() if ids}
    assert "Be kind." in own
    assert "no BOS" not in texts  # the tokenizer has none
    assert texts["no template"] == "Say hi.\n"
    assert "Be kind." not in texts["no system prompt"]
    assert texts["no system prompt"] in own
    assert "GREENHOUSE-7" in texts["foreign system prompt"]
    assert texts["Mistral template"] == "<s>[INST] Say hi. [/INST]"


def test_a_bos_is_removed_where_there_is_one() -> None:
    target = target_with(chat_tokenizer("{{ bos_token }}" + CHATML, bos="<s>"))
    render = next(one.render for one in prompt_formats(target) if one.name == "no BOS")
    assert render(ASKED[0]) == tuple(encode_prompt(target, ASKED[0])[1:])


QWEN3_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set text = m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<U>' if m.role == 'user' else '<A>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)


@pytest.mark.slow
@each(
    ("template", "left_out"),
    [
        (QWEN3_LIKE, {"no BOS", "no system prompt", "ChatML template"}),
        (R1_LIKE, {"no system prompt", "long system prompt", "foreign system prompt"}),
        (None, {"no template", "no system prompt"}),
    ],
)
def test_impossible_renderings_are_left_out_with_a_reason(
    template: str | None, left_out: set[str], subject: Subject
) -> None:
    target = target_with(bos_tokenizer(template))
    asked = [Asked(key=key, ids=tuple(encode_prompt(target, one))) for key, one in ASKED.items()]
    answers = Transcriber(target, tiny.AUX_IDS).answer(asked, Answering(max_new_tokens=10, overshoot=6))
    cases = [case for case in matrix(target, subject, list(answers)) if case.group == "template"]
    assert {case.name for case in cases if case.left_out} == left_out
    assert all("own rendering" in str(case.left_out) for case in cases if not case.cells)


def test_template_arguments_of_a_record_are_kept() -> None:
    tokenizer = chat_tokenizer(QWEN3_LIKE)
    target = target_with(tokenizer)
    quick = replace(ASKED[0], chat_template_kwargs={"enable_thinking": False})
    made = {one.name: one.render(quick) for one in prompt_formats(target)}
    text = tokenizer.decode(list(made["foreign system prompt"] or ()))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    (long,) = long_prompts(target, Filler(target, FILLER), {0: quick}, 60, "end")
    assert tokenizer.decode(list(long.ids)).endswith("</think>\n\n")


@each("template", [QWEN3_LIKE, None])
def test_a_system_prompt_is_removed_where_turns_are_rewritten(template: str | None) -> None:
    target = target_with(bos_tokenizer(template))
    told = replace(ASKED[0], messages=({"role": "system", "content": "Be kind."}, *ASKED[0].messages))
    made = {one.name: one.render(told) for one in prompt_formats(target)}
    assert made["no system prompt"] == tuple(encode_prompt(target, ASKED[0]))


def test_a_longer_text_starts_with_a_shorter_one(target: Target) -> None:
    filler = Filler(target, FILLER)

    def text(length: int, place: str) -> str:
        (asked,) = long_prompts(target, filler, {0: ASKED[2]}, length, place)
        return target.tokenizer.decode(list(asked.ids))

    assert text(60, "end").partition("\n\nWhy?")[0].rstrip() in text(120, "end")
    assert "user\nWhy?\n\nThe quick" in text(60, "start")
