"""`eyas features`: states of a target that another engine runs."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.help import GroupedCommand, new_app
from eyas.cli.options import Cache, report

app = new_app(help="Let vLLM compute the target's states for training.", add_completion=False)


@app.callback()
def options(context: typer.Context) -> None:
    """Let vLLM compute the target's states for training."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(cls=GroupedCommand)
def serve(
    target: Annotated[str, typer.Argument(help="The target: a folder, a hub id, a GGUF file or smollm2.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="Options of `vllm serve`, behind `--`.", show_default=False)
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option(help="The interpreter that vLLM is installed in.", show_default="the `vllm` on the path"),
    ] = None,
    aux_layer_ids: Annotated[
        str | None,
        typer.Option(help="Layers that drafters read: 2,15,27.", show_default="the target's default"),
    ] = None,
    states_folder: Annotated[
        Path, typer.Option(help="Where states are handed over; the recipe's features.states_folder.")
    ] = Path("/dev/shm/eyas-states"),
    max_length: Annotated[int, typer.Option(help="The recipe's data.max_length, or join_length.", min=1)] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32: as vLLM's.")] = "auto",
    port: Annotated[int, typer.Option(help="Where it listens.", min=1, max=65535)] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
    cache: Cache = None,
) -> None:
    """Start a vLLM server that hands out the target's hidden states to `eyas train`.

    It becomes vLLM: signals and exit status are vLLM's own. Options behind `--` are vLLM's, such as
    --tensor-parallel-size.
    """
    from eyas.errors import UserError
    from eyas.target.capture import check_aux_layer_ids
    from eyas.target.config import read_config
    from eyas.target.facts import facts_of
    from eyas.target.locate import locate, options_of
    from eyas.train.served.command import StatesServer, require_servable

    place = locate(target, cache=cache)
    config = read_config(target, place, options_of(target, place))
    facts = facts_of(config, target)
    require_servable(config.get_text_config(), facts)
    try:
        ids = None if aux_layer_ids is None else [int(word) for word in aux_layer_ids.split(",")]
    except ValueError as error:
        raise UserError(
            f"--aux-layer-ids {aux_layer_ids!r} is no list of whole numbers; write it as 2,15,27"
        ) from error
    server = StatesServer(
        model=place,
        layer_ids=check_aux_layer_ids(ids or facts.default_aux_layer_ids(), facts.num_hidden_layers),
        num_hidden_layers=facts.num_hidden_layers,
        folder=states_folder.absolute(),
        max_length=max_length,
        dtype=dtype,
        port=port,
        python=vllm_python,
    )
    if dry_run:
        typer.echo(server.line(vllm_options or ()))
        return
    program = _require_vllm(vllm_python)
    report(server.line(vllm_options or ()))
    states_folder.mkdir(parents=True, exist_ok=True)
    # Only what vLLM needs: this interpreter's packages are not vLLM's.
    os.execvpe(program, server.command(vllm_options or ()), {**os.environ, **server.environment()})


def _require_vllm(python: str | None) -> str:
    """The program that is run; refused where it is not the vLLM that is known."""
    from eyas.errors import UserError
    from eyas.serve.vllm.version import installed
    from eyas.train.served.command import VLLM_SERIES, require_series

    if python is None:
        if (found := shutil.which("vllm")) is None:
            raise UserError(
                f"there is no `vllm` on the path; install vLLM {VLLM_SERIES}0 into an environment of its own and pass "
                "--vllm-python with its interpreter"
            )
        return found
    require_series(installed(python), python)
    return python
