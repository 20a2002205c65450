"""Random weights as quantised blocks of any format."""

import torch

from eyas.kernels.linear.quantised_linear import BLOCK, FOUR_BITS, MINIMA, SCALES_OF_HALVES, Blocks


def random_blocks(format_: int, outputs: int, inputs: int, *, seed: int = 0) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    count = -(-inputs // BLOCK)
    four, minima = bool(format_ & FOUR_BITS), bool(format_ & MINIMA)
    low, high = ((0, 16) if minima else (-8, 8)) if four else (-128, 128)
    scales = 2 * count if format_ & SCALES_OF_HALVES else count
    blocks = Blocks(
        q_NK=torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8),
        scale_NS=torch.randn(outputs, scales, generator=generator).half() / 64,
        minimum_NB=torch.randn(outputs, count, generator=generator).half() if minima else None,
        bits=4 if four else 8,
    )
    assert blocks.format == format_
    return blocks
