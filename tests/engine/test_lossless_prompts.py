"""Real prompts through the default target, in every way the engine runs: greedy answers are transformers' own.

    make lossless PROMPTS=FILE       JSONL with `turns` (the first is taken) or `prompt`

Where two tokens tie within float32's noise, a pass of another shape may choose the other one. Such places are counted
and printed; any other difference fails.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.common import OFF, at_depth, requests, run
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.speculation.draft import Tree
from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, decode_speculatively
from oracle.rejection import SeededDraws
from real_prompts import parting

pytestmark = pytest.mark.lossless
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 200, 400, 32
NEAR_TIE = 1e-4
FEW_BLOCKS = 64  # of 16 tokens: a request needs up to 27, so that a few fit at once
RealPrompts = Callable[[int, int], list[list[int]]]


def assert_equal_up_to_ties(
    what: str, target: DenseTarget, prompts: Sequence[list[int]], ours: Sequence[Any], theirs: Sequence[Any]
) -> None:
    near_ties, wrong = list[str](), list[str]()
    for number, (ids, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        at = parting(mine, other)
        if at is not None:
            best = target([[*ids, *other[:at]]])[0][0][-1].topk(2).values
            margin = float(best[0] - best[1])
            (near_ties if margin < NEAR_TIE else wrong).append(f"prompt {number}, new token {at}: margin {margin:.2e}")
    identical = f"{len(prompts) - len(near_ties) - len(wrong)} of {len(prompts)} identical"
    print(f"\n{what}: {identical}, {len(near_ties)} differ at a near-tie, {len(wrong)} are wrong")
    print("\n".join([*near_ties, *wrong]))
    assert not wrong


def test_the_reference_decoder_on_fifty_prompts(
    real_prompts: RealPrompts, real_drafter: Drafter, default_target: Target
) -> None:
    prompts = real_prompts(50, 200)
    target, draft = DenseTarget(default_target, real_drafter.config), EagleDraft(real_drafter)
    theirs = [generate_plainly(default_target, ids, max_new_tokens=NEW_TOKENS) for ids in prompts]
    ours = [
        decode_speculatively(
            target,
            draft,
            ids,
            shape=Chain(depth=4),
            draws=SeededDraws(0),
            max_new_tokens=NEW_TOKENS,
            stop_ids=default_target.stop_ids(),
        )
        for ids in prompts
    ]
    rounds = [round_ for generation in ours for round_ in generation.rounds]
    accepted = sum(round_.accepted for round_ in rounds)
    what = f"acceptance length {1 + accepted / max(1, len(rounds)):.2f} at depth 4"
    assert_equal_up_to_ties(what, target, prompts, [generation.tokens for generation in ours], theirs)
    assert accepted > 0, "a drafter of which nothing is accepted proves nothing"


def test_a_long_request_among_many_short_ones(
    real_prompts: RealPrompts, real_drafter: Drafter, default_target: Target
) -> None:
    """A request of 8k tokens and 63 others of mixed lengths share a block budget that was set at the start."""
    longest, users, new = 8192, 64, 16
    options = EngineConfig(max_num_seqs=users, max_model_len=longest, memory=2**30)
    with pytest.raises(UserError, match=r"needs 372\.7 MiB of blocks, above the 64\.0 MiB granted"):
        Engine(default_target, real_drafter, config=replace(options, memory=2**26))
    engine, most, lengths = Engine(default_target, real_drafter, config=options), list[int](), random.Random(0)
    prompts = real_prompts(users - 1, 400)
    everything = [token for prompt in prompts * 4 for token in prompt][: longest - new]
    assert len(everything) == longest - new
    asked = [everything, *(prompt[: lengths.choice([20, 60, 150, 400])] for prompt in prompts)]
    answers = run(
        engine, requests(asked, max_new_tokens=new), after_step=lambda: most.append(engine.block_manager.used)
    )
    print(f"\n{engine.budget}; {max(most)} blocks were used at most")
    assert {len(answer.tokens) for answer in answers} == {new}


@dataclass(frozen=True, kw_only=True)
class Manner:
    """One way to run the engine."""

    users: int
    depth: int | None = 4
    blocks: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


MANNERS = {
    "plain, 1 user": Manner(users=1, depth=None),
    "plain, 32 users": Manner(users=32, depth=None),
    "chain, 1 user": Manner(users=1),
    "chain, 7 users, no prefix cache": Manner(users=7, options={"prefix_cache": False}),
    "chain, 32 users, chunks of 48": Manner(users=32, options={"max_num_batched_tokens": 80}),
    "chain, 32 users, preempted": Manner(users=32, blocks=FEW_BLOCKS),
    "tree, 1 user": Manner(users=1, options={"tree": Tree(depth=4, width=3, budget=12)}),
    "tree, 7 users": Manner(users=7, options={"tree": Tree(depth=4, width=3, budget=12)}),
    "tree, 32 users, preempted": Manner(
        users=32, blocks=FEW_BLOCKS, options={"tree": Tree(depth=3, width=2, budget=6)}
    ),
}


@pytest.fixture(scope="module")
def prompts(real_prompts: RealPrompts) -> list[list[int]]:
    return real_prompts(PROMPTS, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def theirs(prompts: list[list[int]], default_target: Target) -> list[tuple[int, ...]]:
    return [generate_plainly(default_target, ids, max_new_tokens=NEW_TOKENS) for ids in prompts]


@pytest.fixture(scope="module")
def served(theirs: list[tuple[int, ...]], default_target: Target, real_drafter: Drafter) -> tuple[Target, Drafter]:
    """Both models as `eyas` serves them, with packed linears, after transformers has answered with its own."""
    pack_linears(default_target.model)
    pack_linears(real_drafter, halve=True)
    return default_target, real_drafter


@pytest.mark.parametrize("name", MANNERS)
def test_greedy_answers_on_two_hundred_prompts(
    name: str, prompts: list[list[int]], theirs: list[tuple[int, ...]], served: tuple[Target, Drafter]
) -> None:
    manner, (target, real_drafter) = MANNERS[name], served
    options = EngineConfig(max_num_seqs=manner.users, max_model_len=512, **manner.options)
    drafter = None if manner.depth is None else real_drafter
    engine = Engine(target, drafter, config=options)
    if manner.blocks is not None:
        few = manner.blocks * engine.budget.bytes_per_block
        engine = Engine(target, drafter, config=replace(options, memory=few))
    speculation = OFF if manner.depth is None else at_depth(manner.depth)
    started, preempted = time.perf_counter(), set[int]()
    asked = requests(prompts, max_new_tokens=NEW_TOKENS, stop_ids=target.stop_ids(), speculation=speculation)
    ours = run(
        engine, asked, after_step=lambda: preempted.update(x.key for x in engine.scheduler.running if x.preemptions)
    )
    what = f"{name}: acceptance length {engine.stats.acceptance_length:.2f}, {len(preempted)} requests preempted"
    dense = DenseTarget(target, real_drafter.config)
    what += f", {time.perf_counter() - started:.0f} s"
    assert_equal_up_to_ties(what, dense, prompts, [answer.tokens for answer in ours], theirs)
    assert bool(preempted) == (manner.blocks is not None)
    assert manner.depth is None or engine.stats.accepted > 0, "a drafter of which nothing is accepted proves nothing"
