"""Without vLLM these tests are skipped, and say how to run them."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            # That one starts vLLM as a process, from whatever interpreter it is given.
            if "parity" in item.path.parts and item.path.stem != "test_served_states":
                item.add_marker(pytest.mark.skip(reason="needs the real vLLM: run `make parity`"))
