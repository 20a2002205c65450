"""Fixtures shared by all tests; heavy imports are local, so that light tests start at once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from resumption import Resumption
from time_budget import TimeBudget

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make lossless` and of `.ci/run`."""
    parser.addoption("--prompts", default="", help="JSONL of prompts (`turns` or `prompt`) for the lossless tests")
    parser.addoption("--drafter", default="", help="drafter of the default target for the lossless tests")
    parser.addoption("--until", type=float, help="time (seconds since 1970) after which no further test begins")


def pytest_configure(config: pytest.Config) -> None:
    """Restore SIGINT, which shells ignore in background processes, for commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--prompts"):
        prompts = Path(config.getoption("--prompts"))
        config.pluginmanager.register(Resumption.of(prompts, config.getoption("--drafter")))
    if config.getoption("--until"):
        config.pluginmanager.register(TimeBudget(config.getoption("--until")))


@pytest.fixture(scope="session")
def native_cache() -> Path:
    """Folder of compiled kernels in every form that tests compare, kept between runs; keyed by their sources."""
    return Path(__file__).parents[1] / ".pytest_cache" / "kernels"


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The embedded default target in float32, obtained once into the user's cache."""
    from eyas.target.locate import DEFAULT_TARGET
    from eyas.target.model import Target

    return Target.load(DEFAULT_TARGET, dtype="float32")


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A target trained on a small language; its tokenizer maps ids to letters."""
    from eyas.target.facts import facts_of
    from eyas.target.model import Target
    from tiny import Letters, trained_target

    model = trained_target(steps=250)
    return Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=Letters())


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Target) -> Drafter:
    """An EAGLE-3.1 drafter trained for the tiny target."""
    from tiny import drafter_config, trained_drafter

    return trained_drafter(tiny_target.model, drafter_config(fc_norm=True, norm_output=True), steps=120)


@pytest.fixture(scope="session")
def tiny_eagle1(tiny_target: Target) -> Drafter:
    """An EAGLE-1 drafter trained for the tiny target."""
    from tiny import eagle1_config, trained_drafter

    return trained_drafter(tiny_target.model, eagle1_config(fc_bias=True), steps=120)
