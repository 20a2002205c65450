"""Speculative decoding keeps the output distribution: proved by enumeration, not by sampling.

Random draws are replayed through every outcome with its exact probability, so the law of whole sequences is computed up
to rounding. Every incorrect rule that has been published or shipped must change the law here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from each import each
from engine.scripted import (
    IMPOSSIBLE,
    ScriptedDrafter,
    ScriptedTarget,
    constant_table,
    deviation,
    exact_law,
    random_table,
)
from eyas.sampling import Sampling
from oracle import reference, rejection
from oracle.reference import Chain, Node, Tree, decode_plainly, decode_speculatively
from oracle.rejection import Candidate, Draws, residual, try_candidates
from oracle.shaping import one_hot, probabilities

PROMPT = (0, 1)
EXACT, CAUGHT = 1e-9, 1e-3
Law = dict[tuple[int, ...], float]

SAMPLINGS = {
    "greedy": Sampling(),
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=0.8, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.75),
    "all three": Sampling(temperature=1.3, top_k=2, top_p=0.7),
}
CHAINS = [Chain(depth=depth, probabilistic=drawn) for depth in (1, 2, 3) for drawn in (False, True)]


def plain_law(target: ScriptedTarget, sampling: Sampling, length: int, stop_ids: Sequence[int] = ()) -> Law:
    return exact_law(
        lambda draws: decode_plainly(
            target, PROMPT, draws=draws, max_new_tokens=length, sampling=sampling, stop_ids=stop_ids
        )
    )


def speculative_law(
    target: ScriptedTarget,
    drafter: ScriptedDrafter,
    shape: Chain | Tree,
    sampling: Sampling,
    length: int,
    stop_ids: Sequence[int] = (),
) -> Law:
    return exact_law(
        lambda draws: (
            decode_speculatively(
                target,
                drafter,
                PROMPT,
                shape=shape,
                draws=draws,
                max_new_tokens=length,
                sampling=sampling,
                stop_ids=stop_ids,
            ).tokens
        )
    )


def accepted_law(
    target: ScriptedTarget, drafter: ScriptedDrafter, shape: Chain, sampling: Sampling, length: int
) -> dict[tuple[int, ...], float]:
    """The law of how many drafts each round accepts."""
    return exact_law(
        lambda draws: tuple(
            round_.accepted
            for round_ in decode_speculatively(
                target, drafter, PROMPT, shape=shape, draws=draws, max_new_tokens=length, sampling=sampling
            ).rounds
        )
    )


def one_round_law(
    target: ScriptedTarget, drafter: ScriptedDrafter, shape: Chain | Tree, sampling: Sampling, length: int
) -> Law:
    """One round of speculation, then plain decoding: what is affordable for a large tree."""

    def run(draws: Draws) -> tuple[int, ...]:
        ids = list(PROMPT)
        aux_TX = target([ids])[0][1][:-1]
        root = reference.draft(drafter, ids, aux_TX, shape, sampling, draws)
        new, _ = reference.verify(target, ids, root, sampling, draws)
        rest = decode_plainly(target, [*ids, *new], draws=draws, max_new_tokens=length - len(new), sampling=sampling)
        return (*new, *rest)[:length]

    return exact_law(run)


def pair(seed: int, vocab: int = 3) -> tuple[ScriptedTarget, ScriptedDrafter]:
    """A target and a drafter that resembles it."""
    table = random_table(vocab, seed)
    return ScriptedTarget(table), ScriptedDrafter(0.5 * table + random_table(vocab, seed + 1000))


def caught(shape: Chain | Tree, sampling: Sampling, length: int = 2) -> float:
    """Deviation from the plain law over a few pairs of models, under whatever rule is patched in."""
    deviations = []
    for seed in range(3):
        target, drafter = pair(seed)
        law = speculative_law(target, drafter, shape, sampling, length)
        assert sum(law.values()) == pytest.approx(1, abs=EXACT), "a broken rule is still a law"
        deviations.append(deviation(law, plain_law(target, sampling, length)))
    return max(deviations)


@each("sampling", SAMPLINGS.values())
def test_enumeration_of_plain_decoding_is_the_product_of_its_probabilities(sampling: Sampling) -> None:
    target, _ = pair(0)
    expected = {}
    for a in range(3):
        for b in range(3):
            first, second = (probabilities(target.table[k], sampling) for k in ((0, 1), (1, a)))
            if (probability := float(first[a] * second[b])) > 0:
                expected[a, b] = probability
    law = plain_law(target, sampling, 2)
    assert law.keys() == expected.keys()
    assert deviation(law, expected) < EXACT


@each("sampling", SAMPLINGS.values())
@each("shape", CHAINS)
def test_a_chain_leaves_the_law_as_it_is(shape: Chain, sampling: Sampling) -> None:
    target, drafter = pair(11, vocab=4 - shape.depth // 2)
    law = speculative_law(target, drafter, shape, sampling, 2)
    assert deviation(law, plain_law(target, sampling, 2)) < EXACT


@each("shape", CHAINS)
def test_whole_drafts_leave_the_law_as_it_is(shape: Chain) -> None:
    target, drafter = pair(15)
    law = one_round_law(target, drafter, shape, Sampling(temperature=1.0, top_p=0.95), shape.depth + 1)
    assert deviation(law, plain_law(target, Sampling(temperature=1.0, top_p=0.95), shape.depth + 1)) < EXACT


@each("seed", range(2))
@each("shape", [*CHAINS[:4], Tree(depth=2, width=2, budget=3)])
def test_several_rounds_leave_the_law_as_it_is(shape: Chain | Tree, seed: int) -> None:
    target, drafter = pair(seed, vocab=2)
    law = speculative_law(target, drafter, shape, Sampling(temperature=1.0), 4)
    assert deviation(law, plain_law(target, Sampling(temperature=1.0), 4)) < EXACT


@each("sampling", SAMPLINGS.values())
@each("budget", [2, 3, 4, 6])
def test_a_greedy_tree_cut_to_its_budget_leaves_the_law_as_it_is(budget: int, sampling: Sampling) -> None:
    target, drafter = pair(21)
    law = speculative_law(target, drafter, Tree(depth=2, width=2, budget=budget), sampling, 3)
    assert deviation(law, plain_law(target, sampling, 3)) < EXACT


@each("sampling", SAMPLINGS.values())
def test_a_tree_drawn_without_replacement_leaves_the_law_as_it_is(sampling: Sampling) -> None:
    target, drafter = pair(31)
    shape = Tree(depth=2, width=2, budget=6, probabilistic=True)
    law = one_round_law(target, drafter, shape, sampling, 3)
    assert deviation(law, plain_law(target, sampling, 3)) < EXACT


def test_whole_runs_of_a_drawn_tree_leave_the_law_as_it_is() -> None:
    target, drafter = pair(41, vocab=2)
    shape = Tree(depth=2, width=2, budget=6, probabilistic=True)
    law = speculative_law(target, drafter, shape, Sampling(temperature=1.0), 3)
    assert deviation(law, plain_law(target, Sampling(temperature=1.0), 3)) < EXACT


def test_which_drawn_nodes_grow_may_depend_on_every_token_drawn_before() -> None:
    # Of the four nodes of depth 2 the two most confident ones grow, before any of their children is drawn.
    target, drafter = pair(51, vocab=2)
    shape = Tree(depth=3, width=2, budget=10, probabilistic=True)
    law = one_round_law(target, drafter, shape, Sampling(temperature=1.0), 4)
    assert deviation(law, plain_law(target, Sampling(temperature=1.0), 4)) < EXACT


@each("drawn", [False, True])
def test_drafts_outside_the_support_of_p_leave_the_law_as_it_is(drawn: bool) -> None:
    target = ScriptedTarget(random_table(4, 0))
    drafter = ScriptedDrafter(-4 * target.table)  # prefers what top-k forbids; drafts are shaped by its own top-k
    sampling = Sampling(temperature=1.0, top_k=2)
    shape = Chain(depth=1, probabilistic=drawn)
    assert accepted_law(target, drafter, shape, sampling, 2).keys() == {(0,)}, "each draft was outside"
    for shape in (Chain(depth=2, probabilistic=drawn), Tree(depth=1, width=3, budget=3, probabilistic=drawn)):
        law = speculative_law(target, drafter, shape, sampling, 2)
        assert deviation(law, plain_law(target, sampling, 2)) < EXACT


@each("drawn", [False, True])
def test_a_draft_vocabulary_that_misses_tokens_leaves_the_law_as_it_is(drawn: bool) -> None:
    target, drafter = pair(61, vocab=4)
    pruned = drafter.table.clone()
    pruned[..., [0, 2]] = IMPOSSIBLE
    for shape in (Chain(depth=2, probabilistic=drawn), Tree(depth=1, width=3, budget=3, probabilistic=drawn)):
        for sampling in (SAMPLINGS["plain"], SAMPLINGS["all three"]):
            law = speculative_law(target, ScriptedDrafter(pruned), shape, sampling, 2)
            assert deviation(law, plain_law(target, sampling, 2)) < EXACT


@each("shape", [*CHAINS[2:4], Tree(depth=2, width=2, budget=4)])
def test_stop_ids_end_every_sequence_as_in_plain_decoding(shape: Chain | Tree) -> None:
    target, drafter = pair(71)
    sampling = Sampling(temperature=1.0)
    law = speculative_law(target, drafter, shape, sampling, 3, stop_ids=[2])
    plain = plain_law(target, sampling, 3, stop_ids=[2])
    assert law.keys() == plain.keys()
    assert {len(tokens) for tokens in law} == {1, 2, 3}
    assert deviation(law, plain) < EXACT


@each(("drawn", "temperature"), [(True, 1.0), (True, 0.0), (False, 0.0)])
def test_a_drafter_that_is_the_target_is_always_accepted(drawn: bool, temperature: float) -> None:
    target, stranger = pair(81)
    shape, sampling = Chain(depth=2, probabilistic=drawn), Sampling(temperature=temperature)
    assert accepted_law(target, ScriptedDrafter(target.table), shape, sampling, 3).keys() == {(2,)}
    assert accepted_law(target, stranger, shape, sampling, 3).keys() != {(2,)}, "another drafter is not"


# Incorrect rules must be caught -------------------------------------------------------------------------------


def test_accepting_whatever_is_possible_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_possible(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
        possible = [i for i, candidate in enumerate(candidates) if p_V[candidate.token] > 0]
        return (possible[0] if possible else None), p_V

    monkeypatch.setattr(reference, "try_candidates", accept_possible)
    for drawn in (False, True):
        assert caught(Chain(depth=1, probabilistic=drawn), Sampling(temperature=1.0)) > CAUGHT


def test_drawing_from_p_after_a_rejection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p_V, q_V: p_V)
    for drawn in (False, True):
        assert caught(Chain(depth=1, probabilistic=drawn), Sampling(temperature=1.0)) > CAUGHT


def test_a_residual_against_the_wrong_q_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def against_the_token(p_V: Tensor, q_V: Tensor) -> Tensor:
        return residual(p_V, one_hot(q_V.argmax(), len(q_V), q_V.dtype))

    with monkeypatch.context() as patch:
        patch.setattr(rejection, "residual", against_the_token)
        assert caught(Chain(depth=1, probabilistic=False), Sampling(temperature=1.0)) < EXACT, "greedy: the same thing"
        assert caught(Chain(depth=1, probabilistic=True), Sampling(temperature=1.0)) > CAUGHT

    def with_replacement(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
        return try_candidates(p_V, [replace(c, q_V=candidates[0].q_V) for c in candidates], draws)

    siblings = Tree(depth=1, width=2, budget=2, probabilistic=True)
    assert caught(siblings, Sampling(temperature=1.0)) < EXACT
    monkeypatch.setattr(reference, "try_candidates", with_replacement)
    assert caught(siblings, Sampling(temperature=1.0)) > CAUGHT


def test_top_p_after_acceptance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.75)
    unshaped: list[Tensor] = []

    def remember(logits_V: Tensor, how: Sampling) -> Tensor:
        unshaped.append(probabilities(logits_V, replace(how, top_p=1.0)))
        return probabilities(logits_V, how)

    def shape_late(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
        index, left_V = try_candidates(unshaped[-1], candidates, draws)
        return index, left_V if index is not None else probabilities(left_V.log(), sampling)

    monkeypatch.setattr(reference, "probabilities", remember)
    assert caught(Chain(depth=1, probabilistic=True), sampling) < EXACT
    monkeypatch.setattr(reference, "try_candidates", shape_late)
    assert caught(Chain(depth=1, probabilistic=True), sampling) > CAUGHT


def drop_drafts(patch: pytest.MonkeyPatch, dropped: Callable[[Sequence[int], Node], bool]) -> None:
    """After drafting, drop the nodes of depth 1 for which this holds, given the text and the node."""
    draft = reference.draft

    def and_drop(drafter, ids, *arguments):  # type: ignore[no-untyped-def]
        root = draft(drafter, ids, *arguments)
        root.children = [child for child in root.children if not dropped(ids, child)]
        return root

    patch.setattr(reference, "draft", and_drop)


def second_token(law: Law) -> list[float]:
    return [sum(p for tokens, p in law.items() if tokens[1] == token) for token in (0, 1)]


def test_submitting_a_drawn_token_by_looking_at_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = ScriptedTarget(constant_table(0.7, 0.3)), ScriptedDrafter(constant_table(0.5, 0.5))
    sampling, shape = Sampling(temperature=1.0), Chain(depth=1, probabilistic=True)
    with monkeypatch.context() as patch:
        # Decided by the text before the token: still lossless.
        drop_drafts(patch, lambda ids, child: ids[-1] == 0)
        assert second_token(speculative_law(target, drafter, shape, sampling, 2)) == pytest.approx(
            [0.7, 0.3], abs=EXACT
        )
    drop_drafts(monkeypatch, lambda ids, child: child.candidate.token == 1)
    assert second_token(speculative_law(target, drafter, shape, sampling, 2)) == pytest.approx([0.85, 0.15], abs=EXACT)
    # A greedy draft is not random, so looking at it reveals nothing.
    greedy = speculative_law(target, drafter, Chain(depth=1), sampling, 2)
    assert second_token(greedy) == pytest.approx([0.7, 0.3], abs=EXACT)


def test_cutting_a_drawn_tree_by_confidence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Tree(depth=1, width=2, budget=2, probabilistic=True)
    assert caught(shape, Sampling(temperature=1.0)) < EXACT
    draft = reference.draft

    def and_cut(*arguments):  # type: ignore[no-untyped-def]
        root = draft(*arguments)
        root.children = [max(root.children, key=lambda child: child.confidence)]
        return root

    monkeypatch.setattr(reference, "draft", and_cut)
    assert caught(shape, Sampling(temperature=1.0)) > CAUGHT
