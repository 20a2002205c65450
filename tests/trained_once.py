"""Trains a small model once and keeps its weights in `.pytest_cache`, for all test processes and later runs.

The key covers the start, the arguments and every file of code that takes part, so a change there trains anew.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from torch import Tensor

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".pytest_cache" / "trained"
CODE = ("tests/tiny.py", "tests/trained_once.py", "src/eyas/drafter", "src/eyas/kernels/elementwise.py")
CODE += ("src/eyas/target/capture.py", "src/eyas/train/init.py")


@cache
def code_digest() -> bytes:
    """Digest of the code that trains and of the libraries' versions."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for name in CODE:
        for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]:
            digest.update(path.read_bytes())
    return digest.digest()


def trained_once(parameters: Sequence[Tensor], train: Callable[[], None], *arguments: object) -> None:
    """Give `parameters` the values that `train` leaves in them; `arguments` are all else that decides these."""
    digest = hashlib.sha256(code_digest())
    for value in (*parameters, *arguments):
        digest.update(value.detach().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    path = KEPT / f"{digest.hexdigest()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            with torch.no_grad():
                for parameter, value in zip(parameters, torch.load(path), strict=True):
                    parameter.copy_(value)
        else:
            train()
            torch.save([parameter.detach() for parameter in parameters], path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
