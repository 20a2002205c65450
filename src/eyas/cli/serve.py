"""`eyas serve`, a model behind OpenAI's API, and `eyas export`, the same by vLLM without eyas."""

import linecache
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import MEMORY, MODEL, OUTPUT, SPECULATION, GroupedCommand, new_app
from eyas.cli.options import (
    CacheOptions,
    ServedEngineOptions,
    Target,
    VLLMArguments,
    build,
    command,
    load_libraries,
    options,
)
from eyas.cli.serve_options import COMMON, ServeArguments, split_target
from eyas.cli.terminal import report
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from socket import socket
    from ssl import SSLContext

    from eyas.serve.access.policy import AccessRules
    from eyas.serve.learning.collector import LearnFolder
    from eyas.serve.model_info import ModelInfo, ServerLimits
    from eyas.serve.served_engine import ServedEngine
    from eyas.serve.speculative_config import SpeculativeConfig
    from eyas.serve.vllm.command import ServeOptions as VLLMOptions

export_app = new_app("Write what other programs need to serve a target with its drafter.")
MAX_DEPTH = 7
"""The deepest that the controller and requests may draft, unless `num_speculative_tokens` is larger."""


@command(common=COMMON)
def serve(target: Target = DEFAULT_TARGET, vllm_arguments: VLLMArguments = None, *, given: ServeArguments) -> None:
    """Serve a target with its drafter behind OpenAI's API, with /health, /metrics, /status and a web page at /.

    Without arguments it serves the default target with the drafter that comes with eyas, on the loopback address.
    """
    from eyas.serve.speculative_config import read_speculative_config

    target, others = split_target(target, vllm_arguments or ())
    config = read_speculative_config(given.speculative_config, target, with_table=given.engine == "vllm")
    load_libraries(target, config.drafter, revision=given.revision, threads=given.threads, lean=True)
    from eyas.cli.serve_learning import learn_from, learner_settings, open_ring
    from eyas.serve.access.policy import access_rules, is_loopback
    from eyas.serve.model_info import ServerLimits, banner
    from eyas.serve.transport.root_path import read_root_path
    from eyas.serve.transport.server import listen, url_of
    from eyas.serve.transport.tls import tls_context

    access = access_rules(
        given.host,
        api_keys=given.api_key or (),
        admin_keys=given.admin_key or (),
        allowed_hosts=given.allowed_hosts or (),
        allowed_origins=given.allowed_origins or (),
    )
    limits = build(ServerLimits, given, queue=given.max_queue)
    given.chat_format()  # refused before the rest is looked at
    learner = learner_settings(given, target, config.drafter)
    opened = (_open_vllm if given.engine == "vllm" else _open_local)(target, config, others, given)
    tls, prefix = tls_context(given.ssl_certfile, given.ssl_keyfile), read_root_path(given.root_path)
    access, ring = open_ring(access, given)
    listener = listen(given.host, given.port)  # before loading: a port in use should fail at once
    with listener, nullcontext() if ring is None else closing(ring), opened as served:
        model_info = _model_info(target, served, given)
        for line in banner(model_info, served.memory):
            report(line)
        report(f"device    {served.device}")
        learn_folder = learn_from(ring, access, served, learner)
        keys, url = access.api_keys, url_of(listener, tls=tls is not None, root_path=prefix)
        if not keys and not is_loopback(given.host):
            report(
                f"warning   {given.host} can be reached by others and there is no --api-key: anyone may use this server"
            )
        report(f"at        {url}/v1, {f'API keys: {len(keys)}' if keys else 'no API key'}")
        if given.page:
            report(f"page      {url}/")
        if given.check:
            return
        _run(served, model_info, limits, access, learn_folder, prefix, listener, tls, given)


@options(MODEL)
class ExportOptions(ServedEngineOptions, CacheOptions):
    """What vLLM is to serve."""

    speculative_config: Annotated[
        str | None, Option(show_default="the target's own drafter", rich_help_panel=SPECULATION)
    ] = None
    """As for `eyas serve`."""
    out: Annotated[Path | None, Option(show_default="where it is, if vLLM reads it so", rich_help_panel=OUTPUT)] = None
    """Folder for the drafter in vLLM's format, which the line then names."""
    dtype: str = "auto"
    """vLLM's --dtype."""
    quantization: str = "auto"
    """auto, or fp8 to quantise while loading."""
    kv_cache_dtype: Annotated[str, Option(rich_help_panel=MEMORY)] = "auto"
    """auto or fp8."""
    gpu_memory_utilization: Annotated[float | None, Option(rich_help_panel=MEMORY)] = None
    """Share of the GPU's memory for all."""


@export_app.command("vllm-command", cls=GroupedCommand)
@command()
def vllm_command(
    target: Target = DEFAULT_TARGET, vllm_arguments: VLLMArguments = None, *, given: ExportOptions
) -> None:
    """Print the exact `vllm serve` line for a target and its drafter, checked first and in vLLM's format.

    For those who run vLLM by charts of their own, without eyas in front of it.
    """
    from eyas.serve.speculative_config import read_speculative_config
    from eyas.serve.vllm.version import SEAM

    target, others = split_target(target, vllm_arguments or ())
    config = read_speculative_config(given.speculative_config, target, with_table=True)
    load_libraries(target, config.drafter, revision=given.revision)
    line = options_for_vllm(target, config, others, given, drafter_out=given.out)
    report(f"for vLLM {SEAM}; eyas checked the drafter against the target's configuration")
    typer.echo(shlex.join(line.words()))


