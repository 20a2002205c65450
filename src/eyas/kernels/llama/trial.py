"""Proves that a fused pass computes what a model's own code computes: a trial of both over a few random tokens.

    each layer alone   given the model's own states before it, returns the model's own states after it, for every token;
                       likewise the embedding, and norm and head
    all layers         in sequence return the model's own states and logits, for most tokens

Experts are those that the model's own router chose: where two scores nearly tie, rounding decides between them, and in
half precision that happens in every layer. Routers are tried separately, on the inputs of the model's own.

Each layer alone, because single tokens cannot be judged after many layers: where a state is about to grow a
hundredfold, as some token's does in many models, the rounding of all earlier layers decides how far it grows, and in
half precision the model's own code is as far from its own float32 result. All layers, because correct layers may be in
the wrong order.

Rounding may decide within a layer, too: keys of Qwen2.5's first layer have biases of 354, where bfloat16 numbers are 2
apart, and one that is rounded the other way changes what all tokens attend to. So where single tokens are off after a
layer, the model's own code runs that layer in float32 too, and it suffices that ours is not further from that than the
model's own half-precision result, on average and at worst. Not token by token: which token is hit is chance.

Shapes: N tokens of a pass, M requested logits, V vocabulary, D hidden size, C slots of a layer, G key heads, K head
dim.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, sqrt
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.kernels.linear.w8a8_linear import rows_kept
from eyas.kernels.llama.block import DecoderLayer, FusedLlama, KVLayers, NotLlamaError, in_one_call
from eyas.kernels.llama.experts import Experts, Routes

BLOCKS, BLOCK_SIZE = 8, 4
"""The layout of the trial's passes."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""How far most tokens' states may be from the model's own after the embedding, relative to their length; after k layers
sqrt(1 + k) times as far. Rounding errors of layers are independent and add up like that; a layer that computes anything
else is further off at once."""
QUANTISED_TOLERANCE, QUANTISED_TOGETHER = 4e-3, 2e-2
"""Tolerances for products that round float32 inputs to 8 bits, after one layer and after several: the last bit of a
float32 may decide between two of 255 values. That is rare within a layer, and after thirty layers it has happened to
every token."""
PHASED_TOLERANCE = 4e-2
"""Tolerance for 4-bit weights and 16-bit inputs, where prompts and decoding have different kernels."""
ROUNDED_TOLERANCE = 8e-2
"""Tolerance for products that round 16-bit inputs to 8 bits. Inputs that differ in the last of 16 bits may then differ
by an eighth, which spreads: in random layers of 8B and fp8 by 5 % after one, by 33 % after all. That hides a lot, so
such passes are first tried without rounding."""
UNSTABLE = 7.0
"""How many times as far any single token may be after one layer: some tokens amplify rounding within a layer, too,
where the attention output decides what its gates let through."""
NO_WORSE, NO_WORSE_AT_WORST = 1.5, 3.0
"""How many times as far from the model's own float32 result our tokens may be than those of the model's own code: on
average, and the furthest of ours beside the furthest of theirs."""


class Routed(NamedTuple):
    """What a model's own router did in a pass."""

    given_ND: Tensor
    routes: Routes


class OwnOutput(NamedTuple):
    """What a model's own code computed for the tokens of a pass."""

    states: Sequence[Tensor]
    """Hidden states [N, D] before every layer and after the last."""
    logits_MV: Tensor
    routed: Mapping[int, Routed]
    """What the model's own routers did, by layer."""
    precise: Mapping[int, Tensor]
    """By layer, where it was asked for: the float32 output [N, D] for the state before the layer."""


class OwnForward(Protocol):
    """A model's own code.

    It keeps keys and values from pass to pass, in BLOCKS blocks of BLOCK_SIZE.
    """

    def __call__(
        self, ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor, precisely: Collection[int]
    ) -> OwnOutput:
        """Run the tokens of a pass; return logits after some of them, and run some layers in float32 as well."""
        ...


class SingleTokensError(NotLlamaError):
    """Most tokens are right, and some are not."""

    def __init__(self, message: str, layers: Collection[int]) -> None:
        super().__init__(message)
        self.layers = layers
        """The numbers of the layers after which they are wrong."""


def require_same(fused: FusedLlama, own: OwnForward, *, max_position_embeddings: int | None) -> None:
    """Refuse a fused pass that differs from the model's own."""
    if fused.rounds_rows:
        with rows_kept():
            _require_same(fused, own, max_position_embeddings, rounds_rows=False)
    try:
        _require_same(fused, own, max_position_embeddings, rounds_rows=fused.rounds_rows)
    except SingleTokensError as off:
        if fused.quantised or fused.phased or fused.dtype == torch.float32:
            raise
        try:
            _require_same(fused, own, max_position_embeddings, rounds_rows=fused.rounds_rows, precisely=off.layers)
        except NotLlamaError:
            raise
        except Exception as why:  # a layer in float32 may not run, or not fit: then there is no evidence for the pass
            raise off from why


