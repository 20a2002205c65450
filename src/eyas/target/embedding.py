"""The target's input embeddings without the target: one tensor out of a folder's safetensors.

`eyas check` holds a drafter's copy against it; loading a whole target for that would take minutes and gigabytes.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import UserError
from eyas.target.locate import locate

_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def read_embedding(source: str, *, cache: Path | None = None) -> torch.Tensor | None:
    """Return the table [V, D], or None where the weights are not on this machine or name it unusually."""
    folder = Path(locate(source, cache=cache))
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith(_NAMES) and "vision" not in name:
                        table: torch.Tensor = stored.get_tensor(name)
                        return table
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the target's {file} ({error}); fetch or export the target again") from error
    return None
