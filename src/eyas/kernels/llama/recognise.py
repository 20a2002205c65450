"""Recognises models that the fused pass of `block.py` can run, from an `nn.Module` and its calls of attention.

Most models are the same block. They are recognised by their parts and by what these compute, not by their names: any
module or weight that the block has no place for makes transformers' own code run, as it does for all other models. What
the model's code asks of attention (heads, scale, window, softcap) is taken from a pass of it.

Parts do not show everything that a model's code does with them (a factor, a layer without rotation): that takes a trial
(`trial.py`). A model must not be moved or cast afterwards; its weights are in use.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.attention.backend import AttentionCall
from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.linear.embedding_table import QuantisedEmbedding, table_of
from eyas.kernels.linear.served_linear import CompiledLinear
from eyas.kernels.llama.block import (
    DecoderLayer,
    FusedLlama,
    GatedMlp,
    NotLlamaError,
    Product,
    Rotary,
    StaticRotary,
    ends_in_one_call,
    in_one_call,
    join,
)
from eyas.kernels.llama.cpu import LlamaSizes
from eyas.kernels.llama.experts import ClampedSwiglu, Experts, PlainExperts, Router, Routes, ServedExperts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NORM_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""How far a norm's output may differ from the expected one, relative to its length."""
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""transformers' names of rotations whose frequencies do not depend on the sequence length."""


@torch.inference_mode(False)  # joined weights outlive the caller's mode
@torch.no_grad()
def recognise(model: Any, calls: Sequence[AttentionCall]) -> FusedLlama:
    """Build the fused pass over the weights of a model, or raise `NotLlamaError`; `trial.py` decides whether it is
    right.

    `calls` is what every layer asks of attention.
    """
    weights = list(model.parameters())
    of_norms = {id(module.weight) for module in model.modules() if _is_norm(module)}
    for what, found in (
        ("devices", {x.device for x in (*weights, *model.buffers())}),
        ("types", {x.dtype for x in weights if id(x) not in of_norms or x.dtype != torch.float32}),
    ):
        if len(found) > 1:
            raise NotLlamaError(f"its weights are of several {what}: {', '.join(sorted(map(str, found)))}")
    if weights[0].dtype not in DTYPES:
        raise NotLlamaError(f"its weights are {weights[0].dtype}")
    compiled = any(isinstance(module, CompiledLinear) for module in model.modules())
    if compiled and weights[0].dtype != torch.float32:
        raise NotLlamaError(f"its products read and write float32, and its other weights are {weights[0].dtype}")
    _expect(model, "model", "lm_head")
    decoder = model.model
    _expect(decoder, "embed_tokens", "layers", "norm", "rotary_emb")
    rotations, rotation_of = _rotations(decoder, model.config)
    probe = weights[0].new_zeros(1, 1)
    several = [
        _sizes(layer, call, rotary_dim=rotations[rotation](probe, position_ids=probe.long())[0].shape[-1])
        for layer, call, rotation in zip(decoder.layers, calls, rotation_of, strict=True)
    ]
    sizes = replace(several[0], intermediate=max(one.intermediate for one in several))
    if any(replace(one, intermediate=one.intermediate or sizes.intermediate) != sizes for one in several):
        raise NotLlamaError("its layers differ in size")
    norm = partial(_norm, dtype=weights[0].dtype)
    blocks = [_block(*each, sizes, norm) for each in zip(decoder.layers, calls, rotation_of, strict=True)]
    embedding_VD, last_norm, head = table_of(decoder.embed_tokens), norm(decoder.norm), _join(model.lm_head)
    scale, softcap = _embedding_scale(decoder.embed_tokens), getattr(model.config, "final_logit_softcapping", None)
    ends = ends_in_one_call(embedding_VD, last_norm, head) if scale is None and softcap is None else None
    return FusedLlama(
        embedding_VD=embedding_VD,
        embedding_scale=scale,
        rotations=rotations,
        blocks=blocks,
        norm=last_norm,
        head=head,
        logit_softcap=softcap,
        sizes=sizes,
        layers=in_one_call(blocks, sizes, ends),
    )


