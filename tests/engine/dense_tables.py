"""On a CPU: attention over rows whose numbers were made on the device, padded or ragged, by dense attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.engine.runner import attention, model_runner
from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow


class DenseTablesBackend(AttentionBackend):
    """Dense attention over rows in tables, whose numbers are no secret on a CPU. Dead tokens get nothing."""

    def __init__(self, metadata: AttentionMetadata, *, sinks: int = 0) -> None:
        super().__init__(metadata, sinks=sinks)
        tables = metadata.tables
        starts: list[int] = tables.query_start_loc_R.tolist()
        ends, bases = tables.seq_lens_R.tolist(), tables.context_lens_R.tolist()
        blocks: list[list[int]] = tables.block_table_RP.tolist()
        rows = [
            (starts[r], _row(metadata, blocks[r], bases[r], ends[r], starts[r], starts[r + 1]))
            for r in range(len(ends))
            if ends[r]
        ]
        self._live = [start + q for start, row in rows for q in range(row.count)]
        self._dense = None
        if rows:
            slots = metadata.slot_mapping_N
            made = AttentionMetadata.of([row for _, row in rows], block_size=metadata.block_size, device=slots.device)
            assert made.slot_mapping_N.tolist() == slots[self._live].tolist()
            assert made.position_N.tolist() == metadata.position_N[self._live].tolist()
            self._dense = DenseBackend(made, sinks=sinks)

    def attend(self, q_NHK: Tensor, keys_GCK: Tensor, values_GCV: Tensor, *rest: Any) -> Tensor:
        output = q_NHK.new_zeros(*q_NHK.shape[:2], values_GCV.shape[2])
        if self._dense is not None:
            output[self._live] = self._dense.attend(q_NHK[self._live], keys_GCK, values_GCV, *rest)
        return output


def _row(
    metadata: AttentionMetadata, blocks: list[int], base: int, end: int, start: int, following: int
) -> AttentionRow:
    mask_N, lens = metadata.tables.tree_mask_N, metadata.tables.query_lens
    if mask_N is None:
        return AttentionRow(blocks=blocks, base=base, count=end - base)
    # A tree that was begun by earlier passes has all its new tokens live; one that begins here may have fewer.
    assert lens is not None
    tail = end - base
    count = min(following - start, tail)
    ancestors_QT = (mask_N[start : start + count, None].cpu() >> torch.arange(tail)) & 1 > 0
    return AttentionRow(blocks=blocks, base=base, count=count, ancestors=ancestors_QT)


def use_dense_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU attend over rows made on the device."""

    def choose(metadata: AttentionMetadata, *, sinks: int = 0) -> AttentionBackend:
        if metadata.on_device is not None:
            return DenseTablesBackend(metadata, sinks=sinks)
        return choose_backend(metadata, sinks=sinks)

    for module in (attention, model_runner):
        monkeypatch.setattr(module, "choose_backend", choose)
