"""The drafter over the requests' blocks, as the passes of rounds run it (`round_passes.py`).

It reads the target's states in the order of tokens: slot i of its cache is made of the state at i and of token i + 1.
Of what is read, later tokens see keys and values alone, so with one layer nothing else needs to be computed but for the
token behind which it drafts. Drafted slots lie behind the read ones and are overwritten by the next read: rejected
drafts are never seen.

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
    """A drafter for many requests."""

    def __init__(self, drafter: Drafter, cache: KVCache, *, window: int | None = None, sinks: int = 0) -> None:
        self.model, self.cache = drafter, cache
        self.run = fused_drafter(drafter)
        """What computes it."""
        self.remembers = len(drafter.layers) == 1
        """Whether later tokens see nothing of a token but keys and values that need no attention."""
        self.window, self.sinks = window, sinks
        self.token_W = drafter.vocab().target_ids_W
        self.dtype = drafter.fc.weight.dtype

    def take_weights(self, drafter: Drafter, target: HasLayers) -> None:
        """Draft with the weights of another drafter, which are copied over these: nothing moves, so whatever was
        captured or compiled goes on. Nothing may be in flight.

        The other one is made ready and tried as this one was, and stays as it is. `UnlikeError`: the two differ in more
        than weights. Whatever is raised, nothing has changed.
        """
        require_alike(self.model, drafter, target)
        paired(self.model, drafter)  # compiled code would read beyond a weight that is too short
        token_W, run = drafter.vocab().target_ids_W, fused_drafter(drafter)
        pairs = [*paired(self.model, drafter), *paired(self.run, run), *paired(self.token_W, token_W, "d2t")]
        copy_weights(pairs, shared_places(self.model))
        self.model.recorded_acceptance = drafter.recorded_acceptance

    def fuse(self, state: RoundState, place_N: Tensor) -> Tensor:
        """The depth-0 states of some places of the ring."""
        assert state.states_NX is not None
        return self.run.fuse_rows(state.states_NX, place_N)

    def step(
        self, hidden_ND: Tensor, token_N: Tensor, layout: AttentionMetadata, keep_M: Tensor | None = None
    ) -> DepthOutput:
        """One depth of all tokens, for the outcome of some, or of all."""
        attend = self.attend(layout)
        if keep_M is None:
            return self.run.step(hidden_ND, token_N, layout.position_N, attend)
        return self.run.step_for(hidden_ND, token_N, layout.position_N, attend, keep_M)

    def read(self, hidden_ND: Tensor, token_N: Tensor, layout: AttentionMetadata) -> None:
        """Let later tokens see these: a slot takes a state and the token behind it."""
        if self.remembers:
            self.run.remember_in(self.cache, layout, hidden_ND, token_N)
        else:
            self.step(hidden_ND, token_N, layout)

    def attend(self, layout: AttentionMetadata) -> PagedAttention:
        """Attention over the drafter's blocks in one pass."""
        return PagedAttention(self.cache, layout, window=self.window, sinks=self.sinks)
