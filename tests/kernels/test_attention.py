"""Paged attention equals attention over each request alone, wherever its blocks lie and whatever its tail."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from each import each
from eyas.drafter.attention import attend_densely
from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.cpu import CompiledBackend, load_kernel
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import TREE_BITS, AttentionMetadata, AttentionRow

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 60, 4, 6, 2, 8, 8


@dataclass(frozen=True, kw_only=True)
class Law:
    """Visibility beyond a row's own rule, and how scores are changed."""

    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    sunk: bool = False
    """Heads have sink logits."""

    def sink_logits(self, heads: int, device: torch.device = CPU) -> Tensor | None:
        return torch.linspace(-1.5, 2.5, heads, device=device) if self.sunk else None


MakeBackend = Callable[..., AttentionBackend]
"""A backend's class, or `choose_backend`."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Keys and values of one layer, in blocks."""

    block_size: int
    keys: Tensor
    values: Tensor

    @classmethod
    def filled(cls, blocks: int, block_size: int, *, heads: int, size: int, value_size: int, seed: int = 9) -> "Layer":
        generator = torch.Generator().manual_seed(seed)
        keys, values = (torch.randn(heads, blocks * block_size, n, generator=generator) for n in (size, value_size))
        return cls(block_size=block_size, keys=keys, values=values)

    def clone(self) -> "Layer":
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def attend(
        self,
        rows: Sequence[AttentionRow] | AttentionMetadata,
        new: Sequence[Tensor],
        law: "Law",
        backend: MakeBackend = choose_backend,
    ) -> Tensor:
        """Run a pass of rows with these new queries, keys and values."""
        if not isinstance(rows, AttentionMetadata):
            rows = AttentionMetadata.of(rows, block_size=self.block_size, device=self.keys.device)
        q, k, v = new
        return backend(rows, sinks=law.sinks).write_and_attend(
            *(q, k, v, self.keys, self.values, q.shape[-1] ** -0.5, law.softcap, law.window),
            law.sink_logits(q.shape[1], q.device),
        )


LAWS = [
    Law(),
    Law(window=7),
    Law(window=2),
    Law(window=6, sinks=3),
    Law(window=1, sinks=5),
    Law(softcap=1.5),
    Law(window=5, softcap=0.7),
    Law(sunk=True),
    Law(window=4, softcap=1.5, sunk=True),
]


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Visibility in a tree given by parents, -1 for none."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def visible_slots(row: AttentionRow, law: Law) -> Tensor:
    """The visibility rule, slot by slot: bool [Q, slots]."""
    tail = row.end - row.base
    ancestors = torch.ones(tail, tail, dtype=torch.bool).tril() if row.ancestors is None else row.ancestors
    visible = torch.zeros(row.count, row.end, dtype=torch.bool)
    for query in range(row.count):
        path = [slot for slot in range(tail) if ancestors[query, slot]]
        position = {slot: slot for slot in range(row.base)}
        position |= {row.base + slot: row.base + depth for depth, slot in enumerate(path)}
        own = row.base + len(path) - 1
        for slot, place in position.items():
            visible[query, slot] = law.window is None or slot < law.sinks or place > own - law.window
    return visible


