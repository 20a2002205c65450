"""The controller never makes users pay for speculation, and uses it where it pays: laws of runs on a virtual clock."""

import json
import random
import re
import subprocess
import sys
import timeit
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from engine.depth_cells import MACHINES as WITH_HOSTS
from engine.depth_cells import PROFILES, busy_spell
from engine.simulated import (
    CPU,
    GOOD,
    GPU,
    GREAT,
    LARGE_ON_H200,
    RANDOM,
    SLOW_HOST,
    SMALL_ON_FAST_GPU,
    SMALL_ON_GPU,
    SMALL_ON_H200,
    Machine,
    Mode,
    best_rate,
    fixed_rate,
    plain_rate,
    serve,
)
from eyas.engine.speculation.controller import Controller, RowFacts
from eyas.engine.speculation.step_report import StepReport

MACHINES = {name: WITH_HOSTS[name] for name in ("cpu", "kind cpu", "gpu", "tiled gpu")}
STEPS = {1: 1600, 4: 800, 16: 500}
both_ways = pytest.mark.parametrize("rehearsed", [False, True], ids=["from nothing", "rehearsed"])


def made(machine: Machine, *, rehearsed: bool = True, recorded: Sequence[float] = ()) -> Controller:
    controller = Controller(7, recorded=recorded)
    if rehearsed:
        controller.rehearse(machine.rehearsal())
    return controller


def rows_of(count: int, mode: Mode = "auto", depth: int | None = None) -> list[RowFacts]:
    return [RowFacts(key=key, context=100, mode=mode, depth=depth, pending=2) for key in range(count)]


def trained(controller: Controller, machine: Machine, *, users: int, acceptance: float, steps: int = 400) -> Controller:
    """A controller after a run with this acceptance."""
    serve(controller, machine, lambda request, step: [acceptance] * 7, users=users, steps=steps)
    return controller


# --- speculation never costs the user ------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("users", [1, 4, 16])
@pytest.mark.parametrize("machine", WITH_HOSTS)
def test_a_random_drafter_costs_less_than_three_percent(machine: str, users: int, rehearsed: bool) -> None:
    controller = made(WITH_HOSTS[machine], rehearsed=rehearsed)
    run = serve(controller, WITH_HOSTS[machine], RANDOM, users=users, steps=500)
    assert run.rate() > 0.97 * plain_rate(WITH_HOSTS[machine], users), "from the first step on"
    assert run.rate(200) > 0.98 * plain_rate(WITH_HOSTS[machine], users)


@pytest.mark.parametrize("users", [2, 8, 24, 64])
@pytest.mark.parametrize("machine", WITH_HOSTS)
def test_a_good_drafter_is_never_slower_than_plain_decoding(machine: str, users: int) -> None:
    runs = [serve(Controller(7), WITH_HOSTS[machine], GOOD, users=users, steps=600, seed=seed) for seed in range(4)]
    assert mean(run.rate(200) for run in runs) > 0.98 * plain_rate(WITH_HOSTS[machine], users)


def test_what_the_host_does_for_drafts_counts() -> None:
    """Judged by passes only, drafts would gain a fifth; the host takes all of it back."""
    assert best_rate(SLOW_HOST, GOOD, users=16) == plain_rate(SLOW_HOST, 16)
    without = replace(SLOW_HOST, rest=lambda requests, drafting: 0.0)
    assert best_rate(without, GOOD, users=16) > 1.2 * plain_rate(without, 16)
    run = serve(Controller(7), SLOW_HOST, GOOD, users=16, steps=800)
    assert run.mean_depth(200) < 0.1
    assert run.rate() > 0.97 * plain_rate(SLOW_HOST, 16)


@pytest.mark.parametrize("users", [4, 16])
@pytest.mark.parametrize("profile", ["good", "great"])
def test_deeper_drafts_are_tried_where_a_depth_of_one_hardly_pays(profile: str, users: int) -> None:
    """The first pass of a draft takes most of the time, so only deeper ones make it pay."""
    chances = PROFILES[profile]
    best, plain = best_rate(SMALL_ON_GPU, chances, users=users), plain_rate(SMALL_ON_GPU, users)
    assert fixed_rate(SMALL_ON_GPU, chances, users=users, depth=1) < 1.1 * plain < 1.2 * plain < best
    assert serve(Controller(7), SMALL_ON_GPU, chances, users=users, steps=800).rate(150) > 0.95 * best


OVERLAPPED = {"135M": SMALL_ON_H200, "8B": LARGE_ON_H200}


