"""One pass's attention over the engine's blocks: binds a cache to what the pass is told, for whoever attends.

Shapes: N tokens of a pass, H query heads, G key heads, K head dim.
"""

from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata


class PagedAttention:
    """An `Attend` for drafters, and what targets attend through (`target/attention.py`)."""

    def __init__(
        self, cache: KVCache, metadata: AttentionMetadata, *, window: int | None = None, sinks: int = 0
    ) -> None:
        assert metadata.block_size == cache.block_size
        self.cache, self.metadata, self.window = cache, metadata, window
        self.backend = choose_backend(metadata, sinks=sinks)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [N, G, K] of the new tokens and answer their queries [N, H, K].

        Scores are scaled by `scale`, K ** -0.5 if none is given, and bent to softcap * tanh(score / softcap).
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        window = self.window if window is None else window
        keys, values = self.cache.memory(layer, k, v)
        return self.backend.write_and_attend(q, k, v, keys, values, scale, softcap, window, sink_logit_H)
