"""`gpu_memory_utilization`: a share of a card, weights and passes included, as bytes for blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from each import each
from eyas.engine.config import EngineConfig, _memory_of_share, plan_budget
from eyas.errors import UserError
from eyas.plan.footprint import CUDA_RUNTIME
from eyas.plan.memory import Footprint

if TYPE_CHECKING:
    from eyas.target.model import Target

GIB = 2**30
FOOTPRINT = Footprint(weights=8 * GIB, drafter=0, token=1, drafter_token=0, working=GIB, recorded=GIB)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 40 GiB where the weights lie and another process takes 4 GiB."""
    free = 28 * GIB - CUDA_RUNTIME
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)


@pytest.mark.usefixtures("card")
def test_blocks_get_what_weights_and_passes_leave_of_the_share() -> None:
    assert _memory_of_share(0.5, torch.device("cuda"), FOOTPRINT) == 20 * GIB - 8 * GIB - 2 * GIB - CUDA_RUNTIME


@pytest.mark.usefixtures("card")
def test_a_share_that_is_not_free_or_holds_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.95 is 38\.00 GiB of the GPU's 40\.00 GiB.*lower it"):
        _memory_of_share(0.95, torch.device("cuda"), FOOTPRINT)
    with pytest.raises(UserError, match=r"0\.2 is 8\.00 GiB.*raise it"):
        _memory_of_share(0.2, torch.device("cuda"), FOOTPRINT)


def test_there_is_no_share_of_a_processor(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="runs on cpu"):
        plan_budget(tiny_target, None, EngineConfig(gpu_memory_utilization=0.5), 64)


@each("share", [0.0, -1.0, 1.01, float("nan")])
def test_no_share_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_two_ways_of_saying_how_much_are_refused() -> None:
    with pytest.raises(UserError, match="give one of them"):
        EngineConfig(gpu_memory_utilization=0.5, memory=1)
