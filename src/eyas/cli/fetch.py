"""`eyas fetch`: obtain and convert a target ahead of its first use."""

import typer

from eyas.cli.options import CacheOptions, Target, command
from eyas.target.locate import DEFAULT_TARGET


@command()
def fetch(target: Target = DEFAULT_TARGET, *, cache: CacheOptions) -> None:
    """Obtain a target and print where it lies."""
    from eyas.target.locate import locate

    typer.echo(locate(target, cache=cache.cache))
