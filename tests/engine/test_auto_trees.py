"""Trees that the controller chooses: worth it or left alone, and answers never show them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

import pytest

from engine.simulated import CPU, GPU, KIND_CPU, RANDOM, TWO_CORES, best_rate, chances, plain_rate, serve
from engine.test_engine import OFF, SAMPLINGS, at_depth, options, request, run
from engine.test_engine import expected as expected  # a fixture
from eyas.drafter.model import Drafter
from eyas.engine import drift_probe
from eyas.engine.engine import Engine
from eyas.engine.proposer import Proposer
from eyas.engine.runner.drafter import DrafterRunner, Tree
from eyas.engine.speculation.controller import Controller
from eyas.engine.speculation.draft import Candidates, Draft
from eyas.engine.speculation.observations import TargetTiming
from eyas.engine.speculation.planner import KeptPlan, Situation
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.sibling_acceptance import SiblingAcceptance
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.verify import VerifyResult, outcome_of
from eyas.errors import UserError
from eyas.plan.shapes import Plan, Shape
from eyas.sampling import Sampling
from eyas.target.model import Target

MACHINES = {"cpu": CPU, "kind cpu": KIND_CPU, "two cores": TWO_CORES, "gpu": GPU}
SHIPPED, SHIPPED_SIBLINGS = chances(0.79, 0.8), (0.4, 0.18, 0.06)
"""What the drafter that comes with eyas has on prompts like those it was trained on."""


# --- where they pay, and where not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [1, 4])
def test_where_tokens_are_nearly_free_trees_are_chosen_and_gain(users: int) -> None:
    mediocre, siblings = chances(0.55, 0.5), (0.45, 0.2, 0.1)
    settings: dict[str, Any] = {"users": users, "steps": 500, "sees": True, "siblings": siblings, "off_the_path": 0.8}
    trees = serve(Controller(trees=True), GPU, mediocre, **settings)
    chains = serve(Controller(), GPU, mediocre, **settings)
    assert fmean(trees.trees[100:]) > 0.8
    assert not any(chains.trees)
    assert trees.rate(100) > 1.1 * chains.rate(100)
    assert "in trees" in trees.reasons[-1]


def test_where_every_token_costs_and_first_candidates_hit_chains_stay() -> None:
    settings: dict[str, Any] = {"users": 1, "steps": 700, "sees": True, "siblings": SHIPPED_SIBLINGS}
    ratios = []
    for seed in range(3):
        trees = serve(Controller(trees=True), TWO_CORES, SHIPPED, seed=seed, **settings)
        chains = serve(Controller(), TWO_CORES, SHIPPED, seed=seed, **settings)
        assert fmean(trees.trees) < 0.25
        assert trees.rate(150) > 0.95 * best_rate(TWO_CORES, SHIPPED, users=1)
        ratios.append(trees.rate() / chains.rate())
    assert fmean(ratios) > 0.98


@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_random_drafter_costs_less_than_three_percent(machine: str, users: int) -> None:
    run = serve(Controller(trees=True), MACHINES[machine], RANDOM, users=users, steps=500, sees=True)
    assert run.rate() > 0.97 * plain_rate(MACHINES[machine], users), "from the first step on"


def test_a_tree_that_does_not_keep_its_promise_is_given_up() -> None:
    """Siblings are often right, and nothing ever comes after them: the plan cannot know."""
    settings: dict[str, Any] = {"users": 1, "steps": 1500, "sees": True, "siblings": (0.6,), "off_the_path": 0.0}
    machine = replace(GPU, deepen=lambda count: 1.5e-3 * count)
    trees = serve(Controller(trees=True), machine, chances(0.8), **settings)
    chains = serve(Controller(), machine, chances(0.8), **settings)
    assert any(trees.trees)
    assert trees.rate(200) > 0.97 * chains.rate(200)


def test_some_rounds_look_at_further_candidates_and_only_where_trees_can_follow() -> None:
    for trees, users, least, most in ((True, 1, 16, 60), (True, 16, 0, 0), (False, 1, 0, 0)):
        looks = []

        class Watched(Controller):
            def choose(self, *rows: Any, **options: Any) -> Any:
                choice = super().choose(*rows, **options)
                looks.append(choice.look)  # noqa: B023
                return choice

        serve(Watched(trees=trees), replace(GPU, noise=0.0), chances(0.9), users=users, steps=600, sees=True)
        assert set(looks) <= {1, POLICY.ranks}
        assert least <= looks.count(POLICY.ranks) <= most


def test_shares_are_believed_once_they_were_seen_and_only_of_candidates_looked_at() -> None:
    siblings = SiblingAcceptance()
    siblings.observe([2])
    assert siblings.shares()[0] < 0.2
    for _ in range(100):
        siblings.observe([1, 2], [(0.9, 0.05), (0.5, 0.3)])
        siblings.observe([0], [(0.5, 0.2, 0.1)])
    assert siblings.shares()[0] == pytest.approx(0.5, abs=0.05)
    assert siblings.shares()[1:] == [0.0] * (POLICY.ranks - 2)
    surely, hardly = (siblings.chances(0.4, [0.5, sure])[0] for sure in (0.3, 0.2))
    assert surely == pytest.approx(0.6, abs=0.05), "the first misses in 60 %, and then such a second one always hits"
    assert hardly < 0.05


# --- answers do not show them --------------------------------------------------------------------------------------


def engine_with_trees(target: Target, drafter: Drafter, tree: Tree, **changes: Any) -> Engine:
    """An engine whose controller finds that this tree pays, always, for whoever is on auto. Its clock ticks by use."""
    engine = Engine(target, drafter, config=options(**changes), clock=count(0.0, 1e-3).__next__)
    controller = engine.controller
    for tokens in (1, 2, 1, 2, 1, 2):
        timing = TargetTiming(tokens=tokens, context=10, seconds=1e-3 * tokens)
        controller.observe(StepReport(target=timing))

    def plan(situation: Situation, step: int, deepest: int) -> KeptPlan:
        depth = min(tree.depth, deepest)
        shape = Shape(kind="tree", depth=depth, width=tree.width, budget=tree.budget)
        # So low a rate makes every draft worth its price.
        made = Plan(by_level={0: [depth]}, drafts=tree.budget, tokens=1.0, seconds=1e3, shape=shape, gain=9.0)
        return KeptPlan(made, "trees", made, 1, until=step + 1)

    controller._planner.plan = plan  # type: ignore[method-assign]
    return engine


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tree, Draft]]:
    """All trees, each with what was offered of it."""
    found: list[tuple[Tree, Draft]] = []
    grow = DrafterRunner.tree

    def tree(self: DrafterRunner, seqs: Any, shapes: Sequence[Tree], *rest: Any, **more: Any) -> list[Draft]:
        drafts = grow(self, seqs, shapes, *rest, **more)
        found.extend(zip(shapes, drafts, strict=True))
        return drafts

    monkeypatch.setattr(DrafterRunner, "tree", tree)
    return found


TREES = [Tree(depth=3, width=2, budget=6), Tree(depth=4, width=4, budget=24), Tree(depth=1, width=3, budget=3)]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_answers_equal_plain_decoding(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    tree: Tree,
    rows: int,
    grown: Any,
) -> None:
    engine = engine_with_trees(target, tiny_drafter, tree, max_num_seqs=rows)
    answers = run(engine, [request(prompt) for prompt in prompts])
    assert [answer.tokens for answer in answers] == expected
    assert any(not draft.is_chain for _, draft in grown)
    assert engine.stats.accepted > 0
    assert max(depth for answer in answers for depth in answer.depths) <= tree.depth
    report = engine.controller.report()
    assert report["rows_in_trees"] > 0
    assert set(report["rows_by_depth"]) <= {0, tree.depth}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_seed_gives_the_same_tokens(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Any, grown: Any
) -> None:
    asked = [request(prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
    plainly = run(Engine(target, tiny_drafter, config=options()), [replace(one, speculation=OFF) for one in asked])
    answers = run(engine_with_trees(target, tiny_drafter, TREES[1]), asked)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plainly]
    assert any(not draft.is_chain for _, draft in grown)


def test_ends_shortest_lengths_and_logprobs(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    stops = frozenset(expected[3][:4])
    asked = [
        request(prompts[3], stop_ids=stops, min_new_tokens=8),
        request(prompts[4], stop_ids=frozenset({expected[4][5]})),
        request(prompts[2], logprobs=3),
    ]
    theirs = run(Engine(target, tiny_drafter, config=options()), [replace(one, speculation=OFF) for one in asked])
    ours = run(engine_with_trees(target, tiny_drafter, TREES[0]), asked)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.finished for answer in ours] == [answer.finished for answer in theirs]
    assert ours[2].logprobs is not None
    assert theirs[2].logprobs is not None
    for a, b in zip(ours[2].logprobs, theirs[2].logprobs, strict=True):
        assert (a.token, a.rank) == (b.token, b.rank)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 9}, {"block_size": 1}], ids=str)
def test_a_tree_is_cut_where_slots_are_short(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    changes: dict[str, Any],
    grown: Any,
) -> None:
    per_block = Engine(target, tiny_drafter, config=options(**changes)).budget.bytes_per_block
    blocks = 120 // options(**changes).block_size
    engine = engine_with_trees(
        target, tiny_drafter, TREES[1], **{"max_model_len": 64, "memory": blocks * per_block, **changes}
    )
    answers = run(engine, [request(prompt) for prompt in prompts])
    assert [answer.tokens for answer in answers] == expected
    assert any(shape.slots < TREES[1].slots for shape, _ in grown)
    assert all(len(draft.tokens) <= shape.budget for shape, draft in grown)


def test_requests_of_a_fixed_depth_draft_chains_beside_them(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]], grown: Any
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[0])
    how = {"speculation": at_depth(5)}
    answers = run(engine, [request(p, **(how if number % 2 else {})) for number, p in enumerate(prompts)])
    assert [answer.tokens for answer in answers] == expected
    chains = [(shape, draft) for shape, draft in grown if shape.width == 1]
    assert chains
    assert all(draft.is_chain and len(draft.tokens) == shape.depth <= 5 for shape, draft in chains)
    assert max(shape.depth for shape, _ in chains) == 5
    assert max(max(answer.depths) for answer in answers[1::2]) > TREES[0].depth


def test_they_grow_no_deeper_than_the_drift_alarm_allows(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], grown: Any
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[1], drift_share=1e-9)
    for _ in range(POLICY.drift_fewest_probes):
        engine.drift.observe_checkup([1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0], {})
    assert engine.drift.deepest == 2
    run(engine, [request(prompt) for prompt in prompts])
    assert {shape.depth for shape, _ in grown} <= {1, 2}


def test_check_ups_go_on_and_tell_the_alarm_what_they_saw(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    grown: Any,
) -> None:
    monkeypatch.setattr(drift_probe, "EVERY", 1)
    engine = engine_with_trees(target, tiny_drafter, TREES[0], drift_share=0.99)
    for _ in range(2):
        answers = run(engine, [request(prompt) for prompt in prompts])
        assert [answer.tokens for answer in answers] == expected
    assert engine.drift.checkups > 16
    assert any(not draft.is_chain for _, draft in grown)
    assert len([chance for chance in engine.drift.report().acceptance if chance == chance]) == 7, "of every depth"


# --- what is told --------------------------------------------------------------------------------------------------


def test_the_costs_are_told_what_really_ran(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[0], max_num_seqs=3, drift_share=0.0)
    assert isinstance(engine.proposer, Proposer)
    drafter = engine.proposer.drafter
    read: list[int] = []
    passes: list[int] = []
    fuse, step = drafter.run.fuse, drafter.run.step

    def fused(aux: Any) -> Any:
        read.append(len(aux))
        return fuse(aux)

    def counted(hidden: Any, *rest: Any) -> Any:
        passes.append(len(hidden))
        return step(hidden, *rest)

    told: list[tuple[int, int, bool]] = []

    def observe(report: StepReport) -> None:
        draft = report.draft
        if draft is not None:
            ran = len(passes), sum(read) + sum(passes[1:])
            assert (draft.passes, draft.tokens) == ran, "the first pass reads what was fused"
            told.append((draft.passes, draft.tokens, draft.trees))

    verify = engine.host_loop._verify
    monkeypatch.setattr(drafter.run, "fuse", fused)
    monkeypatch.setattr(drafter.run, "step", counted)
    monkeypatch.setattr(engine.controller, "observe", observe)
    monkeypatch.setattr(engine.host_loop, "_verify", lambda *given: (read.clear(), passes.clear(), verify(*given))[2])
    run(engine, [request(prompt) for prompt in prompts])
    assert len(told) > 20
    assert all(trees for _, _, trees in told)


class Verdicts:
    """All verdicts on drafts, by the request and the length of its tokens."""

    def __init__(self, engine: Engine) -> None:
        self.found: dict[tuple[int, int], VerifyResult] = {}
        commit = engine.host_loop._commit

        def watched(verdict: VerifyResult, *rest: Any) -> None:
            if verdict.draft.tokens:
                self.found[verdict.row.seq.key, len(verdict.row.seq.tokens)] = verdict
            commit(verdict, *rest)

        engine.host_loop._commit = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLINGS[:3]], ids=range(4))
def test_a_rank_says_which_trees_would_have_had_the_token(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling,
) -> None:
    """Ranks noted beside chains, for the first depth, against trees of two and of four candidates at the same place."""
    asked = [request(p, sampling=sampling, seed=7 + i, speculation=at_depth(3)) for i, p in enumerate(prompts)]
    chains = Engine(target, tiny_drafter, config=options())
    monkeypatch.setattr(chains.controller, "_looks_now", lambda situation: True)
    ranked = Verdicts(chains)
    run(chains, asked)
    for width in (2, 4):
        engine = Engine(target, tiny_drafter, config=options(tree=Tree(depth=1, width=width, budget=width)))
        wide = Verdicts(engine)
        run(engine, [replace(one, speculation=at_depth(1)) for one in asked])
        compared = [
            (outcome_of(0, ranked.found[place]).ranks[0], len(verdict.nodes))
            for place, verdict in wide.found.items()
            if place in ranked.found and len(verdict.draft.tokens) == width
        ]
        assert len(compared) > 25
        assert any(rank > 1 for rank, _ in compared)
        assert all((1 <= rank <= width) == bool(accepted) for rank, accepted in compared)


def test_ranks_of_trees_are_told_so_that_estimates_stay_alive(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_trees(target, tiny_drafter, TREES[1], max_num_seqs=2)
    told = engine.controller.observe
    heard: list[tuple[int, Sequence[int], Sequence[Any]]] = []

    def observe(report: StepReport) -> None:
        for one in report.rounds:
            if one.drafted:
                heard.append((one.accepted, one.ranks, one.candidates))
                assert list(one.confidences) == [some[0] for some in one.candidates]
        told(report)

    monkeypatch.setattr(engine.controller, "observe", observe)
    run(engine, [request(prompt) for prompt in prompts])
    assert len(heard) > 30
    assert all(max(1, accepted) <= len(ranks) <= accepted + 1 for accepted, ranks, _ in heard)
    assert all(all(ranks[:accepted]) for accepted, ranks, _ in heard), "what was accepted was a candidate"
    assert any(rank > 1 for accepted, ranks, _ in heard for rank in ranks[:accepted])
    assert {len(some) for _, _, candidates in heard for some in candidates} == {TREES[1].width, POLICY.ranks}
    assert engine.controller.acceptance.siblings.shares()[0] > 0


def test_ranks_end_where_no_candidates_were_noted() -> None:
    """Behind the last draft of a chain nothing was drafted."""
    noted = {-1: Candidates((5, 6), (0.6, 0.2)), 0: Candidates((7, 8), (0.5, 0.4))}
    draft = Draft(tokens=(5, 7), parents=(-1, 0), confidences=(0.6, 0.5), candidates=noted)
    row: Any = None
    for draft_kept, nodes, tokens, ranks in (
        (draft, [0, 1], [5, 7, 9], [1, 1]),
        (draft, [0], [5, 8], [1, 2]),
        (draft, [], [4], [0]),
        (draft.only(range(1)), [0], [5, 8], [1, 2]),
        (draft.only(range(0)), [], [6], [2]),
    ):
        result = VerifyResult(row=row, draft=draft_kept, nodes=nodes, tokens=tokens, token_at=0, logits_at=0)
        told = outcome_of(0, result)
        assert told.ranks == ranks
        assert told.confidences == [0.6, 0.5][: len(ranks)]


def test_a_tree_with_no_room_in_the_kernels_is_refused() -> None:
    with pytest.raises(UserError, match="takes 64 slots, above the 63"):
        Tree(depth=3, width=2, budget=64)
