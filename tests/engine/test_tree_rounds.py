"""Trees in captured passes on a device that finishes late: the trees, drafts and answers of steps that land at once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.late_queue import LateQueue
from engine.round_engines import (
    graphs_of,
    make_moody,
    round_engine,
)
from engine.test_engine import OFF, SAMPLINGS, at_depth, options, request, run
from engine.test_grammar import SHORT, guidance, letters  # noqa: F401  fixtures are used by name
from engine.test_grammar import requests as grammar_requests
from engine.test_rounds import build, tokens_of  # noqa: F401  fixtures are used by name
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
def with_rounds() -> Callable[..., Engine]:
    """How engines are made whose rounds live on the device."""

    def made(target: Target, drafter: Drafter, **changes: Any) -> Engine:
        return round_engine(target, drafter, options(**changes), LateQueue(1, 0.4))

    return made


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    assert tokens_of(ours) == tokens_of(theirs)
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same nodes"
    assert [(a.stats.drafted, a.stats.accepted) for a in ours] == [(a.stats.drafted, a.stats.accepted) for a in theirs]


@pytest.mark.parametrize(
    ("tree", "rows"),
    [
        (Tree(depth=3, width=2, budget=6), 3),
        (Tree(depth=4, width=4, budget=24), 8),
        (Tree(depth=1, width=3, budget=2), 8),
        (Tree(depth=5, width=1, budget=5), 8),
        (Tree(depth=2, width=2, budget=60), 8),
        (Tree(depth=9, width=2, budget=12), 8),
    ],
    ids=str,
)
def test_trees_of_every_shape(
    build: Callable[..., Engine],  # noqa: F811
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    tree: Tree,
    rows: int,
) -> None:
    """To the ends of the answers, where there is room for less and less of them."""
    asked = [request(prompt, speculation=at_depth(2)) for prompt in prompts[::2]]
    manner: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 1024, "tree": tree}
    ours = run(build(target, tiny_drafter, **manner), asked)
    assert_same(ours, run(Engine(target, tiny_drafter, config=options(**manner)), asked))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampling_among_greedy_ones(
    with_rounds: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    sampling: Any,
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE}
    ours = run(with_rounds(target, tiny_drafter, **manner), asked)
    assert_same(ours, run(Engine(target, tiny_drafter, config=options(**manner)), asked))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 9},
        {"block_size": 1},
        {"block_size": 64},
        {"drafter_window": 5, "drafter_sinks": 2},
        {"max_model_len": 52},
    ],
    ids=str,
)
def test_chunks_blocks_windows_and_stops(
    with_rounds: Callable[..., Engine],
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    changes: dict[str, Any],
) -> None:
    """Where passes have few tokens, a step in flight bounds the slots of rows: then answers alone are the same."""
    asked = [
        request(prompt, speculation=at_depth(4), stop_ids=frozenset({5, 9}), min_new_tokens=3, logprobs=1)
        for prompt in [*prompts, *prompts[:3]]
    ]
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


def test_preempted_requests(
    with_rounds: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    per_block = Engine(target, tiny_drafter, config=options()).budget.bytes_per_block
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    ours = run(with_rounds(target, tiny_drafter, max_model_len=64, memory=34 * per_block, tree=TREE), asked)
    assert tokens_of(ours) == tokens_of(run(Engine(target, config=options()), [_plain(one) for one in asked]))


def test_prefixes_found_later_are_right(
    with_rounds: Callable[..., Engine], target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """A path leaves behind what a chain would have left: for the target and, where it is read, for the drafter."""
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE}
    engine, asked = with_rounds(target, tiny_drafter, **manner), prompts[3:6]
    first = run(engine, [request(prompt, speculation=at_depth(3)) for prompt in asked])
    # Enough behind them for what the drafter lacks to be read at once.
    longer = [
        request((*prompt, *answer.tokens, *prompts[2]), speculation=at_depth(3))
        for prompt, answer in zip(asked, first, strict=True)
    ]
    ours = run(engine, longer)
    assert all(answer.num_cached_tokens > len(prompt) for answer, prompt in zip(ours, asked, strict=True))
    theirs = run(Engine(target, tiny_drafter, config=options(**manner, prefix_cache=False)), longer)
    assert_same(ours, theirs)


def _plain(one: Request) -> Request:
    return replace(one, speculation=OFF)


def test_drafters_of_two_layers(
    with_rounds: Callable[..., Engine], target: Target, prompts: list[tuple[int, ...]]
) -> None:
    drafter = random_drafter(drafter_config(num_hidden_layers=2)).eval().to(target.device)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE}
    ours = run(with_rounds(target, drafter, **manner), asked)
    assert_same(ours, run(Engine(target, drafter, config=options(**manner)), asked))


def test_eagle1_drafters(
    with_rounds: Callable[..., Engine], target: Target, tiny_eagle1: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    manner: dict[str, Any] = {"max_num_batched_tokens": 256, "tree": TREE}
    ours = run(with_rounds(target, tiny_eagle1, **manner), asked)
    assert_same(ours, run(Engine(target, tiny_eagle1, config=options(**manner)), asked))


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
    kinds = {key[0] for key in graphs_of(engine)._made}
    assert {"draft", "draft trees"} <= kinds, "chains beside grammars, and trees without"


@pytest.mark.parametrize(("chance", "accepted"), [(0.0, 0), (1.0, 3)])
def test_a_coin_may_accept_instead_of_the_law(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], chance: float, accepted: int
) -> None:
    # Of this tree all nodes are verified, so the way along first candidates is as deep as the tree.
    tree = Tree(depth=3, width=2, budget=10)
    engine = round_engine(target, tiny_drafter, options(tree=tree, max_num_batched_tokens=256), chance=chance)
    asked = [request(prompt, speculation=at_depth(3), max_new_tokens=13) for prompt in prompts[:3]]
    for answer in run(engine, asked):
        assert list(answer.depths)[:9] == [0, *([*range(1, accepted + 1), 0] * 12)][:9]


def test_the_controller_learns_the_same_from_captured_trees(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [request(prompt, speculation=at_depth(3), sampling=Sampling(temperature=0.7)) for prompt in prompts[:4]]
    lessons = list[list[tuple[int, int, int, list[int]]]]()
    manner = options(tree=TREE, max_num_batched_tokens=256)
    for engine in (round_engine(target, tiny_drafter, manner), Engine(target, tiny_drafter, config=manner)):
        seen, observe = list[RoundOutcome](), engine.controller.observe

        def watch(report: StepReport, *, seen: Any = seen, observe: Any = observe) -> None:
            seen.extend(report.rounds)
            observe(report)

        engine.controller.observe = watch  # type: ignore[method-assign]
        run(engine, asked)
        told = [(one.key, one.drafted, one.accepted, list(one.ranks)) for one in seen]
        lessons.append(sorted(told, key=lambda outcome: outcome[0]))
    assert lessons[0] == lessons[1]
    assert len(lessons[0]) > 10
    # Of an answer that comes to its limit the device tells the tokens before that.
    assert all(1 <= len(ranks) <= accepted + 1 for _, _, accepted, ranks in lessons[0])


def test_a_shape_is_captured_once(target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    engine = round_engine(target, tiny_drafter, options(tree=TREE, max_num_seqs=2, max_num_batched_tokens=256))
    run(engine, [request(prompt, speculation=at_depth(3)) for prompt in prompts[:6]])
    made = [key for key in graphs_of(engine)._made if key[0] in ("verify trees", "sample trees")]
    assert {key[1] for key in made} <= {(1, 4, 3, 9), (2, 4, 3, 9)}
    assert engine.core.runner.bytes > sum(nodes.bytes for nodes in engine.core.runner.graphs.nodes.values()) > 0


def test_trees_that_are_chosen_were_captured_ahead(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """Trees, chains and plain steps follow each other at random, among greedy and sampled requests; nothing shows."""
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
    assert engine.controller.acceptance._extras, "what trees gave was learnt"


def test_every_step_tells_how_first_candidates_fared(
    build: Callable[..., Engine],  # noqa: F811
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
) -> None:
    """A tree one deep tells of one depth, however many candidates it has."""
    asked = [request(prompt, speculation=at_depth(1)) for prompt in prompts]
    manner: dict[str, Any] = {"tree": Tree(depth=1, width=3, budget=3)}
    tallies = []
    for engine in (build(target, tiny_drafter, **manner), Engine(target, tiny_drafter, config=options(**manner))):
        tallies.append(tally := RoundTally())
        engine.generate(asked, on_piece=tally.count)
    assert (tallies[0].tries, tallies[0].hits) == (tallies[1].tries, tallies[1].hits)
    first, *deeper = tallies[0].tries
    assert first > tallies[0].hits[0] > 0
    assert not any(deeper)
