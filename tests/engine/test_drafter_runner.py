"""However much the drafter reads at once, and whatever it leaves out, it knows the same and drafts the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner import fused_drafter
from eyas.engine.runner.drafter import MANY, Draft, DrafterRunner
from eyas.engine.runner.hidden_states import HiddenStates
from eyas.engine.sampler import SamplingMetadata
from eyas.sampling import Sampling
from tiny import drafter_config, random_drafter

PAGE, LENGTHS = 8, (75, 41)


def sampling_metadata(seq: SequenceState, drafts: Sequence[int]) -> SamplingMetadata:
    return SamplingMetadata(sampling=Sampling(), position=len(seq.tokens) + len(drafts))


def read_in(drafter: Drafter, parts: Sequence[int], *, but_last: bool) -> tuple[list[Draft], Tensor]:
    """Two requests, read by parts (of the first; the other keeps step), then drafted for; drafts, and the cache."""
    config, generator = drafter.config, torch.Generator().manual_seed(3)
    paged = DrafterRunner(drafter, KVCache(blocks=32, block_size=PAGE))
    seqs, states = [], []
    for key, length in enumerate(LENGTHS):
        tokens = torch.randint(config.vocab_size, (length + 1,), generator=generator).tolist()
        request = Request(prompt=tuple(tokens), sampling=Sampling(), max_new_tokens=8)
        seq = SequenceState(key=key, arrival=key, request=request)
        seq.blocks = list(range(key, 32, len(LENGTHS)))
        seqs.append(seq)
        width = config.num_aux_hidden_states * config.target_hidden_size
        states.append(torch.randn(length, width, generator=generator))
    for part in parts:
        for seq, state_TX in zip(seqs, states, strict=True):
            size = min(part, len(state_TX) - seq.target_length)
            if size:
                paged.states.add(seq, HiddenStates(state_TX, seq.target_length, size))
                seq.target_length += size
        paged.read(seqs, but_last=but_last)
        for seq in seqs:
            seq.drafter_length = seq.target_length - but_last
    if but_last:
        paged.read(seqs)
    for seq in seqs:
        assert seq.target_length == len(seq.tokens) - 1
        seq.drafter_length = seq.target_length
    drafts = paged.chain(seqs, [3, 3], sampling_metadata)
    return drafts, torch.stack(paged.cache.layers[0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("but_last", [False, True])
@pytest.mark.parametrize("parts", [(75,), (40, 35), (MANY + 5, 2, 36), (5, 3, 7, 60)])
def test_a_prompt_read_in_bulk_is_known_as_one_read_bit_by_bit(
    parts: tuple[int, ...], but_last: bool, layers: int
) -> None:
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True, num_hidden_layers=layers)).eval()
    bit_by_bit, expected = read_in(drafter, [3] * 25, but_last=False)
    drafts, cached = read_in(drafter, parts, but_last=but_last)
    assert [draft.tokens for draft in drafts] == [draft.tokens for draft in bit_by_bit]
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)


def test_nothing_but_keys_and_values_is_computed_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = random_drafter(drafter_config(fc_norm=True, norm_output=True)).eval()
    ran: list[int] = []
    draft = DrafterRunner(drafter, KVCache(blocks=1, block_size=PAGE)).run
    step = type(draft).step

    def counted(self: object, hidden: Tensor, *rest: object) -> object:
        ran.append(len(hidden))
        return step(self, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_drafter, "_is_right", lambda *_: True)  # a trial takes steps of its own
    monkeypatch.setattr(type(draft), "step", counted)
    read_in(drafter, [75], but_last=True)
    assert ran == [2, 2, 2], "a token of each request, then two further depths"
