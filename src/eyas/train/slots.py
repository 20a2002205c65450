"""Which slots of a pack are computed, and how far.

A slot that teaches takes part in every depth. One that does not, a prompt's, is needed for one thing: slots that teach,
later in its document, see its depth-0 key and value. What stands behind the last slot that teaches of a document, a
document that teaches nothing and padding are needed for nothing.

The slot that learns at depth k from teacher row m of a batch is number m - k of those that teach: rows of an answer
stand one behind the other, and row s belongs to slot s - 1 at depth 0. So M counts teacher rows and slots alike.

Shapes: T slots of the pack, M that teach, P whose keys and values alone are needed, R = M + P slots that are read,
B documents with slots that teach, Q places of queries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Place = Callable[[NDArray[np.generic]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots of a pack by what they are needed for, and how attention finds their documents."""

    taught_M: Tensor
    """Slots that teach at depth 0, ascending."""
    context_P: Tensor
    """Slots that are only read, ascending."""
    read_R: Tensor
    """Both, ascending: the keys of depth 0 stand in this order."""
    order_R: Tensor
    """Where the slots that teach, and behind them those that are only read, stand among `read_R`."""
    key_starts: Tensor
    """Where the keys of each document begin, and where the last one ends [B + 1] (int32)."""
    query_starts: Tensor
    """The same for queries [B + 1]. Those of a document are its last keys, which is how flash attention aligns them."""
    query_place_M: Tensor | None
    """Where queries stand if there is something between the answers of a document; None: one behind the other."""
    queries: int
    """Places of queries, those between answers included (Q)."""
    longest_keys: int
    longest_queries: int

    @classmethod
    def build(cls, row_M: NDArray[np.int64], starts: NDArray[np.int64], place: Place) -> "Slots":
        """From teacher rows and document borders; `place` puts an array onto the device."""
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
