"""`eyas export`: what eyas knows, for programs that run without it."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.arguments import require_models
from eyas.cli.help import MEMORY, MODEL, SPECULATION, GroupedCommand, new_app
from eyas.cli.libraries import import_libraries
from eyas.cli.options import Cache, Depths, MaxModelLen, MaxNumSeqs, Revision, ServedModelName, VLLMArguments, report

app = new_app("export", help="Write what other programs need to serve a target with its drafter.")


@app.command("vllm-command", cls=GroupedCommand)
def vllm_command(
    target: Annotated[str, typer.Argument(help="smollm2, a GGUF file, a folder or a hub id.")] = "smollm2",
    vllm_arguments: VLLMArguments = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help="As for `eyas serve`.", show_default="the target's own drafter", rich_help_panel=SPECULATION),
    ] = None,
    depths: Depths = None,
    drafter_out: Annotated[
        Path | None,
        typer.Option(
            help="Write the drafter into this folder, in vLLM's layout, and name it in the line.",
            show_default="where it is, if vLLM reads it so",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    served_model_name: ServedModelName = None,
    revision: Revision = None,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.", rich_help_panel=MODEL)] = "auto",
    quantization: Annotated[
        str, typer.Option(help="auto, or fp8 to quantise while loading.", rich_help_panel=MODEL)
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.", rich_help_panel=MEMORY)] = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory for all.", rich_help_panel=MEMORY)
    ] = None,
    cache: Cache = None,
) -> None:
    """Print the exact `vllm serve` line for a target and its drafter, checked first and in vLLM's layout.

    For those who run vLLM by charts of their own, without eyas in front of it.
    """
    from eyas.cli.serve_vllm import read_table, split_target, vllm_options
    from eyas.cli.speculative_config import read_speculative_config
    from eyas.serve.vllm.version import SEAM

    target, others = split_target(target, vllm_arguments or ())
    config = read_speculative_config(speculative_config, target, with_table=True)
    require_models(target, config.drafter, revision=revision)
    import_libraries()
    options = vllm_options(
        target,
        read_table(config, depths),
        cache=cache,
        max_model_len=max_model_len,
        drafter_out=drafter_out,
        name=served_model_name or target,
        revision=revision,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        others=others,
    )
    report(f"for vLLM {SEAM}; eyas checked the drafter against the target's configuration")
    typer.echo(shlex.join(options.words()))
