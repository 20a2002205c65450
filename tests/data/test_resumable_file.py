"""A resumable file reports a full disk and is continued by the next run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="the size of files is limited there")

FILLS_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from eyas.data.resumable_file import resumable_file, write_line
from eyas.errors import UserError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails, as on a full disk
try:
    with resumable_file(Path(sys.argv[1]), {}, what="answers") as (stream, ids):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        for number in range(100):
            if number not in ids:
                write_line(stream, {"id": number, "text": "x" * 100}, f"answer {number}")
except UserError as error:
    print(error)
    sys.exit(2)
"""


def written(out: Path, most: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FILLS_THE_DISK, str(out), str(most)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)


def test_a_full_disk_is_an_error_and_the_next_run_continues_the_file(
    tmp_path: Path,
) -> None:
    out = tmp_path / "answers.jsonl"
    full = written(out, 1000)
    assert (full.returncode, full.stderr) == (2, "")
    assert "cannot write answer 8: File too large; what was written before is kept" in full.stdout
    assert written(out, 10**6).returncode == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == list(range(100))
