"""4-bit weights as kernels on a GPU unpack them: words of four weights from different planes (`w4a16_triton.py`).

Shapes: E outputs, K inputs, W words.
"""

import torch
from torch import Tensor

PLANES = 4
"""Weights per 16-bit word."""


def pack_planes(q_EK: Tensor, plane: int) -> Tensor:
    """Pack weights 0..15 into words [E, K / 4]."""
    words = torch.zeros(len(q_EK), q_EK.shape[1] // PLANES, dtype=torch.int16, device=q_EK.device)
    q_EBJP = q_EK.view(len(q_EK), -1, PLANES, plane)
    for j in range(PLANES):  # plane by plane: all at once would take several times the memory
        words |= (q_EBJP[:, :, j].reshape(len(q_EK), -1).to(torch.int16) & 15) << 4 * j
    return words


def unpack_planes(words_EW: Tensor, plane: int) -> Tensor:
    """Unpack words into weights [E, K], int16."""
    shift = torch.arange(0, 4 * PLANES, 4, dtype=torch.int16, device=words_EW.device)[:, None]
    words_EB1P = words_EW.view(len(words_EW), -1, 1, plane)
    return ((words_EB1P >> shift) & 15).flatten(1)