@torch.inference_mode()
def _require_same(
    fused: FusedLlama,
    own: OwnForward,
    max_position_embeddings: int | None,
    *,
    rounds_rows: bool,
    precisely: Collection[int] = (),
) -> None:
    """Refuse a fused pass that differs from the model's own: two chunks of one request, then three tokens beside
    another's.

    If short passes have kernels of their own, one, three, four and ten tokens follow; if decoding has, the second time
    is decoding. Most of them read what an earlier pass has cached, so that layers which mix up their caches are off for
    most. All of it runs once more at the end of the context: what models do to far positions (other rotations, scores
    that grow) does not show at the beginning. Blocks and visibility do not follow from positions.
    """
    one, other = (2, 0, 3, 4, 6, 5, 7), (1,)
    passes = [
        [AttentionRow(blocks=one, base=0, count=2)],
        [AttentionRow(blocks=one, base=2, count=5)],
        [AttentionRow(blocks=one, base=7, count=3), AttentionRow(blocks=other, base=0, count=2)],
    ]
    if fused.few_rows:
        passes += [
            [AttentionRow(blocks=one, base=10, count=1)],
            [AttentionRow(blocks=one, base=11, count=2), AttentionRow(blocks=other, base=2, count=1)],
            [AttentionRow(blocks=one, base=13, count=3), AttentionRow(blocks=other, base=3, count=1)],
            [AttentionRow(blocks=one, base=16, count=10)],
        ]
    length = max(row.base + row.count for rows in passes for row in rows)
    device, depth = fused.norm.weight.device, len(fused.blocks)
    singles, head = [_of_blocks(fused, [block]) for block in fused.blocks], _of_blocks(fused, [])
    dtype = fused.dtype
    kv, alone_kv = ({layer: _keys_and_values(fused, dtype, device) for layer in range(depth)} for _ in range(2))
    alone, together, routers = Errors(), Errors(), Errors()
    generator = torch.Generator().manual_seed(0)
    for again, shift in enumerate((0, max(0, (max_position_embeddings or 0) - length))):
        states = partial(_states, decoding=bool(again) and fused.phased)
        for rows in passes:
            metadata = AttentionMetadata.of(rows, block_size=BLOCK_SIZE, device=device)
            metadata = replace(metadata, position_N=metadata.position_N + shift)
            ids_N = torch.randint(len(fused.embedding_VD), metadata.position_N.shape, generator=generator).to(device)
            keep_M = torch.arange(0, len(ids_N), 2, device=device)
            theirs, their_logits, routed, precise = own(ids_N, metadata, keep_M, precisely)

            attention = choose_backend(metadata)
            logits, ours = states(_routed_alike(fused, routed), ids_N, attention, kv, keep_M)
            for layers in range(1, depth + 1):
                together.add("states", layers, ours[layers], theirs[layers])
            together.add("logits", depth, logits, their_logits)

            alone.add("states", 0, ours[0], theirs[0])
            every_N = torch.arange(len(ids_N), device=device)
            for k, single in enumerate(singles):
                given = replace(single, embedding_VD=theirs[k], embedding_scale=None)
                if k in routed:
                    given = _routed_alike(given, {0: routed[k]})
                    _add_routes(routers, fused, k, routed[k])
                _, (_, behind) = states(given, every_N, attention, {0: alone_kv[k]}, keep_M[:0])
                alone.add("states", k + 1, behind, theirs[k + 1], before=theirs[k], precise=precise.get(k + 1))
            given = replace(head, embedding_VD=theirs[depth], embedding_scale=None)
            logits, _ = states(given, every_N, attention, {}, keep_M)
            alone.add("logits", depth, logits, their_logits)
    tolerance = QUANTISED_TOLERANCE if fused.quantised else TOLERANCE[dtype]
    if rounds_rows:
        tolerance = ROUNDED_TOLERANCE
    elif fused.phased and not fused.rounds_rows:
        tolerance = PHASED_TOLERANCE
    for_all = QUANTISED_TOGETHER if fused.quantised else tolerance
    routers.judge("its routers", lambda _: tolerance, single=UNSTABLE if dtype == torch.float32 else inf)
    alone.judge("each layer alone", lambda _: sqrt(2) * tolerance, single=UNSTABLE)
    together.judge("all layers", lambda layers: sqrt(1 + layers) * for_all)


