"""`eyas serve`: a model behind OpenAI's API."""

import linecache
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.cli.arguments import read_chat_format, require_models
from eyas.cli.config_file import read_config_file
from eyas.cli.help import ACCESS, API, LEARNING, LIMITS, MEMORY, MODEL, NETWORK, OPERATION, SPECULATION
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    Cache,
    ChatTemplate,
    Depths,
    Device,
    Dtype,
    KVCacheDtype,
    LogLevel,
    MaxModelLen,
    MaxNumSeqs,
    Quantization,
    Raw,
    Revision,
    ServedModelName,
    Threads,
    VLLMArguments,
    report,
)
from eyas.errors import UserError

logger = logging.getLogger(__name__)
UnknownFieldsOption = Literal["refuse", "report"]
SchedulingPolicyOption = Literal["fcfs", "priority"]
MAX_DEPTH = 7
"""The deepest that the controller and requests may draft, unless `num_speculative_tokens` is larger."""
LEARN_ANSWERS, LEARN_INTERVAL = 500, 1800.0
"""Those of `LearnerSettings`, which is imported late."""


def serve(
    target: Annotated[str, typer.Argument(help="smollm2, a GGUF file, a folder or a hub id.")] = "smollm2",
    vllm_arguments: VLLMArguments = None,
    engine: Annotated[
        Literal["eyas", "vllm"],
        typer.Option(help="What computes: eyas itself, or a vLLM that it starts and watches.", rich_help_panel=MODEL),
    ] = "eyas",
    vllm_python: Annotated[
        str | None,
        typer.Option(
            envvar="EYAS_VLLM_PYTHON",
            help="With --engine vllm: the interpreter of an environment that has it.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    depths: Depths = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='As for vLLM: {"model": ..., "method": "eagle3", "num_speculative_tokens": 3}; without the number as '
            'deep as pays. Method "eagle" is EAGLE-1. {"method": "suffix"} needs no drafter, auto has both. Or none.',
            show_default="auto: the target's own drafter, if shipped, and suffix drafts",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    revision: Revision = None,
    chat_template: ChatTemplate = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help='Variables of the chat template as JSON, such as {"enable_thinking": false}; a request\'s own go over '
            "them.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    raw: Raw = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535, rich_help_panel=NETWORK)
    ] = 8000,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Serve HTTPS with this certificate (PEM, the chain included).", rich_help_panel=NETWORK),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            help="Its private key (PEM, not encrypted).",
            show_default="in the certificate's file",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option(help="The path that a proxy serves this under, such as /eyas.", rich_help_panel=NETWORK)
    ] = "",
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="EYAS_API_KEY", help="Require this key; repeat for several.", rich_help_panel=ACCESS),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EYAS_ADMIN_KEY",
            help="A key that may also change the server, as /v1/drafter does; repeat for several.",
            show_default="changes on loopback alone, without API keys",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Names that requests may be addressed to, beside loopback's; * for all.",
            show_default="loopback's, if it listens there without API keys; else all",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages elsewhere that may call the server, such as https://example.com; * for all.",
            show_default="none",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allowed_drafters: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter that /v1/drafter may load: name, folder or hub id; repeat for several.",
            show_default="those that come with eyas",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    drafter_swap: Annotated[
        bool, typer.Option("--drafter-swap/--no-drafter-swap", help="Take changes of drafter.", rich_help_panel=ACCESS)
    ] = True,
    served_model_name: ServedModelName = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_queue: Annotated[
        int, typer.Option(help="Most answers that wait; beyond that clients get 429.", min=0, rich_help_panel=LIMITS)
    ] = 256,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Most open connections; beyond that the longest silent one is closed.",
            show_default="as open files allow, at most 2048",
            min=1,
            rich_help_panel=LIMITS,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="The tool-call format: hermes, llama3_json, mistral, qwen3_coder, deepseek_v3, deepseek_v31, kimi_k2, "
            "glm45, openai, pythonic.",
            show_default="by the template",
            rich_help_panel=API,
        ),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Let requests bring a chat template, which is a program.",
            rich_help_panel=API,
        ),
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults: auto, the model's generation_config.json; vllm, none; or a folder.",
            rich_help_panel=API,
        ),
    ] = "auto",
    unknown_fields: Annotated[
        UnknownFieldsOption,
        typer.Option(help="Unknown fields of requests: refuse, or report in a header and ignore.", rich_help_panel=API),
    ] = "refuse",
    scheduling_policy: Annotated[
        SchedulingPolicyOption,
        typer.Option(
            help="fcfs: first come, first served; priority: by the request's priority first.", rich_help_panel=API
        ),
    ] = "fcfs",
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Tell reasoning from content: deepseek_r1, qwen3, glm45, openai_gptoss, ...; auto by the template.",
            show_default="off",
            rich_help_panel=API,
        ),
    ] = None,
    reasoning_content_alias: Annotated[
        bool,
        typer.Option("--reasoning-content-alias", help="Hold reasoning as reasoning_content too.", rich_help_panel=API),
    ] = False,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one pass of the target: newest tokens, drafts, and prompts in what is left.",
            show_default="512 on a CPU; 2048, or 8 per --max-num-seqs, on a GPU",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory for the KV cache, in GiB.", show_default="half of what is free", rich_help_panel=MEMORY
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Instead: share of the GPU's memory for weights, passes and KV cache together, as for vLLM.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    async_scheduling: Annotated[
        bool,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="On a GPU, launch every step before the tokens of the last one have arrived.",
            rich_help_panel=OPERATION,
        ),
    ] = True,
    request_seconds: Annotated[
        float, typer.Option(help="The longest a request may take.", rich_help_panel=LIMITS)
    ] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for answers in flight after SIGTERM.", rich_help_panel=OPERATION)
    ] = 30.0,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page", help="Serve the web page at /: chat, compare, dashboard.", rich_help_panel=OPERATION
        ),
    ] = True,
    metrics_names: Annotated[
        Literal["eyas", "vllm", "both"],
        typer.Option(help="Whose names /metrics uses: eyas_..., vllm:..., or both.", rich_help_panel=OPERATION),
    ] = "both",
    log_level: Annotated[
        LogLevel,
        typer.Option(
            help="Least severity of what is logged; requests are info.", case_sensitive=False, rich_help_panel=OPERATION
        ),
    ] = LogLevel.info,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Options from a YAML file: `max-num-seqs: 16`; the command line wins.",
            callback=read_config_file,
            is_eager=True,
            rich_help_panel=OPERATION,
        ),
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(
            help="Keep finished answers of keys that opted in, in this folder, for `eyas adapt` to learn from.",
            show_default="nothing is kept",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    learn_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EYAS_LEARN_KEY",
            help="One of the server's keys that opted in; repeat for several, * for all.",
            show_default="all on loopback without API keys, else none",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    learn_bytes: Annotated[
        int,
        typer.Option(help="Most bytes that are kept; the oldest answers go.", min=2**20, rich_help_panel=LEARNING),
    ] = 2**28,
    learn_share: Annotated[
        float,
        typer.Option(
            help="Share of the device's time in which the server adapts its drafter to what is kept, and swaps in what "
            "is better; 0: it only keeps.",
            min=0.0,
            max=1.0,
            rich_help_panel=LEARNING,
        ),
    ] = 0.0,
    learn_answers: Annotated[
        int, typer.Option(help="New answers that begin an adaptation.", rich_help_panel=LEARNING)
    ] = LEARN_ANSWERS,
    learn_interval: Annotated[
        float, typer.Option(help="Least seconds between two adaptations.", min=0.0, rich_help_panel=LEARNING)
    ] = LEARN_INTERVAL,
    learn_device: Annotated[
        str | None,
        typer.Option(
            help="Where adaptations run: cpu, cuda:1, ...", show_default="as --device", rich_help_panel=LEARNING
        ),
    ] = None,
    learn_options: Annotated[
        str,
        typer.Option(
            help="More options of `eyas adapt`: '--minutes 5 --replay general.jsonl'.", rich_help_panel=LEARNING
        ),
    ] = "",
    learn_resume: Annotated[
        bool,
        typer.Option(
            "--learn-resume/--no-learn-resume",
            help="Start with the last good drafter that was learnt in the folder, or with the one that is named.",
            rich_help_panel=LEARNING,
        ),
    ] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Load everything, print what would be served, and exit.", rich_help_panel=OPERATION
        ),
    ] = False,
    cache: Cache = None,
) -> None:
    """Serve a target with its drafter behind OpenAI's API, with /health, /metrics, /status and a web page at /.

    Without arguments it serves the default target with the drafter that comes with eyas, on the loopback address.
    """
    del config_file  # its values are the defaults of the other options by now
    from eyas.cli.serve_vllm import split_target
    from eyas.cli.speculative_config import read_speculative_config

    target, others = split_target(target, vllm_arguments or ())
    config = read_speculative_config(speculative_config, target, with_table=engine == "vllm")
    require_models(target, config.drafter, revision=revision)
    import_libraries(lean=True, threads=threads)
    from eyas.cli.serve_learning import adapt_options, closing_ring, learn_from, learner_settings, open_ring
    from eyas.freed_memory import give_back
    from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
    from eyas.serve.access.policy import access_rules, is_loopback
    from eyas.serve.app import Application
    from eyas.serve.model_info import ModelInfo, ServerLimits, banner
    from eyas.serve.monitoring.json_logging import log_json_lines
    from eyas.serve.protocol.request_policy import RequestPolicy
    from eyas.serve.transport.root_path import read_root_path
    from eyas.serve.transport.server import Server, listen, url_of
    from eyas.serve.transport.tls import tls_context
    from eyas.target.generation_defaults import read_defaults

    access = access_rules(
        host,
        api_keys=api_key or (),
        admin_keys=admin_key or (),
        allowed_hosts=allowed_hosts or (),
        allowed_origins=allowed_origins or (),
    )
    limits = ServerLimits(
        queue=max_queue,
        max_connections=max_connections,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
    )
    chat_format = read_chat_format(
        chat_template, default_chat_template_kwargs, raw=raw, kwargs_option="--default-chat-template-kwargs"
    )
    learner = learner_settings(
        learn_share,
        folder=learn,
        engine=engine,
        drafter=config.drafter,
        revision=revision,
        answers=learn_answers,
        interval=learn_interval,
        resume=learn_resume,
        options=adapt_options(
            target,
            dtype=dtype,
            quantization=quantization,
            device=device,
            learn_device=learn_device,
            chat_template=chat_template,
            raw=raw,
            cache=cache,
            more=learn_options,
        ),
    )
    if engine == "vllm":
        from eyas.cli.serve_vllm import read_table, vllm_engine, vllm_options
        from eyas.serve.vllm.version import require_version

        installed = require_version(vllm_python)
        if device != "auto":
            raise UserError(f"--device {device} is for eyas' own engine; vLLM takes those of CUDA_VISIBLE_DEVICES")
        told = vllm_options(
            target,
            read_table(config, depths),
            cache=cache,
            max_model_len=max_model_len,
            name=served_model_name or target,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory_gib=memory_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            dtype=dtype,
            quantization=quantization,
            revision=revision,
            scheduling_policy=scheduling_policy,
            async_scheduling=async_scheduling,
            others=others,
        )
        opened = vllm_engine(
            target,
            told,
            config.drafter,
            installed=installed,
            revision=revision,
            chat_format=chat_format,
            cache=cache,
        )
    else:
        from eyas.cli.serve_local import local_engine
        from eyas.engine.config import EngineConfig, require_gpu, require_kv_cache_dtype
        from eyas.target.device import choose_device

        if others or depths is not None:
            raise UserError(f"{others[0] if others else '--depths'} is for --engine vllm; add that, or leave it out")
        options = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            memory=None if memory_gib is None else int(memory_gib * 2**30),
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            max_depth=max(MAX_DEPTH, config.depth or 0),
            suffix=config.suffix,
            async_scheduling=async_scheduling,
            capture_ahead=True,
        )
        if gpu_memory_utilization is not None:
            require_gpu(choose_device(device))
        require_kv_cache_dtype(options, choose_device(device))
        opened = local_engine(
            target,
            config,
            options,
            dtype=dtype,
            device=device,
            quantization=quantization,
            revision=revision,
            chat_format=chat_format,
            cache=cache,
            drafter_swap=drafter_swap,
            allowed_drafters=allowed_drafters or (),
        )
    tls, prefix = tls_context(ssl_certfile, ssl_keyfile), read_root_path(root_path)
    access, ring = open_ring(access, host, learn, learn_key or (), learn_bytes)
    listener = listen(host, port)  # before loading: a port in use should fail at once
    with listener, closing_ring(ring), opened as served:
        model_info = ModelInfo(
            name=served_model_name or target,
            target=target,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=read_kv_cache_dtype(kv_cache_dtype),
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            reasoning_content_alias=reasoning_content_alias,
            sampling_defaults=read_defaults(generation_config, served.generation),
            **served.facts,
        )
        for line in banner(model_info, served.memory):
            report(line)
        report(f"device    {served.device}")
        learn_folder = learn_from(ring, access, served, learner, report)
        keys = access.api_keys
        if not keys and not is_loopback(host):
            report(f"warning   {host} can be reached by others and there is no --api-key: anyone may use this server")
        url = url_of(listener, tls=tls is not None, root_path=prefix)
        report(f"at        {url}/v1, {f'API keys: {len(keys)}' if keys else 'no API key'}")
        if page:
            report(f"page      {url}/")
        if check:
            return
        policy = RequestPolicy(
            unknown_fields=unknown_fields,
            scheduling_policy=scheduling_policy,
            trust_request_chat_template=trust_request_chat_template,
        )
        log_json_lines(log_level.number)
        application = Application(
            served.client,
            model_info,
            limits=limits,
            policy=policy,
            access=access,
            page=page,
            metrics_names=metrics_names,
            root_path=prefix,
            learn_folder=learn_folder,
            slot=served.slot,
        )
        application.context.compiler.start()
        linecache.clearcache()  # transformers reads its own source for docstrings
        give_back()  # what reading tokenizers and the first steps took
        try:
            Server(application, tls=tls).run([listener])
        finally:
            application.close()
