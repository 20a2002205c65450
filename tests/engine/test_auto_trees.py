"""Draft trees for requests on auto: answers are the same as without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from engine.common import OFF, SAMPLINGS, Prompts, at_depth, options, request, requests, run, tokens_of
from eyas.drafter.model import Drafter
from eyas.engine import drift_probe
from eyas.engine.engine import Engine
from eyas.engine.runner.round import Round, RoundResults
from eyas.engine.speculation.draft import Candidates, Tree
from eyas.engine.speculation.step_report import RoundOutcome, StepReport, outcome_of_tree
from eyas.errors import UserError
from eyas.plan.shapes import Shape
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.draft import Draft
from oracle.reference import Tree as ReferenceTree
from oracle.reference import decode_speculatively
from oracle.rejection import SeededDraws

# --- answers do not show them --------------------------------------------------------------------------------------


def engine_with_trees(target: Target, drafter: Drafter, tree: Tree, **changes: Any) -> Engine:
    """An engine whose controller always chooses this tree for requests on auto, unless others have a fixed depth. Its
    clock advances on each use."""
    engine = Engine(target, drafter, config=options(**changes), clock=count(0.0, 1e-3).__next__)
    decide = engine.controller._decide
    shape = Shape(kind="tree", depth=tree.depth, width=tree.width, budget=tree.budget)

    def decided(rows: int, auto: int, fixed: int, **how: Any) -> Any:
        return decide(rows, auto, fixed, **how) if fixed or not auto else ("draft", shape, 9.0, "trees pay")

    engine.controller._decide = decided  # type: ignore[method-assign]
    return engine


@dataclass
class Grown:
    """The tree of a row as it was verified."""

    place: tuple[int, int]
    """Request key and its number of tokens."""
    depth: int
    """Depth of the pass."""
    slots: int
    """Draft slots of the row."""
    draft: Draft
    candidates: list[Candidates]


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[Grown]:
    """Collects all verified trees."""
    found: list[Grown] = []
    collect = Round.collect

    def collected(round_: Round) -> RoundResults:
        results, trees = collect(round_), round_.trees
        if trees is not None:
            assert results.verified is not None
            assert results.trees is not None
            for number, (row, nodes) in enumerate(zip(round_.rows, results.verified, strict=True)):
                draft = Draft(
                    tokens=tuple(trees.kept_token_RQ[number, 1 : 1 + nodes].tolist()),
                    parents=tuple((trees.kept_parent_RQ[number, 1 : 1 + nodes] - 1).tolist()),
                )
                place, candidates = (row.seq.key, len(row.seq.tokens)), results.trees[number].candidates
                found.append(Grown(place, trees.depth, row.drafts, draft, candidates))
        return results

    monkeypatch.setattr(Round, "collect", collected)
    return found


TREES = [Tree(depth=3, width=2, budget=6), Tree(depth=4, width=4, budget=24), Tree(depth=1, width=3, budget=3)]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_answers_equal_plain_decoding(
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    expected: Prompts,
    tree: Tree,
    rows: int,
    grown: list[Grown],
) -> None:
    engine = engine_with_trees(target, tiny_drafter, tree, max_num_seqs=rows)
    answers = run(engine, requests(prompts))
    assert tokens_of(answers) == expected
    assert any(not one.draft.is_chain for one in grown)
    assert engine.stats.accepted > 0
    assert max(depth for answer in answers for depth in answer.depths) <= tree.depth
    report = engine.controller.report()
    assert report["rows_in_trees"] > 0
    assert set(report["rows_by_depth"]) <= {0, tree.depth}


@pytest.mark.parametrize("tree", [*TREES, Tree(depth=5, width=1, budget=5), Tree(depth=9, width=2, budget=12)], ids=str)
def test_trees_equal_those_of_the_reference(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, tree: Tree, grown: list[Grown]
) -> None:
    """Node by node, while there is room for whole trees."""
    dense, eagle = DenseTarget(target, tiny_drafter.config), EagleDraft(tiny_drafter)
    shape, most = ReferenceTree(depth=tree.depth, width=tree.width, budget=tree.budget), tree.slots + 24
    for prompt in prompts[4:6]:
        reference = decode_speculatively(dense, eagle, prompt, shape=shape, draws=SeededDraws(0), max_new_tokens=most)
        expected, length = {}, len(prompt) + 1
        for round_ in reference.rounds:
            expected[length] = {path[:end] for path in round_.drafted for end in range(1, len(path) + 1)}
            length += round_.accepted + 1
        grown.clear()
        run(engine_with_trees(target, tiny_drafter, tree), [request(prompt, max_new_tokens=most)])
        whole = [one for one in grown if one.slots == tree.slots]
        assert len(whole) > 2
        for one in whole:
            paths = {tuple(one.draft.tokens_to(node)) for node in range(len(one.draft.tokens))}
            assert paths == expected[one.place[1]]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_seed_gives_the_same_tokens(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Any, grown: list[Grown]
) -> None:
    asked = [request(prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
    plainly = run(Engine(target, tiny_drafter, config=options()), [replace(one, speculation=OFF) for one in asked])
    answers = run(engine_with_trees(target, tiny_drafter, TREES[1]), asked)
    assert tokens_of(answers) == tokens_of(plainly)
    assert any(not one.draft.is_chain for one in grown)


@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 9}, {"block_size": 1}], ids=str)
def test_a_tree_is_cut_where_slots_are_short(
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    expected: Prompts,
    changes: dict[str, Any],
    grown: list[Grown],
) -> None:
    per_block = Engine(target, tiny_drafter, config=options(**changes)).budget.bytes_per_block
    blocks = 120 // options(**changes).block_size
    engine = engine_with_trees(
        target, tiny_drafter, TREES[1], **{"max_model_len": 64, "memory": blocks * per_block, **changes}
    )
    assert tokens_of(run(engine, requests(prompts))) == expected
    assert any(one.slots < TREES[1].slots for one in grown)
    assert all(len(one.draft.tokens) <= min(one.slots, TREES[1].budget) for one in grown)


def test_beside_requests_of_a_fixed_depth_all_draft_chains(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts, grown: list[Grown]
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[0])
    asked = [request(prompts[0], speculation=at_depth(5)), request(prompts[1])]
    assert tokens_of(run(engine, asked[:1])) == expected[:1]
    assert not grown
    answers = run(engine, asked)
    assert tokens_of(answers) == expected[:2]
    assert max(answers[0].depths) > TREES[0].depth
    run(engine, asked[1:])
    assert any(not one.draft.is_chain for one in grown), "trees again without the other request"


def test_check_ups_still_run_and_inform_the_alarm(
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    expected: Prompts,
    monkeypatch: pytest.MonkeyPatch,
    grown: list[Grown],
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    engine = engine_with_trees(target, tiny_drafter, TREES[0], drift_share=0.99)
    for _ in range(2):
        assert tokens_of(run(engine, requests(prompts))) == expected
    assert engine.drift.checkups > 16
    assert any(not one.draft.is_chain for one in grown)
    assert len([chance for chance in engine.drift.report().acceptance if chance == chance]) == 7, "of every depth"


# --- what is told --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLINGS[:3]], ids=range(4))
def test_ranks_tell_which_trees_would_have_had_the_token(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Sampling, grown: list[Grown]
) -> None:
    """Ranks in trees eight wide, at the first depth, against trees of two and four candidates at the same place."""
    asked = [request(p, sampling=sampling, seed=7 + i, speculation=at_depth(1)) for i, p in enumerate(prompts)]

    def fates(width: int) -> dict[tuple[int, int], tuple[int, RoundOutcome]]:
        """Nodes and outcomes by place."""
        engine = Engine(target, tiny_drafter, config=options(tree=Tree(depth=1, width=width, budget=width)))
        found, observe = dict[tuple[int, int], tuple[int, RoundOutcome]](), engine.controller.observe

        def watched(report: StepReport) -> None:
            trees = {one.place[0]: one for one in grown}
            grown.clear()
            for outcome in report.rounds:
                one = trees[outcome.key]
                found[one.place] = len(one.draft.tokens), outcome
            observe(report)

        engine.controller.observe = watched  # type: ignore[method-assign]
        run(engine, asked)
        return found

    ranked = fates(8)
    for width in (2, 4):
        compared = [
            (ranked[place][1].ranks[0], outcome.accepted)
            for place, (nodes, outcome) in fates(width).items()
            if place in ranked and nodes == width
        ]
        assert len(compared) > 25
        assert any(rank > 1 for rank, _ in compared)
        assert all((1 <= rank <= width) == bool(accepted) for rank, accepted in compared)


def test_ranks_of_trees_are_reported_so_that_estimates_stay_alive(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, grown: list[Grown]
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[1], max_num_seqs=2)
    told = engine.controller.observe
    heard: list[tuple[int, Sequence[int]]] = []

    def observe(report: StepReport) -> None:
        heard.extend((one.accepted, one.ranks) for one in report.rounds if one.drafted)
        told(report)

    monkeypatch.setattr(engine.controller, "observe", observe)
    run(engine, requests(prompts))
    assert len(heard) > 30
    assert all(max(1, accepted) <= len(ranks) <= accepted + 1 for accepted, ranks in heard)
    assert all(all(ranks[:accepted]) for accepted, ranks in heard), "what was accepted was a candidate"
    assert any(rank > 1 for accepted, ranks in heard for rank in ranks[:accepted])
    assert {len(some.tokens) for one in grown for some in one.candidates} == {TREES[1].width}
    assert engine.controller.acceptance.rounds > 0


def test_ranks_end_where_no_candidates_were_noted() -> None:
    """Nothing was drafted behind the last nodes of a tree."""
    candidates = [Candidates((5, 6), (0.6, 0.2)), Candidates((7, 8), (0.5, 0.4))]
    for accepted, tokens, ranks in ((2, [5, 7, 9], [1, 1]), (1, [5, 8], [1, 2]), (0, [4], [0]), (0, [6], [2])):
        told = outcome_of_tree(0, 2, accepted, tokens, candidates)
        assert (told.drafted, told.accepted, told.ranks) == (2, accepted, ranks)


def test_a_tree_larger_than_the_kernels_allow_is_refused() -> None:
    with pytest.raises(UserError, match="takes 64 slots, above the 63"):
        Tree(depth=3, width=2, budget=64)
