"""The reference decoder with a small trained target and drafter."""

from collections.abc import Collection, Sequence

import pytest
import torch
from transformers import GenerationConfig

from each import each
from engine.common import Prompts
from engine.scripted import ScriptedDrafter, ScriptedTarget, random_table
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle import reference
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, Generation, Node, Tree, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from tiny import VOCAB, drafter_config, language, random_drafter

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> DenseTarget:
    return DenseTarget(tiny_target, drafter_config())


@pytest.fixture(scope="module")
def drafter(tiny_drafter: Drafter) -> EagleDraft:
    return EagleDraft(tiny_drafter)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twenty prompts of 5 to 14 tokens that training has not seen."""
    rows = language(20, 14, torch.Generator().manual_seed(99)).tolist()
    return [row[: 5 + i % 10] for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def plain(target: DenseTarget, prompts: list[list[int]]) -> Prompts:
    return [decode_plainly(target, p, draws=SeededDraws(0), max_new_tokens=NEW_TOKENS) for p in prompts]


def speculate(
    target: DenseTarget,
    drafter: EagleDraft,
    prompt: Sequence[int],
    shape: Chain | Tree,
    *,
    max_new_tokens: int = NEW_TOKENS,
    stop_ids: Collection[int] = (),
    sampling: Sampling | None = None,
) -> Generation:
    return decode_speculatively(
        target,
        drafter,
        prompt,
        shape=shape,
        draws=SeededDraws(0),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
    )


@each("shape", [*(Chain(depth=depth) for depth in (0, 1, 3, 7)), Tree(depth=3, width=3, budget=8)])
def test_greedy_speculation_equals_plain_decoding(
    target: DenseTarget, drafter: EagleDraft, prompts: list[list[int]], plain: Prompts, shape: Chain | Tree
) -> None:
    assert [speculate(target, drafter, p, shape).tokens for p in prompts] == plain


@each("shape", [Chain(depth=3), Tree(depth=3, width=2, budget=5)])
def test_rounds_account_for_every_token(
    target: DenseTarget, drafter: EagleDraft, prompts: list[list[int]], shape: Chain | Tree
) -> None:
    for prompt in prompts[:8]:
        generation = speculate(target, drafter, prompt, shape)
        assert len(generation.tokens) == NEW_TOKENS
        assert all(0 <= r.accepted <= shape.depth for r in generation.rounds)
        assert all(len(path) <= shape.depth for r in generation.rounds for path in r.drafted)
        # The first token is the target's; a round adds its accepted drafts and one more; the last may overshoot.
        made = [1 + r.accepted for r in generation.rounds]
        assert 1 + sum(made[:-1]) < NEW_TOKENS <= 1 + sum(made)
        accepted = sum(r.accepted for r in generation.rounds)
        assert generation.acceptance_length == 1 + accepted / len(generation.rounds)
        at = 1
        for r in generation.rounds:
            taken = generation.tokens[at : at + r.accepted]
            assert any(path[: len(taken)] == taken for path in r.drafted), "accepted tokens were drafted"
            at += 1 + r.accepted


@each("shape", [Chain(depth=3), Tree(depth=3, width=2, budget=5)])
def test_stop_ids_and_lengths_cut_exactly_as_plain_decoding(
    target: DenseTarget, drafter: EagleDraft, prompts: list[list[int]], plain: Prompts, shape: Chain | Tree
) -> None:
    for prompt, tokens in zip(prompts[:2], plain, strict=False):
        for at in (0, 2, 5, NEW_TOKENS - 1):
            stop = {tokens[at]}
            expected = tokens[: tokens.index(tokens[at]) + 1]
            options = {"max_new_tokens": NEW_TOKENS, "stop_ids": stop}
            assert decode_plainly(target, prompt, draws=SeededDraws(0), **options) == expected  # type: ignore[arg-type]
            assert speculate(target, drafter, prompt, shape, stop_ids=stop).tokens == expected
            assert speculate(target, drafter, prompt, shape, max_new_tokens=at).tokens == tokens[:at]


def nodes(node: Node) -> list[Node]:
    return [descendant for child in node.children for descendant in (child, *nodes(child))]


@each("budget", [1, 2, 5, 9, 40])
def test_a_greedy_tree_keeps_the_most_confident_nodes_and_their_parents(budget: int) -> None:
    target, drafter = ScriptedTarget(random_table(6, 0)), ScriptedDrafter(random_table(6, 1))
    whole = Tree(depth=3, width=3, budget=1000)
    for a in range(6):
        ids = [a, 2, 3]
        arguments = (drafter, ids, target([ids])[0][1][:-1])
        everyone = nodes(reference.draft(*arguments, whole, Sampling(), SeededDraws(0)))
        assert len(everyone) == 3 + 9 + 9
        shape = Tree(depth=3, width=3, budget=budget)
        kept = nodes(reference.draft(*arguments, shape, Sampling(), SeededDraws(0)))
        # Nodes are reached from the root, so their parents are kept; their number is the budget, so none was lost.
        assert len(kept) == min(budget, len(everyone))
        assert sorted(n.confidence for n in kept) == sorted(n.confidence for n in everyone)[-len(kept) :]


def test_a_drawn_tree_above_its_budget_is_refused() -> None:
    with pytest.raises(UserError, match="has 6 nodes, above the budget 5"):
        Tree(depth=2, width=2, budget=5, probabilistic=True)
    assert Tree(depth=2, width=2, budget=6, probabilistic=True).budget == 6


def test_branches_of_a_draft_are_independent(
    target: DenseTarget, drafter: EagleDraft, prompts: list[list[int]]
) -> None:
    ids = prompts[9]
    aux_TX = target([ids])[0][1][:-1]
    start = drafter.start(ids, aux_TX)
    alone = drafter.logits(drafter.extend(drafter.extend(drafter.start(ids, aux_TX), 5), 6))
    for other in range(10, 14):
        drafter.extend(drafter.extend(start, other), 6)
    branch = drafter.logits(drafter.extend(drafter.extend(start, 5), 6))
    assert torch.equal(branch, alone)
    assert not torch.equal(drafter.logits(drafter.extend(drafter.extend(start, 11), 6)), alone)


def test_the_next_round_gets_the_states_of_a_fresh_forward(
    target: DenseTarget, drafter: EagleDraft, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[tuple[list[int], torch.Tensor]] = []
    start = drafter.start

    def note(ids: Sequence[int], aux_TX: torch.Tensor) -> object:
        handed.append((list(ids), aux_TX))
        return start(ids, aux_TX)

    monkeypatch.setattr(drafter, "start", note)
    for shape in (Chain(depth=3), Tree(depth=3, width=3, budget=8)):
        for prompt in prompts[:4]:
            speculate(target, drafter, prompt, shape)
    assert len(handed) > 16
    for ids, aux_TX in handed:
        fresh_TX = target([ids[:-1]])[0][1]
        torch.testing.assert_close(aux_TX, fresh_TX, rtol=1e-4, atol=1e-4)
    shifted = handed[1][1].roll(1, dims=0)
    assert not torch.allclose(shifted, target([handed[1][0][:-1]])[0][1], rtol=1e-2, atol=1e-2), "off by one would show"


def test_tokens_outside_a_pruned_vocabulary_are_never_drafted(
    target: DenseTarget, prompts: list[list[int]], plain: Prompts
) -> None:
    pruned = random_drafter(drafter_config(draft_vocab_size=VOCAB // 3), own_embedding=True)
    allowed = set(pruned.vocab().target_ids_W.tolist())
    for shape in (Chain(depth=3), Tree(depth=2, width=3, budget=6)):
        for prompt, tokens in zip(prompts[:3], plain, strict=False):
            generation = speculate(target, EagleDraft(pruned), prompt, shape)
            assert generation.tokens == tokens
            assert {t for r in generation.rounds for path in r.drafted for t in path} <= allowed


def test_plain_decoding_by_transformers_ignores_defaults_of_the_checkpoint(
    tiny_target: Target, prompts: list[list[int]], plain: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checkpoints ship such defaults (Qwen2.5 a repetition penalty); speculation applies only what was requested.
    shipped = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=3, suppress_tokens=[3])
    monkeypatch.setattr(tiny_target.model, "generation_config", shipped)
    for prompt, tokens in zip(prompts[:3], plain, strict=False):
        assert generate_plainly(tiny_target, prompt, max_new_tokens=NEW_TOKENS) == tokens
    assert tiny_target.model.generation_config is shipped
