"""Another attention for a while, through transformers' own interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from eyas.errors import UserError


@contextmanager
def attending_through(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model attend through the function registered as `name`; everybody else finds it as it was."""
    config = model.config
    before: dict[str, Any] = {"": config._attn_implementation}
    for part in config.sub_configs:
        if getattr(config, part) is not None:
            before[part] = getattr(config, part)._attn_implementation
    try:
        model.set_attn_implementation(name)
        if config.get_text_config()._attn_implementation != name:
            raise UserError(
                f"the attention of {type(model).__name__} cannot be replaced; batches cannot run this target"
            )
        yield
    finally:
        model.set_attn_implementation(before)
