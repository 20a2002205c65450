"""Numbers reach the trackers by name and step; a tracker that is not installed is named with its extra."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from each import each
from eyas.errors import UserError
from eyas.train import trackers
from eyas.train.recipe import TrackerName
from train.test_journal import counts_of, metrics_at

Number = tuple[int, str, float]


class Library:
    """Both languages that trackers speak; remembers what it is told."""

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
def test_every_number_reaches_the_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, asked = Library(), []
    monkeypatch.setattr(trackers, "import_module", lambda module: asked.append(module) or library)
    tracker = trackers.open_tracker(name, Path("runs/first"), {"train": {"lr": 1}})
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

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(UserError, match=rf"names {name}, which is not installed; `pip install 'eyas\[{name}\]'`"):
        trackers.open_tracker(name, Path("runs/first"), {})
