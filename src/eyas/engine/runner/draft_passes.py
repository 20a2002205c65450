"""What rounds ask of a drafter: here by its own module, in `fused_drafter.py` and `triton_drafter.py` by fused passes.

Shapes: N tokens, M of them, S rows of auxiliary states, X concatenated auxiliary states, D drafter hidden, R rows.
"""

from torch import Tensor

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.model import DepthOutput, Drafter
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.llama.eagle import ChainsOutput


class DraftPasses:
    """A drafter by its own code; a fused pass overrides what it computes otherwise."""

    def __init__(self, model: Drafter) -> None:
        self.model = model

    def fuse(self, aux_NX: Tensor) -> Tensor:
        """The target's auxiliary states as the depth-0 state."""
        return self.model.fuse(aux_NX)

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        """One depth."""
        return self.model.step(hidden, token_ids, positions, attend)

    def remember(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> KeysAndValues:
        """What a depth leaves for later tokens to see, where there is one layer."""
        return self.model.remember(hidden, token_ids, positions)

    def logits(self, normed: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        return self.model.logits(normed)

    def fuse_rows(self, aux_SX: Tensor, row_N: Tensor) -> Tensor:
        """The depth-0 states of some rows of auxiliary states, which may be of another type."""
        return self.fuse(aux_SX.index_select(0, row_N).to(self.model.fc.weight.dtype))

    def step_for(
        self, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor, attend: PagedAttention, keep_M: Tensor
    ) -> DepthOutput:
        """One depth of all tokens, for the outcome of some: what nobody asks for need not be computed."""
        output = self.step(hidden_ND, token_N, position_N, attend)
        normed_MD, feedback_MD = (x_ND.index_select(0, keep_M) for x_ND in (output.normed, output.feedback))
        return DepthOutput(normed=normed_MD, feedback=feedback_MD)

    def read(self, aux_NX: Tensor, token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> DepthOutput:
        """`fuse` and `step` at once."""
        return self.step(self.fuse(aux_NX), token_ids, positions, attend)

    def remember_in(self, cache: KVCache, layout: AttentionMetadata, hidden_ND: Tensor, token_N: Tensor) -> None:
        """Put keys and values in their slots."""
        cache.write(0, layout.slot_mapping_N, *self.remember(hidden_ND, token_N, layout.position_N))

    def chains(
        self, normed_RD: Tensor, feedback_RD: Tensor, attend: PagedAttention, depths: int
    ) -> ChainsOutput | None:
        """`depths` drafts of each row at once, each the likeliest token; None where depths are computed one by one.

        `attend` is of the slots in which the first of them are read; there are blocks for all.
        """
        return None
