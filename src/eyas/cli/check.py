"""`eyas check`: what a drafter is, and whether it will work with a target."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.options import TARGET_HELP, AsJson, CacheOptions, Drafter, command, load_libraries
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.drafter.check import CheckReport
    from eyas.drafter.config import DrafterConfig

_COLOURS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "note": typer.colors.BLUE}


@command()
def check(
    drafter: Drafter,
    target: Annotated[str | None, typer.Option(help=TARGET_HELP, show_default="the drafter is checked alone")] = None,
    *,
    kept: CacheOptions,
    as_json: AsJson = False,
) -> None:
    """Say what a drafter is and refuse what a server would load silently wrong. Exit code 2 if it will not work."""
    load_libraries(target or DEFAULT_TARGET, drafter)
    from eyas.drafter.check import check as run
    from eyas.target.facts import read_facts

    if target is None:
        result = run(drafter)
    else:
        from eyas.target.facts import read_embedding

        facts = read_facts(target, cache=kept.cache)
        result = run(drafter, target=facts, target_embedding=lambda: read_embedding(target, cache=kept.cache))
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _print_text(result)
    if not result.ok:
        raise typer.Exit(2)


def _flags(config: "DrafterConfig") -> str:
    names = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    if config.eagle1:
        return f"bias of fc {'yes' if config.fc_bias else 'no'}; {', '.join(names)} do not apply"
    return ", ".join(f"{flag} {'yes' if getattr(config, flag) else 'no'}" for flag in names)


def _print_text(result: "CheckReport") -> None:
    config = result.config
    ids = "the target's default" if config.aux_layer_ids is None else ", ".join(map(str, config.aux_layer_ids))
    pruned = f"{config.draft_vocab_size} of {config.vocab_size}" if config.pruned else f"all {config.vocab_size}"
    shipped = [
        name for name, ships in (("embeddings", result.ships_embedding), ("head", result.ships_head)) if not ships
    ]
    states = f"after layers {ids}"
    if config.eagle1:
        states = "behind the target's last norm"
    rows = {
        "drafter": f"{result.family} ({result.layout} format), {result.source}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size} ({result.layers}), reading target states "
        f"of width {config.target_hidden_size} {states}",
        "vocabulary": pruned,
        "flags": _flags(config),
        "rope": f"{config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']:g}, "
        f"{config.max_position_embeddings} positions",
        "size": f"{result.parameters / 1e6:.1f} M weights, {result.bytes / 2**20:.1f} MiB, "
        f"{result.kv_bytes_per_token} bytes of KV cache per token",
        "linears": result.quantization or config.dtype,
        "from target": ", ".join(shipped) or "nothing",
    }
    for name, text in rows.items():
        typer.echo(f"{name:12} {text}")
    for finding in result.findings:
        typer.secho(f"{finding.severity:12} {finding.message}", fg=_COLOURS[finding.severity])
    judged = f"with {result.target}" if result.target else "by itself (pass --target to check the pair)"
    typer.echo(f"{'verdict':12} {'works' if result.ok else 'will NOT work'} {judged}")
