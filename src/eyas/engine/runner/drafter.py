"""Runs the drafter over the requests' blocks, for the passes of `round_passes.py`.

The drafter reads the target's states in token order: slot i of its cache comes from the state at i and token i + 1.
Later tokens see only keys and values of what was read, so a one-layer drafter computes nothing else except at the token
from which it drafts. Slots of drafted tokens come behind the read ones and are overwritten by the next read, so
rejected drafts are never seen.
Shapes: N tokens of a pass, D drafter hidden, W draft vocabulary.
"""

from torch import Tensor

from eyas.drafter.config import HasLayers
from eyas.drafter.model import DepthOutput, Drafter
from eyas.drafter.weight_copy import copy_weights, paired, require_alike, shared_places
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.runner.fused_drafter import fused_drafter
from eyas.engine.runner.round_state import RoundState
from eyas.kernels.attention.metadata import AttentionMetadata


class DrafterRunner:
    """A drafter with its KV cache."""

    def __init__(self, drafter: Drafter, cache: KVCache, *, window: int | None = None, sinks: int = 0) -> None:
        self.model, self.cache = drafter, cache
        self.run = fused_drafter(drafter)
        """The code that computes it."""
        self.remembers = len(drafter.layers) == 1
        """Whether reading a token needs only keys and values, computed without attention."""
        self.window, self.sinks = window, sinks
        self.token_W = drafter.vocab().target_ids_W
        self.dtype = drafter.fc.weight.dtype

    def take_weights(self, drafter: Drafter, target: HasLayers) -> None:
        """Copy another drafter's weights over this one's, in place, so that captured graphs stay valid. Nothing may be
        in flight.

        The other drafter goes through the same checks and trials and stays unchanged. Raises `UnlikeError` if more than
        weights differ. If anything is raised, nothing has changed.
        """
        require_alike(self.model, drafter, target)
        paired(self.model, drafter)  # compiled code would read beyond a weight that is too short
        token_W, run = drafter.vocab().target_ids_W, fused_drafter(drafter)
        pairs = [*paired(self.model, drafter), *paired(self.run, run), *paired(self.token_W, token_W, "d2t")]
        copy_weights(pairs, shared_places(self.model))
        self.model.recorded_acceptance = drafter.recorded_acceptance

    def fuse(self, state: RoundState, place_N: Tensor) -> Tensor:
        """Fuse the auxiliary states at some places of the ring into depth-0 states."""
        assert state.states_NX is not None
        return self.run.fuse_rows(state.states_NX, place_N)

    def step(
        self, hidden_ND: Tensor, token_N: Tensor, layout: AttentionMetadata, keep_M: Tensor | None = None
    ) -> DepthOutput:
        """Run one depth over all tokens; returns the output of all, or of the tokens `keep_M`."""
        attend = self.attend(layout)
        if keep_M is None:
            return self.run.step(hidden_ND, token_N, layout.position_N, attend)
        return self.run.step_for(hidden_ND, token_N, layout.position_N, attend, keep_M)

    def read(self, hidden_ND: Tensor, token_N: Tensor, layout: AttentionMetadata) -> None:
        """Add tokens to the drafter's cache; each slot takes a state and the token that follows it."""
        if self.remembers:
            self.run.remember_in(self.cache, layout, hidden_ND, token_N)
        else:
            self.step(hidden_ND, token_N, layout)

    def attend(self, layout: AttentionMetadata) -> PagedAttention:
        """Attention over the drafter's blocks, for one pass."""
        return PagedAttention(self.cache, layout, window=self.window, sinks=self.sinks)
