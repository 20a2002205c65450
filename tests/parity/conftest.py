"""Without vLLM these tests are skipped, and say how to run them."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if "parity" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs the real vLLM: run `make parity`"))
