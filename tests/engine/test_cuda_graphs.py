"""Steps in fixed shapes give what ordinary steps give, tried here without recording them; tests/gpu records them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from time import perf_counter
from typing import Any

import pytest
import torch

from engine.dense_tables import use_dense_tables
from engine.test_engine import OFF, SAMPLINGS, at_depth, options, request, run
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.proposer import Proposer
from eyas.engine.request import Request, Speculation
from eyas.engine.runner import cuda_graphs
from eyas.engine.runner.cuda_graphs import BOTH, DRAFT, READ, VERIFY, CUDAGraphRunner
from eyas.engine.runner.graph_capture import CapturedGraph, Function, GraphCapture
from eyas.engine.runner.input_buffers import InputBuffers
from eyas.target.model import Target


@pytest.fixture(autouse=True)
def _dense_where_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dense_tables(monkeypatch)


class Uncaptured(GraphCapture):
    """The same functions where there is no CUDA: they just run."""

    def _capture(self, inputs: InputBuffers, function: Function, keep: Any) -> CapturedGraph:
        marks = list[float]()

        def run() -> torch.Tensor:
            marks.clear()
            return function(inputs.device, lambda: marks.append(perf_counter()))

        return CapturedGraph(inputs=inputs, run=run, seconds=lambda: [b - a for a, b in pairwise(marks)])


def fixed_engine(
    target: Target,
    drafter: Drafter | None,
    engine_options: EngineConfig,
    *,
    clock: Callable[[], float] = perf_counter,
) -> Engine:
    """An engine that decodes in fixed shapes."""
    engine = Engine(target, drafter, config=engine_options, clock=clock)
    engine.use_graphs(Uncaptured(device=torch.device("cpu")))
    return engine


def both(
    target: Target, drafter: Drafter | None, asked: Sequence[Request], **changes: Any
) -> tuple[Engine, list[Any], list[Any]]:
    fixed = fixed_engine(target, drafter, options(**changes))
    ours = run(fixed, asked)
    theirs = run(Engine(target, drafter, config=options(**changes)), asked)
    return fixed, ours, theirs


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_chains_of_every_depth(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], depth: int, rows: int
) -> None:
    asked = [request(prompt, speculation=at_depth(depth) if depth else OFF) for prompt in prompts]
    engine, ours, theirs = both(target, tiny_drafter, asked, max_num_seqs=rows)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs], "the same drafts"
    kinds = {str(key[0]) for key in engine.graphs.capture._made}  # type: ignore[union-attr]
    assert kinds >= ({"draft and verify"} if depth else {"verify"})


def test_without_a_drafter(target: Target, prompts: list[tuple[int, ...]]) -> None:
    _, ours, theirs = both(target, None, [request(prompt) for prompt in prompts])
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampling_among_greedy_ones(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Any
) -> None:
    asked = [
        request(prompt, seed=seed, speculation=at_depth(3), **({"sampling": sampling} if seed % 3 else {}))
        for seed, prompt in enumerate(prompts)
    ]
    _, ours, theirs = both(target, tiny_drafter, asked)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    drafted = [sum(answer.stats.accepted for answer in answers) for answers in (ours, theirs)]
    assert abs(drafted[0] - drafted[1]) <= 0.1 * drafted[1], "the short list is as good as all"


def test_logprobs_ends_and_shortest_lengths(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    asked = [
        request(prompt, speculation=at_depth(4), logprobs=2, stop_ids=frozenset({5, 9}), min_new_tokens=6)
        for prompt in prompts
    ]
    _, ours, theirs = both(target, tiny_drafter, asked)
    assert [(answer.tokens, answer.finished) for answer in ours] == [(a.tokens, a.finished) for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert [x.token for x in a.logprobs] == [x.token for x in b.logprobs]
        assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-4)


@pytest.mark.parametrize(
    "changes", [{"prefix_cache": False}, {"max_num_batched_tokens": 9}, {"block_size": 1}, {"block_size": 64}]
)
def test_chunks_blocks_and_prefixes(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], changes: dict[str, Any]
) -> None:
    asked = [request(prompt, speculation=at_depth(4)) for prompt in [*prompts, *prompts]]
    _, ours, theirs = both(target, tiny_drafter, asked, **changes)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]


def test_prompts_of_a_step_are_read_in_one_pass(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fit; the last of them may be cut, and says nothing then."""
    monkeypatch.setattr(cuda_graphs, "CHUNK_ROWS", (1, 3))
    passes = list[list[tuple[int, int, bool]]]()
    launch = CUDAGraphRunner.launch_read

    def launch_read(self: CUDAGraphRunner, rows: Sequence[Any]) -> Any:
        passes.append([(row.seq.key, row.count, row.samples) for row in rows])
        return launch(self, rows)

    monkeypatch.setattr(CUDAGraphRunner, "launch_read", launch_read)
    asked = [request(prompt, speculation=at_depth(3), max_new_tokens=4) for prompt in prompts[1:6]]
    _, ours, theirs = both(target, tiny_drafter, asked, max_num_batched_tokens=64)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.depths for answer in ours] == [answer.depths for answer in theirs]
    assert passes[:2] == [[(0, 7, True), (1, 11, True), (2, 15, True)], [(3, 19, True), (4, 12, False)]]


