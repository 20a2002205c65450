"""Top-p for rows that differ in it: the smallest sets of most likely tokens that reach each row's top_p.

It is the cut of `sampling.probabilities`. Probabilities are summed in float64, where sums of float32 are exact but for
tails that weigh nothing; so the order of summation, which differs from device to device, does not show.

Shapes: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton


def nucleus(p_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """What each row keeps, divided by its sum. A top_p above 1 leaves the row as it is. float32.

    Among equals, those of smaller ids go first. Nothing here asks the device.
    """
    if p_NV.is_cuda and has_triton():
        from eyas.kernels.nucleus_triton import nucleus_by_triton  # torch for CPUs comes without triton

        return nucleus_by_triton(p_NV, top_p_N1)
    cuts_N1 = top_p_N1 <= 1
    sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    ahead_NV = (sorted_NV.cumsum(dim=-1, dtype=torch.float64) - sorted_NV).float()
    sorted_NV = sorted_NV.masked_fill((ahead_NV >= top_p_N1) & cuts_N1, 0.0)
    total_N1 = sorted_NV.sum(dim=-1, keepdim=True, dtype=torch.float64).float().masked_fill(~cuts_N1, 1.0)
    return torch.empty_like(p_NV).scatter_(-1, order_NV, sorted_NV / total_N1)
