"""`speculation/verify_budget.py` on a device: from the drafter's confidence to depths, without a number on the host.

The host writes one small tensor now and then, the calibration of confidence (`Acceptance.calibration`), and chooses the
budget by the shape of the pass that it launches.

Shapes: R rows, K depths, C cells of the calibration, M = K * R drafts.
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


def share_budget_on_device(chance_RK: Tensor, most_R: Tensor, budget: Tensor) -> Tensor:
    """depth_R: drafts of each row to verify, of the `most_R` that it has, so that there are `budget` of all or fewer.

    Padding has `most_R` 0.
    """
    rows, depths = chance_RK.shape
    offered_RK = torch.arange(depths, device=chance_RK.device) < most_R[:, None]
    # No draft is likelier than those that lead to it.
    survival_RK = chance_RK.double().clamp(0, 1).cumprod(dim=1).masked_fill(~offered_RK, -1.0)
    # By depth and then by row: a stable sort then takes the shallower of equals first.
    sorted_M, place_M = survival_RK.T.flatten().sort(descending=True, stable=True)
    number_M = torch.arange(rows * depths, device=chance_RK.device)
    kept_M = ((number_M < budget) & (sorted_M >= 0)).long()
    return torch.zeros_like(kept_M).scatter(0, place_M, kept_M).view(depths, rows).sum(dim=0)