def test_preempted_requests(target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    per_block = Engine(target, tiny_drafter, config=options()).budget.bytes_per_block
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    engine = fixed_engine(target, tiny_drafter, options(max_model_len=64, memory=30 * per_block))
    seqs = []
    for one in asked:
        engine.submit(one)
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
        seqs += [seq for seq in engine.scheduler.running if seq.preemptions]
        engine.scheduler.check()
    assert seqs
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)
    assert [tuple(tokens[key]) for key in range(len(asked))] == [answer.tokens for answer in theirs]


def make_moody(engine: Engine, mood: Callable[[], int]) -> None:
    """From now on requests draft as deep as the mood says, and all of it is verified, in turns seen and unseen."""
    choose, skip_pruning = engine.controller.choose, cycle([False, True, True])

    def moody(rows: Sequence[Any], **options: Any) -> Any:
        depths = tuple(mood() for _ in rows)
        choice = replace(
            choose(rows, **options), depths=depths, limits=depths, skip_pruning=next(skip_pruning), holds=1
        )
        step = choice.under_way
        assert step is not None
        step.limits = {row.key: depth for row, depth in zip(rows, depths, strict=True)}
        step.bound = frozenset(step.limits)
        return choice

    engine.controller.choose = moody  # type: ignore[method-assign, assignment]


