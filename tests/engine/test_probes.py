"""Probes never lose more than their share, wait longer while they find nothing, and hurry when they find something."""

import random
from itertools import pairwise

import pytest

from eyas.engine.probes import CREDIT, LONGEST, MOST_LOSS, SHARE, Probes

PLAIN = 1.0


def run(chance_of_hit: float, loss: float, steps: int, seed: int = 0) -> tuple[Probes, list[int]]:
    """Plain steps of one second, with a probe wherever one is due and affordable."""
    probes, chance, when = Probes(), random.Random(seed), []
    for step in range(steps):
        probes.total += PLAIN
        if probes.due(step) and probes.affords(loss, PLAIN):
            hit = chance.random() < chance_of_hit
            probes.settle(step, seconds=PLAIN + loss, plain=PLAIN, saved=PLAIN * hit, hit=hit)
            when.append(step)
    return probes, when


@pytest.mark.parametrize("loss", [0.1, 0.6, 1.9])
@pytest.mark.parametrize("chance_of_hit", [0.0, 0.3, 0.9])
def test_probes_never_lose_more_than_their_share(loss: float, chance_of_hit: float) -> None:
    probes, when = run(chance_of_hit, loss, 5000)
    assert len(when) > 10
    assert probes.lost <= SHARE * probes.total + CREDIT * PLAIN


def test_probes_that_find_nothing_become_rare_and_never_cease() -> None:
    _, when = run(0.0, 0.05, 2000)
    gaps = [later - earlier for earlier, later in pairwise(when)]
    assert gaps[0] < 8
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST


def test_a_probe_that_finds_something_is_followed_at_once() -> None:
    probes = Probes()
    probes.settle(100, seconds=1.1, plain=1.0, saved=1.0, hit=True)
    assert probes.due(101)
    assert probes.streak == 1
    probes.settle(101, seconds=1.1, plain=1.0, saved=0.0, hit=False)
    assert not probes.due(102)
    assert probes.due(110), "but not for long"


def test_probes_that_succeed_and_change_nothing_are_a_matter_of_cost_and_wait_longest() -> None:
    probes, step = Probes(), 0
    while probes.due(step):
        probes.settle(step, seconds=1.1, plain=1.0, saved=1.0, hit=True)
        step += 1
    assert step == 4
    assert not probes.due(step + LONGEST - 2)
    assert probes.due(step + LONGEST)


def test_accepted_drafts_pay_for_their_probe() -> None:
    probes = Probes()
    probes.settle(0, seconds=1.6, plain=1.0, saved=1.0, hit=True)
    assert probes.lost == 0.0


def test_a_compilation_is_not_charged_as_if_it_came_again() -> None:
    probes = Probes()
    probes.settle(0, seconds=100.0, plain=1.0, saved=0.0, hit=False)
    assert probes.lost == MOST_LOSS
