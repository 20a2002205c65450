"""Keys and values of many requests side by side, and attention over them.

A slot is a fixed stretch of memory for one request. One pass takes tokens of several requests flattened into one
line; each row of the pass is a run of consecutive positions of one slot. New keys and values are written first, then
every query attends to what its own slot holds up to its own position.
Invariant: the key of position p of a request lies at index p of its slot, so visibility is a comparison of positions,
writing a position again replaces it, and what lies behind the last position (an earlier request, a rejected draft) is
never seen.

Targets come here through transformers' attention interface, drafters through their `Attend`. Only plain causal
attention is served; whatever a target has beyond that is refused, never ignored.

Shapes: N tokens of a pass, R rows, Q queries of a row, S positions of a slot, H query heads, G key heads, K head dim,
V vocabulary, M logits asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from eyas.drafter.attention import KeysAndValues
from eyas.errors import UserError
from eyas.target.attention import attending_through
from eyas.target.model import Target

IMPLEMENTATION = "eyas_slots"


class SlotCache:
    """Keys and values [slots, S, G, K] of every layer.

    A layer's memory is taken on its first write, once and for good: only then is its shape known for certain (values
    may be narrower than keys). It starts as zeros, because a masked NaN is still a NaN after a product.
    """

    def __init__(self, *, slots: int, length: int) -> None:
        if slots < 1:
            raise UserError(f"slots is {slots}; it must be 1 or more")
        self.slots, self.length = slots, length
        self._layers: dict[int, KeysAndValues] = {}

    def write(self, layer: int, slot_N: Tensor, position_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> KeysAndValues:
        """Put new keys and values in their places and return the whole layer."""
        if layer not in self._layers:
            keys, values = (x.new_zeros(self.slots, self.length, *x.shape[1:]) for x in (k_NGK, v_NGK))
            self._layers[layer] = keys, values
        keys, values = self._layers[layer]
        keys[slot_N, position_N] = k_NGK
        values[slot_N, position_N] = v_NGK
        return keys, values


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Which tokens one pass holds: row r is a run of consecutive positions of slot_R[r]."""

    slot_R: Tensor
    slot_N: Tensor
    position_N: Tensor
    cu_q: Tensor
    """Where rows begin among the N tokens, and N: int32 [R + 1]."""
    used_R: Tensor
    """Keys that the row's last query sees, its own included: int32."""
    longest_q: int
    longest_k: int
    """No row sees more keys; may be above the truth."""
    every_slot: bool = False
    """Rows are all the slots in their order, so that the cache is read where it lies."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], device: torch.device) -> "Spans":
        """Lay out rows of (slot, first position, tokens), known on the host."""
        counts = torch.tensor([count for _, _, count in rows])
        slot_R, first_R = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
        cu_q = functional.pad(counts.cumsum(0), (1, 0))
        place_N = torch.arange(int(cu_q[-1])) - cu_q[:-1].repeat_interleave(counts)
        used_R = first_R + counts
        return cls(
            slot_R=slot_R.to(device),
            slot_N=slot_R.repeat_interleave(counts).to(device),
            position_N=(first_R.repeat_interleave(counts) + place_N).to(device),
            cu_q=cu_q.int().to(device),
            used_R=used_R.int().to(device),
            longest_q=int(counts.max()),
            longest_k=int(used_R.max()),
        )

    @classmethod
    def even(cls, slot_R: Tensor, first_R: Tensor, count: int, *, longest_k: int, every_slot: bool = False) -> "Spans":
        """Lay out rows of equally many tokens without leaving the device."""
        rows, device = len(slot_R), slot_R.device
        position_RQ = first_R[:, None] + torch.arange(count, device=device)
        return cls(
            slot_R=slot_R,
            slot_N=slot_R[:, None].expand(-1, count).reshape(-1),
            position_N=position_RQ.reshape(-1),
            cu_q=torch.arange(0, (rows + 1) * count, count, dtype=torch.int32, device=device),
            used_R=(first_R + count).int(),
            longest_q=count,
            longest_k=longest_k,
            every_slot=every_slot,
        )

    @property
    def last_R(self) -> Tensor:
        """The index among the N tokens of each row's last one."""
        return self.cu_q[1:].long() - 1


