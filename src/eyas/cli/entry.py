"""What the console script calls: Ctrl-C is one line and exit code 130 from the first import on."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell starts what runs in the background deaf to Ctrl-C
        # Raised within an import, an interruption could be swallowed there. Nothing is lost yet, so it ends at once.
        signal.signal(signal.SIGINT, _end)
    from eyas.cli.app import main as run
    from eyas.cli.streams import keep_writing

    signal.signal(signal.SIGINT, before)
    try:
        keep_writing()
        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt this
        print("eyas: interrupted", file=sys.stderr)
        sys.exit(130)


def _end(number: int, frame: FrameType | None) -> None:
    print("eyas: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
