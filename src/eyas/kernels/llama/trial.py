"""The proof that a fused pass may stand in for a model's own code: a trial of both over a few random tokens.

The invariant, a fused pass that was handed out is right, rests on two halves:

    each layer alone   given the model's own states before it, gives the model's own behind it, for every token; so do
                       the embedding, and norm and head
    all layers         one behind the other give the model's own states and logits, for most tokens

Experts are those that the model's own router chose: where two scores nearly tie, rounding decides between them, and in
half precision some do in every layer. Our routers are tried by themselves, on what the model's own were given.

Alone, because single tokens cannot be judged behind many layers: where a state is about to grow a hundredfold, as some
token's does in many models, the rounding of all layers before decides how far it gets, and in half precision the
model's own code lies as far from itself in float32. All, because layers that are right may follow each other wrongly.

Within a layer rounding may decide as well: keys of Qwen2.5's first layer have biases of 354, where the numbers of
bfloat16 are 2 apart, and one that is rounded the other way moves what all tokens attend to. So where single tokens are
off behind a layer, the model's own code runs that layer in float32 too, and it is enough that ours is not further from
that than the model's own is in half precision: on average, and at worst. Not token by token: whose rounding hits which
token is chance.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, D hidden size, C slots of a layer, G key heads, K head
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
"""What the passes of a trial are laid out for."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""How far most tokens' states may lie from the model's own behind the embedding, relative to their length; behind k
layers sqrt(1 + k) times as far. Rounding errors of layers are independent and add up like that; a layer that computes
anything else is further off at once."""
QUANTISED_TOLERANCE, QUANTISED_TOGETHER = 4e-3, 2e-2
"""The same where products quantise what they read to 8 bits, behind one layer and behind several: the last bit of a
float32 may decide between two of 255 values. That is rare within a layer, and behind thirty of them it has happened to
every token."""
PHASED_TOLERANCE = 4e-2
"""The same where products of 16-bit rows have weights of 4 bits, by other kernels for prompts than for decoding."""
ROUNDED_TOLERANCE = 8e-2
"""The same where products round 16-bit rows to 8 bits. Numbers that differ in the last of 16 bits then differ by an
eighth, some of them, and that makes others differ: in random layers of 8B and fp8 by 5 % behind one, by 33 % behind
all. So much hides a lot, which is why such passes are tried with rows as they are first."""
UNSTABLE = 7.0
"""How many times as far any single token may lie behind one layer: some tokens amplify rounding within a layer too,
where what its attention adds decides what its gates let through."""
NO_WORSE, NO_WORSE_AT_WORST = 1.5, 3.0
"""How many times as far as the model's own its tokens may lie from what the model's own code gives in float32: on
average, and the one that is furthest off beside the furthest of the model's own."""


class Routed(NamedTuple):
    """What a model's own router did in a pass."""

    given_ND: Tensor
    routes: Routes


class OwnOutput(NamedTuple):
    """What a model's own code gave for the tokens of a pass."""

    states: Sequence[Tensor]
    """[N, D] before every layer and behind the last."""
    logits_MV: Tensor
    routed: Mapping[int, Routed]
    """What routers did in the layers that have some."""
    precise: Mapping[int, Tensor]
    """Behind layers that this was asked of, by their number: what they give in float32 of the state before [N, D]."""


class OwnForward(Protocol):
    """A model's own code.

    It remembers keys and values from pass to pass, in BLOCKS blocks of BLOCK_SIZE.
    """

    def __call__(
        self, ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor, precisely: Collection[int]
    ) -> OwnOutput:
        """Run the tokens of a pass; logits are asked for behind some, and some layers in float32 as well."""
        ...


class SingleTokensError(NotLlamaError):
    """Most tokens are right, and some are not."""

    def __init__(self, message: str, layers: Collection[int]) -> None:
        super().__init__(message)
        self.layers = layers
        """Behind which they are not."""


