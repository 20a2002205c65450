"""The libraries that take seconds to import, imported in one go where Ctrl-C can end it."""

import os
import signal
import threading
from types import FrameType

from eyas.cli.lean_imports import import_transformers
from eyas.cli.options import report
from eyas.threads import use_threads


def import_libraries(*, lean: bool = False, threads: int | None = None) -> None:
    """Import torch and transformers, to compute with so many threads.

    An interruption ends the process at once: raised in native code it would abort.
    Nothing is lost by that, since a command calls this before it does anything. `lean` is for processes that neither
    compile nor run beside others (`lean_imports.py`); beside a GPU, where some MiB are nothing, all is imported.
    """
    if threading.current_thread() is not threading.main_thread():
        _import(lean)
    else:
        before = signal.signal(signal.SIGINT, _end)
        try:
            _import(lean)
        finally:
            signal.signal(signal.SIGINT, before)
    if threads is not None:
        use_threads(threads)


def _import(lean: bool) -> None:
    import torch

    if lean and not torch.cuda.is_available():
        import_transformers()
    else:
        import transformers  # noqa: F401


def _end(number: int, frame: FrameType | None) -> None:
    report("eyas: interrupted")
    os._exit(130)
