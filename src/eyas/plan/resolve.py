"""Configurations of targets and drafters by the names that users give; no weight is read.

A target is `smollm2`, a config.json, a folder, a GGUF file or a hub id; a drafter is a shipped name, a config.json, a
folder or a hub id. Of a hub id only config.json is fetched: from the local cache, else from the hub.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_json import QUANTIZATION_KEY
from eyas.drafter.layouts import Layout, detect
from eyas.drafter.shipped import shipped_folder
from eyas.drafter.tensors import WEIGHT_DTYPES
from eyas.errors import UserError
from eyas.hub import hub_options
from eyas.plan.decoder import Decoder
from eyas.plan.footprint import DrafterShape
from eyas.plan.quantisation import stored_quantisation
from eyas.target.locate import DEFAULT_TARGET

Json = dict[str, Any]

DEFAULT_CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
"""Configuration of the default target, so that planning needs neither its file nor a network."""
DEFAULT_KINDS = {"token_embd.weight": ("Q8_0", 28_311_552), "blk.weight": ("Q4_1", 106_168_320)}
"""Types of the matrices in its GGUF file: those of the layers are all of one type."""
USUAL_VOCABULARY = 32000
"""Draft vocabulary of a drafter that is yet to be trained."""


def target_config(source: str) -> Json:
    """Find the configuration of a target."""
    if source == DEFAULT_TARGET:
        return dict(DEFAULT_CONFIG)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        return _gguf_config(path)
    return _config_at(path, source, "a target")[0]


def gguf_kinds(source: str) -> dict[str, tuple[str, int]] | None:
    """Type and number of weights of every matrix of a GGUF file, by name; None for every other target."""
    if source == DEFAULT_TARGET:
        return dict(DEFAULT_KINDS)
    path = Path(source).expanduser()
    if path.suffix.lower() != ".gguf" or not path.is_file():
        return None
    from eyas.target.gguf_file import GgufFile

    file = GgufFile(path)
    return {name: (file.kind(name).name, prod(shape)) for name, shape in file.shapes.items() if len(shape) > 1}


def drafter_shape(source: str) -> DrafterShape:
    """Find the shape of a drafter, and which tensors of its own its files have."""
    raw, folder = _config_at(shipped_folder(source) or Path(source).expanduser(), source, "a drafter")
    layout = detect(raw)
    config, extras = layout.read_config(raw)
    stored = None if folder is None else _stored_types(folder, layout)
    shape = _shape(Path(source).name, config, stored)
    stated = {QUANTIZATION_KEY: extras.get(QUANTIZATION_KEY)}
    return replace(shape, bits=stored_quantisation(stated, source).bits) if stated[QUANTIZATION_KEY] else shape


def usual_drafter(decoder: Decoder) -> DrafterShape:
    """Shape of a drafter as usually trained: one layer as wide as the target, three states, a pruned vocabulary.

    Its heads are like the target's; for targets with a latent they have 128 numbers, and 8 are of keys and values.
    """
    heads, kv_heads, head_dim = decoder.heads, decoder.kv_heads, decoder.head_dim
    if decoder.latent:
        head_dim = 128
        heads = max(1, decoder.hidden_size // head_dim)
        kv_heads = 8 if heads % 8 == 0 else heads
    config = DrafterConfig(
        vocab_size=decoder.vocab_size,
        draft_vocab_size=min(USUAL_VOCABULARY, decoder.vocab_size),
        hidden_size=decoder.hidden_size,
        target_hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        fc_norm=True,
        norm_output=True,
    )
    shape = _shape("yet to be trained", config, None)
    return replace(shape, assumed=True)


def require_match(decoder: Decoder, drafter: DrafterShape) -> None:
    """Refuse a drafter for a target of another shape."""
    for word, mine, theirs in (
        ("hidden size", drafter.config.target_hidden_size, decoder.hidden_size),
        ("vocabulary", drafter.config.vocab_size, decoder.vocab_size),
    ):
        if mine != theirs:
            raise UserError(
                f"drafter {drafter.name} was made for a target with {word} {mine}, and {decoder.source} has {theirs}; "
                "choose a drafter of this target, or leave --drafter out to plan with one of the usual shape"
            )


def _shape(name: str, config: DrafterConfig, stored: dict[str, str] | None) -> DrafterShape:
    """Combine a configuration with stored dtypes; without files, bfloat16 and only tensors that it cannot borrow."""
    same_width = config.hidden_size == config.target_hidden_size
    if stored is None:
        return DrafterShape(
            name=name,
            config=config,
            own_embedding=not same_width or config.eagle1,  # published EAGLE-1 drafters have a copy
            own_head=config.pruned or not same_width,
            halved=True,
        )
    matrices = stored.get("fc.weight")
    if matrices not in WEIGHT_DTYPES:  # quantised, so the head is the only plain matrix
        matrices = stored.get("lm_head.weight")
    return DrafterShape(
        name=name,
        config=config,
        own_embedding="embed_tokens.weight" in stored,
        own_head="lm_head.weight" in stored,
        halved=matrices == "BF16",
    )


def _stored_types(folder: Path, layout: Layout) -> dict[str, str] | None:
    """Read dtypes by canonical tensor name from the headers of a folder's files; None without files."""
    types: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: Json = json.loads(stream.read(min(length, 2**28)))
        except (OSError, ValueError, struct.error) as error:
            raise UserError(f"{path} has no readable header ({error}); fetch the drafter again") from error
        types |= {layout.canonical_name(name): entry.get("dtype", "") for name, entry in header.items()}
    return types if files else None


