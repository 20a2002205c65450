"""A reader that leaves, and Ctrl-C: neither changes more than it must."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from each import each

COMMAND = [sys.executable, "-m", "eyas"]


@each(("users", "code"), [(1, 0), (100_000, 1)])
def test_a_reader_that_leaves_does_not_change_the_exit_code(users: int, code: int) -> None:
    command = [*COMMAND, "plan", "smollm2", "--context", "8192", "--users", str(users)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")


@each("seconds", [0.5, 1.5])
def test_an_interruption_is_one_line_wherever_it_comes(tmp_path: Path, seconds: float) -> None:
    """While libraries are imported, and while a command waits for its input."""
    script = "import eyas.cli.entry as entry; print('begun', flush=True); entry.main()"
    command = [sys.executable, "-c", script, "generate", "-", "--target", str(tmp_path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (130, "eyas: interrupted\n")


def test_what_runs_in_the_background_does_not_hear_the_terminals_ctrl_c() -> None:
    script = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import eyas.cli.entry as entry; "
        "import builtins; load = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'eyas.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = interrupted; entry.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("part", ["make_context", "invoke"])
def test_an_interruption_is_one_line_in_every_part_of_a_command(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the command line is read, and while the command runs."""
    from typer.core import TyperGroup

    from eyas.cli.app import main

    def interrupted(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TyperGroup, part, interrupted)
    monkeypatch.setattr(sys, "argv", ["eyas", "plan", "smollm2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "eyas: interrupted\n")
