"""Which models take the fused pass of `block.py`, told from an `nn.Module` and its configuration.

Most models are the same block. They are known by their parts, not by their names: every module, weight and window
that the block has no place for is a reason to let transformers' own code run, as it does for all other models.

Parts do not tell all that a model's code does with them (a factor, a layer without rotation): that takes a trial
(`trial.py`). A model must not be moved or cast afterwards; its weights are in use.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.llama.block import DecoderLayer, FusedLlama, NotLlamaError, Product, in_one_call, join
from eyas.kernels.llama.cpu import LlamaSizes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.inference_mode(False)  # joined weights outlive the caller's mode
@torch.no_grad()
def recognise(model: Any) -> FusedLlama:
    """The fused pass over the weights of a model, or `NotLlamaError`; whether it is right is for `trial.py` to tell."""
    weights = list(model.parameters())
    for what, found in (
        ("devices", {x.device for x in (*weights, *model.buffers())}),
        ("types", {x.dtype for x in weights}),
    ):
        if len(found) > 1:
            raise NotLlamaError(f"its weights are of several {what}: {', '.join(sorted(map(str, found)))}")
    if weights[0].dtype not in DTYPES:
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


def _norm(*norms: Any) -> FusedNorm:
    """One norm, or one for each of several heads."""
    for norm in norms:
        _expect(norm, "weight")
    epsilon, *others = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if others or not isinstance(epsilon, float):
        raise NotLlamaError(f"{type(norms[0]).__name__} is no RMSNorm as Llama has it")
    weights = [norm.weight.detach() for norm in norms]
    return FusedNorm(weights[0] if len(weights) == 1 else torch.stack(weights), epsilon)


def _join(*linears: Any) -> Product:
    product = join(linears)
    if product is None:
        raise NotLlamaError(f"its linears cannot be joined: {', '.join(sorted({type(x).__name__ for x in linears}))}")
    return product
