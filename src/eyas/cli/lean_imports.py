"""Imports transformers without the parts of torch that a server never uses: 70 MiB of memory, and seconds.

Importing it brings torch._dynamo, to mark functions for torch.compile, torch.distributed.tensor with sympy, for models
spread over processes, and scipy where it is installed, for losses. A server compiles nothing and is one process.

So while transformers is imported, stand-ins take the marks, and it is told that there are no distributed tensors, which
it asks for and can do without. Afterwards all is as before: who imports torch._dynamo then gets it. A stand-in that is
asked for something else hands out the real thing.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

DYNAMO = "torch._dynamo"
VMAP = "torch._dynamo._trace_wrapped_higher_order_op"
UNUSED = ("scipy",)
"""What transformers imports where it is installed."""


def import_transformers() -> None:
    """Import what every model of transformers imports."""
    if DYNAMO in sys.modules or "transformers.modeling_utils" in sys.modules:
        _import()  # too late to spare anything
        return
    try:
        with _stand_ins():
            _import()
    except (ImportError, AttributeError) as error:
        logger.info(f"transformers is imported with all of torch, 70 MiB more: {error}")
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        _import()


def _import() -> None:
    from transformers import AutoTokenizer, GenerationMixin, PreTrainedModel  # noqa: F401


class _StandIn(ModuleType):
    """A module that is imported when it is asked for what it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in [module for module in sys.modules if isinstance(sys.modules[module], _StandIn)]:
            del sys.modules[module]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _stand_ins() -> Iterator[None]:
    import torch.distributed

    dynamo, vmap = _StandIn(DYNAMO), _StandIn(VMAP)
    for mark in (disable, assume_constant_result, allow_in_graph):
        setattr(dynamo, mark.__name__, mark)
    vmap.TransformGetItemToIndex = _transform_get_item_to_index  # type: ignore[attr-defined]
    unused = [name for name in UNUSED if name not in sys.modules]
    is_available = torch.distributed.is_available
    sys.modules.update({DYNAMO: dynamo, VMAP: vmap, **dict.fromkeys(unused)})  # type: ignore[dict-item]
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        for name in (DYNAMO, VMAP, *unused):
            if sys.modules.get(name) in (None, dynamo, vmap):
                sys.modules.pop(name, None)


def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """As torch._dynamo's, which leaves a mark as well."""
    del recursive, reason
    if fn is None:
        return disable
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return fn


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As torch._dynamo's."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def allow_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As torch._dynamo's, without the mark: it is kept there."""
    return fn


def _transform_get_item_to_index() -> Any:
    """The context in which transformers maps masks over tensors."""
    return importlib.import_module(VMAP).TransformGetItemToIndex()
