"""`eyas demo`: answers to a few prompts with and without speculation, side by side."""

import gc
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer import Option

from eyas.cli.help import SAMPLING
from eyas.cli.options import AsJson, KVCacheOptions, PairOptions, command, load_libraries
from eyas.errors import UserError

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
)


@command()
def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to ask.", show_default="three prompts")] = None,
    max_tokens: Annotated[int, Option(help="New tokens per answer at most.", min=1, rich_help_panel=SAMPLING)] = 128,
    *,
    pair: PairOptions,
    kept: KVCacheOptions,
    as_json: AsJson = False,
) -> None:
    """Answer prompts plainly and with a drafter, one at a time, and compare speed and text."""
    load_libraries(pair.target, pair.drafter)
    from eyas.drafter.shipped import choose_drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.evaluate.side_by_side import add_up, compare_answers
    from eyas.serve.speculative_config import read_depth

    name = choose_drafter(pair.drafter, pair.target)
    if name is None:
        raise UserError(f"there is no drafter for {pair.target} to compare with; name one with --drafter")
    speculation = read_depth(pair.depth, name)
    if speculation.mode == "off":
        raise UserError("--depth 0 leaves nothing to compare; give 1 or more, or auto")
    # Without the prefix cache: the second answer to a prompt must not profit from the first.
    config = EngineConfig(
        max_num_seqs=1, max_depth=speculation.depth or 7, prefix_cache=False, kv_cache_dtype=kept.kv_cache_dtype
    )
    engine = Engine(*pair.load_pair(name), config=config)
    engine.capture_graphs()
    compare_answers(engine, "Hello! Who are you?", speculation, max_tokens=32)  # pays for what is done once
    gc.collect()
    gc.freeze()  # a collector that went through all that is loaded would hold up one of the answers for 0.2 s
    rows = [compare_answers(engine, prompt, speculation, max_tokens=max_tokens) for prompt in prompts or PROMPTS]
    whole = add_up(rows)
    if as_json:
        record = {"target": pair.target, "drafter": name, "depth": pair.depth, "prompts": rows, "all": whole}
        typer.echo(json.dumps(record))
        return
    for row in rows:
        typer.secho(f"\n{row['prompt']}", bold=True)
        typer.echo(row["answer"])
        same = "the same text" if row["same"] else "text differs behind a near-tie"
        typer.secho(f"[{row['tokens']} tokens: {_described(row)}; {same}]", dim=True)
    typer.secho(f"\nall {len(rows)}: {_described(whole)}", bold=True)


def _described(figures: Mapping[str, Any]) -> str:
    return (
        f"plain {figures['plain_tokens_per_second']:.1f} tokens/s, with drafts "
        f"{figures['drafted_tokens_per_second']:.1f} tokens/s, {figures['speedup']:.2f}x; "
        f"acceptance length {figures['acceptance_length']:.2f}"
    )
