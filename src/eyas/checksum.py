"""SHA-256 of a file: the identity of weights that came from outside."""

import hashlib
from pathlib import Path

from eyas.errors import UserError


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of the bytes of `path`."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions") from error