class SlotAttention:
    """One pass over a cache: an `Attend` for drafters, and what the registered function calls for targets."""

    def __init__(self, cache: SlotCache, spans: Spans) -> None:
        self.cache, self.spans = cache, spans
        self.layers: list[int] = []
        # The kernel finds each row's keys by where they start; where they end is said by used_R.
        self._starts = (torch.cat([spans.slot_R, spans.slot_R[-1:]]) * cache.length).int()
        self._visible: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Write k, v [N, G, K] of the new tokens and answer their queries [N, H, K]."""
        self.layers.append(layer)
        keys, values = self.cache.write(layer, self.spans.slot_N, self.spans.position_N, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if flash_serves(q, v):
            return self._attend_by_kernel(q, keys, values, scale)
        return self._attend_densely(q, keys, values, scale)

    def _attend_by_kernel(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        spans, shape = self.spans, q.shape
        cu_q, longest_q, causal = spans.cu_q, spans.longest_q, True
        shared = q.shape[1] // keys.shape[2]
        swapped = spans.longest_q == 1 and shared > 1
        if swapped:
            # The kernel works on tiles of many queries and would waste one on each head. One query a row: heads that
            # share keys are lined up as queries of their own, which see the same keys, so nothing is causal.
            q = q.view(shape[0], -1, shared, shape[2]).transpose(1, 2).flatten(0, 1)
            cu_q, longest_q, causal = cu_q * shared, shared, False
        output: Tensor = torch.ops.aten._flash_attention_forward(
            q,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            cu_q,
            self._starts,
            longest_q,
            spans.longest_k,
            0.0,
            causal,
            False,
            scale=scale,
            seqused_k=spans.used_R,
        )[0]
        if swapped:
            output = output.view(shape[0], shared, -1, shape[2]).transpose(1, 2).reshape(shape)
        return output

    def _attend_densely(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        spans = self.spans
        rows, longest = len(spans.slot_R), spans.longest_k
        if rows * spans.longest_q == len(q):
            here = slice(None) if spans.every_slot else spans.slot_R
            return _attend_masked(
                q.reshape(rows, -1, *q.shape[1:]), keys[here, :longest], values[here, :longest], self._mask_RQS(), scale
            ).flatten(0, 1)
        outputs = []
        bounds, slots = spans.cu_q.tolist(), spans.slot_R.tolist()
        for slot, start, end, used in zip(slots, bounds, bounds[1:], spans.used_R.tolist(), strict=False):
            visible_RQS = (spans.position_N[start:end, None] >= torch.arange(used, device=q.device))[None]
            k_RSGK, v_RSGK = keys[slot, None, :used], values[slot, None, :used]
            outputs.append(_attend_masked(q[None, start:end], k_RSGK, v_RSGK, visible_RQS, scale)[0])
        return torch.cat(outputs)

    def _mask_RQS(self) -> Tensor:
        if self._visible is None:
            position_RQ = self.spans.position_N.view(len(self.spans.slot_R), -1)
            self._visible = position_RQ[..., None] >= torch.arange(self.spans.longest_k, device=position_RQ.device)
        return self._visible


def flash_serves(q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash kernel takes these; otherwise attention is dense."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    size = q.shape[-1]
    return q.is_cuda and half and size == v.shape[-1] and size <= 256 and size % 8 == 0


def _attend_masked(q_RQHK: Tensor, k_RSGK: Tensor, v_RSGK: Tensor, visible_RQS: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_RQHK, k_RSGK, v_RSGK))
    output = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible_RQS[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2)


class SlotTarget:
    """A target that reads and writes slots."""

    def __init__(self, target: Target, *, slots: int, length: int) -> None:
        _refuse_partial_attention(target, length)
        self.cache = SlotCache(slots=slots, length=length)
        self._target = target

    def forward(self, ids_N: Tensor, spans: Spans, keep_M: Tensor | None = None) -> Tensor:
        """Run the tokens of a pass; logits [M, V] behind the tokens `keep_M`, or behind all of them."""
        model = self._target.model
        attention = SlotAttention(self.cache, spans)
        with attending_through(model, IMPLEMENTATION):
            logits_BMV: Tensor = model(
                input_ids=ids_N[None],
                position_ids=spans.position_N[None],
                use_cache=False,
                logits_to_keep=0 if keep_M is None else keep_M,
                eyas_slots=attention,
            ).logits
        if sorted(attention.layers) != list(range(self._target.facts.num_hidden_layers)):
            raise UserError(
                f"{self._target.facts.source} asked for attention in layers {attention.layers} of "
                f"{self._target.facts.num_hidden_layers}; batches need a target whose every layer is attention"
            )
        if keep_M is not None and logits_BMV.shape[1] != len(keep_M):  # a model without logits_to_keep
            logits_BMV = logits_BMV[:, keep_M]
        return logits_BMV[0]


def _attend_for_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    eyas_slots: SlotAttention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: q [1, H, N, K] and new k, v [1, G, N, K] to [1, N, H, K]."""
    name = type(module).__name__
    if eyas_slots is None:
        raise UserError(f"{name} does not hand its attention what the caller passed; batches cannot run this target")
    length = eyas_slots.cache.length
    if sliding_window is not None and sliding_window < length:
        raise UserError(_window_message(name, sliding_window, length))
    for feature, value_given in (("softcap", softcap), ("s_aux (sinks)", s_aux), ("a mask", attention_mask)):
        if value_given is not None:
            raise UserError(f"{name} attends with {feature}; batches serve plain causal attention only")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return eyas_slots(layer, q, k, v, scaling)[None], None


AttentionInterface.register(IMPLEMENTATION, _attend_for_transformers)


def _refuse_partial_attention(target: Target, length: int) -> None:
    """Windows and chunks may live in the mask alone, and no mask is built for us: the configuration must tell."""
    config = target.model.config.get_text_config()
    name = target.facts.source
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < length:
        raise UserError(_window_message(name, window, length))
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        raise UserError(f"{name} has layers of type {', '.join(others)}; batches serve plain causal attention only")


def _window_message(name: str, window: int, length: int) -> str:
    return (
        f"{name} sees a window of {window} tokens, below the {length} that a slot holds; "
        f"batches have no windows: lower the longest context to {window} or less"
    )
