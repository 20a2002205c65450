"""The thread pool of kernels: all pieces are done once, and no more threads are made than asked for."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eyas.kernels.linear.packed_linear import load_kernel, pack

PREAMBLE = """
import os
os.environ["OMP_NUM_THREADS"] = "1"  # no thread before the first count
import torch
from pathlib import Path
from eyas.kernels.linear.packed_linear import load_kernel, pack
kernel, words = load_kernel()
(packed,) = pack(kernel, [torch.nn.Linear(64, 512)])
torch.set_grad_enabled(False)
def names():
    tasks = [Path("/proc/self/task") / task for task in os.listdir("/proc/self/task")]
    return sorted((task / "comm").read_text().strip() for task in tasks)
before = names()
"""


@pytest.fixture(scope="module")
def kernel():
    kernel, words = load_kernel()
    if kernel is None:
        pytest.skip(words)
    return kernel


@pytest.fixture
def threads():
    """Sets the number of threads, and restores it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", PREAMBLE + script], check=True, timeout=120)


def test_kernels_run_on_as_many_threads_as_torch_is_told(kernel):
    run("""
torch.set_num_threads(1)
packed(torch.ones(1, 64))
assert names() == before, names()
torch.set_num_threads(3)
packed(torch.ones(1, 64))
assert [name for name in names() if name == "eyas-kernels"] == ["eyas-kernels"] * 2, names()
assert len(names()) == len(before) + 2, names()
""")


def test_a_forked_process_has_threads_of_its_own(kernel):
    run("""
torch.set_num_threads(3)
expected = packed(torch.ones(1, 64))
child = os.fork()
if child == 0:
    same = torch.equal(packed(torch.ones(1, 64)), expected)
    os._exit(0 if same and names().count("eyas-kernels") == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
""")


def test_all_pieces_are_done_with_concurrent_callers(kernel, threads):
    threads(4)
    linears = [torch.nn.Linear(inputs, outputs) for inputs, outputs in ((32, 40), (64, 900), (96, 16))]
    packed = [pack(kernel, [linear])[0] for linear in linears]
    with torch.no_grad():
        given = [torch.randn(rows, linear.in_features) for linear in linears for rows in (1, 3)]
        threads(1)
        expected = [linear(x) for linear, x in zip([one for one in packed for _ in range(2)], given, strict=True)]
        threads(4)

        def ask(_: int) -> bool:
            with torch.no_grad():
                several = [one for one in packed for _ in range(2)]
                return all(
                    torch.equal(linear(x), wanted)
                    for _ in range(50)
                    for linear, x, wanted in zip(several, given, expected, strict=True)
                )

        with ThreadPoolExecutor(3) as people:
            assert all(people.map(ask, range(6)))
