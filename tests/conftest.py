"""Fixtures shared by every room; heavy imports stay inside so that light tests start at once."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make lossless` is given."""
    parser.addoption("--prompts", default="", help="JSONL of prompts (`turns` or `prompt`) for the lossless tests")
    parser.addoption("--drafter", default="", help="drafter of the default target for the lossless tests")


def pytest_configure() -> None:
    """A shell starts what runs in the background deaf to Ctrl-C, and commands that tests interrupt would inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The embedded default target in float32, obtained once into the user's cache."""
    from eyas.target.locate import DEFAULT_TARGET
    from eyas.target.model import Target

    return Target.load(DEFAULT_TARGET, dtype="float32")


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A target that learnt a small language; it is asked in ids and answers in letters."""
    from eyas.target.facts import facts_of
    from eyas.target.model import Target
    from tiny import Letters, trained_target

    model = trained_target(steps=250)
    return Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=Letters())


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Target) -> Drafter:
    """An EAGLE-3.1 drafter that learnt the tiny target."""
    from tiny import drafter_config, trained_drafter

    return trained_drafter(tiny_target.model, drafter_config(fc_norm=True, norm_output=True), steps=120)


@pytest.fixture(scope="session")
def tiny_eagle1(tiny_target: Target) -> Drafter:
    """An EAGLE-1 drafter that learnt it."""
    from tiny import eagle1_config, trained_drafter

    return trained_drafter(tiny_target.model, eagle1_config(fc_bias=True), steps=120)
