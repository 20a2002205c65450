"""A drafter as vLLM should load it: its folder where that says everything in vLLM's words, else a copy of it."""

from pathlib import Path

from eyas.checksum import sha256_of_all
from eyas.drafter.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from eyas.drafter.layer_json import QUANTIZATION_KEY
from eyas.drafter.layouts import LAYOUTS
from eyas.drafter.weight_files import weight_files

LAYOUT = "vllm"


def is_explicit(checkpoint: Checkpoint) -> bool:
    """Whether it is safetensors beside the config.json that eyas would write for vLLM: all flags, nothing to guess."""
    extras = checkpoint.extras
    if checkpoint.quantised is not None:
        extras = {**extras, QUANTIZATION_KEY: checkpoint.quantised.said}
    assert checkpoint.folder is not None
    if not any(checkpoint.folder.glob("*.safetensors")):
        return False
    return checkpoint.layout == LAYOUT and LAYOUTS[LAYOUT].write_config(checkpoint.config, extras) == (
        checkpoint.raw_config
    )


def vllm_folder(source: str, cache: Path, destination: Path | None = None) -> Path:
    """The folder to give to vLLM; a copy is kept in `cache` by its content, or written to `destination`."""
    checkpoint = read_checkpoint(source)
    folder = checkpoint.folder
    assert folder is not None, "it was read from one"
    if destination is not None:
        write_checkpoint(checkpoint, destination, layout=LAYOUT)
        return destination.resolve()
    if is_explicit(checkpoint):
        return folder.resolve()
    content = sha256_of_all([folder / "config.json", *weight_files(folder)])
    copy = cache.resolve() / "drafters" / f"{Path(source).resolve().name}-{content[:16]}"
    if not copy.is_dir():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, copy, layout=LAYOUT)
    return copy
