"""Sampling options and rejection sampling of the oracle, compared with independent implementations."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from each import each
from eyas.errors import UserError
from eyas.sampling import Sampling
from oracle.rejection import Candidate, SeededDraws, residual, shape_logits, try_candidates
from oracle.shaping import one_hot, probabilities

SHAPES = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 2.5)
    for top_k in (0, 1, 3, 50)
    for top_p in (0.05, 0.6, 0.95, 1.0)
    for min_p in (0.0, 0.2)
]
PROMPT, OUTPUT = (1, 4, 4, 7), (2, 7, 2, 2)


def random_logits(seed: int, size: int = 11) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class ScriptedCoins:
    """Scripted coin flips, with the probabilities that were asked for."""

    def __init__(self, *falls: bool) -> None:
        self._falls = list(falls)
        self.asked: list[float] = []

    def coin(self, probability: float) -> bool:
        self.asked.append(probability)
        return self._falls.pop(0)

    def pick(self, p_V: Tensor) -> int:
        raise AssertionError("acceptance only flips coins")


@each("sampling", SHAPES)
def test_shaping_equals_the_warpers_of_transformers(sampling: Sampling) -> None:
    logits_BV = torch.stack([random_logits(seed) for seed in range(20)])
    scores_BV = TemperatureLogitsWarper(sampling.temperature)(None, logits_BV)
    if sampling.min_p:
        scores_BV = MinPLogitsWarper(sampling.min_p)(None, scores_BV)
    if sampling.top_k:
        scores_BV = TopKLogitsWarper(sampling.top_k)(None, scores_BV)
    if sampling.top_p < 1:
        scores_BV = TopPLogitsWarper(sampling.top_p)(None, scores_BV)
    torch.testing.assert_close(probabilities(logits_BV, sampling), scores_BV.softmax(-1), rtol=0, atol=1e-12)


def test_the_order_of_the_filters_matters_and_is_that_of_vllm() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # Among the two left by top-k the first has 4/7 > 0.5; top-p before top-k would have kept both.
    assert probabilities(logits_V, Sampling(temperature=1, top_k=2, top_p=0.5)).tolist() == [1, 0, 0, 0]
    # A high temperature flattens before top-p counts, so more tokens stay.
    assert int((probabilities(logits_V, Sampling(temperature=1, top_p=0.65)) > 0).sum()) == 2
    assert int((probabilities(logits_V, Sampling(temperature=9, top_p=0.65)) > 0).sum()) == 3
    # Among the three that min-p leaves, the first two have 7/9 > 0.75; min-p after top-p would have kept all three.
    assert int((probabilities(logits_V, Sampling(temperature=1, top_p=0.75, min_p=0.4)) > 0).sum()) == 2
    # And it is by the tempered distribution that min-p measures: at 9 the last has 0.86 of the first.
    assert int((probabilities(logits_V, Sampling(temperature=9, min_p=0.8)) > 0).sum()) == 4


def test_ties_stay_together_under_top_k_and_go_by_index_under_top_p() -> None:
    logits_V = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    third = pytest.approx(1 / 3)
    assert probabilities(logits_V, Sampling(temperature=1, top_k=1)).tolist() == [0, third, third, third]
    assert probabilities(torch.zeros(4), Sampling(temperature=1, top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]


def test_temperature_0_takes_the_first_most_likely_token() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    for sampling in (Sampling(), Sampling(top_k=2, top_p=0.1)):
        assert probabilities(logits_BV, sampling).tolist() == [[0, 1, 0], [1, 0, 0]]


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_shaped_in_float32(dtype: torch.dtype) -> None:
    logits_V = random_logits(0).to(dtype)
    p_V = probabilities(logits_V, Sampling(temperature=0.7, top_k=5, top_p=0.9))
    assert p_V.dtype == torch.float32
    assert torch.equal(p_V, probabilities(logits_V.float(), Sampling(temperature=0.7, top_k=5, top_p=0.9)))


@each("sampling", SHAPES)
def test_a_token_that_cannot_be_drafted_has_no_probability(sampling: Sampling) -> None:
    logits_V = random_logits(1)
    logits_V[[0, 3, 7]] = float("-inf")
    p_V = probabilities(logits_V, sampling)
    assert p_V[[0, 3, 7]].tolist() == [0, 0, 0]
    assert float(p_V.sum()) == pytest.approx(1)


def test_the_smallest_and_largest_temperatures_stay_distributions() -> None:
    logits_V = torch.tensor([30.0, -40.0, float("-inf"), 29.0])
    assert probabilities(logits_V, Sampling(temperature=1e-5)).tolist() == [1, 0, 0, 0]
    assert probabilities(logits_V, Sampling(temperature=1e30)).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    for penalty in (0.7, 1.3, 2.0):
        logits_V = random_logits(2)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), logits_V[None])[0]
        ours = shape_logits(logits_V, Sampling(repetition_penalty=penalty), prompt=PROMPT, output=OUTPUT)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert not torch.equal(ours, logits_V)


def test_presence_and_frequency_are_counted_in_the_output_alone() -> None:
    logits_V, counts = random_logits(3), Counter(OUTPUT)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-1.25)
    expected = [float(x) + 1.25 * counts[token] - 0.5 * (token in counts) for token, x in enumerate(logits_V)]
    ours = shape_logits(logits_V, sampling, prompt=PROMPT, output=OUTPUT)
    assert ours.tolist() == pytest.approx(expected)
    assert torch.equal(shape_logits(logits_V, sampling, prompt=PROMPT + OUTPUT), logits_V)


def test_the_bias_is_that_of_transformers_and_allowed_tokens_are_the_only_ones() -> None:
    logits_V = random_logits(4)
    theirs = SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -100.0]])(torch.tensor([PROMPT]), logits_V[None].float())[0]
    torch.testing.assert_close(shape_logits(logits_V.float(), Sampling(logit_bias={9: -100.0, 3: 2.5})), theirs)
    allowed_V = shape_logits(logits_V, Sampling(allowed_tokens=frozenset({0, 5})))
    assert allowed_V.isfinite().nonzero()[:, 0].tolist() == [0, 5]
    assert allowed_V[[0, 5]].tolist() == logits_V[[0, 5]].tolist()


def test_options_are_applied_in_the_order_of_vllm() -> None:
    logits_V = torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64)
    sampling = Sampling(
        logit_bias={0: 3.0, 3: 50.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        allowed_tokens=frozenset({0, 1, 2}),
    )
    # The repetition penalty divides the biased 1 + 3, what is subtracted comes after it, and no bias allows a token.
    shaped = shape_logits(logits_V, sampling, prompt=(1,), output=(0, 0))
    assert shaped.tolist() == [(1 + 3) / 2 - 2 * 0.25 - 0.5, -1 * 2, 2, -math.inf]


def test_greedy_decoding_obeys_all_options_that_shape_logits() -> None:
    logits_V = torch.tensor([3.0, 2.0, 1.0, 0.0])

    def best(**options: Any) -> int:
        sampling = Sampling(**options)
        return int(probabilities(shape_logits(logits_V, sampling, prompt=(1,), output=(0, 0)), sampling).argmax())

    assert best() == 0
    assert best(logit_bias={3: 4.0}) == 3
    assert best(allowed_tokens=frozenset({2, 3})) == 2
    assert best(frequency_penalty=0.6) == 1
    assert best(presence_penalty=1.5) == 1
    assert best(repetition_penalty=4.0) == 2
    assert best(min_p=0.5, top_k=1) == 0


def test_shaping_leaves_its_input_alone_and_serves_whole_batches() -> None:
    logits_BV = torch.stack([random_logits(seed) for seed in range(4)])
    before_BV = logits_BV.clone()
    sampling = Sampling(
        logit_bias={2: 1.0}, presence_penalty=1.0, repetition_penalty=1.5, allowed_tokens=frozenset({2})
    )
    shaped_BV = shape_logits(logits_BV, sampling, prompt=PROMPT, output=OUTPUT)
    assert torch.equal(logits_BV, before_BV)
    for logits_V, shaped_V in zip(logits_BV, shaped_BV, strict=True):
        assert torch.equal(shape_logits(logits_V, sampling, prompt=PROMPT, output=OUTPUT), shaped_V)
    assert shape_logits(logits_BV, Sampling(top_p=0.5, temperature=1)) is logits_BV, "nothing to shape, nothing to copy"


def test_sampling_is_hashable_with_any_form_of_bias() -> None:
    from_mapping, from_pairs = Sampling(logit_bias={7: 1.0, 3: -2.0}), Sampling(logit_bias=((3, -2.0), (7, 1.0)))
    assert from_mapping == from_pairs
    assert len({from_mapping, from_pairs, replace(from_mapping, top_k=0)}) == 1
    assert from_mapping.bias_pairs == ((3, -2.0), (7, 1.0))
    assert from_mapping != Sampling()


@each(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"temperature": 1e-40}, "temperature 1e-40"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty inf"),
        ({"presence_penalty": 2.1}, "presence_penalty 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
        ({"logit_bias": {5: 101.0}}, "logit_bias 101.0 of token 5"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias nan of token 5"),
        ({"logit_bias": {-5: 1.0}}, "token -5"),
        ({"allowed_tokens": frozenset()}, "allowed_tokens names 0 tokens"),
        ({"allowed_tokens": frozenset({-1, 4})}, "token -1"),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Sampling(**values)


def test_a_token_outside_the_vocabulary_is_refused_by_name() -> None:
    for sampling in (Sampling(logit_bias={10: 1.0}), Sampling(allowed_tokens=frozenset({2, 10}))):
        sampling.require_vocabulary(11)
        with pytest.raises(UserError, match="token 10, above the last one 9"):
            sampling.require_vocabulary(10)


def test_the_residual_is_the_normalised_excess_of_p_over_q() -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert residual(p_V, q_V).tolist() == pytest.approx([0.75, 0.25, 0])
    assert residual(p_V, p_V).tolist() == p_V.tolist(), "nothing is left above q, so nothing was turned down"
    greedy_V = one_hot(torch.tensor(0), 3, torch.float32)
    assert residual(p_V, greedy_V).tolist() == pytest.approx([0, 0.6, 0.4])


def test_accepted_and_residual_probability_add_up_to_p() -> None:
    for seed in range(20):
        p_V, q_V = random_logits(seed).softmax(-1), random_logits(seed + 100).softmax(-1)
        accepted_V = q_V * (p_V / q_V).clamp(max=1)
        law_V = accepted_V + (1 - accepted_V.sum()) * residual(p_V, q_V)
        torch.testing.assert_close(law_V, p_V, rtol=0, atol=1e-12)
        wrong_V = accepted_V + (1 - accepted_V.sum()) * p_V
        assert float((wrong_V - p_V).abs().max()) > 1e-3, "drawing from p instead would show"


def test_siblings_are_tried_in_turn_against_the_residual() -> None:
    p_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    siblings = [Candidate(token=t, q_V=one_hot(torch.tensor(t), 3, torch.float64)) for t in (0, 2)]
    first = ScriptedCoins(True)
    assert try_candidates(p_V, siblings, first)[0] == 0
    second = ScriptedCoins(False, True)
    assert try_candidates(p_V, siblings, second)[0] == 1
    assert second.asked == pytest.approx([0.5, 0.4]), "0.2 of the 0.5 that are left"
    index, left_V = try_candidates(p_V, siblings, ScriptedCoins(False, False))
    assert index is None
    assert left_V.tolist() == pytest.approx([0, 1, 0])


def test_acceptance_is_certain_below_p_and_impossible_outside_its_support() -> None:
    p_V = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    q_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    for token, chance in ((0, 1.0), (1, 1.0), (2, 0.0)):
        coins = ScriptedCoins(True)
        try_candidates(p_V, [Candidate(token=token, q_V=q_V)], coins)
        assert coins.asked == [chance]


def test_no_candidate_leaves_p_untouched() -> None:
    p_V = torch.tensor([0.6, 0.4])
    index, left_V = try_candidates(p_V, [], ScriptedCoins())
    assert index is None
    assert left_V is p_V


def test_seeded_draws_repeat_and_differ_by_seed() -> None:
    p_V = torch.ones(1000) / 1000

    def sequence(seed: int) -> list[int]:
        draws = SeededDraws(seed)
        return [draws.pick(p_V) if i % 2 else draws.coin(0.5) for i in range(40)]

    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)


def test_seeded_draws_follow_their_probabilities() -> None:
    draws, samples = SeededDraws(0), 4000
    p_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    counts = torch.bincount(torch.tensor([draws.pick(p_V) for _ in range(samples)]), minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], samples * p_V[[0, 2, 3]].double()).pvalue > 1e-3
    assert stats.chisquare(counts[[0, 2, 3]], samples * torch.tensor([0.45, 0.33, 0.22])).pvalue < 1e-3
    heads = sum(draws.coin(0.3) for _ in range(samples))
    assert stats.binomtest(heads, samples, 0.3).pvalue > 1e-3
    assert not any(draws.coin(0.0) for _ in range(100))
    assert all(draws.coin(1.0) for _ in range(100))