@pytest.mark.parametrize("users", [1, 4, 16, 64])
@pytest.mark.parametrize("machine", OVERLAPPED)
def test_a_step_in_flight_finds_its_depth_within_a_few_dozen_steps(machine: str, users: int) -> None:
    """Choices use results one step old, and a step takes as long as the slower of host and device."""
    overlapped = OVERLAPPED[machine]
    best, plain = best_rate(overlapped, GOOD, users=users), plain_rate(overlapped, users)
    runs = [serve(Controller(7), overlapped, GOOD, users=users, steps=200, seed=seed) for seed in range(8)]
    assert best > 1.1 * plain
    assert mean(run.rate(40) for run in runs) > plain + 0.95 * (best - plain)


@pytest.mark.parametrize("users", [1, 4, 16, 64])
@pytest.mark.parametrize("machine", OVERLAPPED)
def test_a_step_in_flight_costs_nothing_with_a_random_drafter(machine: str, users: int) -> None:
    run = serve(Controller(7), OVERLAPPED[machine], RANDOM, users=users, steps=500)
    assert run.rate() > 0.98 * plain_rate(OVERLAPPED[machine], users)


@pytest.mark.parametrize("users", [1, 16])
@pytest.mark.parametrize("machine", ["135M", "8B"])
def test_a_record_that_is_wrong_is_soon_forgotten(machine: str, users: int) -> None:
    overlapped = OVERLAPPED[machine]
    best, plain = best_rate(overlapped, GOOD, users=users), plain_rate(overlapped, users)
    useless = serve(Controller(7, recorded=GREAT(0, 0)), overlapped, RANDOM, users=users, steps=500)
    assert useless.rate() > 0.97 * plain, "with a record that is too good"
    assert useless.rate(100) > 0.98 * plain
    useful = [
        serve(Controller(7, recorded=[0.02] * 7), overlapped, GOOD, users=users, steps=400, seed=seed)
        for seed in range(3)
    ]
    assert mean(run.rate(200) for run in useful) > plain + 0.9 * (best - plain), "with a record that is too bad"


def test_drafts_are_free_as_long_as_the_device_waits_for_the_host() -> None:
    """Depths are larger than without a host: the extra time of the device was idle before."""
    slow = replace(SMALL_ON_H200, rest=lambda requests, drafting: 6e-3)
    depths = [
        serve(Controller(7), machine, GOOD, users=64, steps=200).mean_depth(50) for machine in (slow, SMALL_ON_H200)
    ]
    assert depths[0] > depths[1] + 1


def test_several_choices_may_be_in_flight() -> None:
    """Reports come in the order of the choices, arbitrarily late, and each refers to its own choice."""
    controller = trained(Controller(7), replace(GPU, noise=0.0, outliers=0.0), users=2, acceptance=0.7)
    choices = [controller.choose(rows_of(2)) for _ in range(4)]
    before = controller.account.total
    for seconds, choice in enumerate(choices, 1):
        controller.observe(StepReport(choice=choice, requests=2, seconds=float(seconds)))
    assert controller.account.total - before == 1 + 2 + 3 + 4


def test_no_second_probe_while_one_is_in_flight() -> None:
    controller = trained(Controller(7), CPU, users=1, acceptance=0.0)
    seen = list[bool]()
    for _ in range(200):
        choice = controller.choose(rows_of(1))
        seen.append("probe" in choice.reason)
        if not seen[-1]:
            controller.observe(StepReport(choice=choice, requests=1, seconds=0.058))
    probes = [step for step, probed in enumerate(seen) if probed]
    assert probes, "a probe that is never observed does not end probing"
    assert all(later - earlier >= 8 for earlier, later in pairwise(probes))


def test_a_host_that_is_slow_for_all_steps_makes_drafts_worth_more() -> None:
    slow = replace(CPU, rest=lambda requests, drafting: 0.5)
    depths = [serve(Controller(7), machine, GOOD, users=16, steps=400).mean_depth(100) for machine in (CPU, slow)]
    assert depths[0] < 1 < 2 < depths[1]


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_a_drafter_that_is_rarely_sure_does_not_draft_in_vain(machine: str) -> None:
    """Rejected drafts cost drafter time and must not count as success."""
    run = serve(
        Controller(7),
        MACHINES[machine],
        lambda request, step: [0.95 if random.Random(1000 * request + step).random() < 0.1 else 0.02] * 7,
        users=4,
        steps=800,
        spread=0.0,
    )
    assert run.rate() > 0.98 * plain_rate(MACHINES[machine], 4)


