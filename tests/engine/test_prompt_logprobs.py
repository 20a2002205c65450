"""Logprobs of prompts are the model's own, however prompts are read: in chunks, in batches, past the prefix cache."""

from typing import Any

import pytest
import torch

from each import each
from engine.common import Prompts, at_depth, options, request, requests, run, tokens_of
from engine.round_engines import round_engine
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import FinishReason
from eyas.target.model import Target


def own_logprobs(target: Target, prompt: tuple[int, ...]) -> torch.Tensor:
    """Logprobs [T - 1, V] by transformers, over the whole prompt at once."""
    with torch.no_grad():
        return target.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(dim=-1)


def assert_own(target: Target, prompt: tuple[int, ...], output: RequestOutput, alternatives: int) -> None:
    expected_TV = own_logprobs(target, prompt)
    told = output.prompt_logprobs
    assert told is not None
    assert [entry.token for entry in told] == list(prompt[1:])
    for entry, expected_V in zip(told, expected_TV, strict=True):
        assert entry.logprob == pytest.approx(float(expected_V[entry.token]), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            expected_V.topk(alternatives).values.tolist(), abs=1e-4
        )
        assert (entry.rank == 1) == (entry.token == entry.top[0][0])


@each("changes", [{}, {"max_num_batched_tokens": 9}, {"block_size": 64}, {"max_num_seqs": 1}])
@each("captured", [False, True])
def test_prompts_among_others(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, changes: dict[str, Any], captured: bool
) -> None:
    asked = [
        request(prompt, speculation=at_depth(3), max_new_tokens=6, prompt_logprobs=2 if number % 2 else None)
        for number, prompt in enumerate([*prompts, prompts[0][:1], prompts[-1]])
    ]
    build = round_engine if captured else lambda *given: Engine(*given[:2], config=given[2])
    outputs = run(build(target, tiny_drafter, options(**changes)), asked)
    plain = run(Engine(target, tiny_drafter, config=options()), requests([x.prompt for x in asked], max_new_tokens=6))
    assert tokens_of(outputs) == tokens_of(plain)
    for one, output in zip(asked, outputs, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_own(target, one.prompt, output, 2)


def test_prefix_cache_hits_are_skipped(target: Target, prompts: Prompts) -> None:
    engine, long = Engine(target, config=options()), prompts[-1]
    run(engine, [request(long)])
    asked = [request(long, prompt_logprobs=1), request(long)]
    first, second = run(engine, asked)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0
    assert_own(target, long, first, 1)


def test_a_step_computes_few_logits_of_prompts(
    target: Target, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.engine.engine.MOST_PROMPT_LOGITS", 5 * target.facts.vocab_size)
    monkeypatch.setattr("eyas.engine.runner.round_passes.LOGITS_AT_ONCE", 2)
    engine, most = Engine(target, config=options()), 0
    run_pass = engine.model_runner.run

    def counted(ids_N: Any, metadata: Any, keep_M: Any, *rest: Any) -> Any:
        nonlocal most
        most = max(most, len(ids_N if keep_M is None else keep_M))
        return run_pass(ids_N, metadata, keep_M, *rest)

    monkeypatch.setattr(engine.model_runner, "run", counted)
    asked = requests(prompts[-3:], prompt_logprobs=1, max_new_tokens=2)
    for one, output in zip(asked, run(engine, asked), strict=True):
        assert_own(target, one.prompt, output, 1)
    assert most <= 5 + len(asked)


def test_preempted_prompts_are_read_again(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    engine, steps, caught = Engine(target, tiny_drafter, config=options(max_num_batched_tokens=9)), 0, 0
    asked = {engine.submit(one): one for one in requests(prompts, prompt_logprobs=1)}
    told: dict[int, Any] = {}
    while engine.busy:
        for piece in engine.step():
            if piece.prompt_logprobs is not None:
                assert piece.key not in told, "once"
                told[piece.key] = piece.prompt_logprobs
            assert piece.finished in (None, FinishReason.LENGTH)
        steps += 1
        if steps % 4 == 0 and steps < 40:  # all lose their blocks, some of them within their prompts
            caught += any(seq.lacks_prompt_logprobs and seq.prompt_logprobs for seq in engine.scheduler.running)
            engine.swap_drafter(tiny_drafter)
        engine.scheduler.check()
    assert caught
    for key, one in asked.items():
        assert [entry.token for entry in told[key]] == list(one.prompt[1:])
        expected = own_logprobs(target, one.prompt)
        assert [entry.logprob for entry in told[key]] == pytest.approx(
            [float(row[token]) for row, token in zip(expected, one.prompt[1:], strict=True)], abs=1e-4
        )
