"""Blocks are owned by count, found by content, and evicted by age."""

import random

import pytest

from each import each
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.errors import UserError

SIZE = 4


def must(blocks: list[int] | None) -> list[int]:
    assert blocks is not None
    return blocks


def store(pool: BlockManager, tokens: list[int], *, drafted: bool = True) -> list[int]:
    """Own the blocks of `tokens` and let the full ones with a successor be found."""
    blocks = must(pool.allocate(pool.blocks_for(len(tokens))))
    register(pool, blocks, tokens, drafted=drafted)
    return blocks


def register(pool: BlockManager, blocks: list[int], tokens: list[int], *, drafted: bool = True) -> None:
    for i in range((len(tokens) - 1) // SIZE):
        start, end = i * SIZE, (i + 1) * SIZE
        after = blocks[i - 1] if i else None
        pool.register(blocks[i], after=after, tokens=tokens[start:end], successor=tokens[end], drafted=drafted)


def found(pool: BlockManager, tokens: list[int]) -> list[int]:
    """Blocks that a request would get, without keeping them."""
    blocks = must(pool.match(tokens))
    pool.release(blocks)
    return blocks


def drafted(pool: BlockManager, tokens: list[int]) -> list[int]:
    """The part of `found` that the drafter has read."""
    blocks = found(pool, tokens)
    return blocks[: pool.drafted(blocks)]


def test_allocation_gives_all_or_nothing() -> None:
    with pytest.raises(UserError, match="0 blocks of 4"):
        BlockManager(0, SIZE)
    pool = BlockManager(5, SIZE)
    held = must(pool.allocate(3))
    assert pool.allocate(3) is None
    assert (pool.free, pool.used) == (2, 3)
    pool.check([held])
    rest = must(pool.allocate(2))
    assert sorted(held + rest) == [0, 1, 2, 3, 4]
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None


def test_a_block_is_free_when_its_last_owner_releases_it() -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(9))
    first = store(pool, tokens)
    second = must(pool.match(tokens))
    assert second == first[:2]
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    assert pool.used == 2
    pool.release(second)
    pool.check([])
    assert pool.free == 8
    with pytest.raises(AssertionError, match="released but free"):
        pool.release(second)


def test_the_check_finds_wrong_owners() -> None:
    pool = BlockManager(4, SIZE)
    held = must(pool.allocate(2))
    for owners in ([], [held, held], [[*held, held[0]]], [[*held, 9]], [held[:1]]):
        with pytest.raises(AssertionError):
            pool.check(owners)
    pool.check([held[:1], held[1:]])


def test_blocks_of_an_owner_are_adjacent_and_ascending() -> None:
    pool = BlockManager(32, SIZE)
    held = must(pool.allocate(10))
    assert held == list(range(held[0], held[0] + 10))
    # The owners' number, the size of the pool, the room they ask for, and the blocks they have in the end.
    for count, blocks, room, most in ((3, 32, 10, 10), (2, 64, 64, 22), (1, 20, 20, 20)):
        pool = BlockManager(blocks, SIZE)
        owners = [must(pool.allocate(2, room=room)) for _ in range(count)]
        while len(owners[-1]) < most:
            for owner in owners:
                owner += must(pool.allocate(1, after=owner[-1], room=room - len(owner)))
        assert all(owner == list(range(owner[0], owner[0] + most)) for owner in owners), (count, blocks)
        pool.check(owners)
    pool = BlockManager(16, SIZE)
    held = must(pool.allocate(16))
    pool.release(held[1::2])
    again = must(pool.allocate(8))
    assert sorted(again) == held[1::2], "scattered blocks are allocated if there are no others"
    pool.check([held[::2], again])


def test_the_longest_stored_prefix_is_found_and_referenced() -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(11))
    blocks = store(pool, tokens)
    matched = must(pool.match([*tokens[:10], 99, 98]))
    assert matched == blocks[:2]
    pool.check([blocks, matched])
    pool.release(matched)
    assert found(pool, tokens[:9]) == blocks[:2], "token 8 is left to compute"
    assert found(pool, tokens[:8]) == blocks[:1], "the second block would leave nothing to compute"
    assert found(pool, tokens[:4]) == []
    assert found(pool, tokens[:1]) == []


