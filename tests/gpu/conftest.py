"""What GPU tests share: the tiny target and its drafter on the device, exact products. Without a CUDA device these
tests are skipped, and say how to run them."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make gpu` where there is one"))


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    """Products of float32 are not rounded to tf32."""
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def falls_back_to_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No engine may log that it falls back to slower code. Warnings about slow launches of a busy host are allowed."""
    with caplog.at_level(logging.INFO, logger="eyas.engine"):
        yield
    told = [record for record in caplog.get_records("call") if record.name != "eyas.engine.core"]
    assert [record.getMessage() for record in told] == []


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """The tiny target with letters for tokens."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "".join(chr(ord("0") + token) for token in ids))
    return replace(tiny_target, model=copy.deepcopy(tiny_target.model).cuda(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def drafter(tiny_drafter: Drafter) -> Drafter:
    """The drafter of the tiny target."""
    return copy.deepcopy(tiny_drafter).cuda()


@pytest.fixture(scope="module")
def tiny_eagle1(tiny_eagle1: Drafter) -> Drafter:
    """An EAGLE-1 drafter of the tiny target."""
    return copy.deepcopy(tiny_eagle1).cuda()


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Twelve prompts of 3 to 47 tokens."""
    from tiny import language

    rows = language(12, 47, torch.Generator().manual_seed(21)).tolist()
    return [tuple(row[: 3 + 4 * i]) for i, row in enumerate(rows)]