def _open_local(
    target: str, config: "SpeculativeConfig", others: Sequence[str], given: ServeArguments
) -> "AbstractContextManager[ServedEngine]":
    """eyas' own engine, not yet loaded."""
    from eyas.engine.config import EngineConfig, require_gpu, require_kv_cache_dtype
    from eyas.serve.served_engine import local_engine
    from eyas.target.device import choose_device

    if others or given.depths is not None:
        raise UserError(f"{others[0] if others else '--depths'} is for --engine vllm; add that, or leave it out")
    engine_config = build(
        EngineConfig,
        given,
        memory=None if given.memory_gib is None else int(given.memory_gib * 2**30),
        max_depth=max(MAX_DEPTH, config.depth or 0),
        suffix=config.suffix,
        capture_ahead=True,
    )
    if given.gpu_memory_utilization is not None:
        require_gpu(choose_device(given.device))
    require_kv_cache_dtype(engine_config, choose_device(given.device))
    return local_engine(
        target,
        config,
        engine_config,
        placement=given.placement(),
        drafter_swap=given.drafter_swap,
        allowed_drafters=given.allowed_drafters or (),
    )


def _open_vllm(
    target: str, config: "SpeculativeConfig", others: Sequence[str], given: ServeArguments
) -> "AbstractContextManager[ServedEngine]":
    """vLLM, not yet started."""
    from eyas.serve.vllm.served import vllm_engine
    from eyas.serve.vllm.version import require_version

    installed = require_version(given.vllm_python)
    if given.device != "auto":
        raise UserError(f"--device {given.device} is for eyas' own engine; vLLM takes those of CUDA_VISIBLE_DEVICES")
    told = options_for_vllm(target, config, others, given)
    return vllm_engine(
        target,
        told,
        config.drafter,
        installed=installed,
        revision=given.revision,
        chat_format=given.chat_format(),
        cache=given.cache,
    )


def options_for_vllm(
    target: str, config: "SpeculativeConfig", others: Sequence[str], given: Any, *, drafter_out: Path | None = None
) -> "VLLMOptions":
    """Make vLLM's options of those of `eyas serve` or `eyas export`."""
    from eyas.plan.depth_table import read_depths
    from eyas.serve.vllm.command import ServeOptions as VLLMOptions
    from eyas.serve.vllm.served import vllm_options

    if given.depths is not None and config.drafter is not None:
        if config.depth is not None or config.table is not None:
            raise UserError(f"--depths {given.depths} and --speculative-config both say how deep to draft; give one")
        config = replace(config, table=read_depths(given.depths))
    told = {field.name: getattr(given, field.name) for field in fields(VLLMOptions) if hasattr(given, field.name)}
    told |= {"name": given.served_model_name or target, "others": tuple(others)}
    del told["speculative_config"]  # `config`
    return vllm_options(target, config, cache=given.cache, drafter_out=drafter_out, **told)


def _model_info(target: str, served: "ServedEngine", given: ServeArguments) -> "ModelInfo":
    from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
    from eyas.serve.model_info import ModelInfo
    from eyas.target.text import read_defaults

    return ModelInfo(
        name=given.served_model_name or target,
        target=target,
        max_num_seqs=given.max_num_seqs,
        kv_cache_dtype=read_kv_cache_dtype(given.kv_cache_dtype),
        tool_parser=given.tool_call_parser,
        reasoning_parser=given.reasoning_parser,
        reasoning_content_alias=given.reasoning_content_alias,
        sampling_defaults=read_defaults(given.generation_config, served.generation),
        **served.facts,
    )


def _run(
    served: "ServedEngine",
    model_info: "ModelInfo",
    limits: "ServerLimits",
    access: "AccessRules",
    learn_folder: "LearnFolder | None",
    prefix: str,
    listener: "socket",
    tls: "SSLContext | None",
    given: ServeArguments,
) -> None:
    """Serve until the server is told to stop."""
    from eyas.freed_memory import give_back
    from eyas.serve.app import Application
    from eyas.serve.monitoring.json_logging import log_json_lines
    from eyas.serve.protocol.request_policy import RequestPolicy
    from eyas.serve.transport.server import Server

    log_json_lines(given.log_level.number)
    application = Application(
        served.client,
        model_info,
        limits=limits,
        policy=build(RequestPolicy, given),
        access=access,
        page=given.page,
        metrics_names=given.metrics_names,
        root_path=prefix,
        learn_folder=learn_folder,
        slot=served.slot,
    )
    application.context.compiler.start()
    linecache.clearcache()  # transformers reads its own source for docstrings
    give_back()  # memory of reading tokenizers and of the first steps
    try:
        Server(application, tls=tls).run([listener])
    finally:
        application.close()
