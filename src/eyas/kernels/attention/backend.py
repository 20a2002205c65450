"""The interface of attention backends: write new keys and values, then attend.

One rule of visibility for targets and drafters: a token at position p sees its own prefix and, in the tail, what its
row says (`metadata.py`); with a window it sees of these only positions above p - window, and the first `sinks` slots.
Some targets learn a score per head without a value (`sink_logit_H`), which takes a share of the attention weights.

Three backends implement it: Triton kernels on CUDA (`triton.py`) and compiled C in float32 on a CPU (`cpu.py`), both
reading through block tables, and torch operations anywhere else (`dense.py`), the reference for both. `choose.py`
chooses.

Shapes: N tokens of a pass, C slots of the cache, H query heads, G key heads, K size of queries and keys, V of values.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from eyas.kernels.attention.kv_dtype import as_stored, bits
from eyas.kernels.attention.metadata import AttentionMetadata


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What a layer of a model asks of attention, beside its tensors."""

    layer: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None
    sink_logit_H: Tensor | None = None


class AttentionBackend(ABC):
    """Attention of one pass; the caller passes a layer's keys and values."""

    def __init__(self, metadata: AttentionMetadata, *, sinks: int = 0) -> None:
        self.metadata, self.sinks = metadata, sinks

    @abstractmethod
    def attend(
        self,
        q_NHK: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        """Attend [N, H, V]; the new keys and values have been written already.

        Scores are scaled and, with a softcap, become softcap * tanh(score / softcap); sink logits do not.
        """

    def write_and_attend(
        self,
        q_NHK: Tensor,
        k_NGK: Tensor,
        v_NGV: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        write_slots(keys_GCK, values_GCV, self.metadata.slot_mapping_N, k_NGK, v_NGV)
        return self.attend(q_NHK, keys_GCK, values_GCV, scale, softcap, window, sink_logit_H)


def write_slots(keys_GCK: Tensor, values_GCV: Tensor, slot_mapping_N: Tensor, k_NGK: Tensor, v_NGV: Tensor) -> None:
    """Write new keys and values to their slots."""
    for memory, x_NGK in ((keys_GCK, k_NGK), (values_GCV, v_NGV)):
        bits(memory).index_copy_(1, slot_mapping_N, bits(as_stored(x_NGK, memory.dtype)).transpose(0, 1))
