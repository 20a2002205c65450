"""`eyas fetch`: obtain and convert a target ahead of its first use."""

from typing import Annotated

import typer

from eyas.cli.options import Cache


def fetch(
    target: Annotated[str, typer.Argument(help="Target: smollm2, a GGUF file, a folder or a hub id.")] = "smollm2",
    cache: Cache = None,
) -> None:
    """Obtain a target and print where it lies."""
    from eyas.target.locate import locate

    typer.echo(locate(target, cache=cache))
