"""However much the drafter reads at once, and whatever it skips, its cache and its drafts are the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from each import each
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner import fused_drafter
from eyas.engine.runner.device_queue import ImmediateQueue
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.exact_passes import MANY, ExactPasses
from eyas.engine.runner.round_passes import RoundPasses
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.sampling_needs import NOTHING
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.plan.footprint import ring_length
from tiny import drafter_config, random_drafter

PAGE, BLOCKS, DEPTH, LENGTHS = 8, 16, 3, (75, 41)
CPU = torch.device("cpu")


def read_in(drafter: Drafter, kind: type[RoundPasses], parts: Sequence[int], *, drafts: bool) -> tuple[Tensor, Tensor]:
    """Let two requests be read in parts (of the first; the other keeps pace), then draft; returns drafts and caches.

    Parts are read by drafting passes or by catch-up passes; the last state is left to the final draft.
    """
    config, generator = drafter.config, torch.Generator().manual_seed(3)
    width = config.num_aux_hidden_states * config.target_hidden_size
    runner = DrafterRunner(drafter, KVCache(blocks=len(LENGTHS) * BLOCKS, block_size=PAGE))
    slots, most = len(LENGTHS), max(LENGTHS)
    state = RoundState(
        slots=slots,
        blocks=BLOCKS,
        max_depth=DEPTH,
        like_X=torch.zeros(width),
        device=CPU,
        ring=ring_length(DEPTH, most + 1),
    )
    assert state.states_SLX is not None
    for slot, length in enumerate(LENGTHS):
        state.table_SP[slot] = torch.arange(slot, slots * BLOCKS, slots)
        state.tokens_SL[slot, : length + 1] = torch.randint(config.vocab_size, (length + 1,), generator=generator)
        state.states_SLX[slot, :length] = torch.randn(length, width, generator=generator)
        state.limit_S[slot], state.follows_S[slot] = length + 9, 1
    nobody: Any = None
    passes = kind(
        state=state,
        model=nobody,
        drafter=runner,
        sampling=SlotSampling(slots, config.vocab_size, CPU),
        logits_SV=torch.empty(0),
    )

    def draft(depth: int) -> Tensor:
        state.send_rows(ImmediateQueue(), torch.arange(slots).numpy(), depth, 1)
        return passes.draft(rows=slots, reads=most, depth=depth, blocks=BLOCKS, needs=NOTHING)

    lengths, read = torch.tensor(LENGTHS), 0
    for part in parts:
        read += part
        if drafts:
            state.length_S[:slots] = lengths.clamp(max=read).minimum(lengths - 1)
            draft(1 + read % DEPTH)
        else:
            state.length_S[:slots] = lengths.clamp(max=read)
            state.send_rows(ImmediateQueue(), torch.arange(slots).numpy(), 0, 1)
            passes.catch_up(rows=slots, blocks=BLOCKS)
            assert state.drafted_S[:slots].tolist() == (state.length_S[:slots] - 1).tolist()
    state.length_S[:slots] = lengths
    drafted_RK = draft(DEPTH).clone()
    assert state.drafted_S[:slots].tolist() == list(LENGTHS)
    assert state.depth_R.tolist() == [DEPTH] * slots
    null_slot = runner.cache.null_slot
    return drafted_RK, torch.stack([x_GCK[:, :null_slot] for pair in runner.cache.layers.values() for x_GCK in pair])


@each("layers", [1, 2])
@each("drafts", [False, True])
@each("parts", [(), (75,), (40, 35), (MANY + 5, 2, 36), (5, 3, 7, 60)])
@pytest.mark.parametrize("kind", [ExactPasses, RoundPasses])
def test_reading_a_prompt_in_bulk_equals_reading_it_bit_by_bit(
    kind: type[RoundPasses], parts: tuple[int, ...], drafts: bool, layers: int
) -> None:
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True, num_hidden_layers=layers)).eval()
    with torch.inference_mode():
        expected_RK, expected = read_in(drafter, ExactPasses, [3] * 25, drafts=True)
        drafted_RK, cached = read_in(drafter, kind, parts, drafts=drafts)
    assert torch.equal(drafted_RK, expected_RK)
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)


def test_only_keys_and_values_are_computed_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True)).eval()
    ran: list[int] = []
    draft = DrafterRunner(drafter, KVCache(blocks=1, block_size=PAGE)).run
    step = type(draft).step

    def counted(self: object, hidden: Tensor, *rest: object) -> object:
        ran.append(len(hidden))
        return step(self, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_drafter, "_is_right", lambda *_: True)  # a trial takes steps of its own
    monkeypatch.setattr(type(draft), "step", counted)
    for parts in ([], [75]):
        with torch.inference_mode():
            read_in(drafter, ExactPasses, parts, drafts=False)
        assert ran == [2, 2, 2], "a token of each request, then two further depths"
        ran.clear()
