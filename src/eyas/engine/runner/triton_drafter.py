"""The drafter's pass on a GPU in Triton kernels (`kernels/llama/eagle_triton.py`); `drafter/model.py` defines it.

Products write keys and values directly to their cache slots, and states are read where the target left them, without
copies. All of it can be captured in CUDA graphs.

Shapes: N tokens, M of them whose output is requested, S stored states, D drafter hidden, X concatenated auxiliary
states, W draft vocabulary, G key heads, K head dim.
"""

from copy import copy
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend
from eyas.drafter.model import DepthOutput, Drafter, RMSNorm
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.engine.runner.draft_passes import DraftPasses, EagleParts, NotEagleError
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.linear.w8a8_linear import rows_kept
from eyas.kernels.llama import trial
from eyas.kernels.llama.block import merge
from eyas.kernels.llama.eagle_triton import TritonEagle

TRIAL_BLOCK_SIZE = 16
"""The default block size, so that the trial compiles the kernels that serve."""


class TritonDrafter(DraftPasses):
    """A drafter with one layer, over the weights of a loaded drafter, which must not be moved or cast afterwards."""

    @torch.inference_mode(False)  # joined weights outlive the caller's inference mode
    @torch.no_grad()
    def __init__(self, drafter: Drafter) -> None:
        config = drafter.config
        weights = list(drafter.parameters())
        for what, found in (("devices", {x.device for x in weights}), ("types", {x.dtype for x in weights})):
            if len(found) > 1:
                raise NotEagleError(f"its weights are of several {what}: {', '.join(sorted(map(str, found)))}")
        if weights[0].dtype not in trial.TOLERANCE:
            raise NotEagleError(f"its weights are {weights[0].dtype}")
        if drafter.embed_tokens is None:
            raise NotEagleError("it has no embeddings")
        parts = EagleParts.of(drafter)
        layer = parts.layer
        super().__init__(drafter)
        self._eagle = TritonEagle(
            input_norm=None if drafter.input_norm is None else _norm(drafter.input_norm),
            states_norm=None if drafter.fc_norm is None else _norm(*drafter.fc_norm),
            num_states=config.num_aux_hidden_states,
            fc=parts.fc,
            embedding_VD=drafter.embed_tokens.weight.detach(),
            token_norm=_norm(layer.input_layernorm),
            hidden_norm=_norm(layer.hidden_norm),
            normed_residual=config.norm_before_residual,
            frequency=drafter.rope.inverse_frequencies,
            turn_scale=drafter.rope.scale,
            qkv=parts.qkv,
            kv=parts.kv,
            qk_norm=parts.qk_norm,
            output=parts.output,
            mlp_norm=_norm(layer.post_attention_layernorm),
            gate_up=parts.gate_up,
            down=parts.down,
            last_norm=_norm(drafter.norm),
            sizes=parts.sizes,
        )
        self._like_NGK = weights[0].new_empty(0, config.num_key_value_heads, config.head_dim)

    @property
    def phased(self) -> bool:
        """Whether its weights have 8 bits and its activations are rounded to 8 bits."""
        return self._eagle.phased

    def with_few_rows(self) -> "TritonDrafter | None":
        """A copy with special products for few tokens, if its weights support them."""
        eagle, other = self._eagle.with_few_rows(), copy(self)
        if eagle is None:
            return None
        other._eagle = eagle
        return other

    def fuse(self, aux_NX: Tensor) -> Tensor:
        return self._eagle.fuse(aux_NX)

    def fuse_rows(self, aux_SX: Tensor, row_N: Tensor) -> Tensor:
        return self._eagle.fuse(aux_SX, row_N)

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        """Run one depth; without paged attention by the model's own code."""
        if not isinstance(attend, PagedAttention):
            return super().step(hidden, token_ids, positions, attend)
        return self.step_for(hidden, token_ids, positions, attend, None)

    def step_for(
        self, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor, attend: PagedAttention, keep_M: Tensor | None
    ) -> DepthOutput:
        """Run one depth over all tokens; returns the output of all, or of the tokens `keep_M`."""
        kv = attend.cache.memory(0, self._like_NGK, self._like_NGK)
        state_MD, normed_MD = self._eagle.run_depth(
            hidden_ND, token_N, position_N, attend.backend, kv, attend.window, keep_M
        )
        return DepthOutput(normed=normed_MD, feedback=normed_MD if self.model.config.norm_output else state_MD)

    def remember_in(self, cache: KVCache, layout: AttentionMetadata, hidden_ND: Tensor, token_N: Tensor) -> None:
        kv = cache.memory(0, self._like_NGK, self._like_NGK)
        self._eagle.remember(hidden_ND, token_N, layout.position_N, layout.slot_mapping_N, kv)


