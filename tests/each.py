"""Runs many cases of a law in one test, where `pytest.mark.parametrize` would make a test of each.

Fixtures stay the same from case to case, but each case has its own `tmp_path`, `monkeypatch` and `caplog`. A failure
names its case.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each of the values, in turn, within one test. May be repeated for several parameters."""
    split = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = [dict(zip(split, value if len(split) > 1 else (value,), strict=True)) for value in values]
    assert cases, f"no case of {names}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            for number, case in enumerate(cases):
                with _own(fixtures, number) as own:
                    try:
                        test(**case, **own)
                    except BaseException as error:
                        error.add_note(", ".join(f"{name}={value!r}" for name, value in case.items()))
                        raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in split]
        assert len(left) == len(signature.parameters) - len(split), f"{test.__name__} does not take {names}"
        all_cases.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return all_cases

    return decorate


@contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Fixtures of one case."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"case-{number}"
        own["tmp_path"].mkdir()
    if "caplog" in own:
        own["caplog"].clear()
    if "monkeypatch" not in own:
        yield own
        return
    with own["monkeypatch"].context() as own["monkeypatch"]:
        yield own
