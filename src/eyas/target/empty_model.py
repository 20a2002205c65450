"""Models of transformers whose matrices take no memory until they are given."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Matrices of modules that are made meanwhile take none; norms, and what modules compute themselves, are real."""

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.ndim < 2:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
