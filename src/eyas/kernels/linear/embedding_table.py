"""Tables of embeddings: a tensor [V, D], or a packed matrix that a tied head is multiplied with.

Shapes: V vocabulary, D hidden size.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.quantised_linear import QuantisedLinear


class QuantisedEmbedding(nn.Module):
    """Looks embeddings up in a packed matrix, which a head may be multiplied with."""

    dtype = torch.float32

    def __init__(self, table: QuantisedLinear, scale: float | None = None) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.out_features, table.in_features
        self.scale = scale
        """A factor of the embeddings, which some models have."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.table.shape

    def __len__(self) -> int:
        return self.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The dequantised table [V, D]: a copy made on each call."""
        return self.table.weight

    def rows(self, ids: Tensor) -> Tensor:
        """Look rows up [..., D], without the scale."""
        return self.table.kernel.rows(self.table, ids)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        return rows if self.scale is None else rows.mul_(self.scale)


EmbeddingTable = Tensor | QuantisedEmbedding


def table_of(embedding: Any) -> EmbeddingTable:
    """The table of an embedding module."""
    return embedding if isinstance(embedding, QuantisedEmbedding) else embedding.weight.detach()


def look_up(table_VD: EmbeddingTable, ids: Tensor) -> Tensor:
    """Rows of a table [..., D]."""
    return table_VD.rows(ids) if isinstance(table_VD, QuantisedEmbedding) else functional.embedding(ids, table_VD)


def packed_table(table_VD: EmbeddingTable) -> QuantisedLinear | None:
    """The packed matrix of a table; None if it is a tensor."""
    return table_VD.table if isinstance(table_VD, QuantisedEmbedding) else None


def table_addresses(table_VD: EmbeddingTable) -> tuple[int | None, int | None]:
    """Where compiled code finds a table: as a tensor, or packed."""
    if isinstance(table_VD, QuantisedEmbedding):
        return None, ctypes.addressof(table_VD.table.parts)
    return table_VD.data_ptr(), None
