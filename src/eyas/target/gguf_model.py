"""A model of transformers over a GGUF file's own weights, which stay packed.

The converted folder (`gguf.py`) says which model it is. Here its matrices are those of the file, in the blocks that
they are multiplied in; the embeddings too, and a head that is tied to them is the same memory. Everything else is
float32, as the file has it.

Invariant: every tensor of the file is used, and no dense matrix of the model is ever made: a model of eight billion
weights must load where it fits packed.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from eyas.kernels.linear.quantised_linear import QuantisedEmbedding, QuantisedKernel, QuantisedLinear
from eyas.target.empty_model import matrices_without_memory
from eyas.target.gguf import architecture_of, dense_weight, row_order, tensor_names
from eyas.target.gguf_blocks import blocks_of, is_packable
from eyas.target.gguf_file import GgufFile

logger = logging.getLogger(__name__)


def has_packed_matrices(path: Path) -> bool:
    """Whether a GGUF file has matrices that can stay packed."""
    source = GgufFile(path)
    return any(is_packable(source.kind(name)) for name in source.shapes)


@torch.no_grad()
def packed_model(
    path: Path, kernel: QuantisedKernel, folder: str, config: PretrainedConfig, attention: str | None
) -> PreTrainedModel:
    """The model of a GGUF file, whose converted `folder` has this configuration; `attention` is transformers' name."""
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
            if not _stays_packed(module, source, stored)
        }
        if "weight" in weights:
            if weights["weight"].ndim > 1:
                dense[source.kind(attributes["weight"]).name] += 1
                weights["weight"] = weights["weight"].bfloat16().float()
            for attribute, weight in weights.items():
                setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
            continue
        stored = attributes["weight"]
        blocks = blocks_of(source.packed(stored), source.kind(stored), source.shapes[stored][1])
        order = row_order(f"{owner}.weight", len(blocks.q_NK), architecture, config)
        linear = QuantisedLinear.of(kernel, blocks if order is None else blocks.rows(order), weights.get("bias"))
        packed = QuantisedEmbedding(linear, _scale_of(module)) if isinstance(module, nn.Embedding) else linear
        model.set_submodule(owner, packed)
    if config.tie_word_embeddings:
        embedding = model.get_input_embeddings()
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = embedding.table
        else:
            model.lm_head.weight = embedding.weight
    if dense:
        told = ", ".join(f"{count} of {kind}" for kind, count in sorted(dense.items()))
        logger.info(f"matrices that have no integer product and are computed from bfloat16: {told}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model
    return loaded


def _by_module(names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Tensors of the file by the module they belong to and their name there."""
    modules: dict[str, dict[str, str]] = {}
    for name, stored in names.items():
        owner, _, attribute = name.rpartition(".")
        modules.setdefault(owner, {})[attribute] = stored
    return modules


def _stays_packed(module: nn.Module, source: GgufFile, stored: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) and is_packable(source.kind(stored))


def _scale_of(embedding: nn.Module) -> float | None:
    """What an embedding multiplies its rows by."""
    numbers = list(embedding.buffers())
    return float(numbers[0]) if numbers else None
