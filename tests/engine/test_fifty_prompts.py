"""Fifty real prompts through the default target: greedy speculation against transformers' cached decoding.

    make lossless PROMPTS=FILE       JSONL with `turns` (the first is taken) or `prompt`

Where two tokens tie within float32's noise, a batch of another shape may pick the other one; such places are
counted and shown, and nothing else is let through.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from default_drafter import default_drafter_config, train_default_drafter
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.model import Drafter
from eyas.engine.dense import DenseTarget, EagleDraft
from eyas.engine.plain import generate_plainly
from eyas.engine.reference import Chain, decode_speculatively
from eyas.sampling import Sampling, SeededDraws
from eyas.target.model import Target

pytestmark = pytest.mark.lossless
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DEPTH = 50, 200, 32, 4
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def prompt_file(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--prompts")
    if not path:
        pytest.skip("no --prompts FILE; run `make lossless PROMPTS=FILE`")
    return Path(path)


@pytest.fixture(scope="module")
def prompts(prompt_file: Path, default_target: Target) -> list[list[int]]:
    """Fifty prompts spread evenly over those of the file that are short enough."""
    lines = [json.loads(line) for line in prompt_file.read_text().splitlines() if line.strip()]
    encoded = [default_target.encode_chat([{"role": "user", "content": first_turn(line)}]) for line in lines]
    short = [ids for ids in encoded if len(ids) <= PROMPT_TOKENS]
    assert len(short) >= PROMPTS, (
        f"{prompt_file} has {len(short)} prompts of at most {PROMPT_TOKENS} tokens, not {PROMPTS}"
    )
    print(f"\n{PROMPTS} of {len(lines)} prompts; {len(lines) - len(short)} are longer than {PROMPT_TOKENS} tokens")
    return [short[i * len(short) // PROMPTS] for i in range(PROMPTS)]


def first_turn(line: dict[str, Any]) -> str:
    return str(line["turns"][0] if "turns" in line else line["prompt"])


@pytest.fixture(scope="module")
def drafter(request: pytest.FixtureRequest, prompts: list[list[int]], default_target: Target) -> Drafter:
    """The one given by --drafter, or one trained here on other prompts."""
    path = request.config.getoption("--drafter")
    if path:
        return load_drafter(path).float().share_target(default_target.embedding(), default_target.head())
    return train_default_drafter(default_target, default_drafter_config(fc_norm=True, norm_output=True))


def margin_behind(target: DenseTarget, ids: list[int]) -> float:
    """The distance between the two highest scores behind ids."""
    best = target([ids])[0][0][-1].topk(2).values
    return float(best[0] - best[1])


def test_greedy_speculation_equals_transformers_on_fifty_prompts(
    prompts: list[list[int]], drafter: Drafter, default_target: Target
) -> None:
    target, draft = DenseTarget(default_target, drafter.config), EagleDraft(drafter)
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
        if ours.tokens == theirs:
            identical += 1
            continue
        same = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs, strict=False)) if a != b), None)
        at = min(len(ours.tokens), len(theirs)) if same is None else same
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
