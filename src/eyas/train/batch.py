"""A pack of documents as training sees it: what is read, and which predictions count.

The target's state at token s scores token s + 1. At depth k that score teaches the drafter's slot s - 1 - k, which has
read the true tokens s - k to s as if it had drafted them. The prediction counts if all of those and token s + 1 are
part of one answer, so for every token it is enough to know how many of the tokens up to it are: its `run`. Depth k
counts at s when its run is k + 1 or more.

Shapes: T tokens, M tokens whose score teaches at all.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.train.corpus.corpus import Corpus, Pack, pack_arrays
from eyas.train.slots import Slots


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Documents end to end. Nothing is seen across their borders."""

    ids_T: Tensor
    position_T: Tensor
    """Position within its document."""
    starts: Tensor
    """Where each document begins and, last, where the last one ends (int32)."""
    longest: int
    """No document has more tokens: a power of two, so that compiled code meets few values."""
    row_M: Tensor
    """Tokens whose next one is part of an answer that was already under way, ascending."""
    run_M: Tensor
    """How many depths count there."""
    run_lengths: NDArray[np.int64]
    """The same on the host."""
    slots: Slots
    """What of the pack is computed at all."""
    documents: tuple[int, ...] | None = None
    """Their numbers among all documents of the run, in order; what stands behind them is padding. None: not known."""

    @classmethod
    def build(
        cls,
        *,
        ids: NDArray[np.int64],
        mask: NDArray[np.bool_],
        position: NDArray[np.int64],
        starts: NDArray[np.int64],
        documents: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> "TrainingBatch":
        """From a pack's arrays (corpus.py): ids, loss mask, positions and document borders."""
        index = np.arange(len(ids))
        last_uncounted = np.maximum.accumulate(np.where(_counted(mask, position), -1, index))
        run = index - last_uncounted
        rows = teaching_rows(mask, position)

        on_device = partial(_on_device, torch.device(device))
        return cls(
            ids_T=on_device(ids),
            position_T=on_device(position),
            starts=on_device(starts.astype(np.int32)),
            longest=1 << int(np.diff(starts).max() - 1).bit_length(),
            row_M=on_device(rows),
            run_M=on_device(run[rows]),
            run_lengths=run[rows],
            slots=Slots.build(rows, starts, on_device),
            documents=documents,
        )

    @classmethod
    def from_pack(
        cls, corpus: Corpus, pack: Pack, length: int | None, *, device: torch.device, first_document: int = 0
    ) -> "TrainingBatch":
        """A pack of a corpus, padded to `length` if given; its documents are numbered from `first_document`."""
        arrays = pack_arrays(corpus, pack, length)
        alone = all(len(document) == 1 for document in pack)
        return cls.build(
            ids=arrays.ids,
            mask=arrays.mask,
            position=arrays.position,
            starts=arrays.starts,
            # A joined document is none of the corpus: its parts see each other.
            documents=tuple(first_document + index for (index,) in pack) if alone else None,
            device=device,
        )

    def without(self, places: Collection[int]) -> "TrainingBatch":
        """The same batch, in which the documents at these places teach nothing: what they would teach is not known."""
        if not places:
            return self
        row_M, starts = self.row_M.cpu().numpy(), self.starts.cpu().numpy().astype(np.int64)
        kept_M = ~np.isin(np.searchsorted(starts, row_M, side="right") - 1, list(places))
        on_device = partial(_on_device, self.row_M.device)
        return replace(
            self,
            row_M=on_device(row_M[kept_M]),
            run_M=on_device(self.run_lengths[kept_M]),
            run_lengths=self.run_lengths[kept_M],
            slots=Slots.build(row_M[kept_M], starts, on_device),
        )

    def counts(self, depths: int) -> list[int]:
        """How many predictions count at each depth."""
        return [int((self.run_lengths > depth).sum()) for depth in range(depths)]


def _on_device(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def teaching_rows(mask: NDArray[np.bool_], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens whose next one is part of an answer that was already under way; a document's depend on nothing else."""
    counted = _counted(mask, position)
    return np.nonzero(counted[:-1] & counted[1:])[0]


def _counted(mask: NDArray[np.bool_], position: NDArray[np.int64]) -> NDArray[np.bool_]:
    # A document's first token has no slot before it that could have drafted it.
    return mask & (position > 0)
