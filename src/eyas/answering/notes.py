"""Notes for people about a run that answers prompts."""

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.answering.answers import AnswerLimits
from eyas.data.regenerate import Progress
from eyas.sampling import Sampling
from eyas.train.recipe import DataSettings

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling options of a run."""


def describe_sampling(sampling: Sampling, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Name the sampling options, and which of them are the generation config's."""
    values = ", ".join(f"{name} {getattr(sampling, name):g}" for name in SAMPLED if name in {**defaults, **given})
    unsaid = "" if "temperature" in {**defaults, **given} else "the most likely token each time"
    own = [name for name in defaults if name not in given]
    by = f" ({', '.join(own)} of the generation config)" if own else ""
    return f"sampling: {', '.join(part for part in (unsaid, values) if part)}{by}"


def advice(done: Progress, limits: AnswerLimits) -> Iterator[str]:
    """Yield notes: which limits to raise, and what to set in the recipe."""
    if done.failed:
        yield f"note: {done.failed} conversations got no answer from any server; the same command asks them again"
    room = f"and --max-length (now {limits.max_length}) with it, if prompt and answer reach that"
    for cut, what, flag, now in (
        (done.cut_thinking, "while the target was thinking", "--max-thinking-tokens", limits.max_thinking_tokens),
        (done.cut_answer, "in the answer", "--max-tokens", limits.max_tokens),
    ):
        if cut and 2 * (done.cut_thinking + done.cut_answer) > done.written:
            yield (
                f"note: {cut} of {done.written} conversations end {what}, cut by a length. They can be trained on; "
                f"for whole answers raise {flag} (now {now}), {room}"
            )
    if done.longest > DataSettings.model_fields["max_length"].default:
        yield (
            f"note: the longest prompt with its answer has {done.longest} tokens; set data.max_length and "
            "data.pack_length of the recipe to that, or training cuts or drops what is longer"
        )
