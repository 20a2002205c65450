"""The engine gives every request what it would get alone, whatever is drafted, shared, preempted or cancelled."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import FinishReason, Request, Speculation
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.draft import MOST_IN_CHAIN, Tree
from eyas.errors import UserError
from eyas.plan import footprint
from eyas.plan.shapes import CHAIN
from eyas.sampling import Sampling, probabilities
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.reference import Tree as ReferenceTree
from oracle.rejection import SeededDraws, shape_logits
from tiny import VOCAB, drafter_config, language, random_drafter

NEW_TOKENS = 14
OFF = Speculation(mode="off")


def at_depth(depth: int) -> Speculation:
    return Speculation(mode="fixed", depth=depth)


def request(prompt: Sequence[int], **changes: Any) -> Request:
    values: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": NEW_TOKENS}
    return Request(prompt=tuple(prompt), **{**values, **changes})


def options(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "memory": 2**22,
    }
    return EngineConfig(**{**values, **changes})


def run(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Answers, with the books checked after every step."""
    keys = [engine.submit(one) for one in requests]
    stats_by_key = {key: engine.stats_of(key) for key in keys}
    pieces: dict[int, list[OutputDelta]] = {key: [] for key in keys}
    while engine.busy:
        for piece in engine.step():
            pieces[piece.key].append(piece)
        engine.scheduler.check()
    assert engine.block_manager.used == 0
    return [RequestOutput.of(pieces[key], stats_by_key[key]) for key in keys]


