"""Atomic writing of folders and files.

They are written under a hidden name beside the destination, flushed to disk and renamed at the end, so readers never
see half of one, whatever interrupts the writer.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eyas.errors import UserError


@contextmanager
def new_folder(destination: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `destination` if the block succeeds, and is removed if it fails.

    An existing destination is an error unless `replace`; then the old one is removed last.
    """
    staging: Path | None = None
    new_parents: list[Path] = []
    try:
        if destination.exists() and not replace:
            raise UserError(
                f"{destination} exists and would be overwritten; choose another destination or pass --force"
            )
        new_parents = [parent for parent in destination.parents if not parent.exists()]
        if new_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.partial-", dir=destination.parent))
        staging.chmod(0o777 & ~_umask())
        yield staging
        _flush(staging)
        _move_into_place(staging, destination)
    except OSError as error:
        raise UserError(
            f"cannot write {destination}: {error.strerror or error}; nothing was left behind, "
            "free space or choose another destination"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # not empty: success, or another writer
                parent.rmdir()


@contextmanager
def new_file(destination: Path) -> Iterator[Path]:
    """Yield a path to write to; the file becomes `destination` if the block succeeds, else nothing changes."""
    staging = destination.with_name(f".{destination.name}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        _flush(staging)
        staging.replace(destination)
    except OSError as error:
        raise UserError(
            f"cannot write {destination}: {error.strerror or error}; what was there before is untouched, "
            "free space or choose another destination"
        ) from error
    finally:
        with suppress(OSError):
            staging.unlink()


def _move_into_place(staging: Path, destination: Path) -> None:
    if not destination.exists():
        staging.rename(destination)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{destination.name}.retired-", dir=destination.parent))
    old = retired / "old"
    try:
        destination.rename(old)
        try:
            staging.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
    except BaseException:
        with suppress(OSError):  # not empty: the old folder could not be moved back
            retired.rmdir()
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _flush(place: Path) -> None:
    """Sync a file, or a folder with its files, to disk; a rename alone does not."""
    for path in [*place.rglob("*"), place]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
