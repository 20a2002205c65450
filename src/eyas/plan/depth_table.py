"""Best draft depth by batch size: vLLM's `num_speculative_tokens_per_batch_size`.

For servers that take a table instead of measuring. Measured costs and acceptance enter it as they enter every plan.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.plan.expect import best_depth, expect
from eyas.plan.forecast import Deployment
from eyas.plan.measured import read_json

DepthTable = tuple[tuple[int, int, int], ...]
"""Ranges of batch sizes, each with its first and last size and its depth; they start at 1 and have no gaps."""


def depth_table(deployment: Deployment) -> DepthTable:
    """Find the best depth for batch sizes up to the number of users; large sizes are sampled every 3 %."""
    if deployment.drafter is None:
        return ((1, deployment.users, 0),)
    pair, speed, profile = deployment.pair, deployment.speed, deployment.profile
    sizes = [1]
    while sizes[-1] < deployment.users:
        sizes.append(min(deployment.users, sizes[-1] + 1 + sizes[-1] // 32))
    best: dict[int, int] = {}
    for size in sizes:
        expected = [
            expect(pair, speed, profile, users=size, depth=depth, context=deployment.context / 2)
            for depth in range(deployment.deepest + 1)
        ]
        best[size] = best_depth(expected).depth
    starts = [next(group) for _, group in groupby(sizes, key=lambda size: best[size])]
    ends = [*(start - 1 for start in starts[1:]), deployment.users]
    return tuple((start, end, best[start]) for start, end in zip(starts, ends, strict=True))


def read_depths(path: Path) -> DepthTable:
    """Read the table from the JSON that `eyas plan --out` wrote."""
    where = f"--depths {path}"
    raw = read_json(path, where, "what `eyas plan --out` wrote")
    table = raw.get("depths") if isinstance(raw, dict) else None
    if table is None:
        raise UserError(f"{where} holds no depths; give what `eyas plan --out` wrote")
    return checked_table(table, where)


def checked_table(table: Any, where: str) -> DepthTable:
    """Check that ranges follow each other from 1 on."""
    rows: Sequence[Any] = table if isinstance(table, list) else ()
    following = 1
    for row in rows:
        whole = isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row)
        if not whole or row[0] != following or row[1] < row[0] or row[2] < 0:
            raise UserError(
                f"{where} has {row!r} where a range from batch size {following} on is needed: [first, last, depth]"
            )
        following = row[1] + 1
    if not rows:
        raise UserError(f"{where} is {table!r}; give ranges such as [[1, 8, 3], [9, 64, 1]]")
    return tuple((row[0], row[1], row[2]) for row in rows)
