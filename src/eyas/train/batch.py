"""Packs of documents as training reads them: tokens, the predictions that count, and the slots that are computed.

The target's state at token s scores token s + 1. At depth k that score teaches the drafter's slot s - 1 - k, which has
read the true tokens s - k to s as if it had drafted them. The prediction counts if all of those and token s + 1 belong
to one answer. So each token needs one number, its `run`: how many tokens up to it belong to the answer. Depth k counts
at s when its run is k + 1 or more.

A slot that teaches takes part in every depth. A slot of a prompt is needed for one thing: later slots of its document
see its depth-0 key and value. Slots after the last one that teaches in a document, documents that teach nothing, and
padding are not computed.

The slot that learns at depth k from teacher row m of a batch is number m - k of those that teach: rows of an answer are
consecutive, and row s belongs to slot s - 1 at depth 0. So M counts teacher rows and slots alike.

Shapes: T tokens or slots of the pack, M that teach, P whose keys and values alone are needed, R = M + P slots that are
read, B documents with slots that teach, Q query positions.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.train.corpus.corpus import Corpus, Pack, Replay, pack_arrays, packs

Place = Callable[[NDArray[np.generic]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots of a pack by what they are needed for, and where attention finds their documents."""

    taught_M: Tensor
    """Slots that teach at depth 0, ascending."""
    context_P: Tensor
    """Slots that are only read, ascending."""
    read_R: Tensor
    """Both, ascending: the keys of depth 0 are in this order."""
    order_R: Tensor
    """Index in `read_R` of the slots that teach, followed by those that are only read."""
    key_starts: Tensor
    """First key of each document, and the end of the last one [B + 1] (int32)."""
    query_starts: Tensor
    """First query of each document [B + 1]. A document's queries align with its last keys, as flash attention does."""
    query_place_M: Tensor | None
    """Position of each query if a document has something between its answers; None: queries are consecutive."""
    queries: int
    """Query positions, including those between answers (Q)."""
    longest_keys: int
    longest_queries: int

    @classmethod
    def build(cls, row_M: NDArray[np.int64], starts: NDArray[np.int64], place: Place) -> "Slots":
        """Slots from teacher rows and document borders; `place` puts an array onto the device."""
        taught = row_M - 1
        document_M = np.searchsorted(starts, taught, side="right") - 1
        documents, first_of = np.unique(document_M, return_index=True)
        begin_B, first_B = starts[documents], taught[first_of]
        end_B = taught[np.append(first_of[1:], len(taught)) - 1] + 1 if len(taught) else begin_B

        border = np.zeros(int(starts[-1]) + 1, dtype=np.int64)
        border[begin_B] += 1
        border[end_B] -= 1  # a document may begin where another ends
        is_read = border.cumsum()[:-1] > 0
        is_taught = np.zeros_like(is_read)
        is_taught[taught] = True
        context = np.nonzero(is_read & ~is_taught)[0]
        rank = is_read.cumsum() - 1

        key_starts = np.concatenate([[0], (end_B - begin_B).cumsum()])
        query_starts = np.concatenate([[0], (end_B - first_B).cumsum()])
        queries = int(query_starts[-1])
        here_M = np.searchsorted(documents, document_M)
        return cls(
            taught_M=place(taught),
            context_P=place(context),
            read_R=place(np.nonzero(is_read)[0]),
            order_R=place(rank[np.concatenate([taught, context])]),
            key_starts=place(key_starts.astype(np.int32)),
            query_starts=place(query_starts.astype(np.int32)),
            query_place_M=None if queries == len(taught) else place(query_starts[here_M] + taught - first_B[here_M]),
            queries=queries,
            longest_keys=int(np.diff(key_starts).max(initial=0)),
            longest_queries=int(np.diff(query_starts).max(initial=0)),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Documents end to end. Attention does not cross their borders."""

    ids_T: Tensor
    position_T: Tensor
    """Position within its document."""
    starts: Tensor
    """First token of each document, and the end of the last one (int32)."""
    longest: int
    """Bound on the tokens of a document: a power of two, so that compiled code sees few values."""
    row_M: Tensor
    """Teacher rows: tokens whose next one continues an answer, ascending."""
    run_M: Tensor
    """Number of depths that count at each teacher row."""
    run_lengths: NDArray[np.int64]
    """`run_M` on the host."""
    slots: Slots
    """The part of the pack that is computed."""
    documents: tuple[int, ...] | None = None
    """Numbers of the documents among all of the run, in order; padding stands after them. None: not known."""

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
        """Batch of a pack's arrays (corpus.py): ids, loss mask, positions and document borders."""
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
        """Pack of a corpus, padded to `length` if given; its documents are numbered from `first_document`."""
        arrays = pack_arrays(corpus, pack, length)
        alone = all(len(document) == 1 for document in pack)
        return cls.build(
            ids=arrays.ids,
            mask=arrays.mask,
            position=arrays.position,
            starts=arrays.starts,
            # The parts of a joined document see each other, so it has no number.
            documents=tuple(first_document + index for (index,) in pack) if alone else None,
            device=device,
        )

    def without(self, places: Collection[int]) -> "TrainingBatch":
        """Batch in which the documents at these places teach nothing, because their states are missing."""
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
        """Number of predictions that count at each depth."""
        return [int((self.run_lengths > depth).sum()) for depth in range(depths)]


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One pack of the run: its name, and how to build it."""

    name: str
    build: Callable[[], TrainingBatch]


@dataclass(frozen=True, kw_only=True)
class CorpusPacks:
    """Packs of a corpus, in a new order every epoch, each built when it is needed."""

    corpus: Corpus
    length: int
    seed: int
    device: torch.device
    padded: bool
    """Pad every pack to the full length: compiled code wants one shape, other code less work."""
    join_share: float = 0.0
    join_length: int = 0
    first_document: int = 0
    """Number of the corpus's first document among all of the run: held-out documents come after the others."""
    replay: Replay | None = None
    """Documents that are only mixed in; None: none."""

    def epoch(self, number: int) -> Sequence[PlannedBatch]:
        """All packs of one epoch, in order."""
        chosen = packs(
            self.corpus,
            length=self.length,
            seed=self.seed,
            epoch=number,
            join_share=self.join_share,
            join_length=self.join_length,
            replay=self.replay,
        )
        build = partial(
            TrainingBatch.from_pack,
            self.corpus,
            length=self.length if self.padded else None,
            device=self.device,
            first_document=self.first_document,
        )
        return [
            PlannedBatch(name=_pack_name(number, place, pack), build=partial(build, pack))
            for place, pack in enumerate(chosen)
        ]


def _pack_name(epoch: int, place: int, pack: Pack) -> str:
    members = [index for document in pack for index in document]
    shown = ", ".join(str(index + 1) for index in members[:8]) + (", ..." if len(members) > 8 else "")
    return f"pack {place + 1} of epoch {epoch + 1} (conversations {shown} of those kept)"


def _on_device(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def teaching_rows(mask: NDArray[np.bool_], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens whose next one continues an answer. Each document's rows depend on that document alone."""
    counted = _counted(mask, position)
    return np.nonzero(counted[:-1] & counted[1:])[0]


def _counted(mask: NDArray[np.bool_], position: NDArray[np.int64]) -> NDArray[np.bool_]:
    # A document's first token has no slot before it that could have drafted it.
    return mask & (position > 0)
