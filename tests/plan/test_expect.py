"""Step times and speedups match measurements, and are monotonic."""

from __future__ import annotations

import random
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Any

import pytest

from each import each
from eyas.plan.acceptance import AcceptanceProfile, read_acceptance, read_length
from eyas.plan.cards import CARDS
from eyas.plan.decoder import read_decoder
from eyas.plan.expect import auto_speedup, best_depth, expect
from eyas.plan.quantisation import parse_quantisation
from eyas.plan.resolve import usual_drafter
from eyas.plan.roofline import Pair, speed_of
from eyas.plan.shapes import MARGIN
from known_configs import LLAMA_8B, QWEN3_30B_A3B

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = parse_quantisation("bfloat16")
PROFILE = read_acceptance("0.73,0.52,0.35")


def pair_of(config: dict[str, object], kind: str = "bfloat16") -> Pair:
    decoder = read_decoder(config, "it")
    return Pair(decoder=decoder, drafter=usual_drafter(decoder), quantisation=parse_quantisation(kind))


ANCHORS = [
    (0, 1.0, {1: 203, 4: 804, 16: 3029, 64: 9481, 256: 18316}),
    (3, 3.0, {1: 455, 4: 1766, 16: 6356, 64: 14835, 256: 18176}),
]
"""vLLM on an H200 with weights of the 8B shape: tokens/s by users, 128 tokens in and 256 out, lengths forced."""


def whole_rate(depth: int, length: float, users: int) -> float:
    """Prompts read together, then all decode."""
    pair, speed = pair_of(LLAMA_8B), speed_of(CARDS["h200"], BF16)
    profile = read_length(f"{length}@{depth}") if depth else PROFILE
    found = expect(pair, speed, profile, users=users, depth=depth, context=256)
    prompts = speed.seconds(pair.verify(rows=users, tokens=128 * users, context=64, logits=users))
    return users * 256 / (prompts + 256 / found.length * found.step_seconds)


@each(("depth", "length", "measured"), ANCHORS)
def test_steps_of_an_8b_target_on_an_h200_come_out_within_15_percent(
    depth: int, length: float, measured: dict[int, float]
) -> None:
    for users, rate in measured.items():
        assert whole_rate(depth, length, users) == pytest.approx(rate, rel=0.15), users


def test_its_speedups_come_out_within_15_percent() -> None:
    (_, _, plain), (depth, length, drafted) = ANCHORS
    for users in plain:
        predicted = whole_rate(depth, length, users) / whole_rate(0, 1.0, users)
        assert predicted == pytest.approx(drafted[users] / plain[users], rel=0.16), users


@each("config", [LLAMA_8B, QWEN3_30B_A3B])
@each("card", CARDS)
def test_time_grows_with_work_and_gain_falls_with_users(card: str, config: dict[str, object]) -> None:
    pair, speed = pair_of(config), speed_of(CARDS[card], BF16)

    def step(users: int, depth: int, context: float) -> float:
        return expect(pair, speed, PROFILE, users=users, depth=depth, context=context).step_seconds

    for vary in (
        [step(users, 3, 1000) for users in (1, 2, 8, 64, 512)],
        [step(8, depth, 1000) for depth in range(8)],
        [step(8, 3, context) for context in (0, 10, 1000, 100000)],
    ):
        assert vary == sorted(vary)
        assert vary[0] < vary[-1]
    if pair.decoder.active_parameters == pair.decoder.parameters:
        gains = [expect(pair, speed, PROFILE, users=users, depth=3, context=256).speedup for users in (1, 16, 128, 512)]
        assert gains == sorted(gains, reverse=True)


def test_a_better_drafter_is_faster_and_drafted_deeper() -> None:
    pair, speed = pair_of(LLAMA_8B), speed_of(CARDS["rtx4090"], BF16)
    best = []
    for chance in (0.05, 0.3, 0.6, 0.9):
        profile = AcceptanceProfile(chances=(chance,) * 7, source="")
        table = [expect(pair, speed, profile, users=1, depth=depth, context=512) for depth in range(8)]
        best.append(best_depth(table))
        auto = auto_speedup(pair, speed, profile, users=1, deepest=7, like=max(1, best[-1].depth), context=512)
        assert auto == pytest.approx(best[-1].speedup, rel=0.05), (
            "the engine's own choice for one user is the best depth"
        )
    assert [one.speedup for one in best] == sorted(one.speedup for one in best)
    assert [one.depth for one in best] == sorted(one.depth for one in best)
    assert best[0].depth == 0
    assert best[-1].depth > 3


