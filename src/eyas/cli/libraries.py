"""Imports torch and transformers, which takes seconds, where Ctrl-C can end it."""

import os
import signal
import threading
from types import FrameType

from eyas.cli.terminal import report
from eyas.threads import use_threads


def import_libraries(*, lean: bool = False, threads: int | None = None) -> None:
    """Import both, to compute with this many threads.

    An interruption ends the process at once: raised in native code it would abort. Nothing is lost by that, since a
    command calls this before it does anything. `lean` is for processes that neither compile nor run beside others;
    beside a GPU, where some MiB are nothing, all is imported.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, _end) if in_main else None
    try:
        import torch

        if lean and not torch.cuda.is_available():
            from eyas.target.lean_import import import_transformers

            import_transformers()
        else:
            import transformers  # noqa: F401
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    if threads is not None:
        use_threads(threads)


def _end(number: int, frame: FrameType | None) -> None:
    report("eyas: interrupted")
    os._exit(130)
