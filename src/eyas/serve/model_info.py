"""The served model and the server's limits. They stay while the server runs, except for the drafter."""

import time
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.request import Speculation
from eyas.errors import UserError
from eyas.plan.memory import BlockBudget
from eyas.serve.api_error import ApiError
from eyas.target.generation_defaults import SamplingDefaults


@dataclass(kw_only=True)
class ModelInfo:
    """A target and its drafter, if any, as clients see them."""

    name: str
    """The name that clients use."""
    target: str
    drafter: str | None
    max_model_len: int
    """Most tokens of prompt and answer together."""
    max_num_seqs: int
    """Most answers that run at once."""
    engine: str = "eyas"
    """What computes the answers: eyas, or vLLM and its version."""
    own_depths: bool = True
    """Whether requests may choose how deep they are drafted for."""
    quantization: str = "none"
    """What the target's matrices are quantised as."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in; auto: as they are computed."""
    drafter_quantization: str | None = None
    """What the drafter's are, where there is one."""
    speculation: Speculation = field(default_factory=Speculation)
    """The default for requests without `speculative`, as long as there is somebody to draft by it."""
    suffix_depth: int = 0
    """The most suffix drafts of a request in a step; 0: there are none."""
    tool_parser: str | None = None
    """The tool-call format, if the operator named one."""
    reasoning_parser: str | None = None
    """The reasoning format, if the operator named one or `auto`."""
    reasoning_content_alias: bool = False
    """Whether answers hold reasoning as `reasoning_content` too."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For requests that leave them out; from the model's generation_config.json, unless the operator said otherwise."""
    created: int = field(default_factory=lambda: int(time.time()), init=False)

    def require(self, name: str) -> None:
        """Raise an error unless this is the model's name."""
        if name != self.name:
            raise ApiError(404, f"model {name[:100]!r} is not served here; use {self.name!r}", code="model_not_found")

    @property
    def default_speculation(self) -> Speculation:
        """How requests that do not say are drafted for."""
        return self.speculation if self.drafter is not None or self.speculation.method == "suffix" else Speculation()

    def speculative_card(self) -> dict[str, Any]:
        """The drafter, and how requests that do not say are drafted for."""
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
    """How much the server accepts, and how long it waits."""

    queue: int = 256
    """Answers that may wait for the engine; beyond that clients get 429."""
    max_connections: int | None = None
    """Open connections; without a number, as many as the limit of open files allows."""
    header_seconds: float = 10.0
    """For the head of a request to arrive, from the first moment; also for a body that is not wanted any more."""
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """For a body to arrive."""
    request_seconds: float = 600.0
    """From the first byte of a request to the last byte of its response."""
    drain_seconds: float = 30.0
    """For answers in flight once the server is told to stop."""

    def __post_init__(self) -> None:
        for name, least in (("queue", 0), ("body_bytes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"limit {name} is {getattr(self, name)}; it must be {least} or more")
        if self.max_connections is not None and self.max_connections < 1:
            raise UserError(f"limit max_connections is {self.max_connections}; it must be 1 or more")
        for name in ("header_seconds", "body_seconds", "request_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"limit {name} is {getattr(self, name)}; it must be above 0")


def banner(model_info: ModelInfo, memory: BlockBudget | str) -> list[str]:
    """The lines that the server prints when it starts."""
    beside = (
        ", and what occurred before in the text or in earlier answers to the same key"
        if model_info.suffix_depth
        else ""
    )
    if model_info.drafter is None:
        policy = "no drafter: every token is a pass of the target"
        if model_info.suffix_depth:
            policy = "no drafter; what occurred before in the text or in earlier answers to the same key, where it pays"
    elif model_info.speculation.mode == "fixed":
        others = " unless a request says otherwise" if model_info.own_depths else " for all requests"
        policy = f"{model_info.drafter}, {model_info.speculation.depth} tokens deep{others}"
    elif not model_info.own_depths:
        policy = f"{model_info.drafter}, as deep as the table of batch sizes says"
    elif model_info.speculation.mode == "off":
        policy = f"{model_info.drafter}, only for requests that ask for it"
    else:
        policy = f"{model_info.drafter}, as deep as pays by measured cost and acceptance{beside}"
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
