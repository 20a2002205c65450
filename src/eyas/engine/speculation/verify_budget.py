"""Which drafts of a step are verified: one budget of tokens, shared out to those likeliest to survive. No torch.

A draft is worth its chance to be accepted at all; verifying n of them costs what the target's pass takes longer, in
tokens that the engine gives in that time. No cost is assumed to be smooth: every number of drafts is priced. Of equally
likely drafts the shallower one comes first, then the earlier row, so that no draft is kept without those that lead to
it. `runner/verify_budget.py` is the same on a device, where nobody reads a number.
"""

from collections.abc import Callable, Sequence


def share_budget(
    survivals: Sequence[Sequence[float]], price: Callable[[int], float], *, bound: Sequence[bool] = ()
) -> list[list[int]]:
    """For each row the drafts to verify, in order.

    `survivals` are chances to be accepted at all, never larger than those of the drafts that lead to it. `price` is in
    tokens, by the drafts of all rows together; infinite above a budget. Rows that are `bound` keep all of theirs.
    """
    bound = bound or (False,) * len(survivals)
    kept = [list(range(len(row))) if is_bound else [] for row, is_bound in zip(survivals, bound, strict=True)]
    worth = sorted(
        (-survival, draft, place)
        for place, (row, is_bound) in enumerate(zip(survivals, bound, strict=True))
        if not is_bound
        for draft, survival in enumerate(row)
    )
    forced, gained, most = sum(map(len, kept)), 0.0, 0
    best = -price(forced)
    for count, (loss, _, _) in enumerate(worth, 1):
        gained -= loss
        net = gained - price(forced + count)
        if net > best:
            best, most = net, count
    for _, draft, place in worth[:most]:
        kept[place].append(draft)
    return [sorted(drafts) for drafts in kept]
