"""How deep to draft by batch size, for a server that takes a table instead of measuring: vLLM's
`num_speculative_tokens_per_batch_size`.

The depths are those that the cost model finds best for each number of requests in a step; measured costs and counts
enter it as they enter every plan (`eyas plan --measured`).
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.plan.expect import best_depth, expect
from eyas.plan.forecast import Deployment
from eyas.plan.json_file import read_json

DepthTable = tuple[tuple[int, int, int], ...]
"""First and last batch size, and the depth from one to the other; the first begins at 1 and none is left out."""


def depth_table(deployment: Deployment) -> DepthTable:
    """The best depth for batch sizes up to the number of users; large ones are looked at some percent apart."""
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
    """The table in the JSON that `eyas plan --out` wrote."""
    where = f"--depths {path}"
    raw = read_json(path, where, "what `eyas plan --out` wrote")
    table = raw.get("depths") if isinstance(raw, dict) else None
    if table is None:
        raise UserError(f"{where} holds no depths; give what `eyas plan --out` wrote")
    return checked_table(table, where)


def checked_table(table: Any, where: str) -> DepthTable:
    """A table as it was given: ranges that follow each other from 1 on."""
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
