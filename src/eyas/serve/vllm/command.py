"""Builds the `vllm serve` command line from options of `eyas serve`; options behind `--` are passed unchanged.

Options that eyas sets itself are refused behind `--`: vLLM would use the later of two, and the server would not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eyas.errors import UserError

BEFORE = "give it to eyas, before the --"
OURS = "eyas does that in front of vLLM; give it before the --, where eyas has it"
FIXED = "eyas and vLLM speak through it"
OWNED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("--model", "--revision", "--dtype", "--quantization", "--kv-cache-dtype", "--speculative-config"),
            *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
            *("--kv-cache-memory-bytes", "--scheduling-policy", "--async-scheduling", "--no-async-scheduling"),
            *("--served-model-name", "--generation-config", "--override-generation-config", "--config", "-q", "-sc"),
        ),
        BEFORE,
    ),
    **dict.fromkeys(
        (
            *("--host", "--port", "--uds", "--api-key", "--root-path", "--allowed-origins", "--chat-template"),
            *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--tool-call-parser", "--enable-auto-tool-choice"),
            *("--reasoning-parser", "--middleware", "--default-chat-template-kwargs"),
        ),
        OURS,
    ),
    **dict.fromkeys(
        (
            *("--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init", "--tokens-only", "--enable-scale-out"),
            *("--max-logprobs", "--logprobs-mode", "--structured-outputs-config", "--disable-log-stats", "--headless"),
            *("--per-request-spec-decode-metrics", "--enable-prompt-tokens-details"),
        ),
        FIXED,
    ),
}
"""Options that are refused behind `--`, and why."""
SEAM_OPTIONS = (
    "--enable-scale-out",  # tokens in, tokens out: /inference/v1/generate
    *("--generation-config", "vllm"),  # eyas applies the defaults
    *("--max-logprobs", "21"),  # one more than clients may ask for: see answers.py
    *("--structured-outputs-config", '{"backend": "guidance"}'),  # the library that checks grammars in front
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)
"""The options of vLLM that the server needs."""
DRAFTING_OPTIONS = ("--per-request-spec-decode-metrics", "detailed")
"""The options that it needs with a drafter; without one vLLM refuses them."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options that vLLM is started with."""

    model: str
    """A folder or a hub id."""
    name: str
    """The model's name in requests."""
    max_model_len: int
    max_num_seqs: int
    revision: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    memory_gib: float | None = None
    gpu_memory_utilization: float | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    speculative_config: Mapping[str, Any] | None = None
    others: tuple[str, ...] = ()
    """Options behind `--`."""

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", "none", "fp8"):
            raise UserError(
                f"--quantization {self.quantization} is of eyas' own engine; vLLM takes auto, none or fp8 here, and a "
                "quantised checkpoint as it is"
            )
        require_free(self.others)
        if self.data_parallel > 1 and "num_speculative_tokens_per_batch_size" in (self.speculative_config or {}):
            raise UserError(
                f"--data-parallel-size {self.data_parallel} and a table of depths: vLLM would drop the table, since "
                "its ranks must draft alike; give num_speculative_tokens, or leave --depths out"
            )

    @property
    def data_parallel(self) -> int:
        """Replicas that vLLM runs."""
        for name, value in zip_longest(self.others, self.others[1:], fillvalue=""):
            key, joined, given = name.replace("_", "-").partition("=")
            if key in ("--data-parallel-size", "-dp") and (given if joined else value).isdigit():
                return int(given if joined else value)
        return 1

    def words(self) -> list[str]:
        """`vllm serve` and its options, without those that only eyas needs."""
        words = ["vllm", "serve", self.model, "--served-model-name", self.name]
        words += ["--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)]
        told: Sequence[tuple[str, object, object]] = (
            ("--revision", self.revision, None),
            ("--dtype", self.dtype, "auto"),
            ("--kv-cache-dtype", self.kv_cache_dtype, "auto"),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, None),
            ("--gpu-memory-utilization", self.gpu_memory_utilization, None),
            ("--scheduling-policy", self.scheduling_policy, "fcfs"),
        )
        for option, value, silent in told:
            if value != silent:
                words += [option, str(value)]
        if self.quantization == "fp8":
            words += ["--quantization", "fp8"]
        if self.memory_gib is not None:
            words += ["--kv-cache-memory-bytes", str(int(self.memory_gib * 2**30))]
        if not self.async_scheduling:
            words.append("--no-async-scheduling")
        if self.speculative_config is not None:
            words += ["--speculative-config", json.dumps(dict(self.speculative_config))]
        return [*words, *self.others]

    def seam_words(self, port: int) -> list[str]:
        """The options that the server needs: on loopback, with token ids."""
        drafting = DRAFTING_OPTIONS if self.speculative_config is not None else ()
        return [*self.words(), *SEAM_OPTIONS, *drafting, "--host", "127.0.0.1", "--port", str(port)]


def require_free(others: Sequence[str]) -> None:
    """Refuse options that eyas sets itself."""
    for word in others:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in OWNED:
            raise UserError(f"{word.partition('=')[0]} does not go behind the --: {OWNED[name]}")
