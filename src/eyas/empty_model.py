"""Builds models whose matrices take no memory until weights are loaded.

Building whole models on torch's `meta` device would also move the computations of their constructors there, which load
70 MiB of torch's compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

DRAWS = ("normal_", "uniform_", "zero_", "fill_")
"""Initialisers of tensors, besides those of torch.nn.init."""


class _NothingDrawn(TorchFunctionMode):
    """Skips initialisers of matrices on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else (kwargs or {}).get("tensor")
        fills = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", None) in DRAWS
        if fills and isinstance(first, Tensor) and first.is_meta:
            return first
        return func(*args, **(kwargs or {}))


@contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Put matrices of new modules on the meta device; vectors and buffers are real."""

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.ndim < 2:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        with _NothingDrawn():
            yield
    finally:
        handle.remove()
