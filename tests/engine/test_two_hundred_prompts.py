"""Two hundred real prompts through the engine, in every manner it has: greedy answers are transformers' own.

    make lossless PROMPTS=FILE       JSONL with `turns` (the first is taken) or `prompt`

Where two tokens tie within float32's noise, a pass of another shape may pick the other one; such places are counted
and shown, and nothing else is let through.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.draft import Tree
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget
from oracle.plain import generate_plainly
from real_prompts import parting

pytestmark = pytest.mark.lossless
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 200, 400, 32
NEAR_TIE = 1e-4
SHORT_OF_PAGES = 64  # blocks of 16 tokens: a request needs up to 27, so that a few fit at once


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
    "chain, 32 users, preempted": Manner(users=32, blocks=SHORT_OF_PAGES),
    "tree, 1 user": Manner(users=1, options={"tree": Tree(depth=4, width=3, budget=12)}),
    "tree, 7 users": Manner(users=7, options={"tree": Tree(depth=4, width=3, budget=12)}),
    "tree, 32 users, preempted": Manner(
        users=32, blocks=SHORT_OF_PAGES, options={"tree": Tree(depth=3, width=2, budget=6)}
    ),
}


@pytest.fixture(scope="module")
def prompts(real_prompts: Callable[[int, int], list[list[int]]]) -> list[list[int]]:
    return real_prompts(PROMPTS, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def theirs(prompts: list[list[int]], default_target: Target) -> list[tuple[int, ...]]:
    return [generate_plainly(default_target, ids, sampling=Sampling(), max_new_tokens=NEW_TOKENS) for ids in prompts]


@pytest.fixture(scope="module")
def served(theirs: list[tuple[int, ...]], default_target: Target, real_drafter: Drafter) -> tuple[Target, Drafter]:
    """Both as `eyas` serves them, with packed linears, now that transformers has answered by its own."""
    pack_linears(default_target.model)
    pack_linears(real_drafter, halve=True)
    return default_target, real_drafter


@pytest.mark.parametrize("name", MANNERS)
def test_greedy_answers_are_those_of_transformers(
    name: str, prompts: list[list[int]], theirs: list[tuple[int, ...]], served: tuple[Target, Drafter]
) -> None:
    manner, (default_target, real_drafter) = MANNERS[name], served
    options = EngineConfig(max_num_seqs=manner.users, max_model_len=512, **manner.options)
    drafter = None if manner.depth is None else real_drafter
    engine = Engine(default_target, drafter, config=options)
    if manner.blocks is not None:
        few = manner.blocks * engine.budget.bytes_per_block
        engine = Engine(
            default_target,
            drafter,
            config=EngineConfig(max_num_seqs=manner.users, max_model_len=512, memory=few, **manner.options),
        )
    speculation = Speculation(mode="off") if manner.depth is None else Speculation(mode="fixed", depth=manner.depth)
    started, preempted = time.perf_counter(), set[int]()
    for ids in prompts:
        engine.submit(
            Request(
                prompt=tuple(ids),
                sampling=Sampling(),
                max_new_tokens=NEW_TOKENS,
                stop_ids=default_target.stop_ids(),
                speculation=speculation,
            )
        )
    ours: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    while engine.busy:
        for piece in engine.step():
            ours[piece.key].extend(piece.tokens)
        engine.scheduler.check()
        preempted |= {seq.key for seq in engine.scheduler.running if seq.preemptions}
    dense = DenseTarget(default_target, real_drafter.config)
    near_ties, wrong = list[str](), list[str]()
    for number, (ids, answer) in enumerate(zip(prompts, theirs, strict=True)):
        at = parting(ours[number], answer)
        if at is None:
            continue
        best = dense([[*ids, *answer[:at]]])[0][0][-1].topk(2).values
        margin = float(best[0] - best[1])
        (near_ties if margin < NEAR_TIE else wrong).append(f"prompt {number}, new token {at}: margin {margin:.2e}")
    print(
        f"\n{name}: {len(prompts) - len(near_ties) - len(wrong)} of {len(prompts)} identical, {len(near_ties)} differ "
        f"at a near-tie, {len(wrong)} are wrong; acceptance length {engine.stats.acceptance_length:.2f}, "
        f"{len(preempted)} requests preempted; {time.perf_counter() - started:.0f} s"
    )
    print("\n".join([*near_ties, *wrong]))
    assert not wrong
    assert bool(preempted) == (manner.blocks is not None)
    if manner.depth is not None:
        assert engine.stats.accepted > 0, "a drafter of which nothing is accepted proves nothing"
