"""A drafter on disk: a folder with config.json and safetensors, which is read, checked, written and built.

Invariant: a checkpoint by `read_checkpoint` has exactly the tensors of its config, in the right shapes and dtypes. vLLM
raises on unknown names but not on missing ones; here both are errors.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eyas.atomic import new_folder
from eyas.checksum import sha256_of_all
from eyas.drafter.config import DrafterConfig
from eyas.drafter.eagle1 import unknown_tensor_remedy, with_fc_bias
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.layer_json import QUANTIZATION_KEY, Json
from eyas.drafter.layouts import LAYOUTS, Layout, detect
from eyas.drafter.model import Drafter
from eyas.drafter.quantised_linears import QuantisedLinears, read_linears
from eyas.drafter.recorded_acceptance import read_acceptance
from eyas.drafter.shipped import shipped_folder
from eyas.drafter.tensors import expected_tensors
from eyas.drafter.vocab import check_offsets, membership_from_target_ids
from eyas.drafter.weight_files import PICKLE, PICKLES, read_tensors, weight_files
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
    """A drafter's config, its tensors under canonical names, and the rest of its folder."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    layout: str = "vllm"
    extras: Json
    """Keys of config.json that change nothing; kept so that a conversion loses none."""
    raw_config: Json
    folder: Path | None = None
    quantised: QuantisedLinears | None = None
    """Linears that are quantised on disk. `tensors` has them dequantised: set this to None when you change those."""

    @property
    def stored(self) -> dict[str, Tensor]:
        """Tensors as they are on disk, under canonical names."""
        if self.quantised is None:
            return dict(self.tensors)
        dense = {f"{name}.weight" for name in self.quantised.weights}
        return {name: tensor for name, tensor in self.tensors.items() if name not in dense} | {**self.quantised.stored}

    @property
    def extras_on_disk(self) -> Json:
        return self.extras if self.quantised is None else {**self.extras, QUANTIZATION_KEY: self.quantised.said}


