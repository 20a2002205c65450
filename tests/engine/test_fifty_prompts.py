"""Fifty real prompts through the default target: greedy speculation against transformers' cached decoding.

    make lossless PROMPTS=FILE       JSONL with `turns` (the first is taken) or `prompt`

Where two tokens tie within float32's noise, a batch of another shape may pick the other one; such places are
counted and shown, and nothing else is let through.
"""

import time
from collections.abc import Callable

import pytest

from eyas.drafter.model import Drafter
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, decode_speculatively
from oracle.rejection import SeededDraws
from real_prompts import parting

pytestmark = pytest.mark.lossless
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DEPTH = 50, 200, 32, 4
NEAR_TIE = 1e-4


def margin_behind(target: DenseTarget, ids: list[int]) -> float:
    """The distance between the two highest scores behind ids."""
    best = target([ids])[0][0][-1].topk(2).values
    return float(best[0] - best[1])


def test_greedy_speculation_equals_transformers_on_fifty_prompts(
    real_prompts: Callable[[int, int], list[list[int]]], real_drafter: Drafter, default_target: Target
) -> None:
    prompts = real_prompts(PROMPTS, PROMPT_TOKENS)
    target, draft = DenseTarget(default_target, real_drafter.config), EagleDraft(real_drafter)
    started = time.perf_counter()
    identical = rounds = accepted = 0
    near_ties, wrong = list[str](), list[str]()
    for number, ids in enumerate(prompts):
        theirs = generate_plainly(default_target, ids, sampling=Sampling(), max_new_tokens=NEW_TOKENS)
        ours = decode_speculatively(
            target,
            draft,
            ids,
            shape=Chain(depth=DEPTH),
            draws=SeededDraws(0),
            max_new_tokens=NEW_TOKENS,
            stop_ids=default_target.stop_ids(),
        )
        rounds += len(ours.rounds)
        accepted += sum(r.accepted for r in ours.rounds)
        at = parting(ours.tokens, theirs)
        if at is None:
            identical += 1
            continue
        margin = margin_behind(target, [*ids, *theirs[:at]])
        (near_ties if margin < NEAR_TIE else wrong).append(f"prompt {number}, new token {at}: margin {margin:.2e}")
    length = 1 + accepted / max(1, rounds)
    print(
        f"\n{identical} of {len(prompts)} identical, {len(near_ties)} differ at a near-tie, {len(wrong)} are wrong; "
        f"acceptance length {length:.2f} at depth {DEPTH}; {time.perf_counter() - started:.0f} s"
    )
    print("\n".join([*near_ties, *wrong]))
    assert not wrong
    assert identical + len(near_ties) == PROMPTS
    assert accepted > 0, "a drafter of which nothing is accepted proves nothing"
