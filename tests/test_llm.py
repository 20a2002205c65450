"""The Python API on the default target."""

import asyncio
import subprocess
import sys

import pytest

from each import each
from eyas import LLM, AsyncLLM, SamplingParams, SuffixConfig, UserError

pytestmark = pytest.mark.default

QUESTIONS = ["What is a falcon?", "Name three birds of prey."]
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", max_num_seqs=4, max_model_len=512, suffix=SuffixConfig())


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, eyas; eyas.SamplingParams(); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import eyas

    with pytest.raises(AttributeError, match="LLM"):
        _ = eyas.Llm


def test_chat_answers_in_order_with_reason_and_acceptance(llm: LLM) -> None:
    first, second = llm.chat(QUESTIONS, SHORT)
    assert first.text
    assert second.text
    assert (len(first.tokens), first.finish_reason) == (12, "length")
    assert first.acceptance_length >= 1


def test_drafts_never_change_an_answer(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=16, temperature=0.8, seed=7)
    for params in (SHORT, drawn):
        plain = llm.chat(QUESTIONS, [SamplingParams(**{**vars(params), "depth": 0, "seed": 7 + i}) for i in range(2)])
        deep = llm.chat(QUESTIONS, [SamplingParams(**{**vars(params), "depth": 4, "seed": 7 + i}) for i in range(2)])
        assert [output.tokens for output in plain] == [output.tokens for output in deep]
    assert llm.stats.accepted > 0


@pytest.mark.slow
def test_the_draft_source_can_be_chosen(llm: LLM) -> None:
    line = "The owl sleeps by day and hunts by night. "
    prompt, params = 4 * line + line[:12], SamplingParams(max_tokens=20)
    (plain,) = llm.generate(prompt, SamplingParams(**{**vars(params), "depth": 0}))
    for method in ("eagle3", "suffix"):
        (drafted,) = llm.generate(prompt, SamplingParams(**{**vars(params), "depth": 4, "speculation_method": method}))
        assert drafted.tokens == plain.tokens
        assert drafted.stats.drafted > 0
        assert drafted.stats.suffix_drafted == (drafted.stats.drafted if method == "suffix" else 0)


def test_prompts_may_be_text_or_tokens(llm: LLM) -> None:
    ids = llm.target.tokenizer.encode("The falcon is")
    (by_text,), (by_ids,) = llm.generate("The falcon is", SHORT), llm.generate(ids, SHORT)
    assert by_text.tokens == by_ids.tokens


def test_a_stream_equals_the_answer_even_with_other_requests_in_between(llm: LLM) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    (whole,) = llm.chat([messages], SHORT)
    deltas, seen = llm.stream(messages, SHORT), []
    for delta in deltas:
        seen.append(delta)
        llm.chat(QUESTIONS[1], SamplingParams(max_tokens=2))
    assert "".join(delta.text for delta in seen) == whole.text
    assert tuple(token for delta in seen for token in delta.tokens) == whole.tokens


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    deltas = llm.stream(QUESTIONS[0], SamplingParams(max_tokens=200))
    next(deltas)
    deltas.close()
    assert not llm.engine.busy
    assert llm.engine.block_manager.used == 0


def test_options_reach_the_answer(llm: LLM) -> None:
    (chosen,) = llm.chat("Is a falcon a bird?", SamplingParams(choice=["yes", "no"]))
    assert chosen.text in ("yes", "no")
    (with_logprobs,) = llm.chat(QUESTIONS[0], SamplingParams(max_tokens=3, logprobs=2))
    assert with_logprobs.logprobs is not None
    assert [len(entry.top) for entry in with_logprobs.logprobs] == [2, 2, 2]
    (stopped,) = llm.chat(QUESTIONS[0], SamplingParams(max_tokens=40, stop="falcon"))
    assert "falcon" not in stopped.text


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    outputs = llm.chat(QUESTIONS, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(output.tokens) for output in outputs] == [2, 5]


@each(
    ("call", "words"),
    [
        (lambda llm: LLM("smollm2", max_num_seq=3), "did you mean max_num_seqs"),
        (lambda llm: LLM("smollm2", depth=100), "depth is 100; give 0 to 48, or 'auto'"),
        (lambda llm: LLM("smollm2", depth="3"), "depth is '3'; give 0 to 48, or 'auto'"),
        (lambda llm: LLM("smollm2", suffix=True), "suffix is True; give SuffixConfig"),
        (lambda llm: SamplingParams(regex="a", choice=["b"]), "regex and choice"),
        (lambda llm: SamplingParams(max_tokens=0), "max_tokens is 0"),
        (lambda llm: SamplingParams(depth=-1), "depth is -1"),
        (lambda llm: llm.chat("hello", SamplingParams(speculation_method="ngram")), "use auto, eagle3 or suffix"),
        (lambda llm: llm.chat("hello", SamplingParams(max_tokens=10_000)), "max_tokens 10000"),
        (lambda llm: llm.chat(QUESTIONS, [SHORT]), "2 prompts and 1 params"),
        (lambda llm: llm.chat("hello", SamplingParams(depth=30)), "max_depth"),
        (lambda llm: llm.generate(list(range(600))), "600 tokens"),
        (lambda llm: llm.swap_drafter("no/such-drafter-anywhere"), "no/such-drafter-anywhere"),
    ],
)
def test_wrong_input_is_refused_with_the_value_and_the_fix(llm: LLM, call: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call(llm)  # type: ignore[operator]
    assert llm.chat("hello", SamplingParams(max_tokens=1)), "and nothing is lost"


@pytest.mark.slow
def test_many_tasks_share_an_asynchronous_engine(llm: LLM) -> None:
    async def ask() -> tuple[list[str], str]:
        async with AsyncLLM("smollm2", max_num_seqs=4, max_model_len=512) as served:
            answers = await asyncio.gather(*(served.chat(question, SHORT) for question in QUESTIONS))
            texts = [delta.text async for delta in served.stream([{"role": "user", "content": QUESTIONS[0]}], SHORT)]
            return [answer.text for answer in answers], "".join(texts)

    texts, streamed = asyncio.run(ask())
    assert texts == [output.text for output in llm.chat(QUESTIONS, SHORT)]
    assert streamed == texts[0]
