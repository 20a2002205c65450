"""Converts a GGUF file to a Hugging Face folder of bfloat16 weights, once.

transformers can open a GGUF file but keeps it packed and cannot save it; training, capture and vLLM want plain weights.
`eyas.json` in the folder says which file the weights were dequantised from.
Invariant: every key of the architecture and every tensor is either understood or named in an error, and the result has
exactly the tensors and shapes that transformers expects.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eyas.empty_model import matrices_without_memory
from eyas.errors import UserError
from eyas.target.gguf_architectures import ARCHITECTURES, ROPE_KEYS, ROPE_TENSORS, rope_parameters
from eyas.target.gguf_experts import published_shapes
from eyas.target.gguf_file import GgufFile
from eyas.target.gguf_tokenizer import stop_token_ids, write_tokenizer

CONVERTER_VERSION = 3
"""Part of every cached folder's name: raise it when a file would give another folder."""
SHARD_BYTES = 5 * 10**9
_BYTES_EACH = 2  # of bfloat16

logger = logging.getLogger(__name__)

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_OTHER_KEYS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "expert_count",
    "expert_used_count",
    "vocab_size",
    _EPSILON,
}
_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")


def convert(path: Path, folder: Path, *, sha256: str) -> None:
    """Fill the empty `folder` with a Hugging Face model made from the GGUF file `path`."""
    source = GgufFile(path)
    architecture = architecture_of(source)
    config = _config(source, architecture)
    names = tensor_names(source, architecture, config)
    logger.info(f"dequantising {len(names)} tensors of {path.name} to bfloat16 (once)")
    write_tokenizer(source, folder, vocab_size=config.vocab_size, max_length=config.max_position_embeddings)
    config.save_pretrained(folder)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=source.optional("tokenizer.ggml.bos_token_id", int, None),
        eos_token_id=list(stop_token_ids(source)),
        pad_token_id=source.optional("tokenizer.ggml.padding_token_id", int, None),
    )
    generation.save_pretrained(folder)
    write_bfloat16(
        folder,
        {name: place.shape(source) for name, place in names.items()},
        lambda name: dense_weight(source, names[name], name, architecture, config),
    )
    provenance = {
        "converter_version": CONVERTER_VERSION,
        "dequantised_from": {
            "file": path.name,
            "name": source.optional("general.name", str, ""),
            "license": source.optional("general.license", str, ""),
            "sha256": sha256,
            "tensor_types": source.tensor_types,
        },
    }
    (folder / "eyas.json").write_text(json.dumps(provenance, indent=2) + "\n")


def architecture_of(source: GgufFile) -> str:
    """Return the name of a supported architecture; refuse keys that are not understood."""
    name = source.required("general.architecture", str)
    kind = source.optional("general.type", str, "model")
    if name not in ARCHITECTURES or kind != "model":
        what = f"architecture {name!r}" if kind == "model" else f"a {kind}, not a model, of architecture {name!r}"
        raise source.unsupported(f"holds {what}; supported are models of {', '.join(ARCHITECTURES)}:")
    understood = {f"{name}.{key}" for key in (*_SIZES, *ROPE_KEYS, *_OTHER_KEYS, *ARCHITECTURES[name].keys)}
    unknown = [key for key in source.keys if key.startswith(f"{name}.") and key not in understood]
    if unknown:
        raise source.unsupported(f"sets {', '.join(unknown)}, which eyas does not understand and will not ignore;")
    experts = source.optional(f"{name}.expert_count", int, 0)
    if experts > 0 and not ARCHITECTURES[name].has_experts:
        mixtures = ", ".join(known for known, one in ARCHITECTURES.items() if one.has_experts)
        raise source.unsupported(
            f"is a mixture of {experts} experts of architecture {name!r}; mixtures are supported from GGUF for "
            f"{mixtures},"
        )
    return name


