"""Runs the target over documents laid end to end, without padding: final and auxiliary states.

On a GPU one pass takes them all, with flash attention that respects their borders (through transformers' interface, so
it works for any architecture that attends through that). Elsewhere each document is a pass of its own, which is exact
for every model and no slower on a CPU.

Shapes: T tokens of all documents, D hidden size, X concatenated auxiliary states, H heads, G key heads, K size of
queries and keys, V of values.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from eyas.errors import UserError
from eyas.target.attention import attending_through
from eyas.target.capture import capture, decoder_layers
from eyas.target.model import Target


@dataclass(frozen=True, eq=False)
class _WithinDocuments:
    """Causal attention within documents, by flash attention."""

    starts: Tensor
    longest: int

    def __call__(
        self,
        module: nn.Module,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGV: Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
        sink_logit_H: Tensor | None,
    ) -> Tensor:
        if softcap is not None or sink_logit_H is not None:
            does = "has sinks in its attention" if softcap is None else "caps its attention scores"
            raise UserError(
                f"{type(module).__name__} {does}, which flash attention cannot do here; "
                'set target.dtype = "float32" to run documents one by one'
            )
        borders, longest = self.starts, self.longest
        sees = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        # Flash attention needs values as wide as keys; those of latent attention (DeepSeek) are narrower.
        v_TGK = functional.pad(v_TGV, (0, k_TGK.shape[-1] - v_TGV.shape[-1]))
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *(q_THK, k_TGK, v_TGK, borders, borders, longest, longest, 0.0, True, False), scale=scale, **sees
        )[0]
        return out[..., : v_TGV.shape[-1]]


class PackedTarget:
    """Runs packs of documents through a target."""

    def __init__(self, target: Target, aux_layer_ids: Sequence[int], *, one_pass: bool, compiled: bool = False) -> None:
        self._target = target
        self._layer_ids = aux_layer_ids
        self._decoder: nn.Module = target.model.get_decoder()  # type: ignore[no-untyped-call]
        self._one_pass = one_pass
        # Layers are compiled one by one, since they share one graph.
        self._compiled = [
            (layer, torch.compile(layer.forward, dynamic=False))
            for layer in (decoder_layers(target.model) if compiled else ())
        ]

    @torch.no_grad()
    def __call__(self, ids_T: Tensor, position_T: Tensor, starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Final states [T, D], after the last norm, and auxiliary states [T, X].

        `starts` (int32) holds the first token of each document and, last, the end of the last one.
        """
        if self._one_pass:
            if self._compiled:
                # Empty documents at the end: compiled code sees few shapes of `starts` instead of one per pack.
                spare = (1 << (len(starts) - 1).bit_length()) - len(starts)
                starts = torch.cat([starts, starts[-1:].expand(spare)])
            with (
                attending_through(self._target.model),
                _forwards(self._compiled),
                capture(self._target.model, self._layer_ids) as captured,
            ):
                hidden = self._decoder(
                    input_ids=ids_T[None],
                    position_ids=position_T[None],
                    use_cache=False,
                    eyas_attend=_WithinDocuments(starts, longest),
                ).last_hidden_state
            return hidden[0].to(ids_T.device), captured.aux_hidden()[0].to(ids_T.device)
        borders = starts.tolist()
        pieces = [self._alone(ids_T[a:b]) for a, b in pairwise(borders) if a < b]
        return torch.cat([hidden for hidden, _ in pieces]), torch.cat([aux for _, aux in pieces])

    def _alone(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        with capture(self._target.model, self._layer_ids) as captured:
            hidden = self._decoder(input_ids=ids_T[None], use_cache=False).last_hidden_state
        return hidden[0].to(ids_T.device), captured.aux_hidden()[0].to(ids_T.device)


def runs_in_one_pass(target: Target) -> bool:
    """Whether flash attention can run all documents in one pass: half precision on a GPU, plain attention."""
    half = target.dtype in (torch.bfloat16, torch.float16)
    return half and target.device.type == "cuda" and attends_plainly(target.model) and tells_layers(target)


def attends_plainly(model: PreTrainedModel) -> bool:
    """Whether every layer attends through transformers' interface with scores that flash attention supports.

    A layer that carries a state from token to token (linear attention, convolutions) would carry it across borders.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        bool(model._supports_attention_backend)
        and not getattr(model, "_is_stateful", False)
        and kinds <= {"full_attention", "sliding_attention"}
        and getattr(config, "attn_logit_softcapping", None) is None
        and not getattr(config, "num_kv_shared_layers", None)
        and not any(name.endswith(".sinks") for name, _ in model.named_parameters())
    )


@torch.no_grad()
def tells_layers(target: Target) -> bool:
    """Whether layers pass a caller's arguments on, which compiled layers depend on: one token shows it."""

    def nothing(_: nn.Module, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, *more: object) -> Tensor:
        return q_NHK.new_zeros(*q_NHK.shape[:2], v_NGK.shape[-1])

    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    with attending_through(target.model):
        try:
            target.model(input_ids=token, use_cache=False, eyas_attend=nothing)
        except UserError:
            return False
    return True


@contextmanager
def _forwards(compiled: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Run compiled layers for a while; other users of the model find it unchanged."""
    for layer, forward in compiled:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, _ in compiled:
            del layer.forward
