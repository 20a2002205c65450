"""A target's own code with another attention, through transformers' interface.

The model runs unchanged; only where it would attend does it call the function registered here, which hands queries,
keys and values to the callable that the caller passed to the model as `eyas_attend`: transformers hands unknown keyword
arguments down to every layer. For layers that drop them (StableLM, Nemotron) the engine also puts it into a context
variable. No masks are built for such a function, so who sees whom is the callable's business. What a model adds to
causal attention and the callable could not know of is refused, never ignored.

Shapes: N tokens of a pass, H query heads, G key heads, K head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from eyas.errors import UserError

IMPLEMENTATION = "eyas"


class AttendFor(Protocol):
    """Attends for a target's layers."""

    def __call__(
        self,
        module: nn.Module,
        q_NHK: Tensor,
        k_NGK: Tensor,
        v_NGK: Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
        sink_logit_H: Tensor | None,
    ) -> Tensor:
        """Map the queries and the new keys and values of a layer's attention module to outputs [N, H, K]."""
        ...


_ATTEND: ContextVar[AttendFor | None] = ContextVar("eyas_attend", default=None)


@contextmanager
def attending_by(attend: AttendFor | None) -> Iterator[None]:
    """Who attends meanwhile for layers that are not told."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


@contextmanager
def attending_through(model: PreTrainedModel, attend: AttendFor | None = None) -> Iterator[None]:
    """Let the model attend through `eyas_attend`, or by `attend` where layers drop that; then it is as it was.

    Every step does this, so it sets what `set_attn_implementation` sets without the checks that walk all modules.
    """
    config = model.config
    if not model._can_set_attn_implementation():
        raise UserError(
            f"the attention of {type(model).__name__} cannot be replaced, since its code does not go through "
            "transformers' attention interface; choose another target"
        )
    parts = {part: getattr(config, part) for part in config.sub_configs}
    before = {"": config._attn_implementation}
    before |= {part: found._attn_implementation for part, found in parts.items() if found is not None}
    try:
        config._attn_implementation = IMPLEMENTATION
        with attending_by(attend):
            yield
    finally:
        config._attn_implementation = before


def attend_for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    eyas_attend: AttendFor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: q [1, H, N, K] and new k, v [1, G, N, K] to [1, N, H, K]."""
    if eyas_attend is None:
        eyas_attend = _ATTEND.get()
    if eyas_attend is None:
        name = type(module).__name__
        raise UserError(f"{name} does not hand its attention what the caller passed; choose another target")
    for feature, asked in (
        ("sinks (s_aux) that are no score for each head", s_aux is not None and s_aux.shape != query.shape[1:2]),
        ("a bias of positions", position_bias is not None),
        ("a mask of its own", attention_mask is not None),
        ("tokens that see later ones", not getattr(module, "is_causal", True)),
    ):
        if asked:
            raise UserError(f"{type(module).__name__} attends with {feature}; only causal attention without is served")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return eyas_attend(module, q, k, v, scaling, softcap, sliding_window, s_aux).contiguous()[None], None


AttentionInterface.register(IMPLEMENTATION, attend_for_transformers)
