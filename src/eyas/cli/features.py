"""`eyas features`: states of a target that another engine runs."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from eyas.cli.help import OPERATION, GroupedCommand, new_app
from eyas.cli.options import CacheOptions, Target, build, command, options
from eyas.cli.terminal import report
from eyas.errors import UserError

app = new_app("Let vLLM compute the target's states for training.")


@options(OPERATION)
class StatesOptions(CacheOptions):
    """How vLLM is started."""

    vllm_python: Annotated[str | None, Option(show_default="the `vllm` on the path")] = None
    """The interpreter that vLLM is installed in."""
    aux_layer_ids: Annotated[str | None, Option(show_default="the target's default")] = None
    """Layers that drafters read: 2,15,27."""
    states_folder: Path = Path("/dev/shm/eyas-states")
    """Where states are handed over; the recipe's features.states_folder."""
    max_length: Annotated[int, Option(min=1)] = 2048
    """The recipe's data.max_length, or join_length."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32: as vLLM's."""
    port: Annotated[int, Option(min=1, max=65535)] = 8000
    """Where it listens."""
    dry_run: bool = False
    """Print the command and stop."""


@app.command(cls=GroupedCommand)
@command()
def serve(
    target: Target,
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="Options of `vllm serve`, behind `--`.", show_default=False)
    ] = None,
    *,
    given: StatesOptions,
) -> None:
    """Start a vLLM server that hands out the target's hidden states to `eyas train`.

    It becomes vLLM: signals and exit status are vLLM's own. Options behind `--` are vLLM's, such as
    --tensor-parallel-size.
    """
    from eyas.target.capture import check_aux_layer_ids
    from eyas.target.facts import facts_of, read_config
    from eyas.target.locate import locate, options_of
    from eyas.train.served.command import StatesServer, require_servable

    place = locate(target, cache=given.cache)
    config = read_config(target, place, options_of(target, place))
    facts = facts_of(config, target)
    require_servable(config.get_text_config(), facts)
    try:
        ids = [int(word) for word in given.aux_layer_ids.split(",")] if given.aux_layer_ids is not None else None
    except ValueError as error:
        raise UserError(
            f"--aux-layer-ids {given.aux_layer_ids!r} is no list of whole numbers; write it as 2,15,27"
        ) from error
    server = build(
        StatesServer,
        given,
        model=place,
        layer_ids=check_aux_layer_ids(ids or facts.default_aux_layer_ids(), facts.num_hidden_layers),
        num_hidden_layers=facts.num_hidden_layers,
        folder=given.states_folder.absolute(),
        python=given.vllm_python,
    )
    if given.dry_run:
        typer.echo(server.line(vllm_options or ()))
        return
    program = _require_vllm(given.vllm_python)
    report(server.line(vllm_options or ()))
    given.states_folder.mkdir(parents=True, exist_ok=True)
    # Only what vLLM needs: this interpreter's packages are not vLLM's.
    os.execvpe(program, server.command(vllm_options or ()), {**os.environ, **server.environment()})


def _require_vllm(python: str | None) -> str:
    """Find the program to run; refuse another vLLM than the one that is known."""
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
