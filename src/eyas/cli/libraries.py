"""The libraries that take seconds to import, imported in one go where Ctrl-C can end it."""

import os
import signal
import threading
from types import FrameType

from eyas.cli.options import report


def import_libraries() -> None:
    """Import torch and transformers. An interruption ends the process at once: raised in native code it would abort.

    Nothing is lost by that, since a command calls this before it does anything.
    """
    if threading.current_thread() is not threading.main_thread():
        _import()
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        _import()
    finally:
        signal.signal(signal.SIGINT, before)


def _import() -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401


def _end(number: int, frame: FrameType | None) -> None:
    report("eyas: interrupted")
    os._exit(130)
