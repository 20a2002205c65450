"""What the console script calls: Ctrl-C is one line and exit code 130 from the first import on."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    try:
        from eyas.cli.app import main as run
        from eyas.cli.streams import keep_writing

        keep_writing()
        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt this
        print("eyas: interrupted", file=sys.stderr)
        sys.exit(130)
