"""`eyas convert`: one drafter, in the format of another server or with its linears in 8 bits."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from eyas.cli.options import Drafter, command
from eyas.cli.terminal import report
from eyas.errors import UserError


class Format(StrEnum):
    """Formats of checkpoints; drafter/layouts.py holds what each means."""

    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"


class Rounding(StrEnum):
    """Types of linears; drafter/quantised_linears.py holds what each means."""

    none = "none"
    int8 = "int8"
    fp8 = "fp8"


@command()
def convert(
    drafter: Drafter,
    out: Annotated[Path, Option(help="Folder for the converted drafter; must not exist.")],
    to: Annotated[Format | None, Option(help="The format to write.", show_default="the drafter's")] = None,
    from_: Annotated[
        Format | None, Option("--from", help="The drafter's format, where config.json alone does not tell.")
    ] = None,
    quantize: Annotated[
        Rounding | None,
        Option(
            help="Keep the projections of the layers and fc in 8 bits (compressed-tensors, W8A8), which vLLM and eyas "
            "run as they are; head, embeddings and norms stay. none: dequantise.",
            show_default="as the drafter is",
        ),
    ] = None,
    target: Annotated[
        str | None, Option(help="With --to speculators: the target's name, as its library will load it.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Write a drafter in another format, or quantised. Other weights are copied bit for bit; the source stays."""
    from eyas.drafter.checkpoint import find_folder, read_checkpoint, write_checkpoint
    from eyas.drafter.layouts import name_verifier, names_verifier
    from eyas.drafter.quantise import dequantised, quantised

    if to is None and quantize is None:
        raise UserError(f"there is nothing to convert; say --to {'|'.join(Format)} or --quantize {'|'.join(Rounding)}")
    if to is None and target is not None:
        raise UserError(f"--target {target} goes with --to speculators; add it, or leave --target out")
    if target is not None and to is not Format.speculators:
        raise UserError(f"--target {target} means nothing with --to {to}; only speculators exports name a target")
    old, new = find_folder(drafter).resolve(), out.resolve()
    if new.is_relative_to(old):
        raise UserError(f"{out} lies in the source {drafter}; choose a destination outside it")
    if old.is_relative_to(new):
        raise UserError(f"{out} holds the source {drafter}, which --force would remove; choose another place")
    checkpoint = read_checkpoint(drafter, layout=from_)
    before, to = checkpoint, to or Format(checkpoint.layout)
    if quantize is not None:
        is_none = quantize is Rounding.none
        checkpoint = dequantised(checkpoint, drafter) if is_none else quantised(checkpoint, quantize, drafter)
    if target is not None:
        checkpoint = replace(checkpoint, extras=name_verifier(checkpoint.extras, target))
    write_checkpoint(checkpoint, out, layout=to, replace=force)
    words = "" if checkpoint.quantised is None else f", {checkpoint.quantised.scheme.words}"
    typer.echo(f"{checkpoint.config.family} drafter, {checkpoint.layout} -> {to}{words}: {out}")
    if quantize is not None:
        sizes = (sum(tensor.nbytes for tensor in one.stored.values()) / 1e6 for one in (checkpoint, before))
        typer.echo("{:.1f} MB of weights instead of {:.1f}".format(*sizes))
    if to is Format.speculators and not names_verifier(checkpoint.extras):
        report("note: no target is named; vLLM loads this, the speculators library needs --target NAME to do so")