def test_more_users_get_less_depth() -> None:
    depths = [serve(Controller(7), GPU, GREAT, users=users, steps=300).mean_depth(100) for users in (1, 16, 64)]
    assert depths[0] > depths[1] > depths[2] > 1
    depths = [serve(Controller(7), CPU, GREAT, users=users, steps=300).mean_depth(100) for users in (4, 16, 64)]
    assert depths[0] > 1.5 > depths[1] >= depths[2] < 0.1, "on this machine 64 users leave nothing to gain"


def test_users_that_come_and_go_get_the_current_best_depth() -> None:
    run = serve(Controller(7), GPU, GREAT, users=lambda step: 2 if step // 200 % 2 else 64, steps=1600)
    assert run.mean_depth(1500, 1600) > 4 > 3.5 > run.mean_depth(1300, 1400)
    assert run.rate(1220, 1400) > 1.35 * plain_rate(GPU, 64)
    assert run.rate(1420, 1600) > 2.3 * plain_rate(GPU, 2)


# --- and is used where it pays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [1, 4, 16])
@pytest.mark.parametrize("profile", ["good", "great"])
@pytest.mark.parametrize("machine", MACHINES)
def test_within_five_percent_of_the_best_fixed_depth(machine: str, profile: str, users: int) -> None:
    best = best_rate(MACHINES[machine], PROFILES[profile], users=users)
    run = serve(Controller(7), MACHINES[machine], PROFILES[profile], users=users, steps=STEPS[users])
    if best > 1.05 * plain_rate(MACHINES[machine], users):
        assert run.rate(150) > 0.95 * best
    else:
        assert run.rate(150) > 0.98 * plain_rate(MACHINES[machine], users)


def test_speculation_comes_back_after_drift_ends() -> None:
    for users in (1, 8):
        run = serve(
            Controller(7),
            GPU,
            lambda request, step: [0.0 if 500 <= step < 1000 else 0.8] * 7,
            users=users,
            steps=1600,
        )
        plain = plain_rate(GPU, users)
        assert run.rate(100, 500) > 1.9 * plain
        assert run.rate(550, 1000) > 0.97 * plain
        assert run.rate(1150, 1600) > 1.9 * plain


@pytest.mark.parametrize("users", [1, 4])
def test_waiting_states_do_not_keep_speculation_from_coming_back(users: int) -> None:
    """Every probe comes after a rest, and reading the waiting states takes longer than a plain step."""
    assert SMALL_ON_FAST_GPU.wake > 1.5 / plain_rate(SMALL_ON_FAST_GPU, 1)
    controller, bad = Controller(7), 300
    run = serve(
        controller, SMALL_ON_FAST_GPU, lambda request, step: [0.0 if step < bad else 0.75] * 7, users=users, steps=1500
    )
    plain = plain_rate(SMALL_ON_FAST_GPU, users)
    assert run.rate(0, bad) > 0.97 * plain
    assert run.rate(bad + 300) > 1.5 * plain


def test_probes_that_are_expensive_for_rested_requests_come_when_requests_begin() -> None:
    """Every fourth answer is hard to draft. If all probes came within it, the next answer could afford none."""
    controller = Controller(7)
    run = serve(
        controller,
        SMALL_ON_FAST_GPU,
        lambda request, step: [0.78 if request % 4 else 0.1] * 7,
        users=1,
        steps=4000,
        length=127,
    )
    assert run.rate(1000) > 1.25 * plain_rate(SMALL_ON_FAST_GPU, 1)


def test_a_plain_step_that_is_run_to_be_timed_lasts_one_step() -> None:
    """Even where plain steps are well known, so that plain choices hold for several steps."""
    run = serve(Controller(7), GPU, lambda request, step: [0.0 if step < 200 else 0.85] * 7, users=1, steps=2000)
    timed = [step for step, reason in enumerate(run.reasons) if "to time a step without drafts again" in reason]
    assert len(timed) >= 4
    assert all(later - earlier > 1 for earlier, later in pairwise(timed))


def test_costs_that_fall_bring_speculation_back() -> None:
    """Another process made verification expensive, and ends without notice."""
    run = serve(Controller(7), busy_spell(), GOOD, users=1, steps=4000)
    assert run.mean_depth(1000, 1500) < 0.3
    assert run.mean_depth(3500) > 2


def test_outliers_and_warm_ups_do_not_matter() -> None:
    calm = serve(Controller(7), replace(GPU, noise=0.0, outliers=0.0), GOOD, users=4, steps=800).rate(100)
    wild = serve(Controller(7), replace(GPU, noise=0.1, outliers=0.1), GOOD, users=4, steps=800).rate(100)
    assert wild > 0.96 * calm
    warm = replace(GPU, slower=lambda step: 50.0 if step < 2 else 1.0)
    assert serve(Controller(7), warm, GOOD, users=4, steps=800).rate(100) > 0.96 * calm


# --- what it is told and what it says ------------------------------------------------------------------------------


def test_off_and_fixed_are_obeyed_and_auto_is_unmoved_by_them() -> None:
    modes: dict[int, tuple[Mode, int | None]] = {0: ("off", None), 1: ("fixed", 5), 2: ("auto", None)}
    run = serve(Controller(7), CPU, RANDOM, users=6, steps=300, length=100_000, mode=lambda number: modes[number % 3])
    for depths in run.depths:
        assert [depth for place, depth in enumerate(depths) if (place + 1) % 3 == 0] == [0, 0]
        assert [depth for place, depth in enumerate(depths) if (place + 1) % 3 == 1] == [5, 5]
    assert run.mean_depth(50) < 10 / 6 + 0.1, "auto has learned from the fixed ones"
    assert min(run.made) >= 10, "fixed is fixed, however unsure the drafter is"


def test_depth_zero_is_always_a_choice() -> None:
    controller = trained(Controller(7), CPU, users=4, acceptance=0.0)
    counts = Counter(controller.choose(rows_of(4)).depths for _ in range(50))
    assert counts.most_common(1)[0][0] == (0, 0, 0, 0)


@pytest.mark.parametrize("users", [4, 16])
def test_a_collapse_is_reported_once(users: int) -> None:
    run = serve(Controller(7), GPU, lambda request, step: [0.8 if step < 300 else 0.0] * 7, users=users, steps=1500)
    ((step, said),) = run.events
    assert 300 < step < 1200
    assert re.search(r"accepted in [04]% of the last 24 rounds", said), said
    assert "eyas check" in said


def test_choices_have_reasons() -> None:
    controller = Controller(7)
    assert controller.choose(rows_of(2)).reason == "plain: not enough steps have been timed yet"
    assert "no request" in controller.choose(rows_of(2, "off")).reason
    good = trained(controller, GPU, users=2, acceptance=0.7).choose(rows_of(2)).reason
    assert "for 2 of 2 requests" in good
    assert "tokens/s expected against" in good
    bad = {trained(Controller(7), CPU, users=2, acceptance=0.0).choose(rows_of(2)).reason.split(":")[0]}
    assert bad <= {"plain, drafts would not pay", "probe, 1 deep for 2 of 2 requests"}


def test_the_report_has_what_is_known() -> None:
    report = trained(Controller(7), replace(GPU, noise=0.0), users=4, acceptance=0.7).report()
    assert report["acceptance_by_depth"][0] == pytest.approx(0.7, abs=0.1)
    assert report["step_seconds_by_depth_and_requests"]["depth 0"][4] == pytest.approx(4.9e-3)
    assert sum(report["share_of_depths"].values()) == pytest.approx(1.0)
    assert sum(share for depth, share in report["share_of_depths"].items() if depth) > 0.9
    assert report["seconds_lost_by_probes"] < 0.02 * report["seconds"]
    json.dumps(report, allow_nan=False)  # it goes to /status


# --- what it costs -------------------------------------------------------------------------------------------------


def test_a_choice_for_64_requests_takes_well_under_a_millisecond() -> None:
    controller = Controller(7)
    serve(controller, GPU, lambda request, step: [0.3 + 0.1 * (request % 7)] * 7, users=64, steps=60)
    rows = rows_of(64)
    assert min(timeit.repeat(lambda: controller.choose(rows), number=16, repeat=20)) / 16 < 0.5e-3


def test_it_runs_without_torch() -> None:
    program = (
        "import sys, eyas.engine.speculation.controller; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_256_rounds_are_learned_in_well_under_a_millisecond() -> None:
    controller = Controller(7)
    serve(controller, GPU, GOOD, users=256, steps=10)
    choice = controller.choose(rows_of(256))
    report = StepReport(
        choice=choice,
        requests=256,
        seconds=0.01,
        chains=[(3, key % 4) for key in range(256)],
    )
    assert min(timeit.repeat(lambda: controller.observe(report), number=16, repeat=20)) / 16 < 0.5e-3