class Priced:
    """A pair whose steps take a given time by verified tokens, and by passes of the drafter."""

    def __init__(self, verify: Callable[[int], float], draft: float) -> None:
        self.verify, self.draft = verify, draft

    def step_seconds(self, speed: object, *, rows: int, drafts: int, **_: object) -> float:
        return self.verify(rows + drafts) + ceil(drafts / rows) * self.draft


def priced_speedup(pair: Any, users: int, *chances: float) -> float:
    profile, deepest = AcceptanceProfile(chances=chances, source=""), len(chances)
    return auto_speedup(pair, None, profile, users=users, deepest=deepest, like=1, context=0)  # type: ignore[arg-type]


CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda tokens: 5.0,
    "linear": lambda tokens: 2.0 + tokens,
    "tiled": lambda tokens: 4.0 + 3 * ceil(tokens / 4),
    "convex": lambda tokens: 4.0 + 0.1 * tokens**2,
    "concave": lambda tokens: 4.0 * tokens**0.5,
}


@each("curve", CURVES)
@each("seed", range(8))
def test_no_set_of_depths_is_better_than_the_one_chosen(curve: str, seed: int) -> None:
    chance = random.Random(seed)
    users, draft = chance.randint(1, 4), chance.choice((0.05, 0.4, 1.5))
    chances = [chance.random() for _ in range(3)]
    survivals = AcceptanceProfile(chances=tuple(chances), source="").survivals(3)

    def rate(depths: tuple[int, ...]) -> float:
        tokens = users + sum(sum(survivals[:depth]) for depth in depths)
        return tokens / (CURVES[curve](users + sum(depths)) + max(depths) * draft)

    best = max(rate(depths) for depths in product(range(4), repeat=users) if any(depths)) / rate((0,) * users)
    found = priced_speedup(Priced(CURVES[curve], draft), users, *chances)
    assert found == pytest.approx(best if best > MARGIN else 1.0)


def test_one_more_draft_pays_exactly_if_it_gives_more_than_the_margin() -> None:
    for chance in (0.1, 0.2, 0.22, 0.23, 0.5):
        found = priced_speedup(Priced(lambda tokens: 0.9 + 0.1 * tokens, 0.1), 1, chance)
        assert found == pytest.approx((1 + chance) / 1.2 if chance > 0.224 else 1.0)


def test_some_users_draft_where_a_tile_has_no_room_for_all() -> None:
    tile = Priced(lambda tokens: 1.0 if tokens <= 12 else 9.0, 0.1)
    assert priced_speedup(tile, 8, 0.8, 0.1, 0.05) == pytest.approx((8 + 4 * 0.8) / 8 / 1.1)


def test_drafts_do_not_pay_where_arithmetic_is_the_limit() -> None:
    pair, speed = pair_of(LLAMA_8B), speed_of(CARDS["l4"], BF16)
    table = [expect(pair, speed, PROFILE, users=512, depth=depth, context=64) for depth in range(8)]
    assert best_depth(table).depth <= 1
    assert table[7].speedup < 0.7


def test_quantised_weights_are_read_faster() -> None:
    card = CARDS["rtx4090"]
    steps = [
        expect(
            pair_of(LLAMA_8B, kind), speed_of(card, parse_quantisation(kind)), PROFILE, users=1, depth=0, context=512
        )
        for kind in ("bfloat16", "fp8", "int4")
    ]
    seconds = [one.step_seconds for one in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[2]


def test_a_window_bounds_what_is_read() -> None:
    slides = pair_of({**LLAMA_8B, "model_type": "mistral", "sliding_window": 1024})
    full = pair_of(LLAMA_8B)
    assert slides.verify(rows=1, tokens=1, context=512) == full.verify(rows=1, tokens=1, context=512)
    at_8k, at_64k = (slides.verify(rows=1, tokens=1, context=context).bytes for context in (8192, 65536))
    assert at_8k == at_64k < full.verify(rows=1, tokens=1, context=8192).bytes


def test_a_prompt_in_chunks_reads_every_token_once() -> None:
    pair = pair_of(LLAMA_8B)
    whole, chunks = pair.prefill(1000, 1000), pair.prefill(1000, 256)
    assert sum(work.bytes for work in chunks) > sum(work.bytes for work in whole)
    assert sum(work.flops for work in chunks) == pytest.approx(sum(work.flops for work in whole), rel=0.02)