def _config_at(path: Path, source: str, what: str) -> tuple[Json, Path | None]:
    """Read config.json of a file, a folder or a hub id; also return the folder, if there is one."""
    if not source.strip():
        raise UserError(f"the name of {what} is empty; give a config.json, a folder or a hub id")
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise UserError(f"cannot look at {source}: {error.strerror}; check the path and its permissions") from error
    if is_folder:
        return _read_json(path / "config.json"), path
    if is_file:
        return _read_json(path), None
    if source.count("/") != 1 or source.startswith((".", "/", "~")) or source.endswith(("/", ".json")):
        raise UserError(f"there is no {source}; give {what} as a config.json, a folder or a hub id such as org/name")
    return _read_json(_from_hub(source)), None


def _read_json(path: Path) -> Json:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}; give the folder or file of a model") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); mend it or fetch it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}; config.json must be an object: mend it")
    return raw


def _from_hub(source: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, "config.json", local_files_only=True))
    except Exception:  # not in the cache; the client raises several kinds
        pass
    options = hub_options(source)
    try:
        return Path(hf_hub_download(source, "config.json", **options))
    except Exception as error:  # the client raises a dozen kinds, its own, the network's and the system's
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(
            f"config.json of {source} cannot be had from the hub ({reason}); give the path of its config.json"
        ) from error


def _gguf_config(path: Path) -> Json:
    """Configuration from the metadata of a GGUF file; a GPU dequantises it to bfloat16."""
    from eyas.target.gguf_file import GgufFile

    if not path.is_file():
        raise UserError(f"there is no GGUF file {path}; check the path")
    file = GgufFile(path)
    kind = file.required("general.architecture", str)
    shapes = file.shapes
    if "token_embd.weight" not in shapes:
        raise UserError(f"{path} has no tensor token_embd.weight; it is not a complete model")
    heads = file.required(f"{kind}.attention.head_count", int)
    return {
        "model_type": kind,
        "dtype": "bfloat16",
        "hidden_size": file.required(f"{kind}.embedding_length", int),
        "intermediate_size": file.required(f"{kind}.feed_forward_length", int),
        "num_hidden_layers": file.required(f"{kind}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.optional(f"{kind}.attention.head_count_kv", int, heads),
        "head_dim": file.optional(f"{kind}.attention.key_length", int, None),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "max_position_embeddings": file.optional(f"{kind}.context_length", int, None),
    }
