"""Attention over blocks is attention over each request alone, wherever its blocks lie and whatever shape its tail
has."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import tiny
from eyas.drafter.attention import DenseAttention, attend_densely
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.kernels.attention.dense import Backend, PagedAttention
from eyas.kernels.attention.metadata import MOST_IN_TREE, AttentionMetadata, AttentionRow, KVCache

CPU = torch.device("cpu")
PAGES, PAGE_SIZE, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 60, 4, 6, 2, 8, 8


@dataclass(frozen=True, kw_only=True)
class Law:
    """What a query may see beside its row, and how scores are bent."""

    window: int | None = None
    sinks: int = 0
    softcap: float | None = None


LAWS = [
    Law(),
    Law(window=7),
    Law(window=2),
    Law(window=6, sinks=3),
    Law(window=1, sinks=5),
    Law(softcap=1.5),
    Law(window=5, softcap=0.7),
]


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Who sees whom in a tree given by parents, -1 for none."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def visible_slots(row: AttentionRow, law: Law) -> Tensor:
    """The law of visibility, slot by slot: bool [Q, slots]."""
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
    if law.softcap is None and k.shape == v.shape:
        return attend_densely(q, k, v, visible)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    if law.softcap is not None:
        scores = law.softcap * torch.tanh(scores / law.softcap)
    return torch.einsum("hts,she->the", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


class World:
    """Requests in a cache of scattered blocks, and the same keys and values kept plainly."""

    def __init__(self, seed: int, law: Law, *, device: torch.device = CPU, backend: Backend = "dense") -> None:
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.law, self.device, self.backend = law, device, backend
        self.value_size = VALUE_SIZE
        self.dtype, self.tolerance = torch.float32, 2e-5
        blocks = self.chance.sample(range(PAGES), PAGES)
        if seed % 2:
            blocks.sort()
        self.cache = KVCache(blocks=PAGES, block_size=PAGE_SIZE)
        self.tables = [blocks[12 * i : 12 * i + 12] for i in range(5)]
        self.held = [(torch.empty(0, KEY_HEADS, SIZE), torch.empty(0, KEY_HEADS, VALUE_SIZE)) for _ in range(5)]

    def draw(self, count: int, heads: int, size: int) -> Tensor:
        return torch.randn(count, heads, size, generator=self.generator).to(self.dtype)

    def row(self, request: int, longest: int) -> AttentionRow:
        """Some next tokens of a request; some go back: rejected drafts are written over, new requests begin at 0."""
        chance = self.chance
        room = len(self.tables[request]) * PAGE_SIZE
        base = chance.randint(0, min(len(self.held[request][0]), room - longest))
        count = chance.randint(1, longest)
        row = AttentionRow(blocks=self.tables[request], base=base, count=count)
        if chance.random() < 0.5 and count <= MOST_IN_TREE:
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
        layout = AttentionMetadata.of([row for _, row in rows], block_size=PAGE_SIZE, device=self.device)
        attention = PagedAttention(
            self.cache, layout, window=self.law.window, sinks=self.law.sinks, backend=self.backend
        )
        ours = attention(0, *(x.to(self.device) for x in (q, k, v)), softcap=self.law.softcap).cpu()
        for start, (request, row) in zip(layout.starts, rows, strict=False):
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


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_rows_attend_as_each_request_alone(seed: int, law: Law) -> None:
    World(seed, law).seq(passes=10)


def test_values_may_be_narrower_than_keys() -> None:
    world = World(0, Law(window=6))
    world.value_size = 4
    world.held = [(keys, keys[..., :4]) for keys, _ in world.held]
    world.seq(passes=6)


@pytest.mark.parametrize("law", [Law(), Law(window=50), Law(window=70, sinks=4)], ids=str)
def test_a_long_prompt_is_read_in_pieces(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.attention.dense.LONGEST_PIECE", 16)
    world = World(0, law)
    blocks = random.Random(1).sample(range(PAGES), PAGES)
    for base, count in ((0, 75), (75, 1), (76, 90), (166, 33)):
        world.check([(0, AttentionRow(blocks=blocks, base=base, count=count))])


def filled(cache: KVCache, layers: int = 1) -> None:
    generator = torch.Generator().manual_seed(9)
    for layer in range(layers):
        pair = tuple(
            torch.randn(KEY_HEADS, cache.scrap + cache.block_size, SIZE, generator=generator) for _ in range(2)
        )
        cache.layers[layer] = pair[0], pair[1]


def test_where_blocks_lie_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(5, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    straight, crooked = KVCache(blocks=40, block_size=1), KVCache(blocks=40, block_size=1)
    filled(straight)
    places = random.Random(0).sample(range(40), 40)
    pairs = tuple(x.clone() for x in straight.layers[0])
    for x, y in zip(pairs, straight.layers[0], strict=True):
        x[:, places] = y[:, :40]
    crooked.layers[0] = pairs[0], pairs[1]
    outputs = []
    for cache, blocks in ((straight, range(40)), (crooked, places)):
        layout = AttentionMetadata.of([AttentionRow(blocks=blocks, base=35, count=5)], block_size=1, device=CPU)
        outputs.append(PagedAttention(cache, layout)(0, *new))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_nothing_is_read_or_written_outside_a_rows_own_slots(law: Law) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(blocks=PAGES, block_size=PAGE_SIZE)
    filled(cache)
    tree = ancestors_of([-1, 0, 0, 2])
    blocks = random.Random(3).sample(range(PAGES), PAGES)
    rows = [
        AttentionRow(blocks=blocks[:9], base=31, count=3),
        AttentionRow(blocks=blocks[9:18], base=14, count=4, ancestors=tree),
        AttentionRow(blocks=blocks[18:19], base=0, count=1),
    ]
    layout = AttentionMetadata.of(rows, block_size=PAGE_SIZE, device=CPU)
    q, k, v = (torch.randn(8, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    own = torch.zeros(cache.scrap + PAGE_SIZE, dtype=torch.bool)
    for row in rows:
        own[row.places(0, row.base, PAGE_SIZE)] = True
    before = []
    for x in cache.layers[0]:
        x[:, ~own] = float("nan")
        before.append(x.clone())
    attention = PagedAttention(cache, layout, window=law.window, sinks=law.sinks)
    assert attention(0, q, k, v, softcap=law.softcap).isfinite().all()
    for old, x, new in zip(before, cache.layers[0], (k, v), strict=True):
        torch.testing.assert_close(x[:, layout.slot_N], new.transpose(0, 1), rtol=0, atol=0)
        x[:, layout.slot_N] = old[:, layout.slot_N]
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


def test_a_tree_may_grow_over_several_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    tree = ancestors_of([-1, -1, 0, 0, 1, 3, 4, 4])
    q, k, v = (torch.randn(8, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    grown, whole = KVCache(blocks=8, block_size=4), KVCache(blocks=8, block_size=4)
    blocks = [5, 0, 3, 7, 1]
    for cache in (grown, whole):
        filled(cache)
    row = AttentionRow(blocks=blocks, base=11, count=8, ancestors=tree)
    at_once = PagedAttention(whole, AttentionMetadata.of([row], block_size=4, device=CPU), window=12)(0, q, k, v)
    levels = []
    for first, end in ((0, 2), (2, 5), (5, 8)):
        level = AttentionRow(blocks=blocks, base=11, count=end - first, ancestors=tree[first:end, :end])
        layout = AttentionMetadata.of([level], block_size=4, device=CPU)
        levels.append(PagedAttention(grown, layout, window=12)(0, *(x[first:end] for x in (q, k, v))))
    torch.testing.assert_close(torch.cat(levels), at_once, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grown.layers[0], whole.layers[0], strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return tiny.random_drafter(tiny.drafter_config(num_hidden_layers=2, norm_output=True))


@torch.no_grad()
def test_a_drafter_through_blocks_drafts_as_through_dense_attention(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 5)
    states = [torch.randn(n, tiny.HIDDEN, generator=generator) for n in lengths]
    ids = [torch.randint(tiny.VOCAB, (n,), generator=generator) for n in lengths]
    past, theirs = [], []
    for state, tokens in zip(states, ids, strict=True):
        attention = DenseAttention()
        theirs.append(drafter.step(state, tokens, torch.arange(len(tokens)), attention))
        past.append(attention.present)
    cache = KVCache(blocks=8, block_size=4)
    blocks = [[6, 1, 3, 2], [0, 7, 4]]

    def run(rows: list[AttentionRow], hidden: Tensor, tokens: Tensor) -> Tensor:
        layout = AttentionMetadata.of(rows, block_size=4, device=CPU)
        return drafter.step(hidden, tokens, layout.position_N, PagedAttention(cache, layout)).feedback

    rows = [AttentionRow(blocks=table, base=0, count=n) for table, n in zip(blocks, lengths, strict=True)]
    ours = run(rows, torch.cat(states), torch.cat(ids))
    torch.testing.assert_close(ours, torch.cat([output.feedback for output in theirs]), rtol=1e-4, atol=1e-4)
    # Two drafts side by side behind each request, then a third behind the second: a tree, against two branches.
    fork = torch.eye(2, dtype=torch.bool)
    rows = [
        AttentionRow(blocks=table, base=n, count=2, ancestors=fork) for table, n in zip(blocks, lengths, strict=True)
    ]
    last = torch.stack([output.feedback[-1] for output in theirs])
    ours = run(rows, last.repeat_interleave(2, dim=0), torch.tensor([3, 4, 3, 4]))
    path = torch.tensor([[False, True, True]])
    rows = [
        AttentionRow(blocks=table, base=n, count=1, ancestors=path) for table, n in zip(blocks, lengths, strict=True)
    ]
    third = run(rows, ours[[1, 3]], torch.tensor([5, 5]))
    for i, n in enumerate(lengths):
        for branch, token in enumerate((3, 4)):
            attention = DenseAttention(past[i])
            alone = drafter.step(last[i : i + 1], torch.tensor([token]), torch.tensor([n]), attention).feedback
            torch.testing.assert_close(ours[2 * i + branch : 2 * i + branch + 1], alone, rtol=1e-4, atol=1e-4)
        deeper = DenseAttention(attention.present)
        alone = drafter.step(alone, torch.tensor([5]), torch.tensor([n + 1]), deeper).feedback
        torch.testing.assert_close(third[i : i + 1], alone, rtol=1e-4, atol=1e-4)


def test_moving_reads_everything_before_it_writes() -> None:
    cache = KVCache(blocks=3, block_size=4)
    filled(cache, layers=2)
    before = [x.clone() for pair in cache.layers.values() for x in pair]
    cache.move(torch.tensor([1, 5, 9]), torch.tensor([5, 9, 2]))
    after = [x for pair in cache.layers.values() for x in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, [5, 9, 2]], old[:, [1, 5, 9]])
        old[:, [5, 9, 2]] = new[:, [5, 9, 2]]
        assert torch.equal(new, old)


def test_positions_count_the_path_and_slots_follow_the_table() -> None:
    tree = ancestors_of([-1, 0, 0, 2])
    rows = [
        AttentionRow(blocks=[2, 0], base=3, count=2),
        AttentionRow(blocks=[4, 1, 3], base=6, count=2, ancestors=tree[2:]),
    ]
    layout = AttentionMetadata.of(rows, block_size=4, device=CPU)
    assert layout.position_N.tolist() == [3, 4, 7, 8]
    assert layout.slot_N.tolist() == [11, 0, 12, 13]
    assert layout.last_R.tolist() == [1, 3]
    tables = layout.tables
    assert tables.table_RP.tolist() == [[2, 0, 0], [4, 1, 3]]
    assert (tables.base_R.tolist(), tables.end_R.tolist(), tables.start_R.tolist()) == ([3, 6], [5, 10], [0, 2, 4])
    assert tables.seen_N is not None
    assert tables.seen_N.tolist() == [0b1, 0b11, 0b101, 0b1101]
    assert (tables.counts, tables.longest) == ((2, 2), 12)


def test_the_largest_tree_has_a_bit_for_every_slot() -> None:
    tree = torch.ones(MOST_IN_TREE, MOST_IN_TREE, dtype=torch.bool).tril()
    row = AttentionRow(blocks=range(17), base=3, count=MOST_IN_TREE, ancestors=tree)
    seen = AttentionMetadata.of([row], block_size=4, device=CPU).tables.seen_N
    assert seen is not None
    assert [bin(bits & (2**64 - 1)).count("1") for bits in seen.tolist()] == list(range(1, 65))


@pytest.mark.parametrize("tree", [None, [-1, 0, 0], [-1, 0, -1, 0, 1]])
def test_layouts_made_on_the_device_are_those_made_on_the_host(tree: list[int] | None) -> None:
    cache = KVCache(blocks=20, block_size=4)
    ancestors = None if tree is None else ancestors_of(tree)[-3:]
    earlier = 0 if ancestors is None else ancestors.shape[1] - 3
    table = torch.tensor([[7, 3, 1, 9], [2, 0, 4, 5], [8, 8, 8, 8]], dtype=torch.int32)
    base, seq = torch.tensor([6, 1, 0], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32)
    padded = AttentionMetadata.padded(
        table, base, seq, count=3, cache=cache, ancestors_RQT=None if ancestors is None else ancestors[None]
    )
    host = AttentionMetadata.of(
        [
            AttentionRow(
                blocks=blocks, base=b, count=n, ancestors=None if ancestors is None else ancestors[:n, : earlier + n]
            )
            for blocks, b, n in zip(table.tolist(), base.tolist(), seq.tolist(), strict=True)
            if n
        ],
        block_size=4,
        device=CPU,
    )
    real = (torch.arange(3) < seq[:, None]).flatten()
    assert padded.slot_N[real].tolist() == host.slot_N.tolist()
    assert padded.position_N[real].tolist() == host.position_N.tolist()
    assert set(padded.slot_N[~real].tolist()) == {cache.scrap}
    assert padded.position_N[~real].tolist() == base.repeat_interleave(3)[~real].tolist()
    assert padded.tables.end_R.tolist() == [*host.tables.end_R.tolist(), 0]
    assert padded.tables.start_R.tolist() == [0, 3, 6, 9]
    assert padded.last_R.tolist() == [2, 5, 8]
    if padded.tables.seen_N is None:
        assert host.tables.seen_N is None
    else:
        assert host.tables.seen_N is not None
        assert padded.tables.seen_N[real].tolist() == host.tables.seen_N.tolist()


def test_memory_is_counted_and_taken_before_it_is_needed() -> None:
    one, many = KVCache(blocks=1, block_size=4), KVCache(blocks=10, block_size=4)
    layout = AttentionMetadata.of([AttentionRow(blocks=[0], base=0, count=1)], block_size=4, device=CPU)
    assert many.bytes == 0
    with torch.inference_mode():
        for layer in range(3):
            one.write(layer, layout.slot_N, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    assert one.bytes_per_block == 3 * 4 * 2 * (8 + 6) * 4
    many.reserve(one)
    assert many.bytes == 11 * one.bytes_per_block, "one block more is scrap"
    where = {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    many.write(2, layout.slot_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))
    assert where == {layer: keys.data_ptr() for layer, (keys, _) in many.layers.items()}
    one.write(0, layout.slot_N, torch.ones(1, 2, 8), torch.ones(1, 2, 6))  # outside inference mode as well


def test_a_backend_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.attention.dense.has_triton", lambda: False)
    layout = AttentionMetadata.of([AttentionRow(blocks=[0], base=0, count=1)], block_size=4, device=CPU)
    with pytest.raises(UserError, match="needs the package triton"):
        PagedAttention(KVCache(blocks=1, block_size=4), layout, backend="triton")


@pytest.mark.parametrize("name", ["blocks", "block_size"])
def test_a_cache_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 0"):
        KVCache(**{"blocks": 4, "block_size": 4, name: 0})


@pytest.mark.parametrize(
    "row",
    [
        AttentionRow(blocks=[1], base=3, count=2),
        AttentionRow(blocks=[1], base=0, count=0),
        AttentionRow(blocks=[1], base=0, count=2, ancestors=torch.tensor([[True, False], [True, False]])),
        AttentionRow(blocks=[1], base=0, count=2, ancestors=torch.tensor([[True, True], [False, True]])),
        AttentionRow(blocks=range(99), base=0, count=65, ancestors=torch.eye(65, dtype=torch.bool)),
    ],
)
def test_rows_that_cannot_be_are_noticed(row: AttentionRow) -> None:
    with pytest.raises(AssertionError):
        AttentionMetadata.of([row], block_size=4, device=CPU)
