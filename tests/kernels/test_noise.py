"""Noise is a function of seed, position and token, is random in every direction, and yields fair races."""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from scipy import stats
from torch import Tensor

from each import each
from eyas.kernels import noise
from eyas.kernels.noise import exponential, race, uniform

WRAP = 2**64 - 1
RARE = 1e-4
Uniform = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_mix(x: int) -> int:
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = ((x ^ (x >> shift)) * multiplier) & WRAP
    return x


def plain_uniform(seed: int, position: int, token: int) -> float:
    """The definition in Python integers."""
    golden = 0x9E3779B97F4A7C15
    key = plain_mix((plain_mix((seed + golden) & WRAP) + position * golden) & WRAP)
    bits = plain_mix((key + token * golden) & WRAP)
    return (2 * (bits % 2**52) + 1) / 2**53


def grid(
    of: Uniform = uniform,
    *,
    seeds: int = 16,
    positions: int = 16,
    tokens: int = 2048,
    first: tuple[int, int, int] = (0, 0, 0),
) -> numpy.ndarray:
    """w of a block of neighbours [seed, position, token]."""
    seed, position, token = (torch.arange(n) + a for n, a in zip((seeds, positions, tokens), first, strict=True))
    w = of(seed.repeat_interleave(positions), position.repeat(seeds), token)
    return numpy.asarray(w.reshape(seeds, positions, tokens))


def pair_p_value(x: numpy.ndarray, y: numpy.ndarray, bins: int = 16) -> float:
    """The p-value of pairs against uniform and independent ones."""
    counts, *_ = numpy.histogram2d(x.ravel(), y.ravel(), bins=bins, range=[[0, 1], [0, 1]])
    return float(stats.chisquare(counts.ravel()).pvalue)


def test_noise_matches_its_definition_in_python_integers() -> None:
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63)]
    positions = [0, 1, 7, 2**31, 131_071]
    tokens = [0, 1, 2, 49_151, 151_935]
    seed_N = torch.tensor([s for s in seeds for _ in positions])
    position_N = torch.tensor(positions * len(seeds))
    ours = uniform(seed_N, position_N, torch.tensor(tokens))
    theirs = [[plain_uniform(s, p, t) for t in tokens] for s in seeds for p in positions]
    assert ours.tolist() == theirs, "to the last bit"
    times = torch.tensor([[-math.log(1 - w) for w in row] for row in theirs])
    torch.testing.assert_close(exponential(seed_N, position_N, torch.tensor(tokens)), times, rtol=2**-23, atol=0)


def test_noise_does_not_depend_on_the_batch() -> None:
    seed_N, position_N, token_W = torch.tensor([5, 6, 5]), torch.tensor([9, 9, 8]), torch.arange(1001)
    whole = exponential(seed_N, position_N, token_W)
    for row in range(3):
        alone = exponential(seed_N[row : row + 1], position_N[row : row + 1], token_W)
        assert torch.equal(alone[0], whole[row])
    order_W = torch.randperm(1001, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exponential(seed_N, position_N, order_W), whole[:, order_W])
    few_NK = torch.stack([order_W[:7], order_W[7:14], order_W[14:21]])
    assert torch.equal(exponential(seed_N, position_N, few_NK), whole.gather(-1, few_NK))
    assert seed_N.tolist() == [5, 6, 5], "arguments are left alone"
    assert position_N.tolist() == [9, 9, 8]
    assert token_W.equal(torch.arange(1001))


@each("bits", [0, -1, 1, 2**52 - 1])
def test_the_interval_is_open_and_times_are_finite_at_its_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, bits))
    zero = torch.tensor([0])
    w = float(uniform(zero, zero, zero))
    assert w == (2 * (bits % 2**52) + 1) / 2**53
    assert 0 < w < 1
    time = float(exponential(zero, zero, zero))
    assert time == pytest.approx(-math.log1p(-w), rel=1e-6)
    assert 2**-54 < time < 37


def test_noise_is_uniform_and_exponential() -> None:
    w = grid().ravel()
    assert stats.chisquare(numpy.histogram(w, bins=1024, range=(0, 1))[0]).pvalue > RARE
    assert stats.kstest(w, "uniform").pvalue > RARE
    time = numpy.asarray(exponential(torch.arange(256), torch.arange(256), torch.arange(2048))).ravel()
    assert stats.kstest(time, "expon").pvalue > RARE
    assert stats.kstest(time * 1.01, "expon").pvalue < RARE, "one percent slower would show"