def _keys_and_values(fused: FusedLlama, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros [G, C, K] for one layer."""
    shape = fused.sizes.key_heads, BLOCKS * BLOCK_SIZE, fused.sizes.head_dim
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def _of_blocks(fused: FusedLlama, blocks: Sequence[DecoderLayer]) -> FusedLlama:
    """The pass with these blocks only; given states can replace its embedding."""
    compiled = in_one_call(blocks, fused.sizes) if blocks and fused.layers is not None else None
    return replace(fused, blocks=blocks, layers=compiled)


def _routed_alike(fused: FusedLlama, routed: Mapping[int, Routed]) -> FusedLlama:
    """The pass with tokens sent to the experts that the model's own routers chose."""
    if not routed:
        return fused
    blocks = list(fused.blocks)
    for layer, (_, routes) in routed.items():
        experts = blocks[layer].mlp
        assert isinstance(experts, Experts)
        blocks[layer] = replace(blocks[layer], mlp=replace(experts, router=partial(_given, routes)))
    return replace(fused, blocks=blocks)


def _given(routes: Routes, _: Tensor) -> Routes:
    return routes


def _add_routes(errors: "Errors", fused: FusedLlama, layer: int, routed: Routed) -> None:
    experts = fused.blocks[layer].mlp
    assert isinstance(experts, Experts)
    count = experts.count
    ours = fused.routes(experts, routed.given_ND)
    errors.add("routes", layer + 1, ours.dense(count), routed.routes.dense(count))


def _states(
    fused: FusedLlama,
    ids_N: Tensor,
    attention: AttentionBackend,
    kv: KVLayers,
    keep_M: Tensor,
    *,
    decoding: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits [M, V], and the states [N, D] before every block and after the last."""
    ids = range(len(fused.blocks) + 1)
    logits, aux_NX = fused.forward(ids_N, attention, kv, None if decoding else keep_M, ids)
    assert aux_NX is not None
    return logits[keep_M] if decoding else logits, aux_NX.chunk(len(ids), dim=-1)


class Errors:
    """How far each token of a trial is from the model's own, after every layer."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[Tensor]] = {}
        """By quantity and number of layers: errors [N]."""
        self._precise: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        """Where the model's own float32 result is known: the distances of ours and of the model's own from it, [N]
        each."""

    def add(
        self,
        what: str,
        layers: int,
        ours: Tensor,
        theirs: Tensor,
        *,
        before: Tensor | None = None,
        precise: Tensor | None = None,
    ) -> None:
        """Add tokens [N, ...] after so many layers; `before` is the input of their last layer.

        Errors are relative to the longer of the two: where a layer shortens a state, rounding is that of the long one.
        `precise` is the model's own float32 result.
        """
        length_N = theirs.float().norm(dim=-1).clamp(min=1e-30)
        if before is not None:
            length_N = length_N.maximum(before.float().norm(dim=-1))
        self._of.setdefault((what, layers), []).append(_apart(ours, theirs) / length_N)
        if precise is not None:
            both = _apart(ours, precise) / length_N, _apart(theirs, precise) / length_N
            self._precise.setdefault((what, layers), []).append(both)

    def judge(self, tried: str, allowed_behind: Callable[[int], float], *, single: float = inf) -> None:
        """Refuse a pass if most tokens are off, or one of them by `single` times the limit."""
        singles: list[tuple[int, str]] = []
        for (what, layers), errors in self._of.items():
            error_N, allowed = torch.cat(errors), allowed_behind(layers)
            for tokens, error, limit in (
                ("most", error_N.quantile(0.5), allowed),
                ("one", error_N.max(), single * allowed),
            ):
                if error <= limit:
                    continue  # a NaN is not
                message = (
                    f"a trial of {tried} gave other {what} after {layers} layers, by {error:.1e} of their length "
                    f"for {tokens} of the tokens ({limit:.1e} allowed)"
                )
                if tokens == "most":
                    raise NotLlamaError(message)
                if (reason := self._worse(what, layers)) is not None:
                    singles.append((layers, message + reason))
        if singles:
            raise SingleTokensError(singles[0][1], {layers for layers, _ in singles})

    def _worse(self, what: str, layers: int) -> str | None:
        """Why tokens that are off after so many layers count; None if the model's own are as far off."""
        if (what, layers) not in self._precise:
            return ""
        ours_N, theirs_N = map(torch.cat, zip(*self._precise[what, layers], strict=True))
        mean, worst, their_mean, their_worst = (
            float(x) for x in (ours_N.mean(), ours_N.max(), theirs_N.mean(), theirs_N.max())
        )
        if mean <= NO_WORSE * their_mean and worst <= NO_WORSE_AT_WORST * their_worst:
            return None
        return (
            f"; their distance from float32 is {mean:.1e} on average and {worst:.1e} at worst, that of its own code "
            f"{their_mean:.1e} and {their_worst:.1e}"
        )


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Distances [N] between tokens [N, ...]."""
    apart_N: Tensor = (one.float() - other.float()).norm(dim=-1)
    return apart_N