def attend_alone(q: Tensor, k: Tensor, v: Tensor, row: AttentionRow, law: Law) -> Tensor:
    """One request with all its keys, written out."""
    visible = visible_slots(row, law)
    if law.softcap is None and not law.sunk and k.shape == v.shape:
        return attend_densely(q, k, v, visible)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    if law.softcap is not None:
        scores = law.softcap * torch.tanh(scores / law.softcap)
    weights = scores.masked_fill(~visible, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if law.sunk:
        total = total + law.sink_logits(q.shape[1])[:, None, None].exp()  # type: ignore[index]
    return torch.einsum("hts,she->the", weights / total, v)


class World:
    """Requests in a cache of scattered blocks, and the same keys and values kept plainly."""

    def __init__(self, seed: int, law: Law, *, device: torch.device = CPU, backend: MakeBackend = DenseBackend) -> None:
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.law, self.device, self.backend = law, device, backend
        self.value_size = VALUE_SIZE
        self.dtype, self.tolerance = torch.float32, 2e-5
        blocks = self.chance.sample(range(BLOCKS), BLOCKS)
        if seed % 2:
            blocks.sort()
        self.layer: Layer | None = None
        self.tables = [blocks[12 * i : 12 * i + 12] for i in range(5)]
        self.held = [(torch.empty(0, KEY_HEADS, SIZE), torch.empty(0, KEY_HEADS, VALUE_SIZE)) for _ in range(5)]

    def draw(self, count: int, heads: int, size: int) -> Tensor:
        return torch.randn(count, heads, size, generator=self.generator).to(self.dtype)

    def row(self, request: int, longest: int) -> AttentionRow:
        """Draw the next tokens of a request; some go back, as rejected drafts are overwritten and new requests start at
        0.
        """
        chance = self.chance
        room = len(self.tables[request]) * BLOCK_SIZE
        base = chance.randint(0, min(len(self.held[request][0]), room - longest))
        count = chance.randint(1, longest)
        row = AttentionRow(blocks=self.tables[request], base=base, count=count)
        if chance.random() < 0.5 and count <= TREE_BITS:
            held = len(self.held[request][0]) - base
            earlier = chance.randint(0, max(0, min(held, longest - count)))
            parents = [chance.randint(-1, node - 1) for node in range(earlier + count)]
            row = replace(row, ancestors=ancestors_of(parents)[earlier:])
        return row

    def check(self, rows: Sequence[tuple[int, AttentionRow]]) -> None:
        """Run a pass and compare each row with its request alone."""
        total = sum(row.count for _, row in rows)
        q = self.draw(total, HEADS, SIZE)
        k, v = self.draw(total, KEY_HEADS, SIZE), self.draw(total, KEY_HEADS, self.value_size)
        metadata = AttentionMetadata.of([row for _, row in rows], block_size=BLOCK_SIZE, device=self.device)
        new = [x.to(self.device) for x in (q, k, v)]
        if self.layer is None:
            keys, values = (x.new_zeros(KEY_HEADS, BLOCKS * BLOCK_SIZE, x.shape[2]) for x in new[1:])
            self.layer = Layer(block_size=BLOCK_SIZE, keys=keys, values=values)
        ours = self.layer.attend(metadata, new, self.law, self.backend).cpu()
        for start, (request, row) in zip(metadata.starts, rows, strict=False):
            here = slice(start, start + row.count)
            first = row.end - row.count
            keys, values = (
                torch.cat([old[:first], new[here]]) for old, new in zip(self.held[request], (k, v), strict=True)
            )
            self.held[request] = keys, values
            theirs = attend_alone(q[here].float(), keys.float(), values.float(), row, self.law)
            torch.testing.assert_close(ours[here].float(), theirs, rtol=self.tolerance, atol=self.tolerance)

    def seq(self, passes: int, longest: int = 9) -> None:
        for _ in range(passes):
            requests = self.chance.sample(range(5), self.chance.randint(1, 5))
            self.check([(request, self.row(request, longest)) for request in requests])


def compiled(metadata: AttentionMetadata, *, sinks: int = 0) -> AttentionBackend:
    kernel, words = load_kernel()
    if kernel is None:
        pytest.skip(f"no native code here: {words}")
    return CompiledBackend(kernel, metadata, sinks=sinks)


BACKENDS = [DenseBackend, compiled]


@each("backend", BACKENDS)
@each("law", LAWS)
@each("seed", range(4))
def test_random_rows_equal_each_request_alone(seed: int, law: Law, backend: MakeBackend) -> None:
    World(seed, law, backend=backend).seq(passes=10)


@each("backend", BACKENDS)
def test_values_may_be_narrower_than_keys(backend: MakeBackend) -> None:
    world = World(0, Law(window=6), backend=backend)
    world.value_size = 4
    world.held = [(keys, keys[..., :4]) for keys, _ in world.held]
    world.seq(passes=6)


@each("law", [Law(), Law(window=50), Law(window=70, sinks=4)])
def test_a_long_prompt_is_read_in_pieces(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.attention.dense.LONGEST_PIECE", 16)
    world = World(0, law)
    blocks = random.Random(1).sample(range(BLOCKS), BLOCKS)
    for base, count in ((0, 75), (75, 1), (76, 90), (166, 33)):
        world.check([(0, AttentionRow(blocks=blocks, base=base, count=count))])


def filled(blocks: int, block_size: int) -> Layer:
    return Layer.filled(blocks, block_size, heads=KEY_HEADS, size=SIZE, value_size=SIZE)


def test_block_placement_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(5, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    straight = filled(40, 1)
    places = random.Random(0).sample(range(40), 40)
    crooked = straight.clone()
    for x, y in zip(crooked.both, straight.both, strict=True):
        x[:, places] = y[:, :40]
    outputs = [
        layer.attend([AttentionRow(blocks=blocks, base=35, count=5)], new, Law())
        for layer, blocks in ((straight, range(40)), (crooked, places))
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)


@each("backend", BACKENDS)
@each("law", LAWS)
def test_nothing_is_read_or_written_outside_a_rows_own_slots(law: Law, backend: MakeBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = filled(BLOCKS + 1, BLOCK_SIZE)
    tree = ancestors_of([-1, 0, 0, 2])
    blocks = random.Random(3).sample(range(BLOCKS), BLOCKS)
    rows = [
        AttentionRow(blocks=blocks[:9], base=31, count=3),
        AttentionRow(blocks=blocks[9:18], base=14, count=4, ancestors=tree),
        AttentionRow(blocks=blocks[18:19], base=0, count=1),
    ]
    metadata = AttentionMetadata.of(rows, block_size=BLOCK_SIZE, device=CPU)
    q, k, v = (torch.randn(8, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    own = torch.zeros(layer.keys.shape[1], dtype=torch.bool)
    for row in rows:
        own[row.places(0, row.base, BLOCK_SIZE)] = True
    before = []
    for x in layer.both:
        x[:, ~own] = float("nan")
        before.append(x.clone())
    assert layer.attend(metadata, (q, k, v), law, backend).isfinite().all()
    slots = metadata.slot_mapping_N
    for old, x, new in zip(before, layer.both, (k, v), strict=True):
        torch.testing.assert_close(x[:, slots], new.transpose(0, 1), rtol=0, atol=0)
        x[:, slots] = old[:, slots]
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


def test_a_tree_may_grow_over_several_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    tree = ancestors_of([-1, -1, 0, 0, 1, 3, 4, 4])
    q, k, v = (torch.randn(8, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    grown, whole = filled(8, 4), filled(8, 4)
    blocks = [5, 0, 3, 7, 1]
    row = AttentionRow(blocks=blocks, base=11, count=8, ancestors=tree)
    at_once = whole.attend([row], (q, k, v), Law(window=12))
    levels = []
    for first, end in ((0, 2), (2, 5), (5, 8)):
        level = AttentionRow(blocks=blocks, base=11, count=end - first, ancestors=tree[first:end, :end])
        levels.append(grown.attend([level], [x[first:end] for x in (q, k, v)], Law(window=12)))
    torch.testing.assert_close(torch.cat(levels), at_once, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grown.both, whole.both, strict=True):
        assert torch.equal(ours, theirs)


def test_positions_count_the_path_and_slots_follow_the_table() -> None:
    tree = ancestors_of([-1, 0, 0, 2])
    rows = [
        AttentionRow(blocks=[2, 0], base=3, count=2),
        AttentionRow(blocks=[4, 1, 3], base=6, count=2, ancestors=tree[2:]),
    ]
    metadata = AttentionMetadata.of(rows, block_size=4, device=CPU)
    assert metadata.position_N.tolist() == [3, 4, 7, 8]
    assert metadata.slot_mapping_N.tolist() == [11, 0, 12, 13]
    tables = metadata.tables
    assert tables.block_table_RP.tolist() == [[2, 0, 0], [4, 1, 3]]
    assert (tables.context_lens_R.tolist(), tables.seq_lens_R.tolist()) == ([3, 6], [5, 10])
    assert tables.query_start_loc_R.tolist() == [0, 2, 4]
    assert tables.tree_mask_N is not None
    assert tables.tree_mask_N.tolist() == [0b1, 0b11, 0b101, 0b1101]
    assert (tables.query_lens, tables.max_seq_len) == ((2, 2), 12)


def test_the_largest_tree_has_a_bit_for_every_slot() -> None:
    tree = torch.ones(TREE_BITS, TREE_BITS, dtype=torch.bool).tril()
    row = AttentionRow(blocks=range(17), base=3, count=TREE_BITS, ancestors=tree)
    seen = AttentionMetadata.of([row], block_size=4, device=CPU).tables.tree_mask_N
    assert seen is not None
    assert [bin(bits & (2**64 - 1)).count("1") for bits in seen.tolist()] == list(range(1, 65))


def test_metadata_made_on_the_device_is_that_made_on_the_host() -> None:
    null_slot = 80
    table = torch.tensor([[7, 3, 1, 9], [2, 0, 4, 5], [8, 8, 8, 8]], dtype=torch.int32)
    base, live = torch.tensor([6, 1, 0], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32)
    padded = AttentionMetadata.padded(table, base, live, count=3, block_size=4, null_slot=null_slot)
    host = AttentionMetadata.of(
        [
            AttentionRow(blocks=blocks, base=b, count=n)
            for blocks, b, n in zip(table.tolist(), base.tolist(), live.tolist(), strict=True)
            if n
        ],
        block_size=4,
        device=CPU,
    )
    real = (torch.arange(3) < live[:, None]).flatten()
    assert padded.slot_mapping_N[real].tolist() == host.slot_mapping_N.tolist()
    assert padded.position_N[real].tolist() == host.position_N.tolist()
    assert set(padded.slot_mapping_N[~real].tolist()) == {null_slot}
    assert padded.position_N[~real].tolist() == base.repeat_interleave(3)[~real].tolist()
    assert padded.tables.seq_lens_R.tolist() == [*host.tables.seq_lens_R.tolist(), 0]
    assert padded.tables.query_start_loc_R.tolist() == [0, 3, 6, 9]
    assert padded.tables.tree_mask_N is None
    assert host.tables.tree_mask_N is None


@each("lives", [None, (2, 0, 0, 0, 4)])
def test_ragged_metadata_made_on_the_device_is_that_made_on_the_host(lives: tuple[int, ...] | None) -> None:
    null_slot, counts = 200, (3, 0, 1, 0, 5)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(5, 8).int()
    base = torch.tensor([6, 0, 1, 0, 9], dtype=torch.int32)
    start = torch.tensor([0, *counts]).cumsum(0).int()
    live = None if lives is None else torch.tensor(lives, dtype=torch.int32)
    ragged = AttentionMetadata.ragged(table, base, start, count=12, live_R=live, block_size=4, null_slot=null_slot)
    rows = [
        AttentionRow(blocks=blocks, base=b, count=n)
        for blocks, b, n in zip(table.tolist(), base.tolist(), lives or counts, strict=True)
        if n
    ]
    host = AttentionMetadata.of(rows, block_size=4, device=CPU)
    real = [int(first) + q for first, n in zip(start, lives or counts, strict=False) for q in range(n)]
    assert ragged.slot_mapping_N[real].tolist() == host.slot_mapping_N.tolist()
    assert ragged.position_N[real].tolist() == host.position_N.tolist()
    dead = [token for token in range(12) if token not in real]
    assert set(ragged.slot_mapping_N[dead].tolist()) == {null_slot}
    assert ragged.position_N.max() == host.position_N.max(), "a dead token stands where a live one may"
    assert [end for end in ragged.tables.seq_lens_R.tolist() if end] == host.tables.seq_lens_R.tolist()
    assert (ragged.tables.query_lens, ragged.tables.max_seq_len) == (None, 32)


@each(
    "row",
    [
        AttentionRow(blocks=[1], base=3, count=2),
        AttentionRow(blocks=[1], base=0, count=0),
        AttentionRow(blocks=[1], base=0, count=2, ancestors=torch.tensor([[True, False], [True, False]])),
        AttentionRow(blocks=[1], base=0, count=2, ancestors=torch.tensor([[True, True], [False, True]])),
        AttentionRow(blocks=range(99), base=0, count=65, ancestors=torch.eye(65, dtype=torch.bool)),
    ],
)
def test_invalid_rows_are_refused(row: AttentionRow) -> None:
    with pytest.raises(AssertionError):
        AttentionMetadata.of([row], block_size=4, device=CPU)