def test_a_hit_needs_the_same_tokens_before_and_the_same_successor() -> None:
    pool = BlockManager(8, SIZE)
    blocks = store(pool, [1, 1, 1, 1, 5, 5, 5, 5, 6])
    assert found(pool, [1, 1, 1, 1, 5]) == blocks[:1]
    assert found(pool, [1, 1, 1, 1, 6]) == [], "the drafter's last slot was computed from another token"
    assert found(pool, [2, 2, 2, 2, 5, 5, 5, 5, 6]) == []
    assert found(pool, [5, 5, 5, 5, 6]) == []
    assert hash((-1,)) == hash((-2,)), "a hash collision in Python"
    pool = BlockManager(8, SIZE)
    blocks = store(pool, [-1] * SIZE + [0])
    assert found(pool, [-2] * SIZE + [0]) == []
    assert found(pool, [-1] * SIZE + [0]) == blocks[:1]


def test_registering_again_records_that_the_drafter_has_read() -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(9))
    blocks = store(pool, tokens, drafted=False)
    assert (found(pool, tokens), drafted(pool, tokens)) == (blocks[:2], [])
    register(pool, blocks[:1], tokens[:5], drafted=True)
    assert drafted(pool, tokens) == blocks[:1]
    register(pool, blocks, tokens, drafted=False)
    assert drafted(pool, tokens) == blocks[:1], "what is drafted stays drafted"
    pool.forget_drafts()
    assert (found(pool, tokens), drafted(pool, tokens)) == (blocks[:2], [])


def test_of_equal_blocks_the_first_is_found() -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(9))
    first, second = store(pool, tokens), store(pool, tokens)
    assert drafted(pool, tokens) == first[:2]
    pool.check([first, second])
    pool.release(second)
    pool.check([first])
    assert pool.cached == 0, "the second can be blank at once"
    pool.release(first)
    assert pool.cached == 2


@each("first_is_used", [True, False])
def test_a_drafted_block_takes_the_place_of_an_equal_undrafted_one(first_is_used: bool) -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(9))
    first = store(pool, tokens, drafted=False)
    if not first_is_used:
        pool.release(first)
    second = store(pool, tokens, drafted=True)
    owners = [first, second] if first_is_used else [second]
    pool.check(owners)
    assert drafted(pool, tokens) == second[:2]
    assert found(pool, tokens) == second[:2]
    for owner in owners:
        pool.release(owner)
    pool.check([])
    assert pool.cached == 2


def test_a_longer_prefix_is_found_through_equal_blocks_of_others() -> None:
    pool = BlockManager(12, SIZE)
    tokens = list(range(13))
    first = store(pool, tokens[:5])
    second = store(pool, tokens)
    assert found(pool, tokens) == [first[0], *second[1:3]]


def test_blank_blocks_go_before_idle_ones() -> None:
    pool = BlockManager(6, SIZE)
    tokens = list(range(9))
    pool.release(store(pool, tokens))
    assert (pool.free, pool.cached) == (6, 2)
    must(pool.allocate(4))
    assert pool.cached == 2
    assert len(found(pool, tokens)) == 2
    must(pool.allocate(1))
    assert pool.cached == 1


@each(("taken", "left"), [(1, [0, 2]), (2, [0]), (3, [])])
def test_the_least_recently_used_content_is_evicted_first(taken: int, left: list[int]) -> None:
    pool = BlockManager(3, SIZE)
    contents = [[token] * (SIZE + 1) for token in range(3)]
    for tokens in contents:
        blocks = must(pool.allocate(1))
        register(pool, blocks, tokens)
        pool.release(blocks)
    found(pool, contents[0])  # used again, after 1 and 2
    must(pool.allocate(taken))
    assert [tokens[0] for tokens in contents if found(pool, tokens)] == left


def test_the_end_of_a_request_is_evicted_before_its_beginning() -> None:
    pool = BlockManager(4, SIZE)
    tokens = list(range(17))
    blocks = must(pool.allocate(4))
    register(pool, blocks, tokens)
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        must(pool.allocate(1))
        assert found(pool, tokens) == blocks[:left]


def test_eviction_ahead_of_need_makes_runs() -> None:
    pool = BlockManager(64, SIZE)
    tokens = list(range(64 * SIZE + 1))
    blocks = must(pool.allocate(64))
    register(pool, blocks, tokens)
    pool.release(blocks)
    owner = must(pool.allocate(1, room=8))
    assert pool.cached == 60, "a sixteenth of the pool at once"
    for _ in range(3):
        owner += must(pool.allocate(1, after=owner[-1], room=8))
    assert pool.cached == 60
    assert sorted(owner) == [60, 61, 62, 63], "the end of the request that was released"


