"""Memory of a process: unused blocks cost nothing, a quantised target stays small, and shares of a GPU are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from each import each
from eyas.engine.config import EngineConfig, _memory_of_share, plan_budget
from eyas.engine.kv_cache.cache import KVCache
from eyas.errors import UserError
from eyas.kernels.linear.weight_memory import ALIGNMENT, REGION, laid_apart
from eyas.plan.footprint import CUDA_RUNTIME
from eyas.plan.memory import Footprint
from eyas.target.model import Target

ROLLUP = Path("/proc/self/smaps_rollup")
LAYERS, HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 16
MIB = 2**20
MOST_BESIDE_TORCH = 380
"""MiB of a server of the default target besides Python and torch; 300 were measured, 134 of them other libraries'."""

pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="reads Linux' count of resident memory")

SERVED = """
import json, pathlib, torch
def resident():
    return int(pathlib.Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0]) / 1024
before = resident()
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.freed_memory import give_back
from eyas.loading import load_pair
target, drafter = load_pair("smollm2", "smollm2-eagle3.1", dtype="auto", device="cpu")
engine = Engine(target, drafter, config=EngineConfig(capture_ahead=True))
give_back()
print(json.dumps({"quantization": target.quantization, "beside_torch": resident() - before}))
"""


def resident() -> float:
    """MiB of this process."""
    return int(ROLLUP.read_text().split("Rss:")[1].split()[0]) / 1024


def test_only_blocks_that_are_written_take_memory() -> None:
    cache = KVCache(blocks=2000, block_size=BLOCK)
    new = torch.ones(BLOCK, HEADS, HEAD_DIM)
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(BLOCK), new, new)
    before = resident()
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(BLOCK, 2 * BLOCK), new, new)
    for layer in range(LAYERS):
        cache.write(layer, 1000 * BLOCK + torch.arange(BLOCK), new, new)
    # Two blocks; with huge pages, the second one would take 2 MiB per head and layer.
    two = 2 * 2 * LAYERS * HEADS * HEAD_DIM * BLOCK * 4 / MIB
    assert resident() - before < 2 * two + 4


def test_weights_are_stored_apart_and_one_after_the_other() -> None:
    first, second = torch.arange(101, dtype=torch.uint8), torch.full((3, 5), 7, dtype=torch.uint8)
    kept = [laid_apart(one) for one in (first, second)]
    assert torch.equal(kept[0], first)
    assert torch.equal(kept[1], second)
    assert all(one.data_ptr() % ALIGNMENT == 0 for one in kept)
    large = laid_apart(torch.ones(REGION // 2, dtype=torch.uint8))
    behind = laid_apart(first)
    assert not large.data_ptr() <= behind.data_ptr() < large.data_ptr() + large.nbytes


def test_regions_are_freed_with_their_weights() -> None:
    before = resident()
    for _ in range(4):
        laid_apart(torch.ones(4 * REGION, dtype=torch.uint8))
    assert resident() - before < 2 * 4 * REGION / MIB


@pytest.mark.slow
@pytest.mark.default
def test_a_server_of_the_default_target_stays_small() -> None:
    ran = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, check=True, timeout=300)
    measured = json.loads(ran.stdout.splitlines()[-1])
    if measured["quantization"] == "none":
        pytest.skip("no integer products here: the weights are widened")
    assert measured["beside_torch"] < MOST_BESIDE_TORCH


GIB = 2**30
FOOTPRINT = Footprint(weights=8 * GIB, drafter=0, token=1, drafter_token=0, working=GIB, recorded=GIB)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 40 GiB that holds the weights and 4 GiB of another process."""
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


def test_a_share_of_a_cpu_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="runs on cpu"):
        plan_budget(tiny_target, None, EngineConfig(gpu_memory_utilization=0.5), 64)


@each("share", [0.0, -1.0, 1.01, float("nan")])
def test_shares_outside_0_to_1_are_refused(share: float) -> None:
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_two_limits_of_memory_are_refused() -> None:
    with pytest.raises(UserError, match="give one of them"):
        EngineConfig(gpu_memory_utilization=0.5, memory=1)
