"""The options of `eyas serve`, by the groups of its help."""

import logging
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from eyas.cli.config_file import read_config_file
from eyas.cli.help import ACCESS, API, LEARNING, LIMITS, MEMORY, MODEL, NETWORK, OPERATION, SPECULATION
from eyas.cli.options import (
    CacheOptions,
    KVCacheOptions,
    PrecisionOptions,
    ServedEngineOptions,
    ThreadOptions,
    options,
    vars_of,
)
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.target.chat_template import ChatFormat

COMMON = (
    *("speculative_config", "host", "port", "api_key", "served_model_name"),
    *("max_model_len", "max_num_seqs", "dtype", "quantization", "device"),
)


class LogLevel(StrEnum):
    """Severities, as Python names them."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"

    @property
    def number(self) -> int:
        """The level as `logging` counts."""
        return logging.getLevelNamesMapping()[self.upper()]


@options(MODEL)
class ServeModelOptions(PrecisionOptions):
    """What is loaded, and by which engine."""

    engine: Literal["eyas", "vllm"] = "eyas"
    """The engine: eyas itself, or a vLLM that it starts and watches."""
    vllm_python: Annotated[str | None, Option(envvar="EYAS_VLLM_PYTHON")] = None
    """With --engine vllm: the interpreter of an environment that has it."""
    speculative_config: Annotated[
        str | None,
        Option(
            show_default="auto: the target's own drafter, if shipped, and suffix drafts", rich_help_panel=SPECULATION
        ),
    ] = None
    """As for vLLM: {"model": ..., "method": "eagle3", "num_speculative_tokens": 3}; without the number as deep as pays.
    Method "eagle" is EAGLE-1. {"method": "suffix"} needs no drafter, auto has both. Or none."""
    chat_template: Annotated[str | None, Option(show_default="the target's own")] = None
    """A Jinja file, or the template itself."""
    default_chat_template_kwargs: str | None = None
    """Variables of the chat template, as JSON: {"enable_thinking": false}; a request's own override them."""
    raw: bool = False
    """Plain text in, its continuation out: for base models without a template."""

    def chat_format(self) -> "ChatFormat":
        """The options of the chat template, read."""
        from eyas.target.chat_template import read_chat_format

        kwargs, option = self.default_chat_template_kwargs, "--default-chat-template-kwargs"
        return read_chat_format(self.chat_template, kwargs, raw=self.raw, option=option)


@options(NETWORK)
class NetworkOptions:
    """Addresses, TLS, proxies."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Annotated[int, Option(min=0, max=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    ssl_certfile: Path | None = None
    """Serve HTTPS with this certificate (PEM, the chain included)."""
    ssl_keyfile: Annotated[Path | None, Option(show_default="in the certificate's file")] = None
    """Its private key (PEM, not encrypted)."""
    root_path: str = ""
    """The path that a proxy serves this under, such as /eyas."""


@options(ACCESS)
class AccessOptions:
    """Keys, hosts, origins, and changes of the server."""

    api_key: Annotated[list[str] | None, Option(envvar="EYAS_API_KEY")] = None
    """Require this key; repeat for several."""
    admin_key: Annotated[
        list[str] | None,
        Option(envvar="EYAS_ADMIN_KEY", show_default="changes on loopback alone, without API keys"),
    ] = None
    """A key that may also change the server, as /v1/drafter does; repeat for several."""
    allowed_hosts: Annotated[
        list[str] | None, Option(show_default="loopback's, if it listens there without API keys; else all")
    ] = None
    """Names that requests may be addressed to, beside loopback's; * for all."""
    allowed_origins: Annotated[list[str] | None, Option(show_default="none")] = None
    """Web pages elsewhere that may call the server, such as https://example.com; * for all."""
    allowed_drafters: Annotated[list[str] | None, Option(show_default="those that come with eyas")] = None
    """A drafter that /v1/drafter may load: name, folder or hub id; repeat for several."""
    drafter_swap: bool = True
    """Take changes of drafter."""


@options(LIMITS)
class LimitOptions:
    """What one client may take from the others: queues, sizes, seconds."""

    max_queue: Annotated[int, Option(min=0)] = 256
    """Most answers that wait; beyond that clients get 429."""
    max_connections: Annotated[int | None, Option(show_default="as open files allow, at most 2048", min=1)] = None
    """Most open connections; beyond that the longest silent one is closed."""
    request_seconds: float = 600.0
    """The longest a request may take."""
    drain_seconds: Annotated[float, Option(rich_help_panel=OPERATION)] = 30.0
    """Time for answers in flight after SIGTERM."""


