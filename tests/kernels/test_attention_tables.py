"""Rows laid out in tensors give the bits of rows known on the host; tokens outside all rows get zeros."""

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.cpu import CompiledBackend, load_kernel
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow

ROWS, BLOCKS, SIZE, COUNT = 5, 40, 4, 6
NULL = ROWS * BLOCKS * SIZE


def layouts(seed: int) -> tuple[AttentionMetadata, AttentionMetadata, list[int]]:
    """A layout in tensors, the live rows known on the host, and the places of their tokens."""
    chance = torch.Generator().manual_seed(seed)
    table_RP = torch.randperm(ROWS * BLOCKS, generator=chance).view(ROWS, BLOCKS).int()
    live_R = torch.randint(0, COUNT + 1, (ROWS,), generator=chance).int()
    base_R = torch.where(live_R > 0, torch.randint(0, 140, (ROWS,), generator=chance), 0).int()
    starts, ancestors = [row * COUNT for row in range(ROWS + 1)], list[Tensor | None]([None] * ROWS)
    options: dict[str, int] = {"block_size": SIZE, "null_slot": NULL}
    if seed % 3 == 0:
        made = AttentionMetadata.padded(table_RP, base_R, live_R, count=COUNT, **options)
    elif seed % 3 == 1:
        start_R = torch.cat([torch.zeros(1), live_R.cumsum(0)]).int()
        starts = start_R.tolist()
        made = AttentionMetadata.ragged(table_RP, base_R, start_R, count=starts[-1] + 3, **options)
    else:
        parents = [-1, 0, 0, 1, 1, 2]
        seen_QT = torch.zeros(COUNT, COUNT, dtype=torch.bool)
        for node in range(COUNT):
            at = node
            while at >= 0:
                seen_QT[node, at] = True
                at = parents[at]
        bits_Q = (seen_QT.long() << torch.arange(COUNT)).sum(dim=1)
        depth_RQ = (seen_QT.sum(dim=1) - 1).expand(ROWS, -1)
        made = AttentionMetadata.trees(
            table_RP, base_R, live_R, bits_Q.expand(ROWS, -1), depth_RQ, tail=COUNT, **options
        )
        ancestors = [seen_QT[:live, :live] for live in live_R.tolist()]
    rows, places = [], []
    for row, (base, live) in enumerate(zip(base_R.tolist(), live_R.tolist(), strict=True)):
        if live:
            rows.append(AttentionRow(blocks=table_RP[row].tolist(), base=base, count=live, ancestors=ancestors[row]))
            places += range(starts[row], starts[row] + live)
    known = AttentionMetadata.of(rows, block_size=SIZE, device=torch.device("cpu"))
    return made, known, places


def numbers(tokens: int, seed: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = [(tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8), (2, NULL + SIZE, 8), (2, NULL + SIZE, 8)]
    return [torch.randn(shape, generator=chance) for shape in shapes]


@pytest.mark.parametrize("window", [None, 30])
def test_tables_are_rows(window: int | None) -> None:
    kernel, _ = load_kernel()
    for seed in range(30):
        made, known, places = layouts(seed)
        q, k, v, keys, values = numbers(len(made.position_N), seed)
        asked = 0.3, None, window
        assert kernel is None or isinstance(choose_backend(made), CompiledBackend)
        for choose in (choose_backend, DenseBackend):
            ours = choose(made, sinks=2).write_and_attend(q, k, v, keys.clone(), values.clone(), *asked)
            theirs = choose(known, sinks=2).write_and_attend(
                q[places].contiguous(), k[places].contiguous(), v[places].contiguous(), keys, values, *asked
            )
            if choose is choose_backend and kernel is not None:
                assert torch.equal(ours[places], theirs), "to the last bit"
            torch.testing.assert_close(ours[places], theirs, rtol=1e-4, atol=1e-5)
            nobody = sorted({*range(len(ours))} - {*places})
            assert not ours[nobody].any()
