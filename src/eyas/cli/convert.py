"""`eyas convert`: one drafter, in the format of another server or with its linears in 8 bits."""

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


class Rounding(StrEnum):
    """What linears are kept in; drafter/quantised_linears.py holds what each means."""

    none = "none"
    int8 = "int8"
    fp8 = "fp8"


def convert(
    source: Annotated[str, typer.Argument(help="A drafter's folder or hub id.")],
    destination: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    to: Annotated[Format | None, typer.Option(help="The format to write.", show_default="the source's")] = None,
    from_: Annotated[
        Format | None,
        typer.Option("--from", help="The format of the source, where config.json alone does not tell."),
    ] = None,
    quantize: Annotated[
        Rounding | None,
        typer.Option(
            help="Keep the projections of the layers and fc in 8 bits (compressed-tensors, W8A8), which vLLM and eyas "
            "run as they are; head, embeddings and norms stay. none: dequantise.",
            show_default="as the source is",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --to speculators: the target's name, as its library will load it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing destination.")] = False,
) -> None:
    """Write a drafter in another format, or quantised. Other weights are copied bit for bit; the source stays."""
    from eyas.drafter.checkpoint import find_folder, read_checkpoint, write_checkpoint
    from eyas.drafter.layouts import name_verifier, names_verifier
    from eyas.drafter.quantise import dequantised, quantised
    from eyas.errors import UserError

    if to is None and quantize is None:
        raise UserError(f"there is nothing to convert; say --to {'|'.join(Format)} or --quantize {'|'.join(Rounding)}")
    if to is None and target is not None:
        raise UserError(f"--target {target} goes with --to speculators; add it, or leave --target out")
    if target is not None and to is not Format.speculators:
        raise UserError(f"--target {target} means nothing with --to {to}; only speculators exports name a target")
    old, new = find_folder(source).resolve(), destination.resolve()
    if new.is_relative_to(old):
        raise UserError(f"{destination} lies in the source {source}; choose a destination outside it")
    if old.is_relative_to(new):
        raise UserError(f"{destination} holds the source {source}, which --force would remove; choose another place")
    checkpoint = read_checkpoint(source, layout=from_)
    before, to = checkpoint, to or Format(checkpoint.layout)
    if quantize is not None:
        is_none = quantize is Rounding.none
        checkpoint = dequantised(checkpoint, source) if is_none else quantised(checkpoint, quantize, source)
    if target is not None:
        checkpoint = replace(checkpoint, extras=name_verifier(checkpoint.extras, target))
    write_checkpoint(checkpoint, destination, layout=to, replace=force)
    words = "" if checkpoint.quantised is None else f", {checkpoint.quantised.scheme.words}"
    typer.echo(f"{checkpoint.config.family} drafter, {checkpoint.layout} -> {to}{words}: {destination}")
    if quantize is not None:
        sizes = (sum(tensor.nbytes for tensor in one.stored.values()) / 1e6 for one in (checkpoint, before))
        typer.echo("{:.1f} MB of weights instead of {:.1f}".format(*sizes))
    if to is Format.speculators and not names_verifier(checkpoint.extras):
        report("note: no target is named; vLLM loads this, the speculators library needs --target NAME to do so")
