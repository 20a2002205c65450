"""A tiny target with letters for tokens and prompts for it; real prompts and a real drafter for `make lossless`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest
import torch

from real_prompts import read_prompts, spread
from tiny import language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from eyas.drafter.model import Drafter
    from eyas.kernels.llama.block import FusedLlama
    from eyas.target.model import Target

    RealPrompts = Callable[[int, int], list[list[int]]]


@pytest.fixture(scope="package", autouse=True)
def tried_once() -> Iterator[None]:
    """Try a fused pass of a model only for its first engine, not for the thousands that tests make: saves an eighth of
    the time. Passes with other settings, and refused ones, are tried separately.
    """
    from eyas.engine.runner import fused_target

    passed: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()
    require_same = fused_target.require_same

    def once(fused: FusedLlama, target: Target) -> None:
        tried = passed.setdefault(target.model, set())
        kind = type(fused), fused.dtype, fused.quantised, fused.phased, fused.rounds_rows, fused.few_rows
        if kind not in tried:
            require_same(fused, target)
            tried.add(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_target, "require_same", once)
        yield


@pytest.fixture(scope="session")
def real_prompts(request: pytest.FixtureRequest, default_target: Target) -> RealPrompts:
    """Gives prompts of limited length, spread evenly over the file."""
    path = request.config.getoption("--prompts")
    if not path:
        pytest.skip("no --prompts FILE; run `make lossless PROMPTS=FILE`")
    prompts = read_prompts(path, default_target)
    return lambda count, tokens: spread(prompts, count, tokens)


@pytest.fixture(scope="session")
def real_drafter(request: pytest.FixtureRequest, default_target: Target) -> Drafter:
    """The drafter given by --drafter, or the shipped one."""
    from eyas.drafter.checkpoint import load_drafter
    from eyas.drafter.shipped import DEFAULT_DRAFTER

    drafter = load_drafter(request.config.getoption("--drafter") or DEFAULT_DRAFTER["smollm2"])
    return drafter.float().share_target(default_target.embedding(), default_target.head())


@pytest.fixture(scope="session")
def target(tiny_target: Target) -> Target:
    """The tiny target with letters for tokens."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "".join(chr(ord("0") + token) for token in ids))
    return replace(tiny_target, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Twelve prompts of 3 to 47 tokens."""
    rows = language(12, 47, torch.Generator().manual_seed(21)).tolist()
    return [tuple(row[: 3 + 4 * i]) for i, row in enumerate(rows)]


@pytest.fixture(scope="session")
def expected(target: Target, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Plain answers of the reference decoder to these prompts."""
    from engine.common import plain

    return [plain(target, prompt) for prompt in prompts]