def test_the_smallest_values_come_as_often_as_they_should() -> None:
    # Rare tokens win only by these. Of 2^22 values 64 are below 2^-16, and these are uniform again.
    w = grid(positions=128).ravel()
    small = w[w < 2**-16] * 2**16
    assert stats.binomtest(len(small), len(w), 2**-16).pvalue > RARE
    assert stats.kstest(small, "uniform").pvalue > RARE


def test_every_bit_is_fair() -> None:
    bits = (grid() * 2**53).astype(numpy.uint64).ravel()
    ones = [int(((bits >> numpy.uint64(bit)) & numpy.uint64(1)).sum()) for bit in range(1, 53)]
    p_values = [stats.binomtest(count, len(bits), 0.5).pvalue for count in ones]
    assert min(p_values) > RARE / len(p_values)


@each("first", [(0, 0, 0), (2**40, 100_000, 49_000)])
@each(
    ("one", "other"),
    [
        ((0, 0, 0), (1, 0, 0)),
        ((0, 0, 0), (0, 1, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 1, 0)),
        ((0, 1, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 0, 1)),
        ((0, 0, 0), (1, 1, 1)),
        ((0, 0, 0), (8, 0, 0)),
        ((0, 0, 0), (0, 8, 0)),
        ((0, 0, 0), (0, 0, 1024)),
    ],
)
def test_neighbours_are_independent(
    one: tuple[int, int, int], other: tuple[int, int, int], first: tuple[int, int, int]
) -> None:
    w = grid(first=first)
    s, p, t = (n - max(a, b) for n, a, b in zip(w.shape, one, other, strict=True))
    x, y = (w[a : a + s, b : b + p, c : c + t] for a, b, c in (one, other))
    assert pair_p_value(x, y) > RARE
    assert abs(numpy.corrcoef(x.ravel(), y.ravel())[0, 1]) < 4 / math.sqrt(x.size)


def test_a_key_that_confuses_seed_and_position_is_caught() -> None:
    def confused(seed_N: Tensor, position_N: Tensor, token_W: Tensor) -> Tensor:
        return uniform(seed_N + position_N, torch.zeros_like(position_N), token_W)

    w = grid(confused)
    assert pair_p_value(w[1:, :-1], w[:-1, 1:]) < 1e-9


def test_a_mixer_without_its_multiplications_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda x: noise._fold(x, 31))
    w = grid()
    assert pair_p_value(w[:, :, 1:], w[:, :, :-1]) < 1e-9


@each("argument", [0, 1, 2])
def test_each_bit_of_the_input_turns_half_of_the_output(argument: int) -> None:
    base = torch.randint(0, 2**31, (3, 512), generator=torch.Generator().manual_seed(1))

    def bits(seed: Tensor, position: Tensor, token: Tensor) -> numpy.ndarray:
        w = uniform(seed, position, token[:, None])[:, 0]
        return numpy.asarray(w * 2**53).astype(numpy.uint64)

    for bit in range(17 if argument == 2 else 31):
        turned = base.clone()
        turned[argument] ^= 1 << bit
        share = numpy.bitwise_count(bits(*base) ^ bits(*turned)).mean() / 52
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(512 * 52)


def test_no_two_places_of_a_block_share_their_noise() -> None:
    w = grid(seeds=8, positions=64, tokens=4096)
    assert len(numpy.unique(w)) == w.size


@each("width", [1, 3])
@each("kept", [1, 5, 900, 4000])
@each("shortlist", [-1, 16])
def test_races_are_won_by_the_largest_p_over_e(
    width: int, kept: int, shortlist: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few tokens, many, and many with a shortlist too short to suffice.
    monkeypatch.setattr(noise, "_SHORTLIST", shortlist)
    generator = torch.Generator().manual_seed(kept)
    logits_NW = 2 * torch.randn(64, 4000, generator=generator)
    logits_NW = logits_NW.masked_fill(logits_NW < logits_NW.topk(kept, dim=-1).values[:, -1:], float("-inf"))
    p_NW = logits_NW.softmax(-1)
    seed_N, position_N, token_W = torch.arange(64), torch.arange(64) % 7, 3 * torch.arange(4000)
    expected = (p_NW / exponential(seed_N, position_N, token_W)).topk(width, dim=-1).indices
    ours = race(p_NW, seed_N, position_N, token_W, width=width)
    possible = slice(min(width, kept))
    assert torch.equal(ours[:, possible], expected[:, possible])
    assert all(len(set(row)) == width for row in ours.tolist())