def _norm(*norms: nn.Module) -> FusedNorm:
    """Make a fused norm of one norm, or of several side by side."""
    ours = [norm for norm in norms if isinstance(norm, RMSNorm)]
    if len(ours) < len(norms):
        raise NotEagleError(f"its norms are {', '.join(sorted({type(norm).__name__ for norm in norms}))}")
    return FusedNorm(merge([norm.weight for norm in ours]), ours[0].eps)


def require_same(fused: TritonDrafter, drafter: Drafter) -> None:
    """Try the drafter; with 8-bit activations, first without rounding them (`kernels/llama/trial.py`)."""
    tolerance = trial.TOLERANCE[drafter.norm.weight.dtype]
    if fused.phased:
        with rows_kept():
            _require_same(fused, drafter, tolerance)
        tolerance = trial.ROUNDED_TOLERANCE
    _require_same(fused, drafter, tolerance)


@torch.inference_mode()
def _require_same(fused: TritonDrafter, drafter: Drafter, tolerance: float) -> None:
    """Compare with the model: read states, run a depth that crosses a block boundary, and further depths.

    Each depth gets the model's own input, so that errors do not accumulate. Covers many and few tokens, at the start
    and at the end of the context, where rotation angles are large.
    """
    config, weight, errors = drafter.config, drafter.norm.weight, trial.Errors()
    both: tuple[DraftPasses, ...] = fused, DraftPasses(drafter)
    device, dtype = weight.device, weight.dtype
    caches = [KVCache(blocks=2, block_size=TRIAL_BLOCK_SIZE) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    read, drafted = TRIAL_BLOCK_SIZE - 1, 6
    counts = (read, drafted, 4, 3, 1)
    rows = [AttentionRow(blocks=(1, 0), base=sum(counts[:i]), count=count) for i, count in enumerate(counts)]
    for shift in (0, max(0, config.max_position_embeddings - sum(counts))):
        layouts = [AttentionMetadata.of([row], block_size=TRIAL_BLOCK_SIZE, device=device) for row in rows]
        layouts = [replace(layout, position_N=layout.position_N + shift) for layout in layouts]
        width = config.num_aux_hidden_states * config.target_hidden_size
        aux_NX = torch.randn(read + drafted, width, generator=generator).to(device, dtype)
        reads, *several = torch.split(
            torch.randint(config.vocab_size, (sum(counts),), generator=generator).to(device), list(counts)
        )
        hidden_ND = drafter.fuse(aux_NX)
        errors.add("fused states", 0, fused.fuse(aux_NX), hidden_ND)
        for count in (read + drafted, 1, 3):
            row_N = torch.arange(count, device=device)
            errors.add("fused states", 0, fused.fuse_rows(aux_NX.flip(0), len(aux_NX) - 1 - row_N), hidden_ND[:count])

        read_ND, hidden_ND = torch.split(hidden_ND, [read, drafted])
        fused.remember_in(caches[0], layouts[0], read_ND, reads)
        caches[1].write(0, layouts[0].slot_mapping_N, *drafter.remember(read_ND, reads, layouts[0].position_N))
        for token_N, layout in zip(several, layouts[1:], strict=True):
            hidden_ND = hidden_ND[-len(token_N) :]
            ours, theirs = (
                one.step(hidden_ND, token_N, layout.position_N, PagedAttention(cache, layout))
                for one, cache in zip(both, caches, strict=True)
            )
            errors.add("states", 1, ours.feedback, theirs.feedback, before=hidden_ND)
            errors.add("normed states", 1, ours.normed, theirs.normed)
            hidden_ND = theirs.feedback
        slot_N = torch.cat([layout.slot_mapping_N for layout in layouts])
        for mine, own in zip(caches[0].layers[0], caches[1].layers[0], strict=True):
            mine_NE, own_NE = (x_GCK.index_select(1, slot_N).transpose(0, 1).flatten(1) for x_GCK in (mine, own))
            errors.add("keys and values", 1, mine_NE, own_NE)
    errors.judge("one depth", lambda _: sqrt(2) * tolerance, single=trial.UNSTABLE)
