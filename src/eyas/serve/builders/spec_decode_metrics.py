"""How speculation went for one request, as vLLM tells it: `metrics.speculative_decoding` of a response."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from eyas.engine.output import OutputDelta, SpecDecodeStats


def spec_decode_metrics(
    stats: SpecDecodeStats, deltas: Sequence[OutputDelta], *, num_spec_tokens: int, detailed: bool
) -> dict[str, Any]:
    """The object; `detailed` adds each step, as vLLM's `--per-request-spec-decode-metrics detailed` does."""
    at_least = [stats.drafts, *stats.accepted_at]
    at_least += [0] * max(1, num_spec_tokens + 2 - len(at_least))
    # Steps that accepted exactly 0, 1, 2, ... draft tokens, from those that accepted at least as many.
    histogram = [count - more for count, more in pairwise(at_least)]
    figures: dict[str, Any] = {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / max(1, stats.drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if not detailed:
        return figures
    steps = stats.steps if stats.steps is not None else [(one.drafted, one.accepted) for one in deltas if one.drafted]
    return figures | {
        "per_step_accepted": [accepted for _, accepted in steps],
        "per_step_drafted": [drafted for drafted, _ in steps],
    }
