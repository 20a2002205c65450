"""Sampling in the engine: tokens follow the target's distribution whatever is drafted, and acceptance is optimal."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from each import each
from engine.scripted import random_table
from eyas.kernels import noise
from eyas.sampling import Sampling
from oracle.draft import Draft
from oracle.rejection import Candidate, SeededDraws, shape_logits, try_candidates
from oracle.sampler import SamplingMetadata, choose, draw, draw_many, log_probabilities
from oracle.shaping import probabilities
from oracle.verify import accept_tree, accepted_nodes

RARE, CERTAIN = 1e-4, 1e-6
MANY = 40_000
PROMPT, BEFORE = (1, 0), (1, 0, 1, 1)

SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "bias": Sampling(temperature=1.0, logit_bias={0: -0.7, 1: 1.1}),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.8),
    "presence": Sampling(temperature=1.0, presence_penalty=0.9),
    "frequency": Sampling(temperature=1.0, frequency_penalty=-0.6),
    "allowed": Sampling(temperature=1.0, allowed_tokens=frozenset({0, 1})),
    "all": Sampling(
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={1: 0.5},
    ),
}


def accept_chain(draft_RS: Tensor, token_RQ: Tensor) -> Tensor:
    """Number of drafts of each row that the engine accepts [R]; -1 is no draft."""
    chains = [Draft(tokens=tuple(row), parents=tuple(range(-1, len(row) - 1))) for row in draft_RS.tolist()]
    return torch.tensor([len(accepted_nodes(*pair)) for pair in zip(chains, token_RQ.tolist(), strict=True)])


def random_logits(size: int, seed: int = 0) -> Tensor:
    return 1.2 * torch.randn(size, generator=torch.Generator().manual_seed(100 * size + seed), dtype=torch.float64)


def by_seed(sampling: Sampling, count: int = MANY, position: int = 9) -> list[SamplingMetadata]:
    """One choice for many requests, each with its own random numbers."""
    return [
        SamplingMetadata(sampling=sampling, seed=seed, position=position, before=BEFORE, prompt_length=len(PROMPT))
        for seed in range(count)
    ]


def p_value(tokens: Tensor, p_V: Tensor) -> float:
    """Probability of counts at least as far from p, if p is their law. Rare tokens are pooled."""
    counts_V = torch.bincount(tokens.flatten(), minlength=len(p_V))
    assert int(counts_V[p_V == 0].sum()) == 0, "an impossible token came"
    expected_V = p_V / p_V.sum() * tokens.numel()
    rare_V = expected_V < 10
    counts = [*counts_V[~rare_V].tolist(), int(counts_V[rare_V].sum())]
    expected = [*expected_V[~rare_V].tolist(), float(expected_V[rare_V].sum())]
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return 1.0 if len(counts) == 1 else float(stats.chisquare(counts, expected).pvalue)


# The token of a position has the target's distribution ---------------------------------------------------------


@pytest.mark.slow
@each("size", [2, 3, 10, 50])
@each("sampling", SAMPLINGS.values())
def test_a_token_comes_as_often_as_the_shaped_target_has_it(sampling: Sampling, size: int) -> None:
    logits_V = random_logits(size)
    p_V = probabilities(shape_logits(logits_V, sampling, prompt=PROMPT, output=BEFORE[len(PROMPT) :]), sampling)
    assert p_value(choose(logits_V.expand(MANY, -1), by_seed(sampling)), p_V) > RARE


def test_positions_of_one_request_are_as_random_as_requests() -> None:
    logits_V, sampling = random_logits(10), SAMPLINGS["plain"]
    wanted = [SamplingMetadata(sampling=sampling, seed=7, position=position) for position in range(MANY)]
    assert p_value(choose(logits_V.expand(MANY, -1), wanted), logits_V.softmax(-1)) > RARE


def test_a_bias_of_a_few_percent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_V, sampling = random_logits(10), SAMPLINGS["plain"]
    p_V, wanted = logits_V.softmax(-1), by_seed(sampling)
    favoured_V = p_V * (1 + 0.05 * (torch.arange(10) == p_V.argmax()))
    assert p_value(choose(favoured_V.log().expand(MANY, -1), wanted), p_V) < RARE
    monkeypatch.setattr(noise, "_time", lambda w: w.float())  # uniform instead of exponential times
    assert p_value(choose(logits_V.expand(MANY, -1), wanted), p_V) < CERTAIN


def test_greedy_takes_the_largest_logit_after_all_that_shapes_it() -> None:
    logits_V = torch.tensor([3.0, 2.5, 1.0, 0.0])
    mask_V = torch.tensor([False, False, True, True])
    cases = [
        (SamplingMetadata(sampling=Sampling(), position=0), 0),
        (SamplingMetadata(sampling=Sampling(top_p=0.1), position=0), 0),
        (SamplingMetadata(sampling=Sampling(), position=0, banned=frozenset({0, 1})), 2),
        (SamplingMetadata(sampling=Sampling(), position=0, mask_V=mask_V), 2),
        (SamplingMetadata(sampling=Sampling(), position=0, mask_V=mask_V, banned=frozenset({2})), 3),
        (SamplingMetadata(sampling=Sampling(logit_bias={3: 9.0}), position=0), 3),
        (SamplingMetadata(sampling=Sampling(logit_bias={3: 9.0}), position=0, banned=frozenset({3})), 0),
        (SamplingMetadata(sampling=Sampling(presence_penalty=1.0), position=0, before=[0], prompt_length=1), 0),
        (SamplingMetadata(sampling=Sampling(presence_penalty=1.0), position=0, before=[0], prompt_length=0), 1),
        (SamplingMetadata(sampling=Sampling(repetition_penalty=2.0), position=0, before=[0], prompt_length=1), 1),
        (SamplingMetadata(sampling=Sampling(allowed_tokens=frozenset({1, 2})), position=0), 1),
    ]
    logits_NV = logits_V.repeat(len(cases), 1)
    assert choose(logits_NV, [one for one, _ in cases]).tolist() == [token for _, token in cases]
    assert torch.equal(logits_NV, logits_V.expand(len(cases), -1)), "the raw logits are left as they were"


def test_bans_and_masks_take_tokens_out_of_the_distribution() -> None:
    logits_V, sampling = random_logits(6), SAMPLINGS["plain"]
    mask_V = torch.tensor([True, True, False, True, True, True])
    wanted = [
        SamplingMetadata(sampling=sampling, seed=seed, position=3, banned=frozenset({4}), mask_V=mask_V)
        for seed in range(4000)
    ]
    p_V = logits_V.softmax(-1) * torch.tensor([1, 1, 0, 1, 0, 1])
    assert p_value(choose(logits_V.expand(4000, -1), wanted), p_V) > RARE


def test_a_mixed_batch_chooses_as_each_row_alone() -> None:
    kinds = [*SAMPLINGS.values(), Sampling(), Sampling(presence_penalty=1.0)] * 4
    logits_NV = torch.stack([random_logits(300, seed) for seed in range(len(kinds))]).float()
    wanted = [
        SamplingMetadata(
            sampling=sampling,
            seed=row // 3,
            position=row % 5,
            before=BEFORE,
            prompt_length=len(PROMPT),
            banned=frozenset({0} if row % 2 else ()),
            mask_V=torch.arange(300) > 0 if row % 7 == 0 else None,
        )
        for row, sampling in enumerate(kinds)
    ]
    together = choose(logits_NV, wanted)
    assert together.tolist() == [int(choose(logits_NV[i : i + 1], [one])) for i, one in enumerate(wanted)]


# Speculation changes nothing -----------------------------------------------------------------------------------

TABLE = random_table(4, 3)
"""Logits of a target whose last two tokens decide the next."""


def target_logits(texts: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([TABLE[text[-2], text[-1]] for text in texts])


def wanted_behind(sampling: Sampling, seed: int, text: Sequence[int], prompt_length: int) -> SamplingMetadata:
    # Token 3 is a stop token that may not come at first.
    banned = frozenset({3} if len(text) < prompt_length + 3 else ())
    return SamplingMetadata(
        sampling=sampling, seed=seed, position=len(text), before=text, prompt_length=prompt_length, banned=banned
    )


Propose = Callable[[list[int]], tuple[list[int], list[int]]]
"""Parents and tokens of a tree behind a text."""


def decode(sampling: Sampling, seed: int, propose: Propose, length: int = 12) -> tuple[list[int], int]:
    """New tokens of a request by rounds of draft and verification, and how many of them were drafts."""
    text, accepted = list(PROMPT), 0
    while len(text) < len(PROMPT) + length:
        parents, drafts = propose(text)
        paths: dict[int, list[int]] = {-1: text}
        for index, (parent, token) in enumerate(zip(parents, drafts, strict=True)):
            paths[index] = [*paths[parent], token]
        texts = list(paths.values())
        own = choose(target_logits(texts), [wanted_behind(sampling, seed, t, len(PROMPT)) for t in texts]).tolist()
        path = accept_tree(parents, drafts, own)
        text = [*text, own[0], *(own[1 + node] for node in path)]
        accepted += len(path)
    return text[len(PROMPT) : len(PROMPT) + length], accepted


@each("sampling", [Sampling(), *SAMPLINGS.values()])
def test_the_same_seed_gives_the_same_tokens_whatever_is_drafted(sampling: Sampling) -> None:
    def nothing(text: list[int]) -> tuple[list[int], list[int]]:
        return [], []

    taken = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)

        def number(below: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(below, (), generator=generator))

        def chain(text: list[int]) -> tuple[list[int], list[int]]:
            depth = number(5)
            return list(range(-1, depth - 1)), [number(4) for _ in range(depth)]

        def tree(text: list[int]) -> tuple[list[int], list[int]]:
            size = number(9)
            return [number(index + 1) - 1 for index in range(size)], [number(4) for _ in range(size)]

        plain, _ = decode(sampling, seed, nothing)
        for propose in (chain, tree):
            tokens, accepted = decode(sampling, seed, propose)
            assert tokens == plain
            taken += accepted
    assert taken > 50, "drafts were accepted, too"


def two_tokens(greedy: bool, drafter: Tensor) -> tuple[Tensor, Tensor]:
    """The first two tokens [MANY, 2] behind the prompt, decoded with drafts of depth 2, and how many were accepted."""
    sampling = SAMPLINGS["plain"]
    wanted = [
        [SamplingMetadata(sampling=sampling, seed=seed, position=2 + t) for seed in range(MANY)] for t in range(3)
    ]
    guess = [[SamplingMetadata(sampling=Sampling(), position=2)] * MANY] * 2 if greedy else wanted
    first = torch.full((MANY,), PROMPT[1])
    draft_a = draw(drafter[PROMPT[0], first], guess[0], torch.arange(4)).token
    draft_b = draw(drafter[first, draft_a], guess[1], torch.arange(4)).token
    own_a = choose(TABLE[PROMPT[0], first], wanted[0])
    own_b = choose(TABLE[first, draft_a], wanted[1])
    own_c = choose(TABLE[draft_a, draft_b], wanted[2])
    accepted = accept_chain(torch.stack([draft_a, draft_b], -1), torch.stack([own_a, own_b, own_c], -1))
    # After a rejected first draft, the second token comes in the next round, behind the target's own first.
    later = choose(TABLE[first, own_a], wanted[1])
    return torch.stack([own_a, torch.where(accepted > 0, own_b, later)], -1), accepted


@each("greedy", [False, True])
def test_pairs_of_tokens_have_the_product_of_the_conditionals(greedy: bool) -> None:
    drafter = 0.6 * TABLE + random_table(4, 9)
    pairs, accepted = two_tokens(greedy, drafter)
    first_V, second_VV = TABLE[PROMPT].softmax(-1), TABLE[PROMPT[1]].softmax(-1)
    joint = (first_V[:, None] * second_VV).flatten()
    codes = 4 * pairs[:, 0] + pairs[:, 1]
    assert p_value(codes, joint) > RARE
    assert set(accepted.tolist()) == {0, 1, 2}
    skewed = joint * (1 + 0.08 * (torch.arange(16) % 2))
    assert p_value(codes, skewed) < RARE, "eight percent more of every other pair would show"


def test_taking_accepted_drafts_only_would_be_caught() -> None:
    pairs, accepted = two_tokens(False, random_table(4, 9))
    assert p_value(pairs[accepted > 0, 0], TABLE[PROMPT].softmax(-1)) < CERTAIN


@pytest.mark.slow
def test_a_controller_that_looks_at_drafts_biases_rejection_sampling_and_not_the_engine() -> None:
    p_V, q_V = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    rounds = 3000
    # The controller submits a drawn token only if it is 0, which depends on the very token to be verified.
    draws, rejected = SeededDraws(0), []
    for _ in range(rounds):
        token = draws.pick(q_V)
        index, left_V = try_candidates(p_V, [Candidate(token=token, q_V=q_V)] if token == 0 else [], draws)
        rejected.append(token if index is not None else draws.pick(left_V))
    wanted = by_seed(SAMPLINGS["plain"], rounds)
    draft_R = draw(q_V.log().expand(rounds, -1), wanted, torch.arange(2)).token
    engine = []
    for draft, one in zip(draft_R.tolist(), wanted, strict=True):
        drafts = [draft] if draft == 0 else []
        rows = 1 + len(drafts)
        own = choose(p_V.log().expand(rows, -1), [one] * rows).tolist()
        engine.append(drafts[0] if accept_tree([-1] * len(drafts), drafts, own) else own[0])
    biased_V = torch.tensor([0.85, 0.15], dtype=torch.float64)
    assert p_value(torch.tensor(rejected), biased_V) > RARE
    assert p_value(torch.tensor(rejected), p_V) < CERTAIN
    assert p_value(torch.tensor(engine), p_V) > RARE
    assert p_value(torch.tensor(engine), biased_V) < CERTAIN
    assert 0 < int((draft_R == 0).sum()) < rounds, "it did look"


# Drafts are accepted as often as they can be -------------------------------------------------------------------


def coupled(p_V: Tensor, q_V: Tensor) -> float:
    """Probability that two races over the same noise have the same winner."""
    return sum(1 / float(torch.maximum(p_V / p_V[i], q_V / q_V[i]).sum()) for i in range(len(p_V)))


@pytest.mark.slow
@each(("size", "likeness"), [(2, 0.5), (5, 0.0), (5, 0.9), (50, 0.7)])
def test_drawn_drafts_are_accepted_as_often_as_coupled_races_agree(size: int, likeness: float) -> None:
    logits_V = random_logits(size)
    q_logits_V = likeness * logits_V + (1 - likeness) * random_logits(size, 1)
    wanted = by_seed(SAMPLINGS["plain"])
    draft = draw(q_logits_V.expand(MANY, -1), wanted, torch.arange(size)).token
    accepted = accept_chain(draft[:, None], choose(logits_V.expand(MANY, -1), wanted)[:, None].expand(-1, 2))
    p_V, q_V = logits_V.softmax(-1), q_logits_V.softmax(-1)
    rate, distance = coupled(p_V, q_V), float((p_V - q_V).abs().sum()) / 2
    assert stats.binomtest(int(accepted.sum()), MANY, rate).pvalue > RARE
    assert stats.binomtest(int(accepted.sum()), MANY, 0.95 * rate).pvalue < RARE, "five percent less would show"
    assert (1 - distance) / (1 + distance) <= rate <= 1 - distance + 1e-12
    assert p_value(draft, q_V) > RARE, "drafts themselves are drawn from q"


def test_greedy_drafts_are_accepted_with_their_probability() -> None:
    logits_V, draft = random_logits(6), 2
    tokens = choose(logits_V.expand(MANY, -1), by_seed(SAMPLINGS["plain"]))
    accepted = accept_chain(torch.full((MANY, 1), draft), tokens[:, None].expand(-1, 2))
    assert stats.binomtest(int(accepted.sum()), MANY, float(logits_V.softmax(-1)[draft])).pvalue > RARE


@each("name", ["plain", "hot", "top-k", "top-p", "min-p"])
def test_a_drafter_that_is_the_target_is_always_accepted(name: str) -> None:
    logits_NV = torch.stack([random_logits(50, seed) for seed in range(500)]).float()
    wanted = by_seed(SAMPLINGS[name], 500)
    assert torch.equal(draw(logits_NV, wanted, torch.arange(50)).token, choose(logits_NV, wanted))


def test_penalties_and_bias_reduce_acceptance_and_nothing_else() -> None:
    logits_NV = random_logits(10).expand(2000, -1)
    shaped = by_seed(SAMPLINGS["bias"], 2000)
    draft = draw(logits_NV, shaped, torch.arange(10)).token
    assert torch.equal(draft, choose(logits_NV, by_seed(SAMPLINGS["plain"], 2000))), "drawn without them"
    assert 0.3 < float((draft == choose(logits_NV, shaped)).double().mean()) < 0.95


def test_a_draft_vocabulary_races_by_target_ids() -> None:
    token_W = torch.tensor([3, 7, 8, 20, 41, 49])
    logits_NW = torch.stack([random_logits(6, seed) for seed in range(300)])
    logits_NV = torch.full((300, 50), -math.inf, dtype=torch.float64)
    logits_NV[:, token_W] = logits_NW
    drawn = draw(logits_NW, by_seed(SAMPLINGS["plain"], 300), token_W)
    assert torch.equal(drawn.token, choose(logits_NV.float(), by_seed(SAMPLINGS["plain"], 300)))
    assert torch.equal(token_W[drawn.index], drawn.token)
    torch.testing.assert_close(drawn.confidence, logits_NW.float().softmax(-1).gather(-1, drawn.index[:, None])[:, 0])


@each("sampling", [Sampling(), *list(SAMPLINGS.values())[:5]])
def test_siblings_begin_with_the_draft_and_are_all_different(sampling: Sampling) -> None:
    logits_NW = torch.stack([random_logits(40, seed) for seed in range(200)]).float()
    wanted, token_W = by_seed(sampling, 200), 2 * torch.arange(40)
    one, many = draw(logits_NW, wanted, token_W), draw_many(logits_NW, wanted, token_W, 4)
    assert torch.equal(many.index[:, 0], one.index)
    torch.testing.assert_close(many.confidence[:, 0], one.confidence)  # summed in a different order
    assert all(len(set(row)) == 4 for row in many.tokens)
    assert many.tokens == token_W[many.index].tolist()
    torch.testing.assert_close(many.confidence, logits_NW.softmax(-1).gather(-1, many.index))
    if sampling.temperature == 0:
        assert torch.equal(many.index, logits_NW.topk(4).indices)
    assert draw_many(logits_NW, wanted, token_W, 99).index.shape == (200, 40), "no more than there are"


def test_siblings_that_the_cuts_removed_come_last_and_can_still_be_right() -> None:
    logits_NW = torch.stack([random_logits(40, seed) for seed in range(500)]).float()
    narrow, wide = by_seed(Sampling(temperature=1.0, top_k=1), 500), by_seed(SAMPLINGS["plain"], 500)
    siblings = draw_many(logits_NW, narrow, torch.arange(40), 3).token
    assert torch.equal(siblings[:, 0], logits_NW.argmax(-1))
    # Behind the one that is left, the others compete as without the cut.
    winner = choose(logits_NW, wide)
    beaten = winner != siblings[:, 0]
    assert torch.equal(siblings[beaten, 1], winner[beaten])


# Acceptance and what is reported -------------------------------------------------------------------------------


def test_a_chain_is_accepted_up_to_its_first_difference() -> None:
    draft_RS = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 6, 7], [5, 6, -1], [-1, -1, -1]])
    token_RQ = torch.tensor([5, 6, 7, 8]).expand(5, -1)
    assert accept_chain(draft_RS, token_RQ).tolist() == [3, 1, 0, 2, 0]
    assert accept_chain(torch.empty(2, 0, dtype=torch.int64), token_RQ[:2, :1]).tolist() == [0, 0]


def test_a_tree_is_walked_by_the_target_own_tokens() -> None:
    parents, drafts = [-1, -1, 0, 1, 1, 3], [5, 6, 8, 7, 8, 9]
    assert accept_tree(parents, drafts, [6, 0, 8, 0, 0, 1, 0]) == [1, 4]
    assert accept_tree(parents, drafts, [6, 0, 7, 0, 9, 0, 2]) == [1, 3, 5]
    assert accept_tree(parents, drafts, [5, 7, 0, 0, 0, 0, 0]) == [0]
    assert accept_tree(parents, drafts, [4, 8, 8, 8, 8, 8, 8]) == []
    assert accept_tree([], [], [4]) == []
    assert accept_tree([-1, -1, 0], [5, 5, 6], [5, 6, 0, 0]) == [0, 2], "the first of equal siblings"


def test_a_chain_is_a_tree_with_single_children() -> None:
    for draft in product(range(3), repeat=3):
        for own in product(range(3), repeat=4):
            chain = int(accept_chain(torch.tensor([draft]), torch.tensor([own])))
            assert accept_tree([-1, 0, 1], draft, own) == list(range(chain))


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits_NV = torch.stack([random_logits(30, seed) for seed in range(5)]).float()
    token_N = torch.tensor([0, 7, 29, 3, 3])
    expected_NV = logits_NV.log_softmax(-1)
    for row, report in enumerate(log_probabilities(logits_NV, token_N, 4)):
        token = int(token_N[row])
        assert report.token == token
        assert report.logprob == pytest.approx(float(expected_NV[row, token]), abs=1e-5)
        order = expected_NV[row].argsort(descending=True).tolist()
        assert order[report.rank - 1] == token
        assert [t for t, _ in report.top] == order[:4]
        assert [x for _, x in report.top] == pytest.approx(expected_NV[row, order[:4]].tolist(), abs=1e-5)


def test_ranks_of_equals_and_reports_without_alternatives() -> None:
    logits_NV = torch.tensor([[2.0, 2.0, 1.0]]).bfloat16()
    assert log_probabilities(logits_NV, torch.tensor([1]), 0)[0].rank == 1
    assert log_probabilities(logits_NV, torch.tensor([2]), 0)[0].rank == 3
    assert log_probabilities(logits_NV, torch.tensor([2]), 0)[0].top == ()
    assert len(log_probabilities(logits_NV, torch.tensor([2]), 20)[0].top) == 3
