"""Times answers to prompts with and without drafts."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling


def compare_answers(engine: Engine, prompt: str, speculation: Speculation, *, max_tokens: int) -> dict[str, Any]:
    """Answer a prompt plainly and with drafts."""
    ids = tuple(engine.target.encode_chat([{"role": "user", "content": prompt}]))
    plain, plain_seconds = _timed(engine, ids, Speculation(mode="off"), max_tokens)
    drafted, drafted_seconds = _timed(engine, ids, speculation, max_tokens)
    measured = {
        "tokens": len(drafted.tokens),
        "plain_tokens": len(plain.tokens),
        "plain_seconds": plain_seconds,
        "drafted_seconds": drafted_seconds,
        "drafts": drafted.stats.drafts,
        "accepted": drafted.stats.accepted,
    }
    return {"prompt": prompt, "answer": drafted.text, "same": plain.tokens == drafted.tokens, **add_up([measured])}


def _timed(
    engine: Engine, ids: tuple[int, ...], speculation: Speculation, max_tokens: int
) -> tuple[RequestOutput, float]:
    request = Request(
        prompt=ids,
        sampling=Sampling(),
        max_new_tokens=max_tokens,
        stop_ids=engine.target.stop_ids(),
        speculation=speculation,
    )
    started = time.perf_counter()
    (answer,) = engine.generate([request])
    return answer, time.perf_counter() - started


def add_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum what was measured over all rows, and compute rates."""
    names = ("tokens", "plain_tokens", "plain_seconds", "drafted_seconds", "drafts", "accepted")
    sums: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    plain = sums["plain_tokens"] / sums["plain_seconds"]
    drafted = sums["tokens"] / sums["drafted_seconds"]
    return {
        **sums,
        "plain_tokens_per_second": plain,
        "drafted_tokens_per_second": drafted,
        "speedup": drafted / plain,
        "acceptance_length": 1 + sums["accepted"] / max(1, sums["drafts"]),
    }
