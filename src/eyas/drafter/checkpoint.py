"""A drafter on disk: a folder with config.json and safetensors. Read whole or refused; written whole or not at all.

Invariant: a `Checkpoint` that was read has every tensor its config demands, in the right shape and dtype, and none
that its config does not know. vLLM raises on unknown names but not on missing ones; here both are errors.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eyas.atomic import new_folder
from eyas.checksum import sha256_of_all
from eyas.drafter.config import DrafterConfig
from eyas.drafter.eagle1 import BIAS_KEY
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.layer_json import QUANTIZATION_KEY
from eyas.drafter.layer_kinds import Json
from eyas.drafter.layouts import LAYOUTS, detect
from eyas.drafter.model import Drafter
from eyas.drafter.quantised_linears import QuantisedLinears, read_linears
from eyas.drafter.recorded_acceptance import read_acceptance
from eyas.drafter.shipped import shipped_folder
from eyas.drafter.tensors import TensorSpec, expected_tensors
from eyas.drafter.vocab import check_offsets, membership_from_target_ids
from eyas.drafter.weight_files import PICKLE, PICKLES, read_tensors
from eyas.empty_model import matrices_without_memory
from eyas.errors import UserError
from eyas.hub import hub_options

_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A drafter's config and tensors under canonical names, and what its folder said besides."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    layout: str = "vllm"
    extras: Json
    """config.json keys that change nothing here; carried along so that a conversion loses none."""
    raw_config: Json
    folder: Path | None = None
    quantised: QuantisedLinears | None = None
    """Linears that are quantised on disk. `tensors` holds them too, dequantised: whoever changes those drops this."""

    @property
    def stored(self) -> dict[str, Tensor]:
        """Tensors as they lie on disk, under canonical names."""
        if self.quantised is None:
            return dict(self.tensors)
        dense = {f"{name}.weight" for name in self.quantised.weights}
        return {name: tensor for name, tensor in self.tensors.items() if name not in dense} | dict(
            self.quantised.stored
        )


def find_folder(source: str) -> Path:
    """The folder of a drafter: one that comes with eyas, `source` itself, or a snapshot of that hub id."""
    if (shipped := shipped_folder(source)) is not None:
        return shipped
    folder = Path(source)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise UserError(f"cannot look at {source}: {error.strerror}; check the path and its permissions") from error
    if is_folder:
        return folder
    if exists:
        raise UserError(f"{source} is a file; give the folder that holds config.json and *.safetensors")
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{source} does not exist; give a drafter's folder or a hub id such as org/name")
    options = hub_options(source)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.md", "LICENSE*"]
    try:
        snapshot = Path(snapshot_download(source, **options, allow_patterns=wanted))
        if not any(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(source, **options, allow_patterns=[*wanted, PICKLE]))
        return snapshot
    except Exception as error:  # the hub client raises a dozen kinds, from requests, huggingface_hub and the OS
        raise UserError(
            f"{source} is no folder here and could not be fetched from the hub ({type(error).__name__}); "
            "check the name and the network, or give a folder"
        ) from error


def fingerprint_drafter(source: str) -> str:
    """Tells a drafter's weights from others: the SHA-256 of its files."""
    folder = find_folder(source)
    return sha256_of_all(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")))


def read_raw_config(folder: Path) -> Json:
    """config.json as it stands."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} has no config.json; a drafter's folder holds config.json and *.safetensors")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); mend it or fetch the drafter again") from error
    if not isinstance(raw, dict):
        raise UserError(
            f"{path} holds a {type(raw).__name__}; config.json must be an object: mend it or fetch it again"
        )
    return raw


def tensor_problems(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """Everything wrong with a set of tensors, one line each."""
    expected = expected_tensors(config)
    problems = [
        f"tensor {name} is missing (expected {list(spec.shape)}); {_missing_remedy(name, config)}"
        for name, spec in expected.items()
        if spec.required and name not in tensors
    ]
    problems += [
        f"tensor {name} {list(tensor.shape)} is not part of this drafter; {_unknown_remedy(name, config)}"
        for name, tensor in tensors.items()
        if name not in expected
    ]
    for name, spec in expected.items():
        if name in tensors:
            problems += _misfits(name, tensors[name], spec)
    if not problems and "d2t" in tensors:
        problems += _vocabulary_problems(tensors, config.vocab_size)
    return problems


def _misfits(name: str, tensor: Tensor, spec: TensorSpec) -> list[str]:
    dtype = _SAFETENSORS_DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    if tuple(tensor.shape) != spec.shape:
        return [
            f"tensor {name} is {list(tensor.shape)}, expected {list(spec.shape)}; "
            "correct config.json or export the drafter again"
        ]
    if dtype not in spec.dtypes:
        return [f"tensor {name} is {dtype}, expected {' or '.join(sorted(spec.dtypes))}; convert it and save again"]
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).sum())
        return [f"tensor {name} holds {bad} values that are not finite; the training diverged, use an earlier step"]
    return []


def _missing_remedy(name: str, config: DrafterConfig) -> str:
    if name == "fc.bias":
        return "config.json says bias is true: set it to false if fc was trained without"
    if name == "fc.weight" and config.eagle1:
        return "every EAGLE-1 drafter has it: is this path the target instead of its drafter?"
    if name == "d2t":
        return (
            f"draft_vocab_size {config.draft_vocab_size} is below vocab_size {config.vocab_size}, and without d2t "
            "vLLM would take draft ids for target ids: export the drafter again with it"
        )
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return "the target's cannot stand in, its shape differs: export the drafter with its own"
    return "vLLM would load this and draft garbage: export the drafter again"


def _unknown_remedy(name: str, config: DrafterConfig) -> str:
    if config.eagle1:
        return _unknown_to_eagle1(name)
    for prefix, flag in (("fc_norm.", "fc_norm"), ("input_norm.", "norm_before_fc")):
        if name.startswith(prefix) and not getattr(config, flag):
            return f"config.json says {flag} is false: set it to true if the drafter was trained so"
    if name.endswith((".q_norm.weight", ".k_norm.weight")):
        return "norms of queries and keys are Qwen3's: say so by Eagle3Qwen3ForCausalLM in architectures"
    if ".kv_a_proj_with_mqa." in name or ".kv_b_proj." in name:
        return "latent attention is DeepSeek's: say so by Eagle3DeepseekV2ForCausalLM in architectures"
    if name in ("d2t", "t2d"):
        return f"draft_vocab_size equals vocab_size {config.vocab_size}, so remove it: vLLM refuses both together"
    if name.startswith("model."):
        return "EAGLE-3 tensors have no 'model.' prefix: strip it"
    return "vLLM would refuse it: remove it or correct config.json"


def _unknown_to_eagle1(name: str) -> str:
    if name == "lm_head.weight":
        return "an EAGLE-1 drafter uses the target's head, and vLLM refuses another: remove it"
    if name == "fc.bias":
        return "config.json says bias is false: set it to true if fc was trained with it"
    if name in ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"):
        return "an EAGLE-1 drafter has no norm there: was it trained as something else?"
    if name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias")):
        return (
            "config.json says no attention_bias; where queries, keys and values alone have biases, as Qwen2's "
            "have, eyas and vLLM do not run it"
        )
    if name.endswith(".bias"):
        return "vLLM would leave it out without a word: correct attention_bias or mlp_bias in config.json, or remove it"
    if ".experts." in name or ".block_sparse_moe." in name:
        return "eyas runs EAGLE-1 drafters with layers of Llama, not with experts: use such a one"
    if name.startswith("model."):
        return "EAGLE tensors have no 'model.' prefix: is this path the target instead of its drafter?"
    return "vLLM would refuse it: remove it or correct config.json"


def _vocabulary_problems(tensors: Mapping[str, Tensor], vocab_size: int) -> list[str]:
    d2t = tensors["d2t"]
    try:
        check_offsets(d2t, vocab_size)
    except UserError as error:
        return [str(error)]
    if "t2d" in tensors:
        target_ids = d2t + torch.arange(len(d2t))
        differing = int((membership_from_target_ids(target_ids, vocab_size) != tensors["t2d"]).sum())
        if differing:
            absolute = int(d2t.max()) < vocab_size and int(d2t.min()) >= 0
            if absolute and torch.equal(membership_from_target_ids(d2t, vocab_size), tensors["t2d"]):
                return [
                    "d2t holds absolute target ids (t2d agrees with them as such); it must hold offsets: "
                    "subtract arange(draft_vocab_size) from it"
                ]
            return [f"t2d disagrees with d2t on {differing} target ids; rebuild t2d from d2t"]
    return []


def read_checkpoint(source: str, *, layout: str | None = None) -> Checkpoint:
    """Read a drafter from a folder or a hub id, or raise for the first thing wrong with it."""
    checkpoint = read_unchecked(source, layout=layout)
    problems = tensor_problems(checkpoint.config, checkpoint.tensors)
    if problems:
        more = f" (and {len(problems) - 1} more; see `eyas check {source}`)" if len(problems) > 1 else ""
        raise UserError(f"{source}: {problems[0]}{more}")
    return checkpoint


def read_config(source: str) -> DrafterConfig:
    """What config.json alone says of a drafter."""
    raw = read_raw_config(find_folder(source))
    try:
        return detect(raw).read_config(raw)[0]
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def read_unchecked(source: str, *, layout: str | None = None) -> Checkpoint:
    """Read config and tensors without holding one against the other; `eyas check` reports on the result."""
    folder = find_folder(source)
    raw = read_raw_config(folder)
    chosen = detect(raw) if layout is None else LAYOUTS[layout]
    try:
        config, extras = chosen.read_config(raw)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    tensors = read_tensors(folder, chosen)
    if config.eagle1:
        config = _fc_bias(config, tensors, raw)
    linears = None
    if extras.get(QUANTIZATION_KEY):
        said = extras.pop(QUANTIZATION_KEY)
        tensors, linears = read_linears(said, tensors, getattr(torch, config.dtype), source)
    return Checkpoint(
        config=config,
        tensors=tensors,
        layout=chosen.name,
        extras=extras,
        raw_config=raw,
        folder=folder,
        quantised=linears,
    )


def _fc_bias(config: DrafterConfig, tensors: dict[str, Tensor], raw: Json) -> DrafterConfig:
    """Whether fc has a bias, where config.json does not say; one of zeros is none, and is left out."""
    if "fc.bias" in tensors and raw.get(BIAS_KEY) is not False and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
        return replace(config, fc_bias=False)
    return config if raw.get(BIAS_KEY) is not None else replace(config, fc_bias="fc.bias" in tensors)


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    *,
    layout: str = "vllm",
    replace: bool = False,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write a drafter as `layout` would; refuses what that format cannot express or its servers cannot run.

    `beside` are texts by file name that belong to these weights and appear with them.
    """
    chosen, config = LAYOUTS[layout], checkpoint.config
    problems = tensor_problems(config, checkpoint.tensors)
    if problems:
        raise UserError(f"refusing to write {destination}: {problems[0]}")
    extras = checkpoint.extras
    if checkpoint.quantised is not None:
        if chosen.not_quantised:
            raise UserError(
                f"the drafter is {checkpoint.quantised.scheme.words}, and {chosen.not_quantised}; "
                "dequantise it with --quantize none, or serve it with vLLM or eyas"
            )
        extras = {**extras, QUANTIZATION_KEY: checkpoint.quantised.said}
    config_json = chosen.write_config(config, extras)
    stored = {
        name: tensor.contiguous()
        for canonical, tensor in checkpoint.stored.items()
        for name in chosen.stored_names(canonical, config)
    }
    if layout == "sglang" and config.eagle1 and not config.fc_bias:
        # SGLang's fc always has a bias, which would stay as random as it was made.
        stored["fc.bias"] = torch.zeros(config.hidden_size, dtype=stored["fc.weight"].dtype)
    with new_folder(destination, replace=replace) as staging:
        try:
            # Twins share memory, which safetensors refuses; a copy is the plain way out.
            save_file(_unshared(stored), staging / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (staging / "config.json").write_text(json.dumps(config_json, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if checkpoint.folder is not None:
            _copy_companions(checkpoint.folder, staging)
        for name, text in (beside or {}).items():
            (staging / name).write_text(text, encoding="utf-8")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _copy_companions(source: Path, destination: Path) -> None:
    """Licence, model card, tokenizer: whatever else lies beside the weights, except weights."""
    left_out = ("config.json", "model.safetensors.index.json", f"{PICKLE}.index.json")
    for path in source.iterdir():
        weights = any(path.match(pattern) for pattern in ("*.safetensors", *PICKLES))
        if path.is_file() and path.name not in left_out and not weights:
            shutil.copy2(path, destination / path.name)


def build_drafter(checkpoint: Checkpoint) -> Drafter:
    """A drafter with the checkpoint's weights; what it does not ship waits for `share_target`."""
    with matrices_without_memory():
        drafter = new_drafter(
            checkpoint.config,
            own_embedding="embed_tokens.weight" in checkpoint.tensors,
            own_head="lm_head.weight" in checkpoint.tensors,
        )
    tensors = dict(checkpoint.tensors)
    for name in tensors.keys() & {"d2t", "t2d"}:
        # They are never cast, as weights are: where they lay in the file, all of it would stay mapped for them.
        tensors[name] = tensors[name].clone()
    if checkpoint.config.pruned and "t2d" not in tensors:
        target_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = membership_from_target_ids(target_ids, checkpoint.config.vocab_size)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)


def load_drafter(source: str) -> Drafter:
    """Read a drafter and build it, on the CPU and in the dtype it was stored in; a quantised one is dequantised."""
    return drafter_of(read_checkpoint(source))


def drafter_of(checkpoint: Checkpoint) -> Drafter:
    """Build a drafter, with how often it was accepted as far as its folder says."""
    drafter = build_drafter(checkpoint)
    if checkpoint.folder is not None:
        drafter.recorded_acceptance = read_acceptance(checkpoint.folder)
    return drafter


def checkpoint_of(drafter: Drafter) -> Checkpoint:
    """What of a drafter belongs on disk: its own tensors, not those it shares with the target."""
    shared = {"embed_tokens.weight"} if drafter.shares_embedding else set()
    shared |= {"lm_head.weight"} if drafter.shares_head else set()
    own = {name: t for name, t in drafter.state_dict().items() if not name.startswith("target_norm.")}
    tensors = {name: t.detach().cpu() for name, t in own.items() if name not in shared}
    # A drafter that was cast says on disk what it is now, not what it was built as.
    config = replace(drafter.config, dtype=str(drafter.fc.weight.dtype).removeprefix("torch."))
    return Checkpoint(config=config, tensors=tensors, extras={}, raw_config={})
