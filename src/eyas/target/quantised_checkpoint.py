"""Loads a quantised checkpoint into a model of transformers.

On a GPU weights stay packed if there is a kernel for their kind (`w8a8_linear.py`, `w4a16_linear.py`,
`mxfp4_experts.py`). Otherwise they are dequantised one by one, and the log says so. Embedding, head and norms are as in
the file, usually 16 bits.

Invariant: every weight of the model comes from the file, and packed matrices never exist dequantised.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from eyas.empty_model import matrices_without_memory
from eyas.errors import UserError
from eyas.kernels.attention.choose import has_triton
from eyas.quantization.quantization_config import methods, weight_scheme
from eyas.quantization.weight_format import WeightScheme
from eyas.target.stored_tensors import StoredTensors

logger = logging.getLogger(__name__)

DTYPES_OF_KERNELS = (torch.bfloat16, torch.float16)
FP8_CAPABILITY = (8, 9)
"""The least of a GPU with fp8."""


def scheme_of(config: PretrainedConfig, source: str) -> WeightScheme | None:
    """How a checkpoint is quantised, if a format here reads it; others are left to transformers."""
    said = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not isinstance(said, Mapping) or said.get("quant_method") not in methods():
        return None
    return weight_scheme({"quantization_config": said}, source)


def multiplies(device: torch.device, kind: str, dtype: torch.dtype) -> str | None:
    """Why a device cannot multiply this kind of weights by rows of this dtype; None if it can."""
    if device.type != "cuda":
        return "kernels for this kind of 8- and 4-bit weights run on a GPU only"
    if dtype not in DTYPES_OF_KERNELS:
        return f"they take rows of bfloat16 or float16, not of {str(dtype).removeprefix('torch.')}"
    if not has_triton():
        return "their kernels need Triton, which torch for CUDA brings"
    if kind == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        have = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"fp8 needs a GPU of compute capability 8.9 or more, and this one has {have}"
    return None


@torch.no_grad()
def quantised_model(
    scheme: WeightScheme,
    place: str,
    hub: Mapping[str, Any],
    config: PretrainedConfig,
    attention: str | None,
    *,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    dequantise: bool,
) -> PreTrainedModel:
    """Load the model of a folder or hub id; `attention` is transformers' name, or None."""
    folder = Path(place) if Path(place).is_dir() else Path(snapshot_download(place, **hub))
    config = deepcopy(config)
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)  # transformers must not read it
    with matrices_without_memory():
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention
        )
    reason = "it was asked for" if dequantise else multiplies(device, scheme.kind, dtype)
    filled, unknown, dense, dense_bytes = set[str](), list[str](), Counter[str](), Counter[str]()
    with StoredTensors.open(str(folder), {}, source) as tensors:
        for owner, attributes in tensors.modules.items():
            try:
                module = model.get_submodule(owner)
            except AttributeError:
                unknown.append(owner)
                continue
            stored = None
            if scheme.owns(attributes):
                read = {attribute: tensors.tensor(name).to(device) for attribute, name in attributes.items()}
                stored = scheme.format.read_module(scheme, read, module, owner)
            if stored is not None:
                served = None if reason else stored.served(dtype)
                if served is not None:
                    module = served
                    model.set_submodule(owner, module)
                else:
                    kind = scheme.kind if reason else stored.words
                    for attribute, weight in stored.dense(dtype).items():
                        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
                        dense[kind] += 1
                        dense_bytes[kind] += weight.nbytes
                        filled.add(f"{owner}.{attribute}")
                attributes = {attribute: name for attribute, name in attributes.items() if attribute.endswith("bias")}
            for attribute, name in attributes.items():
                filled |= _fill(module, owner, attribute, tensors.tensor(name).to(device), dtype, source)
    if config.tie_word_embeddings and "lm_head.weight" not in filled:
        model.lm_head.weight = model.get_input_embeddings().weight
        filled.add("lm_head.weight")
    _require_all(model, filled, source)
    if unknown:
        logger.info(f"the model has no place for some weights of {source}; the first are of {unknown[0]}")
    for kind, count in dense.items():
        taken = f"{str(dtype).removeprefix('torch.')} ({dense_bytes[kind] / 1e6:.0f} MB)"
        why = reason or "there is no kernel for them"
        logger.info(f"{count} matrices of {kind} are dequantised to {taken}: {why}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _fill(module: nn.Module, owner: str, attribute: str, value: Tensor, dtype: torch.dtype, source: str) -> set[str]:
    """Set a parameter to a tensor of the file; tensors without a parameter (scales of caches) are skipped."""
    name = f"{owner}.{attribute}"
    own = getattr(module, attribute, None)
    if attribute not in module._parameters or own is None:
        return set()
    if not value.is_floating_point() or value.itemsize < 2:
        raise UserError(f"{name} of {source} is {value.dtype} and has no scales; use another checkpoint")
    if value.shape != own.shape:
        raise UserError(
            f"{name} of {source} has the shape {tuple(value.shape)}, and config.json makes it {tuple(own.shape)}; "
            "they do not belong together"
        )
    setattr(module, attribute, nn.Parameter(value.to(dtype), requires_grad=False))
    return {name}


def _require_all(model: nn.Module, filled: set[str], source: str) -> None:
    missing = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in filled]
    if any(model.get_parameter(name).ndim > 2 for name in missing):
        raise UserError(
            f"{source} has experts, and quantised ones are not read yet; use a copy of it in bfloat16, or a dense model"
        )
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} weights of its architecture, the first is {missing[0]}; use a complete "
            "checkpoint"
        )
