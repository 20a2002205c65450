"""The command line, called in this process: fast, and with everything that reaches the two streams."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.cli.app import main
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from tiny import drafter_config, random_drafter, target_config


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: object
    out: str
    err: str

    def assert_refused(self, *parts: str) -> None:
        """One line on stderr that holds every part, exit code 2, nothing on stdout."""
        assert self.code == 2, self
        assert self.out == "", self
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("eyas: "), self.err
        for part in parts:
            assert part in self.err, (part, self.err)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run `eyas` with these arguments."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["eyas", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Outcome(code=ended.value.code, out=out, err=err)

    return call


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a drafter of this config and say where."""

    def write(
        name: str = "drafter", *, inside: Path = tmp_path, layout: str = "vllm", shipped: bool = False, **changes: Any
    ) -> Path:
        drafter = random_drafter(drafter_config(**changes), own_embedding=shipped)
        write_checkpoint(checkpoint_of(drafter), inside / name, layout=layout)
        return inside / name

    return write


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target's folder: its config alone."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**target_config().to_dict(), "architectures": ["LlamaForCausalLM"]})
    )
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(name="contents")
def contents_fixture() -> Callable[[Path], dict[str, bytes]]:
    """`contents`, for tests: modules here cannot import each other."""
    return contents
