"""Trees in captured passes on a late device: the same trees, drafts and answers as in steps that land at once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from each import each
from engine.common import (
    OFF,
    SAMPLINGS,
    Build,
    Prompts,
    at_depth,
    bytes_for,
    depths_of,
    options,
    request,
    requests,
    run,
    run_preempted,
    tokens_of,
)
from engine.late_queue import LateQueue
from engine.round_engines import graphs_of, make_moody, round_engine
from engine.test_grammar import SHORT, guidance, letters  # noqa: F401  fixtures are used by name
from engine.test_grammar import requests as grammar_requests
from engine.test_rounds import build  # noqa: F401  fixtures are used by name
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.grammar.llguidance import LlGuidance
from eyas.plan.shapes import CAPTURED_TREES, CHAIN
from eyas.sampling import Sampling
from eyas.serve.learning.round_tally import RoundTally
from eyas.target.model import Target
from tiny import drafter_config, random_drafter

TREE = Tree(depth=4, width=3, budget=9)


@pytest.fixture
def with_rounds() -> Build:
    """Makes engines whose rounds run on a late device."""

    def made(target: Target, drafter: Drafter, **changes: Any) -> Engine:
        return round_engine(target, drafter, options(**changes), LateQueue(1, 0.4))

    return made


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    assert tokens_of(ours) == tokens_of(theirs)
    assert depths_of(ours) == depths_of(theirs), "the same nodes"
    assert [(a.stats.drafted, a.stats.accepted) for a in ours] == [(a.stats.drafted, a.stats.accepted) for a in theirs]


def assert_same_trees(
    make: Build,
    target: Target,
    drafter: Drafter,
    asked: Sequence[Request],
    **changes: Any,
) -> None:
    """Answers and nodes are those of steps that land at once."""
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE, **changes}
    ours = run(make(target, drafter, **manner), asked)
    assert_same(ours, run(Engine(target, drafter, config=options(**manner)), asked))


@each(
    ("tree", "rows"),
    [
        (Tree(depth=3, width=2, budget=6), 3),
        (Tree(depth=4, width=4, budget=24), 8),
        (Tree(depth=1, width=3, budget=2), 8),
        (Tree(depth=5, width=1, budget=5), 8),
        (Tree(depth=2, width=2, budget=60), 8),
        (Tree(depth=9, width=2, budget=12), 8),
    ],
)
def test_trees_of_every_shape(
    build: Build,  # noqa: F811
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
    tree: Tree,
    rows: int,
) -> None:
    """To the ends of the answers, where there is less and less room for trees."""
    asked = requests(prompts[::2], speculation=at_depth(2))
    changes = {"max_num_seqs": rows, "max_num_batched_tokens": 1024, "tree": tree}
    assert_same_trees(build, target, tiny_drafter, asked, **changes)


@each("sampling", SAMPLINGS)
def test_every_sampling_among_greedy_ones(
    with_rounds: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Any
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]
    assert_same_trees(with_rounds, target, tiny_drafter, asked)


@each(
    "changes",
    [
        {"max_num_batched_tokens": 9},
        {"block_size": 1},
        {"block_size": 64},
        {"drafter_window": 5, "drafter_sinks": 2},
        {"max_model_len": 52},
    ],
)
def test_chunks_blocks_windows_and_stops(
    with_rounds: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts, changes: dict[str, Any]
) -> None:
    """In passes of few tokens, a step in flight limits the slots of rows: then only the answers are the same."""
    how: dict[str, Any] = {"stop_ids": frozenset({5, 9}), "min_new_tokens": 3, "logprobs": 1}
    asked = requests([*prompts, *prompts[:3]], speculation=at_depth(4), **how)
    manner = {"max_num_batched_tokens": 256, **changes, "tree": TREE}
    ours = run(with_rounds(target, tiny_drafter, **manner), asked)
    theirs = run(Engine(target, tiny_drafter, config=options(**manner)), asked)
    assert [(a.tokens, a.finished) for a in ours] == [(b.tokens, b.finished) for b in theirs]
    if "max_num_batched_tokens" not in changes:
        assert_same(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [(x.token, x.rank) for x in a.logprobs] == [(x.token, x.rank) for x in b.logprobs]
        assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-4)


def test_preempted_requests(with_rounds: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    asked = requests(prompts, speculation=at_depth(3))
    memory = bytes_for(34, target, tiny_drafter)
    ours = run_preempted(with_rounds(target, tiny_drafter, max_model_len=64, memory=memory, tree=TREE), asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, config=options()), [_plain(one) for one in asked]))


def test_prefixes_found_later_are_right(
    with_rounds: Build, target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    """An accepted path leaves what a chain would have left: for the target and, where it is read, for the drafter."""
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE}
    engine, asked = with_rounds(target, tiny_drafter, **manner), prompts[3:6]
    first = run(engine, requests(asked, speculation=at_depth(3)))
    # The rest is long enough for what the drafter lacks to be read at once.
    longer = [
        request((*prompt, *answer.tokens, *prompts[2]), speculation=at_depth(3))
        for prompt, answer in zip(asked, first, strict=True)
    ]
    ours = run(engine, longer)
    assert all(answer.num_cached_tokens > len(prompt) for answer, prompt in zip(ours, asked, strict=True))
    assert_same(ours, run(Engine(target, tiny_drafter, config=options(**manner, prefix_cache=False)), longer))


def _plain(one: Request) -> Request:
    return replace(one, speculation=OFF)


def test_drafters_of_two_layers(with_rounds: Build, target: Target, prompts: Prompts) -> None:
    drafter = random_drafter(drafter_config(num_hidden_layers=2)).eval().to(target.device)
    assert_same_trees(with_rounds, target, drafter, requests(prompts, speculation=at_depth(3)))


def test_eagle1_drafters(with_rounds: Build, target: Target, tiny_eagle1: Drafter, prompts: Prompts) -> None:
    assert_same_trees(with_rounds, target, tiny_eagle1, requests(prompts, speculation=at_depth(3)))


def test_grammars_draft_chains(
    letters: Target,  # noqa: F811
    tiny_drafter: Drafter,
    guidance: LlGuidance,  # noqa: F811
) -> None:
    asked = grammar_requests(letters, guidance.json_schema(SHORT), (at_depth(1), at_depth(3), OFF))
    free = [replace(one, grammar=None) for one in asked[:3]]
    expected = Engine(letters, tiny_drafter, config=options()).generate([*asked, *free])
    engine = round_engine(letters, tiny_drafter, options(tree=TREE))
    assert tokens_of(engine.generate([*asked, *free])) == tokens_of(expected)
    assert tokens_of(engine.generate(free)) == tokens_of(expected[-3:])
    kinds = {key[0] for key in graphs_of(engine)._replays}
    assert {"draft", "draft trees"} <= kinds, "chains beside grammars, trees otherwise"


@each(("chance", "accepted"), [(0.0, 0), (1.0, 3)])
def test_a_coin_may_decide_acceptance(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, chance: float, accepted: int
) -> None:
    # All nodes of this tree are verified, so the path of first candidates is as deep as the tree.
    tree = Tree(depth=3, width=2, budget=10)
    engine = round_engine(target, tiny_drafter, options(tree=tree, max_num_batched_tokens=256), chance=chance)
    for answer in run(engine, requests(prompts[:3], speculation=at_depth(3), max_new_tokens=13)):
        assert list(answer.depths)[:9] == [0, *([*range(1, accepted + 1), 0] * 12)][:9]


def test_the_controller_learns_the_same_from_captured_trees(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    asked = requests(prompts[:4], speculation=at_depth(3), sampling=Sampling(temperature=0.7))
    lessons = list[list[tuple[int, int, int, list[int]]]]()
    manner = options(tree=TREE, max_num_batched_tokens=256)
    for engine in (round_engine(target, tiny_drafter, manner), Engine(target, tiny_drafter, config=manner)):
        seen, observe = list[RoundOutcome](), engine.controller.observe

        def watch(report: StepReport, *, seen: Any = seen, observe: Any = observe) -> None:
            seen.extend(report.rounds)
            observe(report)

        engine.controller.observe = watch  # type: ignore[method-assign]
        run(engine, asked)
        outcomes = [(one.key, one.drafted, one.accepted, list(one.ranks)) for one in seen]
        lessons.append(sorted(outcomes, key=lambda outcome: outcome[0]))
    assert lessons[0] == lessons[1]
    assert len(lessons[0]) > 10
    # For an answer that reaches its limit, the device returns the tokens before that.
    assert all(1 <= len(ranks) <= accepted + 1 for _, _, accepted, ranks in lessons[0])


def test_a_shape_is_captured_once(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    engine = round_engine(target, tiny_drafter, options(tree=TREE, max_num_seqs=2, max_num_batched_tokens=256))
    run(engine, requests(prompts[:6], speculation=at_depth(3)))
    made = [key for key in graphs_of(engine)._replays if key[0] in ("verify trees", "sample trees")]
    assert {key[1] for key in made} <= {(1, 4, 3, 9), (2, 4, 3, 9)}
    assert engine.core.runner.bytes > sum(nodes.bytes for nodes in engine.core.runner.graphs.nodes.values()) > 0


def test_chosen_trees_were_captured_ahead(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    """Trees, chains and plain steps follow each other at random, in greedy and sampled requests."""
    asked = [
        request(
            prompt, seed=seed, max_new_tokens=40, speculation=Speculation(), sampling=Sampling(temperature=seed % 2)
        )
        for seed, prompt in enumerate(prompts)
    ]
    engine = round_engine(target, tiny_drafter, options(max_num_seqs=3), LateQueue(2, 0.4))
    ahead, source = engine.capture_graphs(), random.Random(4)
    assert all(engine.controller.costs.at(1, shape) for shape in CAPTURED_TREES), "they were rehearsed"
    shapes = {(shape.depth, shape.width, shape.budget) for shape in CAPTURED_TREES}
    assert set(engine.core.runner.graphs.nodes) == {(rows, *shape) for rows in (1, 2, 3) for shape in shapes}
    depth, shape = 0, CHAIN
    make_moody(engine, lambda: depth)
    moody = engine.controller.choose

    def choose(rows: Sequence[Any], **how: Any) -> Any:
        nonlocal depth, shape
        shape = source.choice([CHAIN, *CAPTURED_TREES])
        depth = shape.depth or source.choice([0, 1, 3, 7])
        return replace(moody(rows, **how), shape=shape)

    engine.controller.choose = choose  # type: ignore[method-assign, assignment]
    ours = run(engine, asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, config=options()), [_plain(one) for one in asked]))
    assert sum(answer.stats.accepted for answer in ours) > 50
    assert len(graphs_of(engine)) == ahead
    assert engine.controller.acceptance._extras, "gains of trees were learned"


def test_every_step_reports_first_candidates(
    build: Build,  # noqa: F811
    target: Target,
    tiny_drafter: Drafter,
    prompts: Prompts,
) -> None:
    """A tree of depth 1 reports one depth, however many candidates it has."""
    asked = requests(prompts, speculation=at_depth(1))
    manner: dict[str, Any] = {"tree": Tree(depth=1, width=3, budget=3)}
    tallies = []
    for engine in (build(target, tiny_drafter, **manner), Engine(target, tiny_drafter, config=options(**manner))):
        tallies.append(tally := RoundTally())
        engine.generate(asked, on_piece=tally.count)
    assert (tallies[0].tries, tallies[0].hits) == (tallies[1].tries, tallies[1].hits)
    first, *deeper = tallies[0].tries
    assert first > tallies[0].hits[0] > 0
    assert not any(deeper)
