"""Which targets take the lean pass of `block.py`, and the proof that each of them may.

Most targets are the same block. They are known by their parts, not by their names: every module, weight and window
that the block has no place for is a reason to let transformers' own code run, as it does for all other targets.

Parts do not tell all that a model's code does with them (a factor, a layer without rotation). So the invariant, a
lean pass that was handed out is right, rests on a trial against the model's own code, of two halves:

    each layer alone   given the model's own states before it, gives the model's own behind it, for every token; so do
                       the embedding, and norm and head
    all layers         one behind the other give the model's own states and logits, for most tokens

Alone, because single tokens cannot be judged behind many layers: where a state is about to grow a hundredfold, as some
token's does in many models, the rounding of all layers before decides how far it gets, and in half precision the
model's own code lies as far from itself in float32. All, because layers that are right may follow each other wrongly.
A target must not be moved or cast afterwards; its weights are in use.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.engine.runner.target import TargetRunner
from eyas.errors import UserError
from eyas.kernels.attention.dense import PagedAttention, has_triton
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow, KVCache
from eyas.kernels.llama.block import DecoderLayer, FusedLlama, FusedRMSNorm, Product, in_one_call, join
from eyas.kernels.llama.cpu import LlamaSizes
from eyas.target.capture import capture
from eyas.target.model import Target

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""How far most tokens' states may lie from the model's own behind the embedding, relative to their length; behind k
layers sqrt(1 + k) times as far. Rounding errors of layers are independent and add up like that; a layer that computes
anything else is further off at once."""
UNSTABLE = 7.0
"""How many times as far any single token may lie behind one layer: some tokens amplify rounding within a layer too,
where what its attention adds decides what its gates let through."""


class NotLlamaError(Exception):
    """A model is not the plain block; says why."""


def fused_llama(target: Target) -> FusedLlama | None:
    """The lean pass of a target; None where the model's own code must run, and why is logged."""
    try:
        with torch.inference_mode(False), torch.no_grad():  # joined weights outlive the caller's mode
            lean = _build(target)
        if target.device.type == "cuda" and has_triton():
            from eyas.kernels.llama.triton import TritonLlama  # torch for CPUs comes without triton

            fused = TritonLlama(**{part.name: getattr(lean, part.name) for part in fields(lean)})
            try:
                _prove(fused, target)
                return fused
            except Exception as reason:  # kernels fail in many ways, and none is a reason not to serve
                logger.info(f"{target.facts.source} runs without kernels of its own between its products: {reason}")
        _prove(lean, target)
    except (NotLlamaError, UserError) as reason:
        logger.info(f"{target.facts.source} runs by transformers' own code: {reason}")
        return None
    return lean


# --- recognition ---------------------------------------------------------------------------------------------------


def _build(target: Target) -> FusedLlama:
    model: Any = target.model
    weights = list(model.parameters())
    for what, found in (
        ("devices", {x.device for x in (*weights, *model.buffers())}),
        ("types", {x.dtype for x in weights}),
    ):
        if len(found) > 1:
            raise NotLlamaError(f"its weights are of several {what}: {', '.join(sorted(map(str, found)))}")
    if weights[0].dtype not in TOLERANCE:
        raise NotLlamaError(f"its weights are {weights[0].dtype}")
    _expect(model, "model", "lm_head")
    decoder = model.model
    _expect(decoder, "embed_tokens", "layers", "norm", "rotary_emb")
    if type(decoder.embed_tokens) is not nn.Embedding:
        raise NotLlamaError(f"its embeddings are {type(decoder.embed_tokens).__name__}")
    several = {_sizes(layer, model.config) for layer in decoder.layers}
    if len(several) > 1:
        raise NotLlamaError("its layers differ in size")
    sizes = several.pop()
    probe = weights[0].new_zeros(1, 1)
    rotated: int = decoder.rotary_emb(probe, position_ids=probe.long())[0].shape[-1]
    if rotated != sizes.head_dim:
        raise NotLlamaError(f"it rotates {rotated} of {sizes.head_dim} numbers of a head")
    blocks = [_block(layer, sizes) for layer in decoder.layers]
    return FusedLlama(
        embedding_VD=decoder.embed_tokens.weight.detach(),
        rotary=decoder.rotary_emb,
        blocks=blocks,
        norm=_norm(decoder.norm),
        head=_join(model.lm_head),
        sizes=sizes,
        layers=in_one_call(blocks, sizes),
    )