def require_same(fused: FusedLlama, own: OwnForward, *, max_position_embeddings: int | None) -> None:
    """Refuse a fused pass that is not the model's own."""
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
        except Exception as why:  # a layer in float32 may not run, or not fit: then nothing speaks for the pass
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
    """Refuse a fused pass that is not the model's own: two chunks of one request, then three tokens beside another's.

    Where short passes run by kernels of their own, one, three, four and ten tokens follow; where decoding does, the
    second time is decoding.
    Most of them read what an earlier pass has cached, so that layers which mix up their caches are off for most.
    All of it once more at the end of the context: what models do to far positions (other rotations, scores that
    grow) does not show at the beginning. Where a token lies and what it sees is not told by its position.
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
    """Memory of one layer [G, C, K], all zeros."""
    shape = fused.sizes.key_heads, BLOCKS * BLOCK_SIZE, fused.sizes.head_dim
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def _of_blocks(fused: FusedLlama, blocks: Sequence[DecoderLayer]) -> FusedLlama:
    """The pass with these blocks alone; states for it to begin with can take the place of its embedding."""
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
    """Logits [M, V], and the states [N, D] before every block and behind the last; by a pass that decodes or reads."""
    ids = range(len(fused.blocks) + 1)
    logits, aux_NX = fused.forward(ids_N, attention, kv, None if decoding else keep_M, ids)
    assert aux_NX is not None
    return logits[keep_M] if decoding else logits, aux_NX.chunk(len(ids), dim=-1)


class Errors:
    """How far each token of a trial lies from the model's own, behind every layer."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[Tensor]] = {}
        """By what and behind how many layers: errors [N]."""
        self._precise: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        """Where the model's own is known in float32: how far ours and the model's own lie from that, [N] each."""

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
        """Take some tokens [N, ...] behind so many layers; `before` is what their last layer was given.

        Errors are parts of the longer one: where a layer makes a state shorter, rounding is that of the long one.
        `precise` is what the model's own code gives in float32.
        """
        length_N = theirs.float().norm(dim=-1).clamp(min=1e-30)
        if before is not None:
            length_N = length_N.maximum(before.float().norm(dim=-1))
        self._of.setdefault((what, layers), []).append(_apart(ours, theirs) / length_N)
        if precise is not None:
            both = _apart(ours, precise) / length_N, _apart(theirs, precise) / length_N
            self._precise.setdefault((what, layers), []).append(both)

    def judge(self, tried: str, allowed_behind: Callable[[int], float], *, single: float = inf) -> None:
        """Refuse a pass of which most tokens are off, or one by `single` times as much."""
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
                    f"a trial of {tried} gave other {what} behind {layers} layers, by {error:.1e} of their length "
                    f"for {tokens} of the tokens ({limit:.1e} allowed)"
                )
                if tokens == "most":
                    raise NotLlamaError(message)
                if (reason := self._worse(what, layers)) is not None:
                    singles.append((layers, message + reason))
        if singles:
            raise SingleTokensError(singles[0][1], {layers for layers, _ in singles})

    def _worse(self, what: str, layers: int) -> str | None:
        """What speaks against tokens that are off behind so many layers; None, if the model's own are as much so."""
        if (what, layers) not in self._precise:
            return ""
        ours_N, theirs_N = map(torch.cat, zip(*self._precise[what, layers], strict=True))
        mean, worst, their_mean, their_worst = (
            float(x) for x in (ours_N.mean(), ours_N.max(), theirs_N.mean(), theirs_N.max())
        )
        if mean <= NO_WORSE * their_mean and worst <= NO_WORSE_AT_WORST * their_worst:
            return None
        return (
            f"; from float32 they lie {mean:.1e} on average and {worst:.1e} at worst, those of the model's own code "
            f"{their_mean:.1e} and {their_worst:.1e}"
        )


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """How far tokens [N, ...] lie apart [N]."""
    apart_N: Tensor = (one.float() - other.float()).norm(dim=-1)
    return apart_N
