"""SHA-256 of files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import UserError


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of the bytes of `path`."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions") from error


def sha256_of_all(paths: Sequence[Path]) -> str:
    """Return one SHA-256 for several files in order; for a single file, its own."""
    digests = [sha256_of(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
