"""A model of transformers over the weights of a quantised checkpoint, as they are published.

On a GPU linears stay packed where there is a product for their kind (`w8a8_linear.py`, `w4a16_linear.py`), and so do
experts in MXFP4 (`mxfp4_experts.py`). Elsewhere they are dequantised, one after the other, and that is said. Embedding,
head and norms are what the file has, usually 16 bits.

Invariant: every weight of the model comes from the file, and no dense copy of a packed matrix is made.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from eyas.empty_model import matrices_without_memory
from eyas.errors import UserError
from eyas.kernels.attention.choose import has_triton
from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight
from eyas.kernels.linear.quantised_weight import QuantisedWeight
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.kernels.llama.mxfp4_experts import Mxfp4Experts
from eyas.quantization.quantised_tensors import is_quantised, read_quantised
from eyas.quantization.quantization_config import METHODS, WeightScheme, weight_scheme
from eyas.target.mxfp4_tensors import fill_mxfp4, is_mxfp4, read_mxfp4

logger = logging.getLogger(__name__)

DTYPES_OF_KERNELS = (torch.bfloat16, torch.float16)
FP8_CAPABILITY = (8, 9)
"""Of GPUs that know fp8."""


def scheme_of(config: PretrainedConfig, source: str) -> WeightScheme | None:
    """How a checkpoint is quantised, where it is by a method that is read here; others are for transformers."""
    said = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not isinstance(said, Mapping) or said.get("quant_method") not in METHODS:
        return None
    return weight_scheme({"quantization_config": said}, source)


def multiplies(device: torch.device, kind: str, dtype: torch.dtype) -> str | None:
    """Why a device has no product for a kind of weights and this type of rows; None if it has one."""
    if device.type != "cuda":
        return "products of 8- and 4-bit weights of this kind run on a GPU only"
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
    """The model of a folder or hub id; `attention` is transformers' name, or None."""
    folder = Path(place) if Path(place).is_dir() else Path(snapshot_download(place, **hub))
    config = deepcopy(config)
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)  # it is not transformers that reads it
    with matrices_without_memory():
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention
        )
    reason = "it was asked for" if dequantise else multiplies(device, scheme.kind, dtype)
    filled, unknown, dense, dense_bytes = set[str](), list[str](), Counter[str](), Counter[str]()
    with _tensors(folder, source) as tensors:
        for owner, attributes in _by_module(tensors).items():
            try:
                module = model.get_submodule(owner)
            except AttributeError:
                unknown.append(owner)
                continue
            if is_mxfp4(attributes):
                read = {attribute: tensors[name](device) for attribute, name in attributes.items()}
                stored = read_mxfp4(read, module, owner)
                if reason is None:
                    gate_up, down = (Mxfp4Weight.of(*published) for published in stored.values())
                    module = Mxfp4Experts(module, gate_up, down, dtype)
                    model.set_submodule(owner, module)
                else:
                    for attribute, published in stored.items():
                        fill_mxfp4(module, attribute, published, dtype, owner)
                        dense[scheme.kind] += 1
                        dense_bytes[scheme.kind] += module.get_parameter(attribute).nbytes
                        filled.add(f"{owner}.{attribute}")
                attributes = {attribute: name for attribute, name in attributes.items() if attribute.endswith("_bias")}
            elif isinstance(module, nn.Linear) and is_quantised(scheme, attributes):
                read = {attribute: tensors[name](device) for attribute, name in attributes.items()}
                weight = read_quantised(scheme, read, owner)
                _require_shape(weight, module, owner)
                linear = None if reason else packed_linear(scheme, weight, read.get("bias"), dtype)
                if linear is not None:
                    model.set_submodule(owner, linear)
                    continue
                kind = scheme.kind if reason else f"{scheme.kind} in groups of {weight.group}"
                module.weight = nn.Parameter(weight.dequantised().to(dtype), requires_grad=False)
                dense[kind] += 1
                dense_bytes[kind] += module.weight.nbytes
                filled.add(f"{owner}.weight")
                attributes = {attribute: name for attribute, name in attributes.items() if attribute == "bias"}
            for attribute, name in attributes.items():
                filled |= _fill(module, owner, attribute, tensors[name](device), dtype, source)
    if config.tie_word_embeddings and "lm_head.weight" not in filled:
        model.lm_head.weight = model.get_input_embeddings().weight
        filled.add("lm_head.weight")
    _require_all(model, filled, source)
    if unknown:
        logger.info(f"{source} has weights that the model has no place for, the first are of {unknown[0]}")
    for kind, count in dense.items():
        taken = f"{str(dtype).removeprefix('torch.')} ({dense_bytes[kind] / 1e6:.0f} MB)"
        why = reason or "there is no product for them"
        logger.info(f"{count} matrices of {kind} are dequantised to {taken}: {why}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model.to(device)
    return loaded


def packed_linear(
    scheme: WeightScheme, weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype
) -> nn.Module | None:
    """The layer that multiplies a weight as it is; None where there is none."""
    if scheme.quantised_inputs and W8A8Linear.takes(weight):
        return W8A8Linear.of(weight, bias_E, dtype)
    if not scheme.quantised_inputs and W4A16Linear.takes(weight):
        return W4A16Linear.of(weight, bias_E, dtype)
    return None


def _require_shape(weight: QuantisedWeight, module: nn.Linear, name: str) -> None:
    expected = (module.out_features, module.in_features)
    if tuple(weight.q_EK.shape) != expected:
        raise UserError(
            f"{name} has {tuple(weight.q_EK.shape)} weights in the file, and config.json makes it {expected}; "
            "they do not belong together"
        )


def _fill(module: nn.Module, owner: str, attribute: str, value: Tensor, dtype: torch.dtype, source: str) -> set[str]:
    """Give a module a tensor of the file as it is; what it has no place for (scales of caches) is left out."""
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


class _Reader:
    """A tensor of a file, read when it is asked for."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __call__(self, device: torch.device) -> Tensor:
        found: Tensor = self._file.get_tensor(self._name)
        return found.to(device)


@contextmanager
def _tensors(folder: Path, source: str) -> Iterator[Mapping[str, _Reader]]:
    """The tensors of all files of a checkpoint by name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{source} has no file {missing[0]}; use a complete checkpoint in safetensors")
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in files]
            yield {name: _Reader(file, name) for file in opened for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"the weights of {source} are damaged ({error}); fetch them again") from error


def _by_module(names: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Names of tensors by the module they belong to and their name there."""
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        modules.setdefault(owner, {})[attribute] = name
    return modules