@options(API)
class ApiOptions:
    """What clients may send and get."""

    tool_call_parser: Annotated[str | None, Option(show_default="by the template")] = None
    """The tool-call format: hermes, llama3_json, mistral, qwen3_coder, deepseek_v3, deepseek_v31, kimi_k2, glm45,
    openai, pythonic."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template, which is a program."""
    generation_config: str = "auto"
    """Sampling defaults: auto, the target's generation_config.json; vllm, none; or a folder."""
    unknown_fields: Literal["refuse", "report"] = "refuse"
    """Unknown fields of requests: refuse, or report in a header and ignore."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come, first served; priority: by the request's priority first."""
    reasoning_parser: Annotated[str | None, Option(show_default="off")] = None
    """Tell reasoning from content: deepseek_r1, qwen3, glm45, openai_gptoss, ...; auto by the template."""
    reasoning_content_alias: bool = False
    """Hold reasoning as reasoning_content too."""


@options(MEMORY)
class BatchingOptions(ServedEngineOptions, KVCacheOptions, ThreadOptions):
    """How many tokens and answers there is room for."""

    max_num_batched_tokens: Annotated[
        int | None, Option(show_default="512 on a CPU; 2048, or 8 per --max-num-seqs, on a GPU")
    ] = None
    """Tokens of one pass of the target: newest tokens, drafts, and prompts in what is left."""
    memory_gib: Annotated[float | None, Option(show_default="half of what is free")] = None
    """Memory for the KV cache, in GiB."""
    gpu_memory_utilization: float | None = None
    """Instead: share of the GPU's memory for weights, passes and KV cache together, as for vLLM."""
    async_scheduling: Annotated[bool, Option(rich_help_panel=OPERATION)] = True
    """On a GPU, launch every step before the tokens of the last one have arrived."""


@options(LEARNING)
class LearnOptions:
    """Which answers are kept, and whether the server adapts its drafter to them."""

    learn: Annotated[Path | None, Option(show_default="nothing is kept")] = None
    """Keep finished answers of keys that opted in, in this folder, for `eyas adapt` to learn from."""
    learn_key: Annotated[
        list[str] | None,
        Option(envvar="EYAS_LEARN_KEY", show_default="all on loopback without API keys, else none"),
    ] = None
    """One of the server's keys that opted in; repeat for several, * for all."""
    learn_bytes: Annotated[int, Option(min=2**20)] = 2**28
    """Most bytes that are kept; the oldest answers go."""
    learn_share: Annotated[float, Option(min=0.0, max=1.0)] = 0.0
    """Share of the device's time in which the server adapts its drafter to what is kept, and swaps in what is better;
    0: it only keeps."""
    learn_answers: int = 500
    """New answers that begin an adaptation."""
    learn_interval: Annotated[float, Option(min=0.0)] = 1800.0
    """Least seconds between two adaptations."""
    learn_device: Annotated[str | None, Option(show_default="as --device")] = None
    """Where adaptations run: cpu, cuda:1, ..."""
    learn_options: str = ""
    """More options of `eyas adapt`: '--minutes 5 --replay general.jsonl'."""
    learn_resume: bool = True
    """Start with the last good drafter that was learnt in the folder, or with the one that is named."""


@options(OPERATION)
class OperationOptions(CacheOptions):
    """Logs, metrics, pages and files."""

    page: bool = True
    """Serve the web page at /: chat, compare, dashboard."""
    metrics_names: Literal["eyas", "vllm", "both"] = "both"
    """Whose names /metrics uses: eyas_..., vllm:..., or both."""
    log_level: Annotated[LogLevel, Option(case_sensitive=False)] = LogLevel.info
    """Least severity of what is logged; requests are info."""
    config_file: Annotated[Path | None, Option("--config", callback=read_config_file, is_eager=True)] = None
    """Options from a YAML file: `max-num-seqs: 16`; the command line wins."""
    check: bool = False
    """Load everything, print what would be served, and exit."""


@options("")
class ServeArguments(
    OperationOptions,
    LearnOptions,
    BatchingOptions,
    ApiOptions,
    LimitOptions,
    AccessOptions,
    NetworkOptions,
    ServeModelOptions,
):
    """All options of `eyas serve`."""

    def placement(self) -> dict[str, Any]:
        """The arguments of `load_pair` that these options are."""
        found = vars_of(self, PrecisionOptions) | {"cache": self.cache, "revision": self.revision}
        return {**found, "chat_format": self.chat_format()}


def split_target(target: str, others: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Separate the target from vLLM's options, the first of which may stand in the target's place."""
    words = tuple(others)
    if target.startswith("-"):
        target, words = "smollm2", (target, *others)
    if words and not words[0].startswith("-"):
        raise UserError(
            f"there is a word {words[0]!r} behind the target; options of vLLM go behind --, as --name value"
        )
    return target, words
