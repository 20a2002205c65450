"""Imports transformers without torch's compiler, distributed tensors and scipy: 110 MiB, and seconds of a start.

transformers imports them to mark functions for torch.compile, for models spread over processes, and for losses. A
server on a CPU uses none of that, so stubs take their places while transformers is imported, and are removed behind it:
who imports torch._dynamo then gets the real one.
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


def import_transformers() -> None:
    """Import what every model of transformers imports; plainly if stubs come too late or do not suffice."""
    if DYNAMO not in sys.modules and "transformers.modeling_utils" not in sys.modules:
        try:
            with _stubs():
                _import()
            return
        except (ImportError, AttributeError) as error:
            logger.info(f"transformers is imported with all of torch, 110 MiB more: {error}")
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
                del sys.modules[name]
    _import()


def _import() -> None:
    from transformers import AutoTokenizer, GenerationMixin, PreTrainedModel  # noqa: F401


@contextmanager
def _stubs() -> Iterator[None]:
    import torch.distributed

    dynamo, vmap = ModuleType(DYNAMO), ModuleType(VMAP)
    for mark in ("disable", "assume_constant_result", "allow_in_graph"):
        setattr(dynamo, mark, _unmarked)
    vmap.TransformGetItemToIndex = lambda: importlib.import_module(VMAP).TransformGetItemToIndex()  # type: ignore[attr-defined]
    stubs: dict[str, Any] = {DYNAMO: dynamo, VMAP: vmap}
    stubs |= {} if "scipy" in sys.modules else {"scipy": None}
    is_available = torch.distributed.is_available
    sys.modules.update(stubs)
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        for name in stubs:
            sys.modules.pop(name, None)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Stand in for a decorator of torch._dynamo, with or without arguments."""
    return _unmarked if function is None else function
