"""Log, record, plots and trackers of a run agree with what happened, whatever interrupts it."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from each import each
from eyas.errors import UserError
from eyas.train import journal as journal_module
from eyas.train.estimate import RoundCounts
from eyas.train.journal import Journal, read_log, write_record, write_text
from eyas.train.loop import DrafterMetrics, TrainMetrics
from eyas.train.plots import plot_run
from eyas.train.recipe import TrackerName
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


def test_the_log_has_a_line_per_drafter_and_report(tmp_path: Path) -> None:
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


def test_a_resumed_run_drops_log_lines_after_its_checkpoint(tmp_path: Path) -> None:
    log = written(tmp_path, [1, 2, 3, 4])
    Journal(tmp_path, from_step=2).progressed(metrics_at(3))
    assert steps_of(log) == [1, 2, 3]
    assert len(read_log(log)) == 5
    Journal(tmp_path, from_step=0)
    assert log.read_text() == ""


@each("torn", ['{"drafter": "drafter", "st', "{", '{"drafter": "a", "step": 3}\n{"dra'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    log = written(tmp_path, [1, 2])
    with log.open("a") as file:
        file.write(torn)
    Journal(tmp_path, from_step=2).progressed(metrics_at(3))
    assert [line["step"] for line in read_log(log)] == [1, 1, 2, 2, 3]
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert read_log(tmp_path / "log.jsonl") == []


def test_the_record_has_the_versions(tmp_path: Path) -> None:
    write_record(tmp_path, {"step": 4, "recipe": {"train": {"lr": 1e-3}}})
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["step"] == 4
    assert record["recipe"] == {"train": {"lr": 1e-3}}
    assert record["versions"]["torch"] == version("torch")
    assert record["versions"].keys() >= {"python", "platform", "eyas", "transformers", "numpy", "safetensors", "device"}


def no_room(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*recipe\.toml: .*another destination"):
        write_text(tmp_path / "file" / "recipe.toml", "text")


@each(("steps", "names"), [((), ()), ((1, 2, 3), ("only",)), ((1, 2), ("old", "new"))])
def test_a_run_is_plotted(tmp_path: Path, steps: tuple[int, ...], names: tuple[str, ...]) -> None:
    plot_run(written(tmp_path, steps, *names), tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)


def test_a_run_is_plotted_at_any_depth_and_without_estimates(tmp_path: Path) -> None:
    Journal(tmp_path, from_step=0).progressed(metrics_at(1, depths=64))
    plot_run(tmp_path / "log.jsonl", tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)
    with pytest.raises(UserError, match=r"cannot write .*nowhere/training\.png: No such file"):
        plot_run(tmp_path / "log.jsonl", tmp_path / "nowhere" / "training.png")


Number = tuple[int, str, float]


class Library:
    """Both interfaces of trackers; records its calls."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.numbers: list[Number] = []

    def SummaryWriter(self, folder: str) -> SimpleNamespace:
        self.started = {"name": folder}
        return SimpleNamespace(
            add_scalar=lambda name, value, step: self.numbers.append((step, name, value)), flush=lambda: None
        )

    def init(self, **settings: Any) -> None:
        self.started = settings

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self.numbers += [(step, name, value) for name, value in numbers.items()]


@each("name", get_args(TrackerName))
def test_every_metric_reaches_the_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, asked = Library(), []
    monkeypatch.setattr(journal_module, "import_module", lambda module: asked.append(module) or library)
    tracker = journal_module.open_tracker(name, Path("runs/first"), {"train": {"lr": 1}})
    tracker.progressed(metrics_at(3, "old", "new"))
    tracker.estimated(4, counts_of("old"))
    tracker.saved(4, Path("x"))
    assert asked == ["torch.utils.tensorboard" if name == "tensorboard" else name]
    assert {number[:2] for number in library.numbers} == {
        (3, "tokens_per_second"),
        (3, "lr_share"),
        *(
            (3, f"{own}/{what}")
            for own in ("old", "new")
            for what in ("loss", "gradient_norm", "accuracy_1", "accuracy_2")
        ),
        (4, "old/acceptance_length"),
    }
    assert (4, "old/acceptance_length", 1.7) in library.numbers
    if name == "tensorboard":
        assert library.started == {"name": "runs/first/tensorboard"}
    else:
        assert library.started == {"project": "eyas", "name": "first", "config": {"train": {"lr": 1}}}


@each("name", get_args(TrackerName))
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(module)

    monkeypatch.setattr(journal_module, "import_module", missing)
    with pytest.raises(UserError, match=rf"names {name}, which is not installed; `pip install 'eyas\[{name}\]'`"):
        journal_module.open_tracker(name, Path("runs/first"), {})
