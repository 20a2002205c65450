"""Top-p for rows with different values: the smallest sets of most likely tokens that reach each row's top_p.

The same cut as in `tests/oracle/shaping.py`. Probabilities are summed in float64, where float32 sums are exact except
for negligible tails; so the order of summation, which differs between devices, does not show.

Shapes: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton


def nucleus(p_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """The kept probabilities of each row, normalised, float32. A top_p above 1 leaves the row as it is.

    Among equals, smaller ids come first. There is no host synchronisation on a GPU.
    """
    if p_NV.is_cuda and has_triton():
        from eyas.kernels.nucleus_triton import nucleus_by_triton  # torch for CPUs comes without triton

        return nucleus_by_triton(p_NV, top_p_N1)
    cuts_N1 = top_p_N1 <= 1
    if p_NV.is_cpu:
        if not bool(cuts_N1.any()):
            return p_NV
        cut_NV = _cut(p_NV, top_p_N1, *_likeliest(p_NV, torch.where(cuts_N1, top_p_N1, 0.0)))
        return cut_NV if bool(cuts_N1.all()) else torch.where(cuts_N1, cut_NV, p_NV)
    return _cut(p_NV, top_p_N1, *p_NV.sort(dim=-1, descending=True, stable=True))


def _likeliest(p_NV: Tensor, top_p_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order with their ids, as many as can be in a nucleus: mostly few.

    If what is strictly above the k-th probability reaches top_p, no others are in it.
    """
    for k in (64, 512, 4096):
        if k > p_NV.shape[-1] // 4:
            break
        p_NK, index_NK = p_NV.topk(k, dim=-1)
        above_N1 = p_NK.masked_fill(p_NK == p_NK[:, -1:], 0.0).sum(dim=-1, keepdim=True)
        if bool((above_N1 > top_p_N1 + 1e-6).all()):  # sums in different orders differ by less than this
            index_NK = index_NK.sort(dim=-1).values
            p_NK, order_NK = p_NV.gather(-1, index_NK).sort(dim=-1, descending=True, stable=True)
            return p_NK, index_NK.gather(-1, order_NK)
    sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    return sorted_NV, order_NV


def _cut(p_NV: Tensor, top_p_N1: Tensor, sorted_NV: Tensor, order_NV: Tensor) -> Tensor:
    cuts_N1 = top_p_N1 <= 1
    ahead_NV = (sorted_NV.cumsum(dim=-1, dtype=torch.float64) - sorted_NV).float()
    sorted_NV = sorted_NV.masked_fill((ahead_NV >= top_p_N1) & cuts_N1, 0.0)
    total_N1 = sorted_NV.sum(dim=-1, keepdim=True, dtype=torch.float64).float().masked_fill(~cuts_N1, 1.0)
    return torch.zeros_like(p_NV).scatter_(-1, order_NV, sorted_NV / total_N1)
