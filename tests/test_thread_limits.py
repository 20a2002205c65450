"""CPU threads: their number, and that torch's threads sleep while waiting."""

import os
import subprocess
import sys

import torch

from eyas import threads
from eyas.threads import cpu_quota, limit_threads

DECODE = """
import os
from pathlib import Path
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.loading import load_drafter_for, load_target
from eyas.sampling import Sampling
target = load_target("smollm2", dtype="auto", device="cpu")
engine = Engine(target, load_drafter_for(target, "smollm2-eagle3.1"), config=EngineConfig(capture_ahead=True))
def awakenings():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()) and (task / "comm").read_text().strip() != "eyas-kernels":
            status = (task / "status").read_text()
            count += int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return count
for depth in (0, 3):
    for rows in (1, 4):
        for _ in range(rows):
            speculation = Speculation(mode="fixed", depth=depth)
            engine.submit(Request(prompt=(1, 2, 3), sampling=Sampling(), max_new_tokens=40, speculation=speculation))
        while any(seq.new_tokens == 0 for seq in engine.scheduler.requests):
            engine.step()
        before = awakenings()
        while engine.busy:
            engine.step()
        assert awakenings() == before, (depth, rows, awakenings() - before)
"""


def run(script: str, **environment: str) -> str:
    """Run a script in a new process; return its stderr."""
    decided = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    rest = {name: value for name, value in os.environ.items() if name not in decided}
    done = subprocess.run(
        [sys.executable, "-c", script], env=rest | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torchs_threads_wait_passively_and_children_inherit_no_policy():
    script = "import eyas, os, torch; torch.ones(9); assert 'OMP_WAIT_POLICY' not in os.environ"
    told = run(script, OMP_DISPLAY_ENV="TRUE")
    assert told.count("OMP_WAIT_POLICY") == 1
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told


def test_a_wait_policy_of_the_environment_is_kept():
    told = run("import eyas, torch; torch.ones(9)", OMP_DISPLAY_ENV="TRUE", OMP_WAIT_POLICY="ACTIVE")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in told


def test_a_decoding_step_wakes_no_thread_of_torch():
    run(DECODE, OMP_NUM_THREADS="2")


def test_the_cpu_quota_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota((str(tmp_path / "cpu.max"), "")) == 1.5
    assert cpu_quota((str(tmp_path / "none"), str(tmp_path / "cpu.cfs_quota_us"))) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("200000\n")
    assert cpu_quota((str(tmp_path / "none"), str(tmp_path / "cpu.cfs_quota_us"))) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota((str(tmp_path / "cpu.max"), "")) is None


def test_thread_counts_apply_to_the_process_and_its_children():
    run("""
import subprocess, sys
from eyas.threads import limit_threads, use_threads
use_threads(3)
limit_threads()
import torch
assert torch.get_num_threads() == 3
use_threads(2)
limit_threads()
assert torch.get_num_threads() == 2
child = "import torch; assert torch.get_num_threads() == 2"
subprocess.run([sys.executable, "-c", child], check=True)
""")


def test_the_cpu_quota_limits_the_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.5)
    limit_threads()
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    limit_threads()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
