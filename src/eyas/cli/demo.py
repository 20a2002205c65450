"""`eyas demo`: the same prompts with and without speculation, side by side."""

import gc
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import read_chat_format, require_models
from eyas.cli.help import MODEL, SAMPLING, SPECULATION
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    KVCacheDtype,
    Quantization,
    Raw,
)

if TYPE_CHECKING:
    from eyas.engine.engine import Engine
    from eyas.engine.output import RequestOutput
    from eyas.engine.request import Speculation

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
)


def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to ask.", show_default="three prompts")] = None,
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter's name, folder or hub id.",
            show_default="the target's own, shipped",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    depth: Annotated[
        str, typer.Option(help="Tokens to draft: a number, or auto: as deep as pays.", rich_help_panel=SPECULATION)
    ] = "auto",
    max_tokens: Annotated[
        int, typer.Option(help="New tokens per answer at most.", min=1, rich_help_panel=SAMPLING)
    ] = 128,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Answer prompts plainly and with a drafter, one at a time, and compare speed and text."""
    require_models(target, drafter)
    import_libraries()
    from eyas.cli.speculation import read_depth
    from eyas.drafter.shipped import choose_drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.errors import UserError
    from eyas.loading import load_pair

    name = choose_drafter(drafter, target)
    if name is None:
        raise UserError(f"there is no drafter for {target} to compare with; name one with --drafter")
    speculation = read_depth(depth, name)
    if speculation.mode == "off":
        raise UserError("--depth 0 leaves nothing to compare; give 1 or more, or auto")
    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=raw)
    # Without the prefix cache: the second answer to a prompt must not profit from the first.
    options = EngineConfig(
        max_num_seqs=1, max_depth=speculation.depth or 7, prefix_cache=False, kv_cache_dtype=kv_cache_dtype
    )
    loaded, model = load_pair(
        target, name, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
    )
    engine = Engine(loaded, model, config=options)
    engine.capture_graphs()
    _both(engine, "Hello! Who are you?", speculation, max_tokens=32)  # later ones find done what this one pays for
    gc.collect()
    gc.freeze()  # a collector that went through all that is loaded would hold up one of the answers for 0.2 s
    rows = [_both(engine, prompt, speculation, max_tokens=max_tokens) for prompt in prompts or PROMPTS]
    whole = _figures(rows)
    if as_json:
        typer.echo(json.dumps({"target": target, "drafter": name, "depth": depth, "prompts": rows, "all": whole}))
        return
    for row in rows:
        typer.secho(f"\n{row['prompt']}", bold=True)
        typer.echo(row["answer"])
        same = "the same text" if row["same"] else "text differs behind a near-tie"
        typer.secho(f"[{row['tokens']} tokens: {_told(row)}; {same}]", dim=True)
    typer.secho(f"\nall {len(rows)}: {_told(whole)}", bold=True)


def _both(engine: "Engine", prompt: str, speculation: "Speculation", *, max_tokens: int) -> dict[str, Any]:
    """One prompt, plainly and with drafts."""
    from eyas.engine.request import Speculation

    ids = tuple(engine.target.encode_chat([{"role": "user", "content": prompt}]))
    plain, plain_seconds = _timed(engine, ids, Speculation(mode="off"), max_tokens)
    drafted, drafted_seconds = _timed(engine, ids, speculation, max_tokens)
    measured = {
        "tokens": len(drafted.tokens),
        "plain_tokens": len(plain.tokens),
        "plain_seconds": plain_seconds,
        "drafted_seconds": drafted_seconds,
        "drafts": drafted.stats.drafts,
        "accepted": drafted.stats.accepted,
    }
    return {"prompt": prompt, "answer": drafted.text, "same": plain.tokens == drafted.tokens, **_figures([measured])}


def _timed(
    engine: "Engine", ids: tuple[int, ...], speculation: "Speculation", max_tokens: int
) -> "tuple[RequestOutput, float]":
    from eyas.engine.request import Request
    from eyas.sampling import Sampling

    request = Request(
        prompt=ids,
        sampling=Sampling(),
        max_new_tokens=max_tokens,
        stop_ids=engine.target.stop_ids(),
        speculation=speculation,
    )
    started = time.perf_counter()
    (answer,) = engine.generate([request])
    return answer, time.perf_counter() - started


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was measured, over all rows, and what follows of it."""
    names = ("tokens", "plain_tokens", "plain_seconds", "drafted_seconds", "drafts", "accepted")
    all_: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    plain = all_["plain_tokens"] / all_["plain_seconds"]
    drafted = all_["tokens"] / all_["drafted_seconds"]
    return {
        **all_,
        "plain_tokens_per_second": plain,
        "drafted_tokens_per_second": drafted,
        "speedup": drafted / plain,
        "acceptance_length": 1 + all_["accepted"] / max(1, all_["drafts"]),
    }


def _told(figures: Mapping[str, Any]) -> str:
    return (
        f"plain {figures['plain_tokens_per_second']:.1f} tokens/s, with drafts "
        f"{figures['drafted_tokens_per_second']:.1f} tokens/s, {figures['speedup']:.2f}x; "
        f"acceptance length {figures['acceptance_length']:.2f}"
    )
