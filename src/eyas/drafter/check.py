"""`eyas check`: describes a drafter and finds faults, some of which servers would load silently.

Errors would draft garbage or fail to load; warnings may fail in another server.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, read_unchecked, tensor_problems
from eyas.drafter.config import DrafterConfig, HasLayers
from eyas.drafter.cost import kv_bytes_per_token
from eyas.drafter.eagle1 import BIAS_KEY, VLLM
from eyas.drafter.layer_json import IDS_KEY, NORM_FLAGS, QUANTIZATION_KEY, kind_of
from eyas.drafter.quantised_linears import linear_names

Severity = Literal["error", "warning", "note"]


class TargetShape(HasLayers, Protocol):
    """The facts of a target that decide whether a drafter fits it."""

    @property
    def source(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding, in one line."""

    severity: Severity
    message: str


def _error(message: str) -> Finding:
    return Finding(severity="error", message=message)


def _warning(message: str) -> Finding:
    return Finding(severity="warning", message=message)


def _note(message: str) -> Finding:
    return Finding(severity="note", message=message)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Facts of a drafter, and findings."""

    source: str
    family: str
    layout: str
    layers: str
    config: DrafterConfig
    parameters: int
    bytes: int
    kv_bytes_per_token: int
    ships_embedding: bool
    ships_head: bool
    quantization: str | None
    target: str | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": dict(asdict(self.config)), "ok": self.ok}


def check(
    source: str, *, target: TargetShape | None = None, target_embedding: Callable[[], Tensor | None] | None = None
) -> CheckReport:
    """Check a drafter, alone or against a target; raises only if it cannot be read."""
    checkpoint = read_unchecked(source)
    config, tensors = checkpoint.config, checkpoint.tensors
    findings = [_error(message) for message in tensor_problems(config, tensors)]
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


def _config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find what config.json leaves for each server to guess."""
    raw, config = checkpoint.raw_config, checkpoint.config
    if config.eagle1:
        yield from _eagle1_findings(checkpoint)
        return
    eagle_config = raw.get("eagle_config") or {}
    for flag in NORM_FLAGS:
        if raw.get(flag) is None and flag not in eagle_config:
            yield _warning(
                f"{flag} is not written in config.json and counts as false; readers differ in what they assume: "
                "`eyas convert` writes every flag"
            )
    quantised = {} if checkpoint.quantised is None else checkpoint.quantised.weights
    left = [name for name in linear_names(config) if name not in quantised]
    if quantised and left:
        yield _warning(
            f"{left[0]} is not quantised beside linears that are ({len(left)} such); vLLM takes every linear for "
            f"quantised that `ignore` of {QUANTIZATION_KEY} does not name in vLLM's own words: try it there, or "
            "quantise all with `eyas convert --quantize`"
        )
    if config.mla is not None and raw.get("model_type") == "deepseek_v3":
        yield _warning(
            "model_type is deepseek_v3: vLLM 0.32 takes the drafter for multi-token prediction and refuses it; "
            "`eyas convert` writes deepseek_v2, which it runs"
        )
    if config.mla is not None and config.mla.q_lora_rank is None:
        yield _warning("q_lora_rank is null: vLLM 0.32 does not load such a drafter, nor does SGLang; eyas does")
    if checkpoint.layout == "speculators":
        return
    nested = eagle_config.get(IDS_KEY)
    if nested and not raw.get(IDS_KEY):
        yield _warning(
            f"auxiliary layer ids {nested} stand only in eagle_config: vLLM takes them as numbers of finished layers, "
            f"SGLang as layer indices, which is {[i + 1 for i in nested]} finished layers; if this drafter was trained "
            "for SGLang, `eyas convert --from sglang` writes the ids for every server"
        )
    if "num_aux_hidden_states" not in raw and not nested and config.num_aux_hidden_states != 3:
        yield _error(
            f"num_aux_hidden_states is not written and is {config.num_aux_hidden_states} here; vLLM would assume 3 "
            "and fail: add it to config.json"
        )
    if raw.get("tie_word_embeddings") and "lm_head.weight" in checkpoint.tensors:
        yield _warning(
            "tie_word_embeddings is true beside a shipped lm_head: vLLM uses the head, SGLang the embeddings; set it "
            "to false"
        )


def _eagle1_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find what servers misread in an EAGLE-1 drafter."""
    named = checkpoint.raw_config["architectures"]
    if checkpoint.config.fc_bias:
        message = "fc has a bias: vLLM 0.32 leaves it out without a word and drafts worse, eyas and SGLang run it"
        if checkpoint.raw_config.get(BIAS_KEY):
            message += "; `eyas convert --to sglang` leaves bias out of config.json, which SGLang takes for the layers'"
        yield _warning(message)
    elif checkpoint.layout == "vllm" and VLLM not in named:
        yield _note(
            f"architectures is {named}, as of a target; servers take it for an EAGLE-1 drafter when they are told so: "
            "`eyas convert --to vllm` writes it out"
        )


def _target_findings(checkpoint: Checkpoint, target: TargetShape) -> Iterator[Finding]:
    config = checkpoint.config
    if config.vocab_size != target.vocab_size:
        yield _error(
            f"vocab_size {config.vocab_size} is not the target's {target.vocab_size}; "
            "this drafter was trained for another target: choose that one"
        )
    if config.target_hidden_size != target.hidden_size:
        yield _error(
            f"target_hidden_size {config.target_hidden_size} is not the target's hidden_size {target.hidden_size}; "
            "this drafter was trained for another target: choose that one"
        )
    ids, layers = config.aux_layer_ids, target.num_hidden_layers
    if ids is not None and ids[-1] > layers:
        yield _error(
            f"auxiliary layer id {ids[-1]} is outside the target's 0..{layers}; "
            "this drafter was trained for a deeper target: choose that one"
        )
    if ids is None and not config.eagle1:
        default = target.default_aux_layer_ids()
        if config.num_aux_hidden_states == len(default):
            yield _note(f"no auxiliary layer ids are written; servers assume {list(default)}")
        else:
            yield _error(
                f"no auxiliary layer ids are written and num_aux_hidden_states is {config.num_aux_hidden_states}; "
                f"servers would assume the {len(default)} ids {list(default)}: write the ids into config.json"
            )
    limit = target.max_position_embeddings
    if limit is not None and config.max_position_embeddings < limit:
        yield _warning(
            f"max_position_embeddings {config.max_position_embeddings} is below the target's {limit}: "
            f"vLLM stops drafting at {config.max_position_embeddings} tokens; eyas does not"
        )


def _embedding_findings(shipped_VD: Tensor | None, target_embedding: Callable[[], Tensor | None]) -> Iterator[Finding]:
    """Compare shipped embeddings with the target's; random or stale copies are a known export fault."""
    if shipped_VD is None:
        return
    target_VD = target_embedding()
    if target_VD is None or shipped_VD.shape != target_VD.shape:
        return
    similarity = torch.nn.functional.cosine_similarity(shipped_VD.float(), target_VD.float(), dim=-1)
    median = float(similarity.median())
    if median <= 0.999:
        yield _warning(
            f"embed_tokens differs from the target's (median cosine {median:.3f}); servers use the shipped one: "
            "fine if it was trained, wrong if it is a stale or random copy, then export without it"
        )