def plain(target: Target, prompt: Sequence[int], *, max_new_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
    dense = DenseTarget(target, drafter_config())
    return decode_plainly(dense, prompt, draws=SeededDraws(0), max_new_tokens=max_new_tokens)


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [plain(target, prompt) for prompt in prompts]


# --- greedy equality ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("speculation", [OFF, at_depth(3), Speculation()], ids=["plain", "chain", "auto"])
def test_greedy_answers_equal_plain_decoding(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    rows: int,
    speculation: Speculation,
) -> None:
    engine = Engine(target, tiny_drafter, config=options(max_num_seqs=rows))
    answers = run(engine, [request(prompt, speculation=speculation) for prompt in prompts])
    assert [answer.tokens for answer in answers] == expected
    assert {answer.finished for answer in answers} == {FinishReason.LENGTH}
    if speculation.mode == "fixed":
        assert engine.stats.accepted > 0


@pytest.mark.parametrize("tree", [Tree(depth=3, width=2, budget=6), Tree(depth=4, width=4, budget=24)])
def test_trees_give_the_same_answers(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    tree: Tree,
) -> None:
    engine = Engine(target, tiny_drafter, config=options(tree=tree))
    answers = run(engine, [request(prompt, speculation=at_depth(tree.depth)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == expected
    assert engine.stats.accepted > 0


@pytest.mark.parametrize(
    "changes", [{"prefix_cache": False}, {"max_num_batched_tokens": 9}, {"block_size": 1}, {"block_size": 64}]
)
def test_chunks_blocks_and_prefixes_do_not_show(
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    changes: dict[str, Any],
) -> None:
    engine = Engine(target, tiny_drafter, config=options(**changes))
    twice = [request(prompt, speculation=at_depth(4)) for prompt in [*prompts, *prompts]]
    assert [answer.tokens for answer in run(engine, twice)] == [*expected, *expected]


def test_preempted_requests_continue_where_they_were(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    per_block = Engine(target, tiny_drafter, config=options()).budget.bytes_per_block
    engine = Engine(target, tiny_drafter, config=options(max_model_len=64, memory=30 * per_block))
    seqs = []
    for prompt in prompts:
        engine.submit(request(prompt, speculation=at_depth(3)))
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for piece in engine.step():
            tokens.setdefault(piece.key, []).extend(piece.tokens)
        seqs += [seq for seq in engine.scheduler.running if seq.preemptions]
        engine.scheduler.check()
    assert seqs, "blocks were short enough for a preemption"
    assert [tuple(tokens[key]) for key in range(len(prompts))] == expected


def test_a_shared_prefix_is_read_once(target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    long = prompts[-1]
    first = run(engine, [request(long, speculation=at_depth(3))])
    again = run(engine, [request(long, speculation=at_depth(3))])
    assert again[0].tokens == first[0].tokens
    assert again[0].stats == first[0].stats, "the drafter finds its own part of the blocks too"
    assert engine.block_manager.hits > 0


# --- acceptance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_accepted_counts_equal_the_reference_decoders(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], depth: int
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    dense, eagle = DenseTarget(target, tiny_drafter.config), EagleDraft(tiny_drafter)
    for prompt in prompts[:6]:
        reference = decode_speculatively(
            dense, eagle, prompt, shape=Chain(depth=depth), draws=SeededDraws(0), max_new_tokens=NEW_TOKENS
        )
        depths = run(engine, [request(prompt, speculation=at_depth(depth))])[0].depths
        rebuilt = [0]
        for round_ in reference.rounds:
            rebuilt += [*range(1, round_.accepted + 1), 0]
        # The engine drafts no further than the answer may get, the reference does.
        assert list(depths[: NEW_TOKENS - depth]) == rebuilt[: NEW_TOKENS - depth]


def test_a_tree_accepts_what_the_reference_tree_accepts(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    tree = Tree(depth=3, width=3, budget=9)
    engine = Engine(target, tiny_drafter, config=options(tree=tree))
    dense, eagle = DenseTarget(target, tiny_drafter.config), EagleDraft(tiny_drafter)
    shape = ReferenceTree(depth=3, width=3, budget=9)
    for prompt in prompts[:6]:
        reference = decode_speculatively(
            dense, eagle, prompt, shape=shape, draws=SeededDraws(0), max_new_tokens=NEW_TOKENS
        )
        depths = run(engine, [request(prompt, speculation=at_depth(3))])[0].depths
        rebuilt = [0]
        for round_ in reference.rounds:
            rebuilt += [*range(1, round_.accepted + 1), 0]
        assert list(depths[: NEW_TOKENS - 9]) == rebuilt[: NEW_TOKENS - 9]


# --- sampling ----------------------------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8, min_p=0.02),
    Sampling(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, logit_bias={5: 3.0, 7: -4.0}, allowed_tokens=frozenset(range(0, VOCAB, 2))),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], sampling: Sampling
) -> None:
    def answers(engine_options: EngineConfig, speculation: Speculation) -> list[tuple[int, ...]]:
        engine = Engine(target, tiny_drafter, config=engine_options)
        asked = [
            request(prompt, sampling=sampling, seed=seed, speculation=speculation)
            for seed, prompt in enumerate(prompts)
        ]
        return [answer.tokens for answer in run(engine, asked)]

    alone = answers(options(max_num_seqs=1), OFF)
    assert answers(options(), at_depth(3)) == alone
    assert answers(options(), Speculation()) == alone
    assert answers(options(tree=Tree(depth=3, width=2, budget=6)), at_depth(3)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_second_token_has_the_targets_distribution(
    target: Target, tiny_drafter: Drafter, sampling: Sampling
) -> None:
    """By the whole engine, behind a first token that speculation may have accepted: given it, p of the target."""
    prompt = tuple(language(1, 9, torch.Generator().manual_seed(3))[0].tolist())
    engine = Engine(target, tiny_drafter, config=options(max_num_seqs=64, max_num_batched_tokens=1024))
    asked = [
        request(prompt, sampling=sampling, seed=seed, max_new_tokens=3, speculation=at_depth(2)) for seed in range(1500)
    ]
    pairs = [answer.tokens[:2] for answer in run(engine, asked)]
    dense = DenseTarget(target, tiny_drafter.config)
    logits_TV, _ = dense([prompt])[0]
    p_V = probabilities(shape_logits(logits_TV[-1], sampling, prompt=prompt, output=()), sampling)
    assert fits([first for first, _ in pairs], p_V)
    firsts = [first for first, _ in pairs]
    common = max(firsts, key=firsts.count)
    logits_TV, _ = dense([(*prompt, common)])[0]
    p_V = probabilities(shape_logits(logits_TV[-1], sampling, prompt=prompt, output=(common,)), sampling)
    assert fits([second for first, second in pairs if first == common], p_V)
    assert not fits([second for first, second in pairs if first == common], p_V.roll(1)), "the test can fail"


def fits(tokens: Sequence[int], p_V: torch.Tensor) -> bool:
    """Chi-square, rare tokens pooled."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(p_V)).double()
    expected = p_V.double() * len(tokens)
    if counts[p_V == 0].sum() > 0:
        return False
    large = expected >= 5
    observed = [*counts[large].tolist(), float(counts[~large].sum())]
    wanted = [*expected[large].tolist(), float(expected[~large].sum())]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [x * sum(observed) / sum(wanted) for x in wanted]
    if len(wanted) < 2:
        return True
    return bool(stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4)


# --- ends --------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_answer_even_inside_a_draft(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    for prompt, tokens in zip(prompts, expected, strict=True):
        stop = tokens[5]
        answer = run(engine, [request(prompt, stop_ids=frozenset({stop}), speculation=at_depth(6))])[0]
        assert answer.tokens == tokens[: tokens.index(stop) + 1]
        assert answer.finished is FinishReason.STOP
        assert answer.text == "".join(chr(ord("0") + token) for token in answer.tokens[:-1])


def test_no_stop_id_comes_before_the_shortest_length(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    stops = frozenset(expected[3][:4])
    plainly, drafted = (
        run(engine, [request(prompts[3], stop_ids=stops, min_new_tokens=8, speculation=how)])[0]
        for how in (OFF, at_depth(5))
    )
    assert drafted.tokens == plainly.tokens
    assert not stops & set(drafted.tokens[:8])


def test_a_stop_string_ends_the_answer_and_is_not_shown(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    text = "".join(chr(ord("0") + token) for token in expected[4])
    answer = run(engine, [request(prompts[4], stop_strings=(text[6:9],), speculation=at_depth(6))])[0]
    assert answer.text == text[: text.index(text[6:9])]
    assert answer.finished is FinishReason.STOP


def test_logprobs_are_the_targets_own(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    answer = run(engine, [request(prompts[2], logprobs=3, speculation=at_depth(4))])[0]
    logits_TV, _ = DenseTarget(target, tiny_drafter.config)([[*prompts[2], *expected[2]]])[0]
    logprobs_TV = logits_TV[len(prompts[2]) - 1 : -1].log_softmax(dim=-1)
    assert answer.logprobs is not None
    for entry, token, logprobs_V in zip(answer.logprobs, expected[2], logprobs_TV, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        assert [other for other, _ in entry.top] == logprobs_V.topk(3).indices.tolist()


def test_cancelled_at_any_moment_nothing_is_left_and_others_do_not_notice(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    source = random.Random(5)
    for _ in range(5):
        engine = Engine(target, tiny_drafter, config=options(max_num_seqs=4))
        keys = [engine.submit(request(prompt, speculation=at_depth(3))) for prompt in prompts]
        doomed = set(source.sample(keys, 5))
        tokens: dict[int, list[int]] = {key: [] for key in keys}
        while engine.busy:
            for piece in engine.step():
                tokens[piece.key].extend(piece.tokens)
            if doomed and source.random() < 0.4:
                engine.cancel(doomed.pop())
            engine.scheduler.check()
        assert engine.block_manager.used == 0
        survivors = [key for key in keys if len(tokens[key]) == NEW_TOKENS]
        assert len(survivors) >= 7
        assert all(tuple(tokens[key]) == expected[key] for key in survivors)


# --- speculation that does not help -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_random_drafter_changes_nothing_and_is_soon_left_alone(
    target: Target, prompts: list[tuple[int, ...]]
) -> None:
    ticks, engines = iter(range(10**9)), list[Engine]()

    def clock() -> float:
        """Ticks by use, and by every draft: otherwise drafts would cost nothing."""
        return float(next(ticks)) + sum(engine.stats.drafted for engine in engines)

    wrong = random_drafter(drafter_config(), seed=9).share_target(target.embedding(), target.head())
    engine = Engine(target, wrong, config=options(max_model_len=256), clock=clock)
    engines.append(engine)
    answers = run(engine, [request(prompt, max_new_tokens=60) for prompt in prompts])
    assert [answer.tokens for answer in answers] == [plain(target, prompt, max_new_tokens=60) for prompt in prompts]
    assert engine.stats.drafts < engine.stats.passes / 2


def test_depth_without_a_drafter_or_beyond_the_engines_is_refused(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    with pytest.raises(UserError, match="no drafter"):
        Engine(target, config=options()).submit(request(prompts[0], speculation=at_depth(2)))
    with pytest.raises(UserError, match="max_depth 7"):
        Engine(target, tiny_drafter, config=options()).submit(request(prompts[0], speculation=at_depth(8)))


def test_chains_as_deep_as_may_be_give_the_same_answers_and_deeper_ones_are_refused_at_the_start(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options(max_depth=MOST_IN_CHAIN, max_num_batched_tokens=512))
    answers = run(
        engine, [request(prompt, max_new_tokens=70, speculation=at_depth(MOST_IN_CHAIN)) for prompt in prompts]
    )
    assert [answer.tokens[:NEW_TOKENS] for answer in answers] == expected
    assert engine.stats.accepted > 0
    with pytest.raises(UserError, match="max_depth is 49; it must be 1 to 48"):
        options(max_depth=MOST_IN_CHAIN + 1)


def test_a_refused_request_takes_the_others_of_its_call_with_it(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    with pytest.raises(UserError, match="max_depth"):
        engine.generate([request(prompts[0]), request(prompts[1], speculation=at_depth(8))])
    assert not engine.busy
    assert len(engine.generate([request(prompts[0])])) == 1


def test_more_memory_than_there_is_is_refused_with_the_numbers(target: Target) -> None:
    with pytest.raises(UserError, match=r"GiB.*free"):
        Engine(target, config=options(memory=2**50))
    with pytest.raises(UserError, match=r"one request of 128 tokens needs .* lower max_model_len"):
        Engine(target, config=options(memory=2**10))


# --- what other decoders cannot do, and the drafter's reading ----------------------------------------------------


@pytest.mark.parametrize("changes", [{"presence_penalty": 1.0}, {"logit_bias": {1: 2.0}}, {"allowed_tokens": {1, 2}}])
def test_decoders_without_an_option_refuse_it(target: Target, tiny_drafter: Drafter, changes: dict[str, Any]) -> None:
    sampling = Sampling(temperature=1.0, **changes)
    dense, draws = DenseTarget(target, tiny_drafter.config), SeededDraws(0)
    with pytest.raises(UserError, match="the reference decoder has no penalties"):
        decode_plainly(dense, [1], draws=draws, max_new_tokens=1, sampling=sampling)
    with pytest.raises(UserError, match="the reference decoder has no penalties"):
        decode_speculatively(
            dense,
            EagleDraft(tiny_drafter),
            [1],
            shape=Chain(depth=1),
            draws=draws,
            max_new_tokens=1,
            sampling=sampling,
        )
    with pytest.raises(UserError, match="transformers has no penalties"):
        generate_plainly(target, [1], sampling=sampling, max_new_tokens=1)


@pytest.mark.parametrize("patient", [False, True])
def test_requests_that_are_not_drafted_for_are_read_together_when_too_much_waits(
    patient: bool,
    target: Target,
    tiny_drafter: Drafter,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not patient:
        monkeypatch.setattr(footprint, "PATIENCE_BYTES", 0)  # a lump of states, then
    engine = Engine(target, tiny_drafter, config=options(max_model_len=256))
    monkeypatch.setattr(
        engine.controller,
        "choose",
        lambda rows, **_: Choice(depths=(0,) * len(rows), shape=CHAIN, reason=""),
    )
    reads: list[int] = []
    catching_up = engine.core.runner.graphs.catching_up
    monkeypatch.setattr(
        engine.core.runner.graphs, "catching_up", lambda rows, *rest: (reads.append(rows), catching_up(rows, *rest))[1]
    )
    run(engine, [request(prompt, max_new_tokens=100) for prompt in prompts[:6]])
    assert len(reads) == 0 if patient else 1 <= len(reads) <= 3
    assert max(reads, default=0) == (0 if patient else 6)


def test_a_rehearsal_tells_what_steps_take_and_leaves_nothing_else(
    target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    assert engine.capture_graphs() == 0
    costs, report = engine.controller.costs, engine.controller.report()
    steps = [costs.at(rows, depth) for rows in (1, 4) for depth in (0, 1, 3, 7)]
    assert all(seconds is not None for seconds in steps)
    assert report["rounds"] == 0, "of acceptance nothing"
    assert engine.stats.passes == 0
    assert engine.block_manager.used == 0
    assert not engine.busy
    asked = [request(prompt, speculation=Speculation()) for prompt in prompts]
    fresh = Engine(target, tiny_drafter, config=options())
    assert [answer.tokens for answer in run(engine, asked)] == [answer.tokens for answer in run(fresh, asked)]
    # While somebody is served it disturbs nobody.
    key = engine.submit(asked[0])
    tokens = [token for piece in engine.step() for token in piece.tokens]
    before = engine.controller
    engine.capture_graphs()
    assert engine.controller is before
    while engine.busy:
        tokens += [token for piece in engine.step() for token in piece.tokens if piece.key == key]
    assert tuple(tokens) == expected[0]
