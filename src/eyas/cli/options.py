"""Options that several commands share, and how every command reports progress."""

import sys
from pathlib import Path
from typing import Annotated

import typer

Cache = Annotated[
    Path | None,
    typer.Option(
        envvar="EYAS_CACHE", help="Where converted models are kept.", show_default="the user's cache directory"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]


def report(message: str) -> None:
    """Progress goes to stderr, so that stdout holds results only."""
    print(message, file=sys.stderr, flush=True)
