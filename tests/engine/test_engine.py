"""The engine gives every request the answer it would get alone, whatever is drafted, shared, preempted or cancelled."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from each import each
from engine.common import (
    NEW_TOKENS,
    OFF,
    SAMPLINGS,
    Prompts,
    at_depth,
    bytes_for,
    options,
    plain,
    reference_depths,
    request,
    requests,
    run,
    run_preempted,
    tokens_of,
)
from eyas.drafter.config import LatentSizes
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import FinishReason, Speculation
from eyas.engine.speculation.choice import Choice
from eyas.engine.speculation.draft import MOST_IN_CHAIN, Tree
from eyas.errors import UserError
from eyas.plan import footprint
from eyas.plan.shapes import CHAIN
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget
from oracle.rejection import shape_logits
from oracle.shaping import probabilities
from tiny import drafter_config, language, random_drafter, trained_drafter

# --- greedy equality ---------------------------------------------------------------------------------------------


@each("rows", [1, 7, 32])
@each("speculation", [OFF, at_depth(3), Speculation()])
def test_greedy_answers_equal_plain_decoding(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts, rows: int, speculation: Speculation
) -> None:
    engine = Engine(target, tiny_drafter, config=options(max_num_seqs=rows))
    answers = run(engine, requests(prompts, speculation=speculation))
    assert tokens_of(answers) == expected
    assert {answer.finished for answer in answers} == {FinishReason.LENGTH}
    if speculation.mode == "fixed":
        assert engine.stats.accepted > 0


@each("tree", [Tree(depth=3, width=2, budget=6), Tree(depth=4, width=4, budget=24)])
def test_trees_give_the_same_answers(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts, tree: Tree
) -> None:
    engine = Engine(target, tiny_drafter, config=options(tree=tree))
    assert tokens_of(run(engine, requests(prompts, speculation=at_depth(tree.depth)))) == expected
    assert engine.stats.accepted > 0


@each("changes", [{"prefix_cache": False}, {"max_num_batched_tokens": 9}, {"block_size": 1}, {"block_size": 64}])
def test_chunks_blocks_and_prefixes_do_not_show(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts, changes: dict[str, Any]
) -> None:
    engine = Engine(target, tiny_drafter, config=options(**changes))
    twice = requests([*prompts, *prompts], speculation=at_depth(4))
    assert tokens_of(run(engine, twice)) == [*expected, *expected]


def test_preempted_requests_continue_where_they_were(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    memory = bytes_for(30, target, tiny_drafter)
    engine = Engine(target, tiny_drafter, config=options(max_model_len=64, memory=memory))
    assert tokens_of(run_preempted(engine, requests(prompts, speculation=at_depth(3)))) == expected


def test_a_shared_prefix_is_read_once(target: Target, tiny_drafter: Drafter, prompts: Prompts) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    long = prompts[-1]
    first = run(engine, [request(long, speculation=at_depth(3))])
    again = run(engine, [request(long, speculation=at_depth(3))])
    assert again[0].tokens == first[0].tokens
    assert again[0].stats == first[0].stats, "the drafter finds its entries in the blocks too"
    assert engine.block_manager.hits > 0


# --- acceptance --------------------------------------------------------------------------------------------------


@each("depth", [1, 3, 6])
def test_accepted_counts_equal_the_reference_decoders(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, depth: int
) -> None:
    assert_accepts_as_the_reference(target, tiny_drafter, prompts[:6], depth)


def assert_accepts_as_the_reference(target: Target, drafter: Drafter, prompts: Prompts, depth: int) -> None:
    engine = Engine(target, drafter, config=options())
    for prompt in prompts:
        (answer,) = run(engine, [request(prompt, speculation=at_depth(depth))])
        expected = reference_depths(target, drafter, prompt, depth, new=NEW_TOKENS)
        assert list(answer.depths[: NEW_TOKENS - depth]) == expected


LATENT = LatentSizes(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16)
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "deepseek_v2": {"mla": LATENT, "num_key_value_heads": 2, "head_dim": LATENT.qk_head_dim},
}


@pytest.fixture(scope="module", params=[*LAYERS, "eagle1"])
def other_layers(request: pytest.FixtureRequest, target: Target, tiny_eagle1: Drafter) -> Drafter:
    """A drafter with other layers than Llama's."""
    if request.param == "eagle1":
        return tiny_eagle1
    model: Any = target.model
    return trained_drafter(model, drafter_config(fc_norm=True, norm_output=True, **LAYERS[request.param]), steps=120)


