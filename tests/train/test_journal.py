"""What a run writes down tells one story, whatever happened while it was written."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.errors import UserError
from eyas.train.estimate import RoundCounts
from eyas.train.journal import Journal, read_log, write_record, write_text
from eyas.train.loop import DrafterMetrics, TrainMetrics
from eyas.train.plot import plot_run
from eyas.train.schedule import RunLength

PNG = b"\x89PNG\r\n"


def metrics_at(step: int, *names: str, depths: int = 2) -> TrainMetrics:
    own = DrafterMetrics(loss=2.0, accuracy=(0.5,) * depths, overlap=(0.4,) * depths, gradient_norm=1.5)
    return TrainMetrics(
        step=step,
        length=RunLength(steps=9),
        tokens=100 * step,
        tokens_per_second=12.4,
        seconds=7.5,
        seconds_left=3.0,
        lr_share=0.5,
        drafters=dict.fromkeys(names or ("drafter",), own),
    )


def counts_of(*names: str) -> dict[str, RoundCounts]:
    return dict.fromkeys(names or ("drafter",), RoundCounts(rounds=10, accepted_at=(5, 2)))


def written(folder: Path, steps: Sequence[int], *names: str) -> Path:
    journal = Journal(folder, from_step=0)
    for step in steps:
        journal.progressed(metrics_at(step, *names))
        journal.estimated(step, counts_of(*names))
        journal.saved(step, folder)
    return folder / "log.jsonl"


def steps_of(log: Path) -> list[int]:
    return sorted({line["step"] for line in read_log(log)})


def test_a_line_for_every_drafter_and_report(tmp_path: Path) -> None:
    log = written(tmp_path / "deep" / "run", [1], "old", "new")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["drafter"] for line in lines] == ["old", "new", "old", "new"]
    assert lines[0] == {
        "drafter": "old",
        "step": 1,
        "seconds": 7.5,
        "tokens": 100,
        "tokens_per_second": 12,
        "lr_share": 0.5,
        "loss": 2.0,
        "accuracy": [0.5, 0.5],
        "overlap": [0.4, 0.4],
        "gradient_norm": 1.5,
    }
    assert lines[2] == {
        "drafter": "old",
        "step": 1,
        "held_out": {"acceptance_length": 1.7, "rounds": 10, "accepted_at": [5, 2]},
    }


def test_a_run_taken_up_again_drops_what_lies_behind_its_checkpoint(tmp_path: Path) -> None:
    log = written(tmp_path, [1, 2, 3, 4])
    Journal(tmp_path, from_step=2).progressed(metrics_at(3))
    assert steps_of(log) == [1, 2, 3]
    assert len(read_log(log)) == 5
    Journal(tmp_path, from_step=0)
    assert log.read_text() == ""


@each("torn", ['{"drafter": "drafter", "st', "{", '{"drafter": "a", "step": 3}\n{"dra'])
def test_a_torn_last_line_is_dropped_and_never_written_behind(tmp_path: Path, torn: str) -> None:
    log = written(tmp_path, [1, 2])
    with log.open("a") as file:
        file.write(torn)
    Journal(tmp_path, from_step=2).progressed(metrics_at(3))
    assert [line["step"] for line in read_log(log)] == [1, 1, 2, 2, 3]
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_no_log_has_no_lines(tmp_path: Path) -> None:
    assert read_log(tmp_path / "log.jsonl") == []


def test_the_record_says_with_what_it_was_made(tmp_path: Path) -> None:
    write_record(tmp_path, {"step": 4, "recipe": {"train": {"lr": 1e-3}}})
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["step"] == 4
    assert record["recipe"] == {"train": {"lr": 1e-3}}
    assert record["versions"]["torch"] == version("torch")
    assert record["versions"].keys() >= {"python", "platform", "eyas", "transformers", "numpy", "safetensors", "device"}


def no_room(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written(tmp_path, [1, 2])
    before = log.read_text()
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", no_room)
        with pytest.raises(UserError, match=r"cannot write .*log\.jsonl: No space left.*free space"):
            Journal(tmp_path, from_step=1)
    assert log.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    journal = Journal(tmp_path, from_step=1)
    monkeypatch.setattr(Path, "open", no_room)
    with pytest.raises(UserError, match=r"cannot write .*log\.jsonl: No space left.*free space"):
        journal.progressed(metrics_at(2))


def test_a_place_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*recipe\.toml: .*another destination"):
        write_text(tmp_path / "file" / "recipe.toml", "text")


@each(("steps", "names"), [((), ()), ((1, 2, 3), ("only",)), ((1, 2), ("old", "new"))])
def test_a_run_is_drawn(tmp_path: Path, steps: tuple[int, ...], names: tuple[str, ...]) -> None:
    plot_run(written(tmp_path, steps, *names), tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)


def test_a_run_is_drawn_at_any_depth_and_without_estimates(tmp_path: Path) -> None:
    Journal(tmp_path, from_step=0).progressed(metrics_at(1, depths=64))
    plot_run(tmp_path / "log.jsonl", tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)
    with pytest.raises(UserError, match=r"cannot write .*nowhere/training\.png: No such file"):
        plot_run(tmp_path / "log.jsonl", tmp_path / "nowhere" / "training.png")
