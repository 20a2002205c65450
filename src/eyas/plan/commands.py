"""Lines that serve what was planned, by eyas and by vLLM, and what to know before running them."""

import json
import shlex
from math import ceil
from pathlib import Path

from eyas.drafter.shipped import SHIPPED, shipped_folder
from eyas.plan.outlook import Outlook
from eyas.target.locate import DEFAULT_TARGET

DEFAULT_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
UNTRAINED = "my-drafter"
"""What a drafter that is yet to be trained is called."""


def eyas_command(outlook: Outlook, target: str, drafter: str | None) -> str:
    """`eyas serve`; how deep to draft is left to its controller, which measures what is only estimated here."""
    question = outlook.question
    words = ["eyas", "serve", _model(target), "--device", question.card.device, *_limits(outlook)]
    if question.kept.plain:
        words += ["--dtype", question.kept.dtype]
    if outlook.budget is not None:
        words += ["--memory-gib", f"{ceil(outlook.budget.bytes / 2**30 * 100) / 100:g}"]
    if question.drafter is None:
        words += ["--speculative-config", "none"]
    elif drafter is not None:
        words += ["--speculative-config", json.dumps({"model": drafter, "method": "eagle3"})]
    return shlex.join(words)


def vllm_command(outlook: Outlook, target: str, drafter: str | None) -> str:
    """`vllm serve`, which drafts at one depth for everyone: the best one for this number of users, or none."""
    question = outlook.question
    words = ["vllm", "serve", DEFAULT_ON_HUB if target == DEFAULT_TARGET else _model(target), *_limits(outlook)]
    if question.card.device != "cpu":
        # It takes what it is given, and measures its own working memory within that.
        words += ["--gpu-memory-utilization", "0.9" if outlook.needed < 0.85 * question.card.memory else "0.95"]
    if question.kept.plain:
        words += ["--dtype", question.kept.dtype]
    elif question.kept.name == "fp8":
        words += ["--quantization", "fp8"]
    if question.drafter is not None and drafter is not None and outlook.best.depth:
        place = str(shipped_folder(drafter)) if drafter in SHIPPED else drafter
        config = {"model": place, "method": "eagle3", "num_speculative_tokens": outlook.best.depth}
        words += ["--speculative-config", json.dumps(config)]
    return shlex.join(words)


def cautions(outlook: Outlook, target: str) -> list[str]:
    """What the lines take for granted."""
    question, said = outlook.question, []
    if _model(target) != target:
        said.append(f"{target} is a configuration; the lines name the folder it lies in, where weights must be too")
    if question.drafter is not None and question.drafter.assumed:
        said.append(f"no drafter was named: {UNTRAINED} is one of the usual shape, yet to be trained (`eyas train`)")
    if not question.kept.plain:
        how = "; vLLM can do that while it loads" if question.kept.name == "fp8" else ", by AWQ or GPTQ for instance"
        said.append(f"{question.kept.name} needs a checkpoint that is quantised so{how}")
    if any(layer.window for layer in question.decoder.layers):
        said.append("layers with a window are kept whole by eyas; vLLM frees what they no longer see")
    if question.decoder.note:
        said.append(question.decoder.note)
    return said


def _limits(outlook: Outlook) -> list[str]:
    question = outlook.question
    return ["--max-model-len", str(question.context), "--max-num-seqs", str(question.users)]


def _model(target: str) -> str:
    """What servers open: of a config.json, the folder around it."""
    return str(Path(target).parent) if target.endswith(".json") else target