def _expect(module: nn.Module, *names: str) -> None:
    """Refuse a module that does not consist of these parts, or has weights besides."""
    own = (*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    odd = {name for name, _ in own} ^ set(names)
    if odd:
        expected = ", ".join(names)
        raise NotLlamaError(f"{type(module).__name__} does not consist of {expected} alone: {', '.join(sorted(odd))}")


def _sizes(layer: Any, config: Any) -> LlamaSizes:
    """Look a layer over."""
    _expect(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    attention, mlp = layer.self_attn, layer.mlp
    norms = ("q_norm", "k_norm") if hasattr(attention, "q_norm") else ()
    _expect(attention, "q_proj", "k_proj", "v_proj", "o_proj", *norms)
    _expect(mlp, "gate_proj", "up_proj", "down_proj", "act_fn")
    numbers = torch.linspace(-9, 9, 64)
    if not torch.allclose(mlp.act_fn(numbers), functional.silu(numbers)):
        raise NotLlamaError(f"its activation is {type(mlp.act_fn).__name__}")
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]  # of one kind, with or without a window
    windows = [config, attention] if "sliding_attention" in kinds else [attention]
    if any(getattr(place, "sliding_window", None) is not None for place in windows):
        raise NotLlamaError("its attention has a window")
    try:
        size = attention.head_dim
        heads, keys, values = (x.out_features // size for x in (attention.q_proj, attention.k_proj, attention.v_proj))
        inner, other = mlp.gate_proj.out_features, mlp.up_proj.out_features
    except AttributeError as error:
        raise NotLlamaError(str(error)) from error
    if keys != values or inner != other or any(getattr(attention, norm).weight.shape != (size,) for norm in norms):
        raise NotLlamaError("its keys and values, or gates and what they gate, or norms of heads differ in size")
    return LlamaSizes(heads=heads, key_heads=keys, head_dim=size, intermediate=inner)


def _block(layer: Any, sizes: LlamaSizes) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if hasattr(attention, "q_norm"):
        norms = [attention.q_norm] * sizes.heads + [attention.k_norm] * sizes.key_heads
        qk_norm = _norm(*norms)
    return DecoderLayer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=qk_norm,
        output=_join(attention.o_proj),
        scale=float(attention.scaling),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=_join(mlp.down_proj),
    )


def _norm(*norms: Any) -> FusedRMSNorm:
    """One norm, or one for each of several heads."""
    for norm in norms:
        _expect(norm, "weight")
    epsilon, *others = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if others or not isinstance(epsilon, float):
        raise NotLlamaError(f"{type(norms[0]).__name__} is no RMSNorm as Llama has it")
    weights = [norm.weight.detach() for norm in norms]
    return FusedRMSNorm(weights[0] if len(weights) == 1 else torch.stack(weights), epsilon)


def _join(*linears: Any) -> Product:
    product = join(linears)
    if product is None:
        raise NotLlamaError(f"its linears cannot be joined: {', '.join(sorted({type(x).__name__ for x in linears}))}")
    return product


# --- proof ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _prove(lean: FusedLlama, target: Target) -> None:
    """Run both over a few random tokens: two chunks of one request, then three tokens of it beside another's first.

    Most of them read what an earlier pass has cached, so that layers which mix up their caches are off for most.
    All of it once more at the end of the context: what models do to far positions (other rotations, scores that
    grow) does not show at the beginning. Where a token lies and what it sees is not told by its position.
    """
    one, other = (2, 0, 3), (1,)
    passes = (
        [AttentionRow(blocks=one, base=0, count=2)],
        [AttentionRow(blocks=one, base=2, count=5)],
        [AttentionRow(blocks=one, base=7, count=3), AttentionRow(blocks=other, base=0, count=2)],
    )
    device, depth = target.device, len(lean.blocks)
    singles, head = [_of_blocks(lean, [block]) for block in lean.blocks], _of_blocks(lean, [])
    cache, *single_caches = (KVCache(blocks=4, block_size=4) for _ in range(1 + depth))
    own, alone, together = TargetRunner(target, KVCache(blocks=4, block_size=4)), Errors(), Errors()
    generator = torch.Generator().manual_seed(0)
    for shift in (0, max(0, (target.facts.max_position_embeddings or 0) - 10)):
        for rows in passes:
            layout = AttentionMetadata.of(rows, block_size=4, device=device)
            layout = replace(layout, position_N=layout.position_N + shift)
            ids_N = torch.randint(len(lean.embedding_VD), layout.slot_N.shape, generator=generator).to(device)
            keep_M = torch.arange(0, len(ids_N), 2, device=device)
            with capture(target.model, range(depth + 1)) as captured:
                their_logits = own.forward(ids_N, layout, keep_M)
            theirs = captured.aux_hidden()[0].chunk(depth + 1, dim=-1)

            attention = PagedAttention(cache, layout)
            logits, ours = _states(lean, ids_N, attention, keep_M)
            for layers in range(1, depth + 1):
                together.add("states", layers, ours[layers], theirs[layers])
            together.add("logits", depth, logits, their_logits)

            alone.add("states", 0, ours[0], theirs[0])
            every_N = torch.arange(len(ids_N), device=device)
            for k, (single, its_cache) in enumerate(zip(singles, single_caches, strict=True)):
                given = replace(single, embedding_VD=theirs[k])
                _, (_, behind) = _states(given, every_N, PagedAttention(its_cache, layout), keep_M[:0])
                alone.add("states", k + 1, behind, theirs[k + 1], before=theirs[k])
            logits, _ = _states(replace(head, embedding_VD=theirs[depth]), every_N, attention, keep_M)
            alone.add("logits", depth, logits, their_logits)
    tolerance = TOLERANCE[lean.embedding_VD.dtype]
    alone.judge("each layer alone", lambda _: sqrt(2) * tolerance, single=UNSTABLE)
    together.judge("all layers", lambda layers: sqrt(1 + layers) * tolerance)


def _of_blocks(lean: FusedLlama, blocks: Sequence[DecoderLayer]) -> FusedLlama:
    """The pass with these blocks alone; states for it to begin with can take the place of its embedding."""
    compiled = in_one_call(blocks, lean.sizes) if blocks and lean.layers is not None else None
    return replace(lean, blocks=blocks, layers=compiled)


def _states(
    lean: FusedLlama, ids_N: Tensor, attention: PagedAttention, keep_M: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits [M, V], and the states [N, D] before every block and behind the last."""
    ids = range(len(lean.blocks) + 1)
    logits, aux_NX = lean.forward(ids_N, attention, keep_M, ids)
    assert aux_NX is not None
    return logits, aux_NX.chunk(len(ids), dim=-1)


class Errors:
    """How far each token of a trial lies from the model's own, behind every layer."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, what: str, layers: int, ours: Tensor, theirs: Tensor, *, before: Tensor | None = None) -> None:
        """Take some tokens [N, ...] behind so many layers; `before` is what their last layer was given.

        Errors are parts of the longer one: where a layer makes a state shorter, rounding is that of the long one.
        """
        length_N = theirs.float().norm(dim=-1).clamp(min=1e-30)
        if before is not None:
            length_N = length_N.maximum(before.float().norm(dim=-1))
        self._of.setdefault((what, layers), []).append((ours.float() - theirs.float()).norm(dim=-1) / length_N)

    def judge(self, tried: str, allowed_behind: Callable[[int], float], *, single: float = inf) -> None:
        """Refuse a pass of which most tokens are off, or one by `single` times as much."""
        for (what, layers), several in self._of.items():
            error_N, allowed = torch.cat(several), allowed_behind(layers)
            limits = (("most", error_N.quantile(0.5), allowed), ("one", error_N.max(), single * allowed))
            for tokens, error, limit in limits:
                if not error <= limit:  # nor if it is no number
                    raise NotLlamaError(
                        f"a trial of {tried} gave other {what} behind {layers} layers, by {error:.1e} of their length "
                        f"for {tokens} of the tokens ({limit:.1e} allowed)"
                    )
