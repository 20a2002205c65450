"""Converted targets on disk: each is built once, whole, by one process.

A first run takes seconds and several may start together (test workers, two terminals, a server and a benchmark),
so building happens under a file lock: the second waits and finds the finished folder.
Invariant: a folder under its final name is complete; what a killed builder left is swept by the next one.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from eyas.atomic import new_folder
from eyas.errors import UserError

logger = logging.getLogger(__name__)


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filling it with `build` first when it is not there."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info(f"waiting for another process that is making {folder}")
            lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot use the cache {folder.parent}: {error.strerror or error}; choose one that can be written"
        ) from error
    try:
        if not folder.is_dir():
            for stale in folder.parent.glob(f".{folder.name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            with new_folder(folder) as staging:
                build(staging)
    finally:
        lock.release()
    return folder
