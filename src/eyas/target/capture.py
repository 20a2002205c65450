"""Auxiliary states: the target's residual stream at chosen layers, captured by hooks in an ordinary forward pass.

transformers' `output_hidden_states` would keep all states and apply the final norm to the last one.
Invariant: id k is the residual stream after k decoder layers. 0 is the input of the first layer (embeddings, after any
scaling), L the output of the last layer BEFORE the final norm. States are concatenated in ascending id order.

Shapes: B batch, T tokens, D hidden size, A number of ids, X = A * D.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from eyas.errors import UserError

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


class Captured:
    """States of the latest forward pass in a `capture` block."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.state_BTD: dict[int, torch.Tensor] = {}

    def aux_hidden(self) -> torch.Tensor:
        """Return the captured states, concatenated: [B, T, A * D]."""
        if len(self.state_BTD) != len(self.ids):
            raise RuntimeError("no states yet: run the model inside the capture block before asking for them")
        states = [self.state_BTD[k] for k in self.ids]
        # Layers of one model may be on several devices.
        return torch.cat([state_BTD.to(states[-1].device) for state_BTD in states], dim=-1)


@contextmanager
def capture(model: PreTrainedModel, ids: Sequence[int]) -> Iterator[Captured]:
    """Capture the states `ids` of each forward pass of `model` in the block."""
    layers = decoder_layers(model)
    captured = Captured(check_aux_layer_ids(ids, len(layers)))

    def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.state_BTD[0] = args[0] if args else kwargs["hidden_states"]

    def keep_output(k: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured.state_BTD[k] = output if isinstance(output, torch.Tensor) else output[0]

    handles = []
    try:
        for k in captured.ids:
            if k == 0:
                handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
            else:
                handles.append(layers[k - 1].register_forward_hook(partial(keep_output, k)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def check_aux_layer_ids(ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """Return `ids` as a tuple; refuse ids that are not ascending or outside 0..L."""
    chosen = tuple(ids)
    if not chosen:
        raise UserError(f"no auxiliary layer ids given; name at least one between 0 and {num_hidden_layers}")
    for k in chosen:
        if not 0 <= k <= num_hidden_layers:
            raise UserError(
                f"auxiliary layer id {k} is outside 0..{num_hidden_layers}, from the embeddings to the output of "
                "the last layer; choose ids in that range"
            )
    if list(chosen) != sorted(set(chosen)):
        raise UserError(
            f"auxiliary layer ids {list(chosen)} are not strictly ascending; "
            f"use {sorted(set(chosen))}, the order in which states are joined"
        )
    return chosen


def select_states(states_NX: torch.Tensor, captured: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Pick the layers `wanted` out of concatenated states of the layers `captured`."""
    if tuple(wanted) == tuple(captured):
        return states_NX
    of = dict(zip(captured, states_NX.chunk(len(captured), dim=-1), strict=True))
    return torch.cat([of[k] for k in wanted], dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the list of decoder layers of any causal language model of transformers."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    count = model.config.get_text_config().num_hidden_layers
    found = [
        (name.count("."), name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # A layer may have as many experts as there are layers, but their list is nested deeper.
    outermost = [(name, module) for depth, name, module in found if depth == min(entry[0] for entry in found)]
    if len(outermost) != 1:
        names = ", ".join(name for name, _ in outermost) or "none"
        raise UserError(
            f"cannot find the {count} decoder layers of {type(model).__name__}: lists of that length: {names}; "
            "use a target whose decoder keeps its layers in exactly one list"
        )
    return outermost[0][1]


def last_norm(decoder: nn.Module) -> nn.Module | None:
    """Return the norm between the last layer and the head; None if it has an unusual name."""
    found = (getattr(decoder, name, None) for name in _NORM_NAMES)
    return next((norm for norm in found if isinstance(norm, nn.Module)), None)