def test_drafters_with_other_layers(target: Target, other_layers: Drafter, prompts: Prompts) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9)):
        asked = [request(prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
        plainly = tokens_of(run(Engine(target, config=options()), asked))
        for tree in (None, Tree(depth=3, width=2, budget=6)):
            engine = Engine(target, other_layers, config=options(tree=tree))
            assert tokens_of(run(engine, [replace(one, speculation=at_depth(4)) for one in asked])) == plainly
            assert engine.stats.accepted > 0
    assert_accepts_as_the_reference(target, other_layers, prompts[:6], 4)


# --- sampling ----------------------------------------------------------------------------------------------------


@each("sampling", SAMPLINGS)
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, sampling: Sampling
) -> None:
    def answers(engine_options: EngineConfig, speculation: Speculation) -> Prompts:
        engine = Engine(target, tiny_drafter, config=engine_options)
        asked = [
            request(prompt, sampling=sampling, seed=seed, speculation=speculation)
            for seed, prompt in enumerate(prompts)
        ]
        return tokens_of(run(engine, asked))

    alone = answers(options(max_num_seqs=1), OFF)
    assert answers(options(), at_depth(3)) == alone
    assert answers(options(), Speculation()) == alone
    assert answers(options(tree=Tree(depth=3, width=2, budget=6)), at_depth(3)) == alone


@pytest.mark.slow
@each("sampling", SAMPLINGS)
def test_the_second_token_has_the_targets_distribution(
    target: Target, tiny_drafter: Drafter, sampling: Sampling
) -> None:
    """Through the whole engine, behind a first token that may come from a draft: given it, the target's p."""
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
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    for prompt, tokens in zip(prompts, expected, strict=True):
        stop = tokens[5]
        answer = run(engine, [request(prompt, stop_ids=frozenset({stop}), speculation=at_depth(6))])[0]
        assert answer.tokens == tokens[: tokens.index(stop) + 1]
        assert answer.finished is FinishReason.STOP
        assert answer.text == "".join(chr(ord("0") + token) for token in answer.tokens[:-1])


def test_no_stop_id_comes_before_the_shortest_length(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
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
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    text = "".join(chr(ord("0") + token) for token in expected[4])
    answer = run(engine, [request(prompts[4], stop_strings=(text[6:9],), speculation=at_depth(6))])[0]
    assert answer.text == text[: text.index(text[6:9])]
    assert answer.finished is FinishReason.STOP


def test_logprobs_are_the_targets_own(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
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


def test_requests_cancelled_at_any_time_leave_nothing_and_do_not_affect_others(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    source = random.Random(5)
    for _ in range(5):
        engine = Engine(target, tiny_drafter, config=options(max_num_seqs=4))
        keys = [engine.submit(one) for one in requests(prompts, speculation=at_depth(3))]
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
def test_a_random_drafter_changes_nothing_and_is_soon_left_alone(target: Target, prompts: Prompts) -> None:
    ticks, engines = iter(range(10**9)), list[Engine]()

    def clock() -> float:
        """Advances on each use and with every draft; otherwise drafts would cost nothing."""
        return float(next(ticks)) + sum(engine.stats.drafted for engine in engines)

    wrong = random_drafter(drafter_config(), seed=9).share_target(target.embedding(), target.head())
    engine = Engine(target, wrong, config=options(max_model_len=256), clock=clock)
    engines.append(engine)
    answers = run(engine, requests(prompts, max_new_tokens=60))
    assert tokens_of(answers) == [plain(target, prompt, max_new_tokens=60) for prompt in prompts]
    assert engine.stats.drafts < engine.stats.passes / 2


def test_depth_without_a_drafter_or_beyond_the_engines_is_refused(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
) -> None:
    with pytest.raises(UserError, match="no drafter"):
        Engine(target, config=options()).submit(request(prompts[0], speculation=at_depth(2)))
    with pytest.raises(UserError, match="max_depth 7"):
        Engine(target, tiny_drafter, config=options()).submit(request(prompts[0], speculation=at_depth(8)))


def test_the_deepest_chains_give_the_same_answers_and_deeper_ones_are_refused_at_the_start(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=options(max_depth=MOST_IN_CHAIN, max_num_batched_tokens=512))
    answers = run(engine, requests(prompts, max_new_tokens=70, speculation=at_depth(MOST_IN_CHAIN)))
    assert [answer.tokens[:NEW_TOKENS] for answer in answers] == expected
    assert engine.stats.accepted > 0
    with pytest.raises(UserError, match="max_depth is 49; it must be 1 to 48"):
        options(max_depth=MOST_IN_CHAIN + 1)


def test_a_refused_request_takes_the_others_of_its_call_with_it(
    target: Target, tiny_drafter: Drafter, prompts: Prompts
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


# --- the drafter's reading, and rehearsals -----------------------------------------------------------------------


@each("patient", [False, True])
def test_requests_without_drafts_are_read_together_when_too_much_waits(
    patient: bool, target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not patient:
        monkeypatch.setattr(footprint, "PATIENCE_BYTES", 0)  # few states may wait
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
    run(engine, requests(prompts[:6], max_new_tokens=100))
    assert len(reads) == 0 if patient else 1 <= len(reads) <= 3
    assert max(reads, default=0) == (0 if patient else 6)


def test_a_rehearsal_learns_step_times_and_leaves_nothing_else(
    target: Target, tiny_drafter: Drafter, prompts: Prompts, expected: Prompts
) -> None:
    engine = Engine(target, tiny_drafter, config=options())
    assert engine.capture_graphs() == 0
    costs, report = engine.controller.costs, engine.controller.report()
    steps = [costs.at(rows, depth) for rows in (1, 4) for depth in (0, 1, 3, 7)]
    assert all(seconds is not None for seconds in steps)
    assert report["rounds"] == 0, "acceptance is not affected"
    assert engine.stats.passes == 0
    assert engine.block_manager.used == 0
    assert not engine.busy
    asked = requests(prompts, speculation=Speculation())
    fresh = Engine(target, tiny_drafter, config=options())
    assert tokens_of(run(engine, asked)) == tokens_of(run(fresh, asked))
    # Requests under way are not disturbed.
    key = engine.submit(asked[0])
    tokens = [token for piece in engine.step() for token in piece.tokens]
    before = engine.controller
    engine.capture_graphs()
    assert engine.controller is before
    while engine.busy:
        tokens += [token for piece in engine.step() for token in piece.tokens if piece.key == key]
    assert tuple(tokens) == expected[0]
