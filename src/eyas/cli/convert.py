"""`eyas convert`: one drafter, the format of another server."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import report


class Format(StrEnum):
    """The formats; layouts.py holds what each means."""

    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"


def convert(
    source: Annotated[str, typer.Argument(help="A drafter's folder or hub id.")],
    destination: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    from_: Annotated[
        Format | None,
        typer.Option("--from", help="The format of the source, where config.json alone does not tell."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --to speculators: the target's name, as its library will load it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing destination.")] = False,
) -> None:
    """Write a drafter in another format. Weights are copied bit for bit; the source is never touched."""
    from eyas.drafter.checkpoint import find_folder, read_checkpoint, write_checkpoint
    from eyas.drafter.layouts import name_verifier, names_verifier
    from eyas.errors import UserError

    if target is not None and to is not Format.speculators:
        raise UserError(f"--target {target} means nothing with --to {to}; only speculators exports name a target")
    old, new = find_folder(source).resolve(), destination.resolve()
    if new.is_relative_to(old):
        raise UserError(f"{destination} lies in the source {source}; choose a destination outside it")
    if old.is_relative_to(new):
        raise UserError(f"{destination} holds the source {source}, which --force would remove; choose another place")
    checkpoint = read_checkpoint(source, layout=from_)
    if target is not None:
        checkpoint = replace(checkpoint, extras=name_verifier(checkpoint.extras, target))
    write_checkpoint(checkpoint, destination, layout=to, replace=force)
    typer.echo(f"{checkpoint.config.family} drafter, {checkpoint.layout} -> {to}: {destination}")
    if to is Format.speculators and not names_verifier(checkpoint.extras):
        report("note: no target is named; vLLM loads this, the speculators library needs --target NAME to do so")
