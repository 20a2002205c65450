"""`eyas check`: what a checkpoint is, and whether it will work, before a server loads it silently wrong.

Errors are what would draft garbage or refuse to load; warnings are what works here and may not work elsewhere.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, read_unchecked, tensor_problems
from eyas.drafter.config import DrafterConfig
from eyas.drafter.cost import kv_bytes_per_token
from eyas.drafter.eagle1 import BIAS_KEY, VLLM
from eyas.drafter.layer_json import IDS_KEY, NORM_FLAGS, QUANTIZATION_KEY
from eyas.drafter.layer_kinds import kind_of
from eyas.drafter.quantised_linears import linear_names

Severity = Literal["error", "warning", "note"]


class TargetShape(Protocol):
    """What must be known of a target to say whether a drafter fits it."""

    @property
    def source(self) -> str: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int | None: ...
    def default_aux_layer_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One remark, in one line."""

    severity: Severity
    message: str


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a drafter is and what was found."""

    source: str
    family: str
    layout: str
    layers: str
    """What its layers are, by the name of their kind."""
    config: DrafterConfig
    parameters: int
    bytes: int
    kv_bytes_per_token: int
    ships_embedding: bool
    ships_head: bool
    quantization: str | None
    """What its linears are kept in, where they are quantised."""
    target: str | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing found is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "config": dict(asdict(self.config)), "ok": self.ok}


def check(
    source: str, *, target: TargetShape | None = None, target_embedding: Callable[[], Tensor | None] | None = None
) -> CheckReport:
    """Check a drafter, alone or against a target. Raises only where not even a config can be read."""
    checkpoint = read_unchecked(source)
    config, tensors = checkpoint.config, checkpoint.tensors
    findings = [Finding(severity="error", message=message) for message in tensor_problems(config, tensors)]
    findings += _config_findings(checkpoint)
    if target is not None:
        findings += _target_findings(checkpoint, target)
        if target_embedding is not None and not any(f.severity == "error" for f in findings):
            findings += _embedding_findings(tensors.get("embed_tokens.weight"), target_embedding)
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return CheckReport(
        source=source,
        family=config.family,
        layout=checkpoint.layout,
        layers=kind_of(config).name,
        config=config,
        parameters=sum(tensor.numel() for tensor in weights),
        bytes=sum(tensor.nbytes for tensor in checkpoint.stored.values()),
        kv_bytes_per_token=kv_bytes_per_token(config, config.dtype),
        ships_embedding="embed_tokens.weight" in tensors,
        ships_head="lm_head.weight" in tensors,
        quantization=None if checkpoint.quantised is None else checkpoint.quantised.scheme.words,
        target=None if target is None else target.source,
        findings=tuple(findings),
    )


def _config_findings(checkpoint: Checkpoint) -> list[Finding]:
    """What config.json leaves for each server to guess."""
    raw, config = checkpoint.raw_config, checkpoint.config
    if config.eagle1:
        return _eagle1_findings(checkpoint)
    found: list[Finding] = []
    for flag in NORM_FLAGS:
        if raw.get(flag) is None and flag not in (raw.get("eagle_config") or {}):
            found.append(
                Finding(
                    severity="warning",
                    message=f"{flag} is not written in config.json and counts as false; readers differ in what they "
                    "assume: `eyas convert` writes every flag",
                )
            )
    if checkpoint.quantised is not None:
        left = [name for name in linear_names(config) if name not in checkpoint.quantised.weights]
        if left:
            found.append(
                Finding(
                    severity="warning",
                    message=f"{left[0]} is not quantised beside linears that are ({len(left)} such); vLLM takes every "
                    f"linear for quantised that `ignore` of {QUANTIZATION_KEY} does not name in vLLM's own words: try "
                    "it there, or quantise all with `eyas convert --quantize`",
                )
            )
    if config.mla is not None and raw.get("model_type") == "deepseek_v3":
        found.append(
            Finding(
                severity="warning",
                message="model_type is deepseek_v3: vLLM 0.32 takes the drafter for multi-token prediction and "
                "refuses it; `eyas convert` writes deepseek_v2, which it runs",
            )
        )
    if config.mla is not None and config.mla.q_lora_rank is None:
        found.append(
            Finding(
                severity="warning",
                message="q_lora_rank is null: vLLM 0.32 does not load such a drafter, nor does SGLang; eyas does",
            )
        )
    if checkpoint.layout == "speculators":
        return found
    nested = (raw.get("eagle_config") or {}).get(IDS_KEY)
    if nested and not raw.get(IDS_KEY):
        found.append(
            Finding(
                severity="warning",
                message=f"auxiliary layer ids {nested} stand only in eagle_config: vLLM takes them as numbers of "
                f"finished layers, SGLang as layer indices, which is {[i + 1 for i in nested]} finished layers; if "
                "this drafter was trained for SGLang, `eyas convert --from sglang` says so to everyone",
            )
        )
    if "num_aux_hidden_states" not in raw and not nested and config.num_aux_hidden_states != 3:
        found.append(
            Finding(
                severity="error",
                message=f"num_aux_hidden_states is not written and is {config.num_aux_hidden_states} here; vLLM "
                "would assume 3 and fail: add it to config.json",
            )
        )
    if raw.get("tie_word_embeddings") and "lm_head.weight" in checkpoint.tensors:
        found.append(
            Finding(
                severity="warning",
                message="tie_word_embeddings is true beside a shipped lm_head: vLLM uses the head, SGLang the "
                "embeddings; set it to false",
            )
        )
    return found


def _eagle1_findings(checkpoint: Checkpoint) -> list[Finding]:
    """What servers make of an EAGLE-1 drafter as it stands."""
    if checkpoint.config.fc_bias:
        message = "fc has a bias: vLLM 0.32 leaves it out without a word and drafts worse, eyas and SGLang run it"
        if checkpoint.raw_config.get(BIAS_KEY):
            message += "; `eyas convert --to sglang` leaves bias out of config.json, which SGLang takes for the layers'"
        return [Finding(severity="warning", message=message)]
    if checkpoint.layout == "vllm" and VLLM not in checkpoint.raw_config["architectures"]:
        return [
            Finding(
                severity="note",
                message=f"architectures is {checkpoint.raw_config['architectures']}, as of a target; servers take it "
                "for an EAGLE-1 drafter when they are told so: `eyas convert --to vllm` writes it out",
            )
        ]
    return []


def _target_findings(checkpoint: Checkpoint, target: TargetShape) -> list[Finding]:
    config = checkpoint.config
    found: list[Finding] = []

    def error(message: str) -> None:
        found.append(Finding(severity="error", message=message))

    if config.vocab_size != target.vocab_size:
        error(
            f"vocab_size {config.vocab_size} is not the target's {target.vocab_size}; "
            "this drafter was trained for another target: choose that one"
        )
    if config.target_hidden_size != target.hidden_size:
        error(
            f"target_hidden_size {config.target_hidden_size} is not the target's hidden_size {target.hidden_size}; "
            "this drafter was trained for another target: choose that one"
        )
    ids, layers = config.aux_layer_ids, target.num_hidden_layers
    if ids is not None and ids[-1] > layers:
        error(
            f"auxiliary layer id {ids[-1]} is outside the target's 0..{layers}; "
            "this drafter was trained for a deeper target: choose that one"
        )
    elif ids is None and not config.eagle1:
        default = target.default_aux_layer_ids()
        if config.num_aux_hidden_states != len(default):
            error(
                f"no auxiliary layer ids are written and num_aux_hidden_states is {config.num_aux_hidden_states}; "
                f"servers would assume the {len(default)} ids {list(default)}: write the ids into config.json"
            )
        else:
            found.append(
                Finding(
                    severity="note",
                    message=f"no auxiliary layer ids are written; servers assume {list(default)}",
                )
            )
    limit = target.max_position_embeddings
    if limit is not None and config.max_position_embeddings < limit:
        found.append(
            Finding(
                severity="warning",
                message=f"max_position_embeddings {config.max_position_embeddings} is below the target's {limit}: "
                f"vLLM stops drafting at {config.max_position_embeddings} tokens; eyas does not",
            )
        )
    return found


def _embedding_findings(shipped_VD: Tensor | None, target_embedding: Callable[[], Tensor | None]) -> list[Finding]:
    """A copy of the target's embeddings should be one; random or stale copies are a known export fault."""
    if shipped_VD is None:
        return []
    target_VD = target_embedding()
    if target_VD is None or shipped_VD.shape != target_VD.shape:
        return []
    similarity = torch.nn.functional.cosine_similarity(shipped_VD.float(), target_VD.float(), dim=-1)
    median = float(similarity.median())
    if median > 0.999:
        return []
    return [
        Finding(
            severity="warning",
            message=f"embed_tokens differs from the target's (median cosine {median:.3f}); servers use the shipped "
            "one: fine if it was trained, wrong if it is a stale or random copy, then export without it",
        )
    ]
