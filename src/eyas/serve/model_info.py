"""Facts about the served model, and the server's limits. Only the drafter can change while the server runs."""

import time
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.request import Speculation
from eyas.errors import UserError
from eyas.plan.memory import BlockBudget
from eyas.serve.api_error import ApiError
from eyas.target.text import SamplingDefaults


@dataclass(kw_only=True)
class ModelInfo:
    """A target and its drafter, if any, as clients see them."""

    name: str
    """The name that clients use."""
    target: str
    drafter: str | None
    max_model_len: int
    """The most tokens of prompt and answer together."""
    max_num_seqs: int
    """The most answers that run at once."""
    engine: str = "eyas"
    """The engine: eyas, or vLLM and its version."""
    own_depths: bool = True
    """Whether requests may choose their speculation mode and depth."""
    quantization: str = "none"
    """The quantization of the target's matrices."""
    kv_cache_dtype: str = "auto"
    """The type of cached keys and values; auto: as computed."""
    drafter_quantization: str | None = None
    """The quantization of the drafter's matrices, if there is a drafter."""
    speculation: Speculation = field(default_factory=Speculation)
    """The default for requests without `speculative`, as long as something can draft that way."""
    suffix_depth: int = 0
    """The most suffix drafts of a request in a step; 0 for none."""
    tool_parser: str | None = None
    """The tool-call format, if the operator named one."""
    reasoning_parser: str | None = None
    """The reasoning format, if the operator named one or `auto`."""
    reasoning_content_alias: bool = False
    """Whether answers hold reasoning under the name `reasoning_content` too."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Defaults for requests, from the model's generation_config.json unless the operator chose others."""
    created: int = field(default_factory=lambda: int(time.time()), init=False)

    def require(self, name: str) -> None:
        """Raise an error unless this is the model's name."""
        if name != self.name:
            raise ApiError(404, f"model {name[:100]!r} is not served here; use {self.name!r}", code="model_not_found")

    @property
    def default_speculation(self) -> Speculation:
        """The speculation of requests that do not choose."""
        return self.speculation if self.drafter is not None or self.speculation.method == "suffix" else Speculation()

    def speculative_card(self) -> dict[str, Any]:
        """The drafter, and the speculation of requests that do not choose."""
        drafted, default = self.drafter is not None or self.suffix_depth > 0, self.default_speculation
        return {
            "drafter": self.drafter,
            "drafter_quantization": self.drafter_quantization,
            "suffix": self.suffix_depth > 0,
            "mode": default.mode if drafted else "off",
            "method": default.method if drafted else None,
            "depth": default.depth if drafted else None,
            "per_request": self.own_depths,
        }


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on sizes, numbers and waiting times."""

    queue: int = 256
    """Answers that may wait for the engine; beyond them clients get 429."""
    max_connections: int | None = None
    """Open connections; None for as many as the limit of open files allows."""
    header_seconds: float = 10.0
    """For the head of a request to arrive; also for the rest of a body that is not needed any more."""
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """For a body to arrive."""
    request_seconds: float = 600.0
    """From the first byte of a request to the last byte of its response."""
    drain_seconds: float = 30.0
    """For answers in flight once the server was told to stop."""

    def __post_init__(self) -> None:
        for name, least in (("queue", 0), ("body_bytes", 1), ("max_connections", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"limit {name} is {value}; it must be {least} or more")
        for name in ("header_seconds", "body_seconds", "request_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"limit {name} is {getattr(self, name)}; it must be above 0")


def banner(model_info: ModelInfo, memory: BlockBudget | str) -> list[str]:
    """The lines that the server prints when it starts."""
    suffix = "what occurred before in the text or in earlier answers to the same key"
    if model_info.drafter is None:
        policy = "no drafter: every token is a pass of the target"
        if model_info.suffix_depth:
            policy = f"no drafter; {suffix}, where it pays"
    elif model_info.speculation.mode == "fixed":
        others = " unless a request says otherwise" if model_info.own_depths else " for all requests"
        policy = f"{model_info.drafter}, {model_info.speculation.depth} tokens deep{others}"
    elif not model_info.own_depths:
        policy = f"{model_info.drafter}, as deep as the table of batch sizes says"
    elif model_info.speculation.mode == "off":
        policy = f"{model_info.drafter}, only for requests that ask for it"
    else:
        policy = f"{model_info.drafter}, as deep as pays by measured cost and acceptance"
        policy += f", and {suffix}" if model_info.suffix_depth else ""
    return [
        f"serving   {model_info.name} ({model_info.target}), up to {model_info.max_model_len:,} tokens, "
        f"{model_info.max_num_seqs} at once",
        f"drafting  {policy}",
        f"memory    {memory}{'' if model_info.kv_cache_dtype == 'auto' else ', keys and values in fp8'}",
        f"defaults  {_default_words(model_info.sampling_defaults)}",
    ]


def _default_words(defaults: SamplingDefaults) -> str:
    if not defaults.given:
        return "the API's own: the generation config recommends no sampling"
    told = ", ".join(f"{name} {value}" for name, value in defaults.given.items())
    return f"{told}, from the generation config; the rest is the API's own"
