"""Shared fixtures of kernel tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
