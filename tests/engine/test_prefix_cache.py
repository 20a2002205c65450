"""Prefix cache hits do not depend on how requests draft: a request finds what it would find without speculation.

Entries that the drafter lacks are read again when it is to draft, never earlier, and the target's entries stay bitwise
the same.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from each import each
from engine.common import AUTO, OFF, at_depth, options, request, run, tokens_of
from engine.late_queue import LateQueue
from engine.round_engines import round_engine
from eyas.engine.engine import Engine
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request, Speculation
from eyas.engine.speculation.controller import Choice, RowFacts
from eyas.engine.suffix.config import SuffixConfig
from eyas.plan.shapes import CHAIN
from eyas.sampling import Sampling
from tiny import language

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eyas.drafter.model import Drafter
    from eyas.kernels.attention.metadata import AttentionMetadata
    from eyas.target.model import Target

MODES = {"off": OFF, "auto": AUTO, "fixed": at_depth(3), "suffix": Speculation(method="suffix")}
SIZE = 4
"""Tokens of a block."""
TEXT = tuple(language(1, 80, torch.Generator().manual_seed(4))[0].tolist())
Tokens = tuple[int, ...]


def made(target: Target, drafter: Drafter | None, *, late: bool = False, suffix: bool = True) -> Engine:
    """An engine whose steps land at once, or late."""
    config = options(suffix=SuffixConfig() if suffix else None, max_num_seqs=16, memory=2**24)
    return (
        round_engine(target, drafter, config, LateQueue(seed=1, haste=0.3))
        if late
        else Engine(target, drafter, config=config)
    )


def answered(engine: Engine, prompt: Tokens, mode: str, *, new: int, salt: str | None = None) -> RequestOutput:
    (answer,) = run(engine, [request(prompt, speculation=MODES[mode], max_new_tokens=new, cache_salt=salt)])
    return answer


def talked(
    engine: Engine, orders: list[tuple[str, ...]], turns: list[int], *, new: int
) -> list[tuple[list[int], Tokens]]:
    """Prefix cache hits of each conversation, turn by turn, and its text. Each has a cache salt of its own."""
    found: list[list[int]] = [[] for _ in orders]
    texts: list[Tokens] = [() for _ in orders]
    for turn, count in enumerate(turns):
        asked = TEXT[sum(turns[:turn]) :][:count]
        texts = [text + asked for text in texts]
        requests = [
            request(text, speculation=MODES[order[turn]], max_new_tokens=new, cache_salt=f"{order} {turns} {new}")
            for text, order in zip(texts, orders, strict=True)
        ]
        answers = run(engine, requests)
        for number, answer in enumerate(answers):
            found[number].append(answer.num_cached_tokens)
            texts[number] += answer.tokens
    return list(zip(found, texts, strict=True))


@each("late", [False, True])
def test_as_much_is_found_as_without_speculation_in_every_order_of_modes(
    target: Target, tiny_drafter: Drafter, late: bool
) -> None:
    engine, without = made(target, tiny_drafter, late=late), made(target, None, suffix=False)
    pairs, triples = list(product(MODES, repeat=2)), list(product(MODES, repeat=3))
    lengths = (5, 30) if late else (3, 4, 5, 8, 30)
    for new in (1, 9):
        cases = [(pairs, [length, extra]) for length in lengths for extra in (0, 5)]
        for orders, turns in [*cases, (triples[new == 9 :: 2], [6, 7, 8] if late else [17, 0, 3])]:
            (expected,) = talked(without, [("off",) * len(turns)], turns, new=new)
            for first in range(0, len(orders), 16):  # as many as run at once
                some = orders[first : first + 16]
                for order, found in zip(some, talked(engine, some, turns, new=new), strict=True):
                    assert found == expected, (order, turns, new)


@each("in_place", [True, False])
def test_as_much_is_found_after_the_drafter_was_swapped(target: Target, tiny_drafter: Drafter, in_place: bool) -> None:
    engine = made(target, deepcopy(tiny_drafter), suffix=False)
    for before, after in product(("off", "auto", "fixed"), repeat=2):
        answered(engine, TEXT[:30], before, new=9, salt=before + after)
        assert engine.swap_drafter(deepcopy(tiny_drafter), in_place=in_place) == in_place
        assert answered(engine, TEXT[:30], after, new=9, salt=before + after).num_cached_tokens == 28
    depth_before = engine.stats.accepted
    answered(engine, TEXT[:30], "fixed", new=30)
    assert engine.stats.accepted > depth_before


def drafted(engine: Engine, prompt: Tokens) -> int:
    """How many cached tokens of a prompt the drafter has read, too."""
    blocks = engine.block_manager.match(prompt)
    assert blocks is not None
    engine.block_manager.release(blocks)
    return engine.block_manager.drafted(blocks) * SIZE


def read_tokens(engine: Engine) -> list[int]:
    """Collects how many prompt tokens every pass reads, again or not."""
    counts: list[int] = []
    begin_read = engine.core.runner.begin_read

    def counted(rows, **options):  # type: ignore[no-untyped-def]
        counts.append(sum(row.count for row in rows))
        return begin_read(rows, **options)

    engine.core.runner.begin_read = counted  # type: ignore[method-assign]
    return counts


@each("late", [False, True])
def test_what_the_drafter_lacks_is_read_again_only_when_it_is_to_draft(
    target: Target, tiny_drafter: Drafter, late: bool
) -> None:
    prompt = TEXT[:42]
    fresh = answered(made(target, tiny_drafter, late=late), prompt, "fixed", new=40)
    engine = made(target, tiny_drafter, late=late)
    assert answered(engine, prompt, "off", new=1).tokens == fresh.tokens[:1]
    assert drafted(engine, prompt) == 0
    counts = read_tokens(engine)
    for mode in MODES:
        assert answered(engine, prompt, mode, new=1).tokens == fresh.tokens[:1]
    answered(engine, prompt, "off", new=9)
    assert counts == [2] * 5, "answers of one token and plain ones read only what is not cached"
    assert drafted(engine, prompt) == 0
    counts.clear()
    blocks = engine.block_manager.match(prompt)
    assert blocks is not None
    written, run_pass = [], engine.model_runner.run_pass

    def watched(ids_N: Any, layout: AttentionMetadata, *rest: Any, **more: Any) -> Any:
        written.extend(layout.slot_mapping_N.tolist())
        return run_pass(ids_N, layout, *rest, **more)

    engine.model_runner.run_pass = watched  # type: ignore[method-assign]
    answer = answer_of(engine, request(prompt, speculation=at_depth(3), max_new_tokens=40))
    assert (answer.tokens, answer.num_cached_tokens) == (fresh.tokens, 40)
    assert answer.stats.acceptance_length == pytest.approx(fresh.stats.acceptance_length, rel=0.1)
    assert counts[0] == 2
    assert sum(counts[1:]) in range(43, 43 + 8), "all that the drafter lacked, once"
    assert {place // SIZE for place in written}.isdisjoint(blocks), "others read these blocks"
    engine.block_manager.release(blocks)
    assert drafted(engine, prompt) == 40
    counts.clear()
    assert answered(engine, prompt, "fixed", new=40).stats.accepted >= answer.stats.accepted
    assert counts == [2], "later requests find it in the cache"


def answer_of(engine: Engine, asked: Request) -> RequestOutput:
    """An answer, while the test itself owns blocks."""
    pieces, key = [], engine.submit(asked)
    stats = engine.stats_of(key)
    while engine.busy:
        pieces += engine.step()
    return RequestOutput.of(pieces, stats)


def test_a_gap_no_longer_than_the_rest_of_a_prompt_is_read_with_it(target: Target, tiny_drafter: Drafter) -> None:
    engine = made(target, tiny_drafter)
    answered(engine, TEXT[:12], "off", new=1)
    counts = read_tokens(engine)
    answer = answered(engine, TEXT[:24], "fixed", new=2)
    assert (answer.num_cached_tokens, counts) == (12, [24])
    answered(engine, TEXT[24:36], "off", new=1)
    counts.clear()
    answered(engine, TEXT[24:48], "fixed", new=1)
    assert counts == [12], "one token is not drafted for, so nothing is read again"


@each("late", [False, True])
def test_answers_stay_right_whatever_requests_share_lag_read_again_or_lose(
    target: Target, tiny_drafter: Drafter, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mode, greedy and sampled, with few blocks: requests that share a prompt lag at the same time."""
    chance = Sampling(temperature=0.8)
    asked = [
        request(
            TEXT[i // 7 :][: 33 - 4 * (i % 2)] + TEXT[60 : 60 + i % 5],
            speculation=MODES[mode],
            max_new_tokens=(1, 60, 40)[i % 3],
            sampling=chance if i % 4 == 3 else Sampling(),
            seed=i,
        )
        for i, mode in enumerate(["off", "auto", "off", "fixed", "auto", "suffix", "fixed"] * 4)
    ]
    expected = tokens_of(run(made(target, None, suffix=False), [replace(one, speculation=OFF) for one in asked]))
    config = options(max_num_seqs=6, max_num_batched_tokens=20, memory=2**18, suffix=SuffixConfig())
    engine = (
        round_engine(target, tiny_drafter, config, LateQueue(seed=2, haste=0.3))
        if late
        else Engine(target, tiny_drafter, config=config)
    )
    choose, depths = engine.controller.choose, cycle([0, 3, 0, 0, 2, 5])

    def moody(rows: Sequence[RowFacts], **more: Any) -> Choice:
        drawn = tuple(0 if row.mode == "off" else next(depths) for row in rows)
        return replace(choose(rows, **more), depths=drawn, shape=CHAIN, holds=1)

    monkeypatch.setattr(engine.controller, "choose", moody)
    lagged = read_again = preempted = 0
    keys = {engine.submit(one): tokens for one, tokens in zip(asked, expected, strict=True)}
    gone = {key for key in keys if key % 9 == 4}
    said: dict[int, list[int]] = {key: [] for key in keys}
    while engine.busy:
        for piece in engine.step():
            said[piece.key] += piece.tokens
        engine.scheduler.check()
        for seq in engine.scheduler.running:
            lagged += seq.lags
            read_again += seq.target_length < seq.written_length
            preempted += seq.preemptions > 0
            if seq.key in gone and seq.target_length < seq.written_length:
                engine.cancel(seq.key)
    assert engine.block_manager.used == 0
    for key, tokens in keys.items():
        assert tuple(said[key]) == tokens[: len(said[key])]
        assert key in gone or len(said[key]) == len(tokens)
    assert min(lagged, read_again, preempted) > 0
