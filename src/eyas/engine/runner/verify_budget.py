"""`speculation/verify_budget.py` on a device: from the drafter's confidence to depths, without a number on the host.

The host writes two small tensors now and then: the calibration of confidence (`Acceptance.calibration`) and what
verifying 0, 1, 2, ... drafts costs in tokens. Both may be rewritten between replays of a captured graph.

Shapes: R rows, K depths, C cells of the calibration, N = R * K + 1 numbers of drafts.
"""

import torch
from torch import Tensor

from eyas.engine.speculation.policy import POLICY


def calibrated_chances(confidence_RK: Tensor, calibration_C2: Tensor) -> Tensor:
    """The chance that each draft is accepted when all before it were: `Acceptance.chances_of` for chains."""
    depths, bins = confidence_RK.shape[1], POLICY.confidence_bins
    depth_K = torch.arange(depths, device=confidence_RK.device).clamp(max=POLICY.calibrated_depths - 1)
    bin_RK = (confidence_RK * bins).long().clamp(0, bins - 1)
    line_RK2 = calibration_C2[depth_K * bins + bin_RK]
    return line_RK2[..., 0] + line_RK2[..., 1] * confidence_RK


def share_budget_on_device(chance_RK: Tensor, most_R: Tensor, price_N: Tensor, bound_R: Tensor) -> Tensor:
    """depth_R: drafts of each row to verify, of the `most_R` that it has; rows that are bound keep all of theirs.

    `price_N` does not fall. Padding has `most_R` 0.
    """
    rows, depths = chance_RK.shape
    device = chance_RK.device
    offered_RK = torch.arange(depths, device=device) < most_R[:, None]
    survival_RK = chance_RK.double().cumprod(dim=1)
    # Bound drafts sort before all others and those that were not made behind them; neither is worth anything.
    order_RK = survival_RK.masked_fill(bound_R[:, None], 2.0).masked_fill(~offered_RK, -1.0)
    # By depth and then by row: a stable sort then takes the shallower of equals first.
    sorted_M, place_M = order_RK.T.flatten().sort(descending=True, stable=True)
    worth_M = torch.where((sorted_M > 1.5) | (sorted_M < 0), 0.0, sorted_M)
    net_N = torch.cat([worth_M.new_zeros(1), worth_M.cumsum(0)]) - price_N[: rows * depths + 1].double()
    number_N = torch.arange(rows * depths + 1, device=device)
    possible_N = (number_N >= (sorted_M > 1.5).sum()) & (number_N <= (sorted_M >= 0).sum())
    net_N = net_N.masked_fill(~possible_N, -torch.inf)
    # The fewest drafts of those that are best; with an infinite price everywhere, what is bound.
    last = number_N[-1]
    count = torch.where((net_N == net_N.max()) & possible_N, number_N, last).min()
    kept_M = torch.zeros(rows * depths, dtype=torch.long, device=device)
    kept_M = kept_M.scatter(0, place_M, (number_N[:-1] < count).long())
    return kept_M.view(depths, rows).sum(dim=0)