def _expect(module: nn.Module, *names: str) -> None:
    """Refuse a module that has other parts or weights than these."""
    children = [(name, part) for name, part in module.named_children() if not isinstance(part, nn.Dropout)]
    own = (*children, *module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    odd = {name for name, _ in own} ^ set(names)
    if odd:
        expected = ", ".join(names)
        raise NotLlamaError(f"{type(module).__name__} does not consist of {expected} alone: {', '.join(sorted(odd))}")


def _is_norm(module: Any) -> bool:
    """Whether it may be a norm; norm weights may have a finer dtype than the others."""
    return [name for name, _ in module.named_parameters()] == ["weight"] and module.weight.ndim == 1


def _embedding_scale(embedding: nn.Module) -> Tensor | None:
    """The factor that an embedding module applies."""
    if isinstance(embedding, QuantisedEmbedding):
        return None if embedding.scale is None else torch.tensor(embedding.scale)
    if type(embedding) is nn.Embedding:
        return None
    numbers = list(embedding.buffers())
    if isinstance(embedding, nn.Embedding) and len(numbers) == 1 and numbers[0].numel() == 1:
        weight_VD = embedding.weight.detach()
        scale, ids_N = numbers[0].to(weight_VD.dtype), torch.arange(0, len(weight_VD), 1 + len(weight_VD) // 16)
        ids_N = ids_N.to(weight_VD.device)
        if torch.equal(embedding(ids_N), functional.embedding(ids_N, weight_VD) * scale):
            return scale
    raise NotLlamaError(f"its embeddings are {type(embedding).__name__}")


def _rotations(decoder: Any, config: Any) -> tuple[list[Rotary], list[int]]:
    """The rotations of a model, and each layer's index among them."""
    rotary, layers = decoder.rotary_emb, len(decoder.layers)
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [_rotation(rotary, rotary, getattr(rotary, "rope_type", None))], [0] * layers
    kind_of = getattr(config, "layer_types", None) or ()
    if len(kind_of) != layers:
        raise NotLlamaError(f"it rotates layers by their type, and has {len(kind_of)} types for {layers} layers")
    kinds = list(dict.fromkeys(kind_of))
    rope_types = getattr(rotary, "rope_type", None)
    rotations = [
        _rotation(
            partial(rotary, layer_type=kind),
            rotary,
            rope_types.get(kind) if isinstance(rope_types, dict) else None,
            f"{kind}_",
        )
        for kind in kinds
    ]
    return rotations, [kinds.index(kind) for kind in kind_of]


def _rotation(call: Rotary, module: nn.Module, rope_type: object, prefix: str = "") -> Rotary:
    """One rotation, with its frequencies if they do not depend on the sequence length."""
    frequency_F = getattr(module, f"{prefix}inv_freq", None)
    scale = getattr(module, f"{prefix}attention_scaling", None)
    if isinstance(frequency_F, torch.Tensor):
        probe = frequency_F.new_zeros(1, 1)
        angles: object = call(probe, position_ids=probe.long())
        if not isinstance(angles, tuple) or len(angles) != 2:  # DeepSeek V2 has complex numbers
            raise NotLlamaError(f"{type(module).__name__} does not return cosines and sines")
        if angles[0].shape[-1] == len(frequency_F):
            call = partial(_for_both_halves, call)
    if (
        rope_type not in STATIC_ROPE_TYPES
        or not isinstance(frequency_F, torch.Tensor)
        or not isinstance(scale, float | int)
    ):
        return call
    return StaticRotary(call, frequency_F.float(), float(scale))


def _for_both_halves(call: Rotary, like: Tensor, *, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A rotation whose module returns the angles of half a head; the other half has the same."""
    cos, sin = call(like, position_ids=position_ids)
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def _is_in(module: nn.Module, *names: str) -> bool:
    return any(hasattr(module, name) for name in names)


def _qkv_names(attention: nn.Module) -> tuple[str, ...]:
    return ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")


def _gate_names(mlp: nn.Module) -> tuple[str, ...]:
    return ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")


def _activation_name(mlp: nn.Module) -> str:
    return "activation_fn" if hasattr(mlp, "activation_fn") else "act_fn"


def _output_norms(layer: nn.Module) -> bool:
    """Whether a layer also norms its outputs; then the norm after attention applies to the attention output."""
    return _is_in(layer, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _sizes(layer: Any, call: AttentionCall, *, rotary_dim: int) -> LlamaSizes:
    """Check a layer and return its sizes."""
    more = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if _output_norms(layer) else ()
    _expect(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", *more)
    attention = layer.self_attn
    norms = ("q_norm", "k_norm") if _is_in(attention, "q_norm", "k_norm") else ()
    qkv = _qkv_names(attention)
    _expect(attention, *qkv, "o_proj", *norms, *(() if call.sink_logit_H is None else ("sinks",)))
    size = call.head_dim
    q, kv = call.heads * size, call.key_heads * size
    try:
        widths = [getattr(attention, name).out_features for name in qkv]
        inner = 0 if hasattr(layer.mlp, "experts") else _intermediate(layer.mlp)
    except AttributeError as error:
        raise NotLlamaError(str(error)) from error
    if widths not in ([q + 2 * kv], [q, kv, kv]):
        raise NotLlamaError("its keys and values differ in size")
    if call.value_dim != size or any(getattr(attention, norm).weight.shape != (size,) for norm in norms):
        raise NotLlamaError("its values or norms of heads are of another size than its keys")
    if rotary_dim > size or rotary_dim % 2:
        raise NotLlamaError(f"it rotates {rotary_dim} of {size} numbers of a head")
    return LlamaSizes(
        heads=call.heads, key_heads=call.key_heads, head_dim=size, rotary_dim=rotary_dim, intermediate=inner
    )


def _intermediate(mlp: Any) -> int:
    """Check a dense feed-forward and return its number of gates."""
    gates = _gate_names(mlp)
    _expect(mlp, *gates, "down_proj", _activation_name(mlp))
    inner = int(mlp.down_proj.in_features)
    if [getattr(mlp, name).out_features for name in gates] not in ([2 * inner], [inner, inner]):
        raise NotLlamaError("its gate and up projections differ in size")
    return inner


def _block(
    layer: Any, call: AttentionCall, rotation: int, sizes: LlamaSizes, norm: Callable[..., FusedNorm]
) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = attention_output_norm = mlp_output_norm = None
    if hasattr(attention, "q_norm"):
        qk_norm = norm(*[attention.q_norm] * sizes.heads, *[attention.k_norm] * sizes.key_heads)
    mlp_norm = norm(layer.post_attention_layernorm)
    if _output_norms(layer):
        attention_output_norm, mlp_norm = mlp_norm, norm(layer.pre_feedforward_layernorm)
        mlp_output_norm = norm(layer.post_feedforward_layernorm)
    return DecoderLayer(
        attention_norm=norm(layer.input_layernorm),
        qkv=_join(*(getattr(attention, name) for name in _qkv_names(attention))),
        qk_norm=qk_norm,
        rotation=rotation,
        scale=call.scale,
        softcap=call.softcap,
        window=call.window,
        sink_logit_H=None if call.sink_logit_H is None else call.sink_logit_H.detach().float(),
        output=_join(attention.o_proj),
        attention_output_norm=attention_output_norm,
        mlp_norm=mlp_norm,
        mlp=_experts(mlp) if hasattr(mlp, "experts") else _gated(mlp),
        mlp_output_norm=mlp_output_norm,
    )


def _gated(mlp: Any) -> GatedMlp:
    return GatedMlp(
        gate_up=_join(*(getattr(mlp, name) for name in _gate_names(mlp))),
        activation=_activation(getattr(mlp, _activation_name(mlp))),
        down=_join(mlp.down_proj),
    )


def _experts(mlp: Any) -> Experts:
    router_name, experts = "router" if hasattr(mlp, "router") else "gate", mlp.experts
    _expect(mlp, router_name, "experts")
    router, interleaved = _router(getattr(mlp, router_name)), not getattr(experts, "is_concatenated", True)
    clamps = hasattr(experts, "alpha") and hasattr(experts, "limit")
    if not clamps and not hasattr(experts, "act_fn"):
        raise NotLlamaError(f"{type(experts).__name__} does not name its activation")
    gating = ClampedSwiglu(float(experts.alpha), float(experts.limit)) if clamps else _activation(experts.act_fn)
    if isinstance(experts, ServedExperts):
        fused = experts.fused(router, interleaved=interleaved, gating=gating)
        if fused is None:
            raise NotLlamaError("its experts and their router differ in size")
        return fused
    has_bias = hasattr(experts, "gate_up_proj_bias")
    biases = ("gate_up_proj_bias", "down_proj_bias") if has_bias else ()
    _expect(experts, "gate_up_proj", "down_proj", *biases, *(() if clamps else ("act_fn",)))
    transposed = bool(getattr(experts, "is_transposed", False))
    gate_up_EGD, down_EDI = (_outputs_first(x, transposed) for x in (experts.gate_up_proj, experts.down_proj))
    (count, gates, hidden), shape = gate_up_EGD.shape, down_EDI.shape
    if shape != (count, hidden, gates // 2) or router.weight_ED.shape != (count, hidden):
        raise NotLlamaError("its experts and their router differ in size")
    return PlainExperts(
        router=router,
        gate_up_EGD=gate_up_EGD,
        gate_up_bias_EG=experts.gate_up_proj_bias.detach() if has_bias else None,
        interleaved=interleaved,
        gating=gating,
        down_EDI=down_EDI,
        down_bias_ED=experts.down_proj_bias.detach() if has_bias else None,
    )


def _outputs_first(weights: nn.Parameter, transposed: bool) -> Tensor:
    """The weights of experts [E, outputs, inputs], each output's contiguous; the module keeps a view of them."""
    if weights.ndim != 3:
        raise NotLlamaError(f"its experts have weights of shape {tuple(weights.shape)}")
    found = weights.detach().transpose(1, 2) if transposed else weights.detach()
    if not found.is_contiguous():
        found = found.contiguous()
        weights.data = found.transpose(1, 2) if transposed else found
    return found


def _router(router: Any) -> Router:
    """The router that matches a module, with weights that add up to 1 or do not, whichever is nearer."""
    has_bias, name = getattr(router, "bias", None) is not None, type(router).__name__
    _expect(router, "weight", *(("bias",) if has_bias else ()))
    weight_ED = router.weight.detach()
    if weight_ED.ndim != 2:
        raise NotLlamaError(f"{name} has a weight of shape {tuple(weight_ED.shape)}")
    x_ND = torch.randn(8, weight_ED.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_ED)
    try:
        _, weight_NK, expert_NK = router(x_ND)
        right = weight_NK.shape == expert_NK.shape == (len(x_ND), expert_NK.shape[-1])
        right = right and weight_NK.is_floating_point() and not expert_NK.is_floating_point()
    except Exception as error:  # its signature may be anything
        raise NotLlamaError(f"{name} cannot be called with rows alone: {error}") from error
    if not right:
        raise NotLlamaError(f"{name} does not return scores, weights and experts")
    several = [
        Router(
            weight_ED=weight_ED,
            bias_E=router.bias.detach() if has_bias else None,
            top_k=expert_NK.shape[1],
            renormalises=renormalises,
            dtype=weight_NK.dtype,
            module=router,
        )
        for renormalises in (True, False)
    ]
    theirs_NE = Routes(expert_NK, weight_NK).dense(len(weight_ED)).float()
    return min(several, key=lambda one: float((one(x_ND).dense(len(weight_ED)).float() - theirs_NE).norm()))


def _activation(module: Any) -> Activation:
    numbers = torch.linspace(-9, 9, 64)
    for activation in Activation:
        if torch.allclose(module(numbers), activation(numbers)):
            return activation
    raise NotLlamaError(f"its activation is {type(module).__name__}")


def _norm(*norms: Any, dtype: torch.dtype) -> FusedNorm:
    """Recognise one norm, or one for each of several heads."""
    fused = {norm: _one_norm(norm, dtype) for norm in norms}
    if len({one.eps for one in fused.values()}) > 1:
        raise NotLlamaError("its norms of heads have several epsilons")
    weights = [fused[norm].weight for norm in norms]
    return FusedNorm(weights[0] if len(weights) == 1 else torch.stack(weights), fused[norms[0]].eps)


def _one_norm(norm: Any, dtype: torch.dtype) -> FusedNorm:
    """The norm that matches a module, with its weight or with its weight plus one.

    Some round before the weight and some after it: the nearest is taken.
    """
    _expect(norm, "weight")
    epsilons = [getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    if len(epsilons) != 1 or not isinstance(epsilons[0], float):
        raise NotLlamaError(f"{type(norm).__name__} does not name its epsilon")
    weight = norm.weight.detach()
    sizes = torch.tensor([3.0, 1.0, 1e-2, 1e-3])
    x_ND = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)) * sizes[:, None]
    x_ND = x_ND.to(weight.device, dtype)
    given_ND, kinds = norm(x_ND).float(), (weight, weight.float(), 1 + weight.float())
    several = [FusedNorm(kind, epsilons[0]) for kind in kinds]
    errors = [float((one(x_ND).float() - given_ND).norm() / given_ND.norm().clamp(min=1e-30)) for one in several]
    error, one = min(zip(errors, several, strict=True), key=lambda pair: pair[0])
    if not error <= NORM_ERROR[dtype]:
        raise NotLlamaError(f"{type(norm).__name__} is not an RMSNorm: it differs by {error:.1e} of its length")
    return one


def _join(*linears: Any) -> Product:
    product = join(linears)
    if product is None:
        raise NotLlamaError(f"its linears cannot be joined: {', '.join(sorted({type(x).__name__ for x in linears}))}")
    return product
