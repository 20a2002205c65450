"""Compiles C for this CPU at first use, with a shared thread pool.

Machine code in a wheel would serve either every CPU slowly or one of them well; compiling on the user's machine takes
two seconds, once, and is faster. Without a compiler the caller learns why and uses torch.

All libraries share one thread pool (`threads.c`), which is loaded first. Invariants: a cached library was made from
this source by this compiler for this CPU and is complete, or it is made again; nothing here raises, and whatever is
missing is returned as a sentence.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from eyas.atomic import new_folder
from eyas.checksum import sha256_of
from eyas.errors import UserError

THREADS = Path(__file__).with_name("threads.c")
"""The shared thread pool."""
LIBRARY = "library.so"
CHECKSUM = "library.sha256"
# Fused multiply-add rounds once, in every loop alike, whatever the compiler's default. Scheduling before register
# allocation would move loads up until the sums no longer fit into registers.
FLAGS = ["-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-schedule-insns"]
# x86 compilers avoid AVX-512 by default and would split each of its vectors in two. On some CPUs GCC also avoids
# fusing single chains of sums: then a row alone would be rounded differently than among others.
FLAGS_OF_ARM = ["-mcpu=native"]
FLAGS_OF_X86 = ["-march=native", "-mprefer-vector-width=512", "--param=avoid-fma-max-bits=0"]
COMPILE_SECONDS = 60


class _UnavailableError(Exception):
    """Why there is no native code; never leaves this module."""


def load_native(
    source: Path, *, cache: Path | None = None, defines: Sequence[str] = ()
) -> tuple[ctypes.CDLL | None, str]:
    """Return the compiled `source` and its compiler, or None and the reason why there is none."""
    folder = (cache or user_cache_path("eyas")) / "native"
    reasons = []
    try:
        if sys.platform != "linux":
            raise _UnavailableError(f"native code is made on Linux only, this is {sys.platform}")
        for compiler in _compilers():
            try:
                _load(THREADS, compiler, folder, (), ctypes.RTLD_GLOBAL)
                return _load(source, compiler, folder, defines), f"{_version(compiler)}, for this processor"
            except (OSError, UserError, subprocess.SubprocessError, _UnavailableError) as error:
                reasons.append(f"{shlex.join(compiler)}: {error}")
    except (OSError, _UnavailableError) as error:
        reasons.append(str(error))
    return None, "; ".join(reasons) or "no C compiler found (looked for $CC, cc, gcc and clang)"


def _load(
    source: Path, compiler: list[str], folder: Path, defines: Sequence[str], mode: int = ctypes.RTLD_LOCAL
) -> ctypes.CDLL:
    flags = FLAGS + (FLAGS_OF_ARM if platform.machine() == "aarch64" else FLAGS_OF_X86)
    flags += [f"-D{name}" for name in defines]
    # Headers beside the source or above it may be part of it.
    parts = [source, *sorted(source.parent.glob("*.h")), *sorted(source.parent.parent.glob("*.h"))]
    identity = [part.read_text() for part in parts]
    identity += [*flags, *compiler, _version(compiler), platform.machine(), _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    made = folder / f"{source.stem}-{key}"
    if not _is_whole(made):
        folder.mkdir(parents=True, exist_ok=True)
        # Of processes that start together, the second waits and finds the library.
        with FileLock(folder / f".{made.name}.lock"):
            if not _is_whole(made):
                with new_folder(made, replace=True) as staging:
                    _compile(source, compiler, flags, staging)
    return ctypes.CDLL(str(made / LIBRARY), mode=mode)


def _compile(source: Path, compiler: list[str], flags: list[str], folder: Path) -> None:
    compiled, library = folder / "compiled.o", folder / LIBRARY
    _call([*compiler, *flags, "-c", str(source), "-o", str(compiled)])
    _call([*compiler, "-shared", "-pthread", str(compiled), "-o", str(library)])
    compiled.unlink()
    (folder / CHECKSUM).write_text(sha256_of(library))


def _is_whole(folder: Path) -> bool:
    """Whether the library matches its checksum; loading a damaged one would kill the process."""
    try:
        return sha256_of(folder / LIBRARY) == (folder / CHECKSUM).read_text()
    except (OSError, UserError, ValueError):
        return False


def _compilers() -> Iterator[list[str]]:
    """Commands to try; `cc` is often another name of one of the others."""
    seen = set()
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        program = shutil.which(words[0]) if words else None
        if program is not None:
            found = (Path(program).resolve(), *words[1:])
            if found not in seen:
                seen.add(found)
                yield [program, *words[1:]]


def _version(compiler: list[str]) -> str:
    return _call([*compiler, "--version"]).partition("\n")[0]


def _call(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if finished.returncode != 0:
        lines = finished.stderr.splitlines() or [f"ended with status {finished.returncode}"]
        raise _UnavailableError(next((line for line in lines if "error" in line), lines[0]))
    return finished.stdout


def _processor() -> str:
    """Identifies the CPU: machines that differ may share a cache."""
    telling = re.compile(r"(vendor_id|cpu family|model|stepping|flags|CPU \w+|Features)\b")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if telling.match(line)}))