def live_through(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Tokens and the depths they came from, while depths change at random and users come and go."""
    source = random.Random(3)
    make_moody(engine, lambda: source.choice([0, 0, 1, 2, 5, 7]))
    tokens: dict[int, list[int]] = {}
    depths: dict[int, list[int]] = {}
    left, doomed = list(enumerate(prompts)), {2, 7}
    while left or engine.busy:
        if left and source.random() < 0.3:
            number, prompt = left.pop(0)
            assert engine.submit(request(prompt, max_new_tokens=60, speculation=Speculation())) == number
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
            depths.setdefault(piece.key, []).extend(piece.depths)
        engine.scheduler.check()
        for seq in engine.scheduler.running:
            if seq.key in doomed and seq.new_tokens > 10:
                doomed.remove(seq.key)
                engine.cancel(seq.key)
    assert engine.block_manager.used == 0
    return tokens, depths


def test_depths_that_change_and_requests_that_come_and_go(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """Plain steps gather states, deep ones follow shallow ones, users leave in the middle: nothing shows."""
    asked = [request(prompt, max_new_tokens=60) for prompt in prompts]
    expected = [answer.tokens for answer in run(Engine(target, config=options()), asked)]
    manner = options(max_num_seqs=6, max_model_len=256)
    engine = fixed_engine(target, tiny_drafter, manner)
    tokens, depths = live_through(engine, prompts)
    assert engine.graphs is not None
    assert {key[0] for key in engine.graphs.capture._made} == {READ, DRAFT, VERIFY, BOTH}
    for key, made in tokens.items():
        assert tuple(made) == expected[key][: len(made)]
        assert len(made) == 60 or key in (2, 7)
    _, others = live_through(Engine(target, tiny_drafter, config=manner), prompts)
    for key, row in depths.items():
        assert row == others[key][: len(row)], "the same drafts; of the cancelled ones, the last piece is never told"
    assert sum(depth > 0 for row in depths.values() for depth in row) > 100


def test_what_waited_through_a_long_rest_is_no_price_of_drafts(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    """It is read once, before the first draft; taken for a part of each, it would keep drafts from ever paying."""
    late = 0.0
    engine = fixed_engine(target, tiny_drafter, options(max_model_len=256), clock=lambda: perf_counter() + late)
    assert isinstance(engine.proposer, Proposer)
    read, depths = engine.proposer.read, cycle([0] * 12 + [3] * 4)

    def read_slowly(*given: Any, **options: Any) -> None:
        nonlocal late
        late += 100.0
        read(*given, **options)

    engine.proposer.read = read_slowly  # type: ignore[method-assign]
    make_moody(engine, lambda: next(depths))
    for prompt in prompts[:3]:
        run(engine, [request(prompt, max_new_tokens=100, speculation=Speculation())])
    report = engine.controller.report()
    beside = report["seconds_beside_passes_by_requests"]
    prices = [report["target_seconds_by_tokens"], report["first_draft_seconds_by_tokens"], *beside.values()]
    assert all(prices)
    assert max(seconds for price in prices for seconds in price.values()) < 1
    assert set(report["first_draft_seconds_by_tokens"]) <= {1, 2, 4, 8}, "of what the captured pass read"
    assert report["seconds"] > late > 500, "time it was, all the same"


@pytest.mark.parametrize("max_depth", [7, 5, 1])
def test_nothing_is_left_to_record_behind_what_was_recorded_ahead(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], max_depth: int
) -> None:
    engine = fixed_engine(target, tiny_drafter, options(max_num_seqs=6, max_model_len=256, max_depth=max_depth))
    assert engine.graphs is not None
    ahead = engine.capture_graphs()
    assert ahead == len(engine.graphs.capture) > 0
    asked = [request(prompt, max_new_tokens=40, speculation=Speculation()) for prompt in prompts]
    source = random.Random(5)
    make_moody(engine, lambda: source.randint(0, max_depth))
    ours = run(engine, asked)
    assert [answer.tokens for answer in ours] == [
        answer.tokens for answer in run(Engine(target, config=options()), asked)
    ]
    assert sum(answer.stats.accepted for answer in ours) > 0
    assert len(engine.graphs.capture) == ahead
    assert Engine(target, config=options()).capture_graphs() == 0, "without a GPU there is nothing to record"


def test_steps_of_very_many_rows_are_recorded_when_they_are_met(target: Target, tiny_drafter: Drafter) -> None:
    engine = fixed_engine(target, tiny_drafter, options(max_num_seqs=200, max_model_len=64))
    engine.capture_graphs()
    assert engine.graphs is not None
    assert {int(str(key[1])) for key in engine.graphs.capture._made} == {1, 2, 4, 8, 16, 24, 32, 48, 64}


@pytest.mark.parametrize("usual", [512, 2])
def test_longer_requests_than_usual_have_tables_of_their_own(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, usual: int
) -> None:
    monkeypatch.setattr(cuda_graphs, "USUAL_BLOCKS", usual)
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    engine, ours, theirs = both(target, tiny_drafter, asked, max_model_len=64, block_size=4)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert engine.graphs is not None
    widths = {key[3] for key in engine.graphs.capture._made}
    assert widths == ({16} if usual == 512 else {8, 32}), "no wider than what may come, but for the steps between"


def test_what_cannot_be_recorded_is_told_and_runs_eagerly(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [request(prompt, speculation=at_depth(3)) for prompt in prompts]
    theirs = run(Engine(target, tiny_drafter, config=options()), asked)

    def refuse(*_: object) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(GraphCapture, "_capture", refuse)
    engine = Engine(target, tiny_drafter, config=options())
    engine.use_graphs(GraphCapture(device=torch.device("cpu")))
    assert [answer.tokens for answer in run(engine, asked)] == [answer.tokens for answer in theirs]
    told = [line for line in caplog.messages if "runs eagerly" in line]
    assert len(told) == len(engine.graphs.capture.refused) >= 2, "once for each kind of step"
    assert all("runs eagerly: not while capturing" in line for line in told)
