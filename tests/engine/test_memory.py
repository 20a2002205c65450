"""What a process takes: blocks that hold nothing cost nothing, and a quantised target keeps its size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas.engine.kv_cache.cache import KVCache
from eyas.kernels.linear.weight_memory import ALIGNMENT, REGION, laid_apart

ROLLUP = Path("/proc/self/smaps_rollup")
LAYERS, HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 16
MIB = 2**20
MOST_BESIDE_TORCH = 380
"""MiB of a server of the default target beside Python and torch; 300 were measured, 134 of them other libraries'."""

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
    # Two blocks; in huge pages, the second of them would take 2 MiB in every head of every layer.
    two = 2 * 2 * LAYERS * HEADS * HEAD_DIM * BLOCK * 4 / MIB
    assert resident() - before < 2 * two + 4


def test_weights_lie_apart_and_one_behind_the_other() -> None:
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