def find_folder(source: str) -> Path:
    """Return the folder of a drafter: a shipped one, `source` itself, or a snapshot of that hub id."""
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
    """Return the SHA-256 of a drafter's weight files."""
    folder = find_folder(source)
    return sha256_of_all(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")))


def read_raw_config(folder: Path) -> Json:
    """Return the content of config.json."""
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
    """Return everything wrong with a set of tensors, one line each."""
    problems = list(_name_and_shape_problems(config, tensors))
    if not problems and "d2t" in tensors:
        problems += _vocabulary_problems(tensors["d2t"], tensors.get("t2d"), config.vocab_size)
    return problems


def _name_and_shape_problems(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    expected = expected_tensors(config)
    for name, spec in expected.items():
        if spec.required and name not in tensors:
            yield f"tensor {name} is missing (expected {list(spec.shape)}); {_missing_remedy(name, config)}"
    for name, tensor in tensors.items():
        if name not in expected:
            yield f"tensor {name} {list(tensor.shape)} is not part of this drafter; {_unknown_remedy(name, config)}"
    for name in (name for name in expected if name in tensors):
        tensor, spec = tensors[name], expected[name]
        dtype = _SAFETENSORS_DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        if tuple(tensor.shape) != spec.shape:
            yield (
                f"tensor {name} is {list(tensor.shape)}, expected {list(spec.shape)}; "
                "correct config.json or export the drafter again"
            )
        elif dtype not in spec.dtypes:
            yield f"tensor {name} is {dtype}, expected {' or '.join(sorted(spec.dtypes))}; convert it and save again"
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            yield f"tensor {name} holds {bad} values that are not finite; the training diverged, use an earlier step"


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
        return unknown_tensor_remedy(name)
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


def _vocabulary_problems(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> Iterator[str]:
    try:
        check_offsets(d2t, vocab_size)
    except UserError as error:
        yield str(error)
        return
    members = membership_from_target_ids(d2t + torch.arange(len(d2t)), vocab_size)
    if t2d is None or torch.equal(members, t2d):
        return
    absolute = int(d2t.max()) < vocab_size and int(d2t.min()) >= 0
    if absolute and torch.equal(membership_from_target_ids(d2t, vocab_size), t2d):
        yield (
            "d2t holds absolute target ids (t2d agrees with them as such); it must hold offsets: "
            "subtract arange(draft_vocab_size) from it"
        )
    else:
        yield f"t2d disagrees with d2t on {int((members != t2d).sum())} target ids; rebuild t2d from d2t"


def read_checkpoint(source: str, *, layout: str | None = None) -> Checkpoint:
    """Read a drafter from a folder or a hub id; raises the first problem."""
    checkpoint = read_unchecked(source, layout=layout)
    problems = tensor_problems(checkpoint.config, checkpoint.tensors)
    if problems:
        more = f" (and {len(problems) - 1} more; see `eyas check {source}`)" if len(problems) > 1 else ""
        raise UserError(f"{source}: {problems[0]}{more}")
    return checkpoint


def read_config(source: str) -> DrafterConfig:
    """Read the config of a drafter, without its tensors."""
    raw = read_raw_config(find_folder(source))
    return _parsed(source, detect(raw), raw)[0]


def _parsed(source: str, layout: Layout, raw: Json) -> tuple[DrafterConfig, Json]:
    try:
        return layout.read_config(raw)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def read_unchecked(source: str, *, layout: str | None = None) -> Checkpoint:
    """Read config and tensors without comparing them; `eyas check` reports on the result."""
    folder = find_folder(source)
    raw = read_raw_config(folder)
    chosen = detect(raw) if layout is None else LAYOUTS[layout]
    config, extras = _parsed(source, chosen, raw)
    tensors = read_tensors(folder, chosen)
    if config.eagle1:
        config = with_fc_bias(config, tensors, raw)
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


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    *,
    layout: str = "vllm",
    replace: bool = False,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write a drafter in the format `layout`; refuses what it cannot express or its servers cannot run.

    `beside` maps names of further files to their text. The folder appears whole or not at all.
    """
    chosen, config = LAYOUTS[layout], checkpoint.config
    problems = tensor_problems(config, checkpoint.tensors)
    if problems:
        raise UserError(f"refusing to write {destination}: {problems[0]}")
    if checkpoint.quantised is not None and chosen.not_quantised:
        raise UserError(
            f"the drafter is {checkpoint.quantised.scheme.words}, and {chosen.not_quantised}; "
            "dequantise it with --quantize none, or serve it with vLLM or eyas"
        )
    config_json = chosen.write_config(config, checkpoint.extras_on_disk)
    stored = {
        name: tensor.contiguous()
        for canonical, tensor in checkpoint.stored.items()
        for name in chosen.stored_names(canonical, config)
    }
    if layout == "sglang" and config.eagle1 and not config.fc_bias:
        # SGLang's fc always has a bias, which would keep its random values.
        stored["fc.bias"] = torch.zeros(config.hidden_size, dtype=stored["fc.weight"].dtype)
    with new_folder(destination, replace=replace) as staging:
        try:
            # safetensors refuses tensors that share memory, as twins do.
            save_file(_unshared(stored), staging / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (staging / "config.json").write_text(json.dumps(config_json, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if checkpoint.folder is not None:
            _copy_other_files(checkpoint.folder, staging)
        for name, text in (beside or {}).items():
            (staging / name).write_text(text, encoding="utf-8")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _copy_other_files(source: Path, destination: Path) -> None:
    """Copy licence, model card, tokenizer: everything but weights and config."""
    left_out = ("config.json", "model.safetensors.index.json", f"{PICKLE}.index.json")
    for path in source.iterdir():
        weights = any(path.match(pattern) for pattern in ("*.safetensors", *PICKLES))
        if path.is_file() and path.name not in left_out and not weights:
            shutil.copy2(path, destination / path.name)


def build_drafter(checkpoint: Checkpoint) -> Drafter:
    """Build a drafter with the checkpoint's weights; `share_target` adds the tables that it does not ship."""
    with matrices_without_memory():
        drafter = new_drafter(
            checkpoint.config,
            own_embedding="embed_tokens.weight" in checkpoint.tensors,
            own_head="lm_head.weight" in checkpoint.tensors,
        )
    tensors = dict(checkpoint.tensors)
    for name in tensors.keys() & {"d2t", "t2d"}:
        # Not cast like weights: without a copy, the whole file would stay mapped for them.
        tensors[name] = tensors[name].clone()
    if checkpoint.config.pruned and "t2d" not in tensors:
        target_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = membership_from_target_ids(target_ids, checkpoint.config.vocab_size)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)


def load_drafter(source: str) -> Drafter:
    """Read and build a drafter on the CPU, in its stored dtype; a quantised one is dequantised."""
    return drafter_of(read_checkpoint(source))


def drafter_of(checkpoint: Checkpoint) -> Drafter:
    """Build a drafter, with the acceptance that its folder records."""
    drafter = build_drafter(checkpoint)
    if checkpoint.folder is not None:
        drafter.recorded_acceptance = read_acceptance(checkpoint.folder)
    return drafter


def checkpoint_of(drafter: Drafter) -> Checkpoint:
    """Return a drafter's own tensors for writing, without those it shares with the target."""
    shared = {"embed_tokens.weight"} if drafter.shares_embedding else set()
    shared |= {"lm_head.weight"} if drafter.shares_head else set()
    own = {name: t for name, t in drafter.state_dict().items() if not name.startswith("target_norm.")}
    tensors = {name: t.detach().cpu() for name, t in own.items() if name not in shared}
    # The drafter may have been cast since it was built.
    config = replace(drafter.config, dtype=str(drafter.fc.weight.dtype).removeprefix("torch."))
    return Checkpoint(config=config, tensors=tensors, extras={}, raw_config={})


def is_explicit(checkpoint: Checkpoint) -> bool:
    """Whether a folder has safetensors and the config.json that eyas writes for vLLM: nothing is left to guess."""
    assert checkpoint.folder is not None, "it was read from one"
    if checkpoint.layout != "vllm" or not any(checkpoint.folder.glob("*.safetensors")):
        return False
    return LAYOUTS["vllm"].write_config(checkpoint.config, checkpoint.extras_on_disk) == checkpoint.raw_config


def vllm_folder(source: str, cache: Path, destination: Path | None = None) -> Path:
    """Return the folder to give to vLLM: the drafter's own if explicit, else a copy in `cache`, or at `destination`."""
    checkpoint = read_checkpoint(source)
    folder = checkpoint.folder
    assert folder is not None, "it was read from one"
    if destination is not None:
        write_checkpoint(checkpoint, destination)
        return destination.resolve()
    if is_explicit(checkpoint):
        return folder.resolve()
    content = sha256_of_all([folder / "config.json", *weight_files(folder)])
    copy = cache.resolve() / "drafters" / f"{Path(source).resolve().name}-{content[:16]}"
    if not copy.is_dir():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, copy)
    return copy
