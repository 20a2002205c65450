"""Processes wait for each other without a time limit, and share numbers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eyas
from eyas.train.ranks import Ranks

pytestmark = pytest.mark.slow

WORKER = """
import time, torch
from datetime import timedelta
from eyas.train.ranks import Ranks
ranks = Ranks.join(timeout=timedelta(seconds=2))
for slow in (0, 1):
    if ranks.rank == slow:
        time.sleep(3)  # tokenising, say: longer than a collective may take
    ranks.barrier()
cpu = torch.device("cpu")
seen = ranks.sum_counts([ranks.rank + 1], cpu), ranks.any_true(not ranks.is_main, cpu)
print(ranks.from_main(0.25 + ranks.rank, cpu), *seen)
ranks.barrier()
ranks.leave()
"""


def test_a_barrier_outlasts_the_timeout_of_the_group() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"PYTHONPATH": str(Path(eyas.__file__).parent.parent), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert [out.strip() for out, _ in said] == ["0.25 [3] True"] * 2


def test_a_single_process_does_not_wait() -> None:
    ranks = Ranks()
    ranks.barrier()
    ranks.leave()
    cpu = torch.device("cpu")
    assert (ranks.from_main(0.5, cpu), ranks.any_true(True, cpu)) == (0.5, True)