def test_used_content_is_never_evicted_and_nothing_is_found_without_a_prefix_cache() -> None:
    pool = BlockManager(4, SIZE)
    tokens = list(range(9))
    blocks = store(pool, tokens)
    must(pool.allocate(1))
    assert pool.allocate(1) is None
    assert found(pool, tokens) == blocks[:2]
    pool = BlockManager(8, SIZE, prefix_cache=False)
    pool.release(store(pool, tokens))
    assert pool.match(tokens) == []
    assert (pool.cached, pool.free) == (0, 8)


def test_content_is_found_again_when_its_beginning_was_computed_again() -> None:
    pool = BlockManager(8, SIZE)
    tokens = list(range(9))
    first = store(pool, tokens[:5])
    second = store(pool, tokens)
    pool.release(first)
    filler = must(pool.allocate(pool.free))
    assert found(pool, tokens) == [], "the block of its first tokens went to another"
    pool.release(filler)
    third = store(pool, tokens[:5])
    assert found(pool, tokens) == [third[0], second[1]]
    pool.check([second, third])


def test_a_match_leaves_everything_as_it_was_if_the_rest_has_no_room() -> None:
    pool = BlockManager(6, SIZE)
    tokens = list(range(9))
    pool.release(store(pool, tokens))
    held = must(pool.allocate(2))
    before = (pool.lookups, pool.hits, pool.free, pool.cached)
    assert pool.match(tokens, total=5) is None, "2 found and free, 2 free beside them"
    pool.check([held])
    assert (pool.lookups, pool.hits, pool.free, pool.cached) == before
    matched = must(pool.match(tokens, total=4))
    pool.check([held, matched, must(pool.allocate(2))])


def test_hits_and_lookups_count_blocks() -> None:
    pool = BlockManager(8, SIZE)
    store(pool, list(range(9)))
    found(pool, [*range(8), 8, 9, 9, 9, 9])
    found(pool, [7, 7, 7])
    assert (pool.hits, pool.lookups) == (2, 3)


def test_forgetting_leaves_nothing_to_find_and_takes_no_block_from_an_owner() -> None:
    pool = BlockManager(12, SIZE)
    idle, used = list(range(9)), list(range(50, 59))
    pool.release(store(pool, idle))
    blocks = store(pool, used)
    pool.forget()
    pool.check([blocks])
    assert (found(pool, idle), found(pool, used), pool.cached) == ([], [], 0)
    pool.register(blocks[2], after=blocks[1], tokens=[1] * SIZE, successor=0, drafted=True)
    pool.release(blocks)
    pool.check([])
    assert pool.cached == 0


def test_a_very_long_prefix_can_be_stored_found_and_evicted() -> None:

    pool = BlockManager(50_000, 1)
    tokens = list(range(50_000))
    blocks = must(pool.allocate(50_000))
    for i in range(49_999):
        pool.register(
            blocks[i], after=blocks[i - 1] if i else None, tokens=tokens[i : i + 1], successor=i + 1, drafted=True
        )
    pool.release(blocks)
    assert len(found(pool, tokens)) == 49_999
    pool.forget()
    pool.check([])
    assert (pool.free, pool.cached) == (50_000, 0)


def test_any_order_of_operations_keeps_the_pool_whole() -> None:
    chance = random.Random(5)
    pool = BlockManager(24, SIZE)
    owners: list[list[int]] = []
    for _ in range(4000):
        tokens = [chance.choice([0, 0, 0, 0, 0, 0, 0, 1]) for _ in range(chance.randrange(1, 30))]
        action = chance.random()
        if action < 0.35:
            matched = must(pool.match(tokens))
            assert pool.drafted(matched) <= len(matched)
            rest = pool.allocate(pool.blocks_for(len(tokens)) - len(matched), after=matched[-1] if matched else None)
            if rest is None:
                pool.release(matched)
            else:
                register(pool, matched + rest, tokens, drafted=chance.random() < 0.5)
                owners.append(matched + rest)
        elif action < 0.6:
            blocks = pool.allocate(chance.randrange(4), after=chance.randrange(24), room=chance.randrange(12))
            owners += [] if blocks is None else [blocks]
        elif action < 0.98 and owners:
            pool.release(owners.pop(chance.randrange(len(owners))))
        elif action > 0.99:
            chance.choice([pool.forget, pool.forget_drafts])()
        pool.check(owners)
    assert pool.hits > 500
    for owner in owners:
        pool.release(owner)
    pool.check([])
    assert pool.free == 24
