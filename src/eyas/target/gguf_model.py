"""Loads a transformers model whose matrices stay packed as in a GGUF file.

The configuration comes from the converted folder (`gguf.py`). Matrices and embeddings keep the file's quantised blocks;
a tied head shares the memory of the embeddings. All other weights are float32, as in the file.

Invariant: every tensor of the file is used, and no packable matrix is made dense: a model of eight billion weights must
load where it fits packed.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from eyas.empty_model import matrices_without_memory
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.packed_linear import load_kernel
from eyas.kernels.linear.quantised_linear import QuantisedKernel, QuantisedLinear
from eyas.target.gguf import Place, architecture_of, dense_weight, row_order, tensor_names
from eyas.target.gguf_blocks import blocks_of, is_packable
from eyas.target.gguf_experts import dense_experts, quantised_experts, stay_packed
from eyas.target.gguf_file import GgufFile

logger = logging.getLogger(__name__)


def has_packed_matrices(path: Path) -> bool:
    """Whether a GGUF file has matrices that can stay packed."""
    source = GgufFile(path)
    return any(is_packable(source.kind(name)) for name in source.shapes)


@torch.no_grad()
def packed_model(
    path: Path,
    kernel: QuantisedKernel,
    cache: Path | None,
    folder: str,
    config: PretrainedConfig,
    attention: str | None,
) -> PreTrainedModel:
    """Build the model of a GGUF file from the configuration of its converted `folder`.

    `attention` is transformers' name of it, None for the default. Compiled code is kept in `cache`.
    """
    source = GgufFile(path)
    architecture = architecture_of(source)
    names = tensor_names(source, architecture, config)
    with matrices_without_memory():
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=attention
        )
    dense: Counter[str] = Counter()
    for owner, attributes in _by_module(names).items():
        module = model.get_submodule(owner)
        weights = {
            attribute: dense_weight(source, stored, f"{owner}.{attribute}", architecture, config)
            for attribute, stored in attributes.items()
            if not _stays_packed(module, source, stored.tensor)
        }
        if "weight" in weights:
            if isinstance(module, nn.Linear | nn.Embedding):
                dense[source.kind(attributes["weight"].tensor).name] += 1
                weights["weight"] = weights["weight"].bfloat16().float()
            for attribute, weight in weights.items():
                setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
            continue
        stored = attributes["weight"].tensor
        blocks = blocks_of(source.packed(stored), source.kind(stored), source.shapes[stored][1])
        order = row_order(f"{owner}.weight", len(blocks.q_NK), architecture, config)
        linear = QuantisedLinear.of(kernel, blocks if order is None else blocks.rows(order), weights.get("bias"))
        packed = QuantisedEmbedding(linear, _scale_of(module)) if isinstance(module, nn.Embedding) else linear
        model.set_submodule(owner, packed)
    for owner, tensors in _by_experts(names).items():
        module = model.get_submodule(owner)
        if stay_packed(source, tensors):
            router = load_kernel(cache=cache)[0]
            model.set_submodule(owner, quantised_experts(module, source, tensors, kernel, router))
            continue
        dense.update(source.kind(tensor).name for tensor in tensors.values())
        for attribute, weight in dense_experts(source, tensors).items():
            setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
    if config.tie_word_embeddings:
        embedding = model.get_input_embeddings()
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = embedding.table
        else:
            model.lm_head.weight = embedding.weight
    if dense:
        told = ", ".join(f"{count} of {kind}" for kind, count in sorted(dense.items()))
        logger.info(f"matrices without an integer kernel, computed from bfloat16: {told}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model
    return loaded


def _by_module(names: Mapping[str, Place]) -> dict[str, dict[str, Place]]:
    """Group tensors, without those of experts, by module and attribute."""
    modules: dict[str, dict[str, Place]] = {}
    for name, place in names.items():
        if place.expert is None:
            owner, _, attribute = name.rpartition(".")
            modules.setdefault(owner, {})[attribute] = place
    return modules


def _by_experts(names: Mapping[str, Place]) -> dict[str, dict[str, str]]:
    """Group tensors of experts by the module of a layer's experts, and by projection."""
    modules: dict[str, dict[str, str]] = {}
    for name, place in names.items():
        match = re.fullmatch(r"(.+)\.0\.(\w+)\.weight", name)  # experts of a layer share tensors: expert 0 is enough
        if match is not None and place.expert is not None:
            modules.setdefault(match[1], {})[match[2]] = place.tensor
    return modules


def _stays_packed(module: nn.Module, source: GgufFile, stored: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) and is_packable(source.kind(stored))


def _scale_of(embedding: nn.Module) -> float | None:
    """Factor of an embedding's rows, if it has one."""
    numbers = list(embedding.buffers())
    return float(numbers[0]) if numbers else None
