"""Probes never lose more than their share, wait longer while they find nothing, and hurry when they find something."""

import random
from itertools import pairwise

import pytest

from eyas.engine.speculation.exploration import Exploration
from eyas.engine.speculation.policy import POLICY

PLAIN = 1.0


def run(chance_of_hit: float, loss: float, steps: int, seed: int = 0) -> tuple[Exploration, list[int]]:
    """Plain steps of one second, with a probe wherever one is due and affordable."""
    probes, chance, when = Exploration(), random.Random(seed), []
    for step in range(steps):
        probes.total += PLAIN
        if probes.due(step) and probes.affords(loss, PLAIN):
            hit = chance.random() < chance_of_hit
            probes.settle(step, seconds=PLAIN + loss, plain=PLAIN, saved=PLAIN * hit, hit=hit, chance=chance_of_hit)
            when.append(step)
    return probes, when


@pytest.mark.parametrize("loss", [0.1, 0.6, 1.9])
@pytest.mark.parametrize("chance_of_hit", [0.0, 0.3, 0.9])
def test_probes_never_lose_more_than_their_share(loss: float, chance_of_hit: float) -> None:
    probes, when = run(chance_of_hit, loss, 5000)
    assert len(when) > 10
    assert probes.lost <= POLICY.probe_share * probes.total + POLICY.probe_credit * PLAIN


def test_probes_that_find_nothing_become_rare_and_never_cease() -> None:
    _, when = run(0.0, 0.05, 2000)
    gaps = [later - earlier for earlier, later in pairwise(when)]
    assert gaps[0] < 8
    assert gaps == sorted(gaps)
    assert gaps[-1] == POLICY.probe_longest_wait


def test_a_probe_that_finds_something_is_followed_at_once() -> None:
    probes = Exploration()
    probes.settle(100, seconds=1.1, plain=1.0, saved=1.0, hit=True, chance=0.7)
    assert probes.due(101)
    assert probes.streak == 1
    probes.settle(101, seconds=1.1, plain=1.0, saved=0.0, hit=False, chance=0.7)
    assert not probes.due(102)
    assert probes.due(110), "but not for long"


def settle_a_streak(probes: Exploration, step: int = 0) -> int:
    """Probes that all hit, until the next one has to wait; the step after them."""
    while probes.due(step):
        probes.settle(step, seconds=1.1, plain=1.0, saved=1.0, hit=True, chance=0.7)
        step += 1
    return step


def test_probes_that_succeed_and_change_nothing_are_a_matter_of_cost_and_become_seldom() -> None:
    probes = Exploration()
    step = settle_a_streak(probes)
    assert step == 4
    for _ in range(3):
        assert not probes.due(step + POLICY.probe_seldom - 2)
        step += int(POLICY.probe_seldom)
        assert settle_a_streak(probes, step) == step + 1, "one more hit is no news"
    probes.rest()
    assert settle_a_streak(probes, step) == step + 4, "speculation has paid since"


def test_a_streak_begins_anew_once_drafts_became_worse_than_when_they_were_too_dear() -> None:
    probes = Exploration()
    step = settle_a_streak(probes) + int(POLICY.probe_seldom)
    probes.settle(step, seconds=1.1, plain=1.0, saved=0.0, hit=False, chance=0.5)
    assert not probes.due(step + POLICY.probe_longest_wait), "half of them are still accepted"
    probes.settle(step, seconds=1.1, plain=1.0, saved=0.0, hit=False, chance=0.4)
    assert probes.due(step + 8)
    probes.settle(step + 8, seconds=1.1, plain=1.0, saved=1.0, hit=True, chance=0.45)
    assert probes.streak == 1


def test_accepted_drafts_pay_for_their_probe() -> None:
    probes = Exploration()
    probes.settle(0, seconds=1.6, plain=1.0, saved=1.0, hit=True, chance=0.7)
    assert probes.lost == 0.0


def test_a_compilation_is_not_charged_as_if_it_came_again() -> None:
    probes = Exploration()
    probes.settle(0, seconds=100.0, plain=1.0, saved=0.0, hit=False, chance=0.7)
    assert probes.lost == POLICY.probe_most_loss


def test_what_drafts_have_saved_pays_for_probes_that_come_sooner_until_it_is_spent() -> None:
    """Drafts that paid before may pay again: their gains, and no more than those, are risked for it."""
    probes, when = Exploration(), []
    probes.put_aside(1000.0, PLAIN)
    assert probes.put_by == POLICY.probe_most_put_by * PLAIN
    saved, loss = probes.put_by, 0.5
    for step in range(2000):
        probes.total += PLAIN
        if probes.due(step) and probes.affords(loss, PLAIN):
            probes.settle(step, seconds=PLAIN + loss, plain=PLAIN, saved=0.0, hit=False, chance=0.1)
            when.append(step)
    gaps = [later - earlier for earlier, later in pairwise(when)]
    paid = int(saved / loss) - 1
    assert max(gaps[: paid - 1]) == POLICY.probe_paid_wait
    assert max(gaps[paid:]) > POLICY.probe_paid_wait
    assert probes.lost <= POLICY.probe_share * probes.total + POLICY.probe_credit * PLAIN
    probes.put_aside(-1000.0, PLAIN)
    assert probes.put_by == 0.0