def _config(source: GgufFile, architecture: str) -> PretrainedConfig:
    values: dict[str, object] = {name: source.required(f"{architecture}.{key}", int) for key, name in _SIZES.items()}
    heads = source.required(f"{architecture}.attention.head_count", int)
    hidden = source.required(f"{architecture}.embedding_length", int)
    head_dim = source.optional(f"{architecture}.attention.key_length", int, hidden // max(heads, 1))
    if source.optional(f"{architecture}.attention.value_length", int, head_dim) != head_dim:
        raise UserError(f"{source.path} has keys and values of different sizes; use its safetensors folder instead")
    shapes = source.shapes
    for stored in ("token_embd.weight", "output_norm.weight"):
        if stored not in shapes:
            raise UserError(f"{source.path} has no tensor {stored}; it is not a complete model")
    known = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(
        known.model_type or architecture,
        **values,
        num_key_value_heads=source.optional(f"{architecture}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=shapes["token_embd.weight"][0],
        rms_norm_eps=source.required(f"{architecture}.{_EPSILON}", float),
        tie_word_embeddings="output.weight" not in shapes,
        eos_token_id=list(stop_token_ids(source)),
        dtype="bfloat16",
        **known.settings(source, rope_parameters(source, architecture, head_dim)),
    )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


class Place(NamedTuple):
    """Place of a weight in the file: a tensor, or the part of one expert in it."""

    tensor: str
    expert: int | None = None

    def shape(self, source: GgufFile) -> tuple[int, ...]:
        return source.shapes[self.tensor][0 if self.expert is None else 1 :]


def tensor_names(source: GgufFile, architecture: str, config: PretrainedConfig) -> dict[str, Place]:
    """Map each tensor of transformers' checkpoints to its place, in file order; checked against the model's own list.

    Experts are named one by one, as in published checkpoints.
    """
    with matrices_without_memory():
        empty = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    expected = published_shapes(empty)
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    known: dict[str | None, str] = {}
    for name in expected:  # GGUF keeps all experts of a layer in one tensor
        stored = table.get_name(_EXPERT.sub("", name), try_suffixes=(".weight", ".bias"))
        known[stored] = _EXPERT.sub(".{expert}", name)
    names: dict[str, Place] = {}
    for stored, shape in source.shapes.items():
        if stored in ROPE_TENSORS:
            continue
        if stored not in known:
            raise source.unsupported(f"has a tensor {stored} that a {architecture} model does not use;")
        name = known[stored]
        if "{expert}" in name and len(shape) == 3:
            names |= {name.format(expert=e): Place(stored, e) for e in range(shape[0])}
        else:
            names[name] = Place(stored)
    for name in sorted(expected.keys() | names.keys()):
        found = names[name].shape(source) if name in names else None
        if found != expected.get(name):
            raise UserError(
                f"{source.path} is not a whole {architecture} model: {name} is {found or 'missing'}, "
                f"expected {expected.get(name) or 'none'}; download or convert it again"
            )
    return names


def dense_weight(
    source: GgufFile, place: Place, name: str, architecture: str, config: PretrainedConfig
) -> torch.Tensor:
    """Return a tensor in float32 as transformers has it, under its name there."""
    weight = torch.from_numpy(source.tensor(*place))
    if ARCHITECTURES[architecture].norms_add_one and name.endswith("norm.weight"):
        return weight - 1
    order = row_order(name, len(weight), architecture, config)
    return weight if order is None else weight[order]


def row_order(name: str, rows: int, architecture: str, config: PretrainedConfig) -> torch.Tensor | None:
    """Return the file's row for each row of transformers' tensor `name`; None if the order is equal."""
    if name.partition("layers.")[2].partition(".")[2] not in ARCHITECTURES[architecture].permuted:
        return None
    # llama.cpp rotates neighbouring rows, transformers the two halves of a head: undo its reordering.
    pairs = torch.arange(rows).view(rows // config.head_dim, config.head_dim // 2, 2)
    return pairs.transpose(1, 2).flatten()


def write_bfloat16(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    produce: Callable[[str], torch.Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a bfloat16 tensor for each name in `shapes`, asking `produce` for each in that order.

    The safetensors library wants all tensors of a file in memory; here it is one at a time, because a header needs
    names and shapes only. The files are those of transformers: `model.safetensors`, or numbered shards with an index.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _BYTES_EACH
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = {
        name: "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    for names in shards:
        _write_shard(folder / files[names[0]], {name: shapes[name] for name in names}, produce)
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * _BYTES_EACH
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], produce: Callable[[str], torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * _BYTES_EACH
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of eight bytes
    with path.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little"))
        stream.write(encoded)
        for name, shape in shapes.items():
            tensor = produce(name).to(torch.bfloat16).contiguous()
            assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} produced, {shape} announced"
            stream.write(tensor.view(torch.int16).numpy().tobytes())
