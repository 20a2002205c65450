"""Chunks of many prompts in one pass leave what reading one prompt after the other leaves."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.dense_tables import use_dense_tables
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner.drafter import DrafterRunner
from eyas.engine.runner.hidden_states import HiddenStates
from eyas.engine.runner.model_runner import ModelRunner
from eyas.engine.runner.passes import ChunksRead, read_ragged
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow
from eyas.sampling import Sampling
from eyas.target.model import Target
from tiny import drafter_config, random_drafter

BLOCKS, BLOCK_SIZE, CPU = 160, 4, torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Pair:
    """A target and perhaps a drafter over caches of their own."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        cache = partial(KVCache, blocks=BLOCKS, block_size=BLOCK_SIZE)
        self.runner = ModelRunner(target, cache())
        self.drafter = None if drafter is None else DrafterRunner(drafter, cache())
        layer_ids = () if drafter is None else (0, 1, 2)[: drafter.config.num_aux_hidden_states]
        self.run = partial(self.runner.run, layer_ids=layer_ids)

    def caches(self) -> list[Tensor]:
        """All keys and values but those of the null block."""
        caches = [self.runner.cache, *([self.drafter.cache] if self.drafter else [])]
        return [x[:, : cache.null_slot] for cache in caches for pair in cache.layers.values() for x in pair]


def read_alone(pair: Pair, seq: SequenceState) -> tuple[Tensor, Tensor | None]:
    """A whole prompt by itself: logits behind it, and the state of its last token, which the drafter has not read."""
    count = len(seq.tokens)
    row = AttentionRow(blocks=seq.blocks, base=0, count=count)
    layout = AttentionMetadata.of([row], block_size=BLOCK_SIZE, device=CPU)
    logits_1V, aux_NX = pair.run(torch.tensor(seq.tokens), layout, torch.tensor([count - 1]))
    seq.target_length = count
    if pair.drafter is not None:
        assert aux_NX is not None
        pair.drafter.states.add(seq, HiddenStates(aux_NX, 0, count))
        pair.drafter.read([seq], but_last=True)
        aux_NX = aux_NX[-1]
    return logits_1V[0], aux_NX


def read_together(pair: Pair, chunks: list[tuple[SequenceState, int, int]], *, rows: int, tokens: int) -> ChunksRead:
    """Chunks start..end of prompts, padded to so many rows and tokens."""
    ids, behind, starts = list[int](), list[int](), [0]
    table = torch.zeros(rows, BLOCKS // 4, dtype=torch.int64)
    for row, (seq, start, end) in enumerate(chunks):
        ids += seq.tokens[start:end]
        behind += [*seq.tokens[start + 1 : end], seq.tokens[end] if end < len(seq.tokens) else -1][: end - start]
        starts.append(len(ids))
        table[row, : len(seq.blocks)] = torch.tensor(seq.blocks)
    starts += [len(ids)] * (rows - len(chunks))
    bases = [start for _, start, _ in chunks] + [0] * (rows - len(chunks))
    blank = [0] * (tokens - len(ids))
    numbers = {
        "ids": torch.tensor(ids + blank),
        "behind": torch.tensor(behind + blank),
        "start": torch.tensor(starts),
        "base": torch.tensor(bases),
        "table": table,
    }
    return read_ragged(numbers, pair.run, pair.runner.cache, pair.drafter)


def sequences(prompts: list[tuple[int, ...]]) -> list[SequenceState]:
    free = random.Random(5).sample(range(BLOCKS), BLOCKS)
    seqs = []
    for key, prompt in enumerate(prompts):
        request = Request(prompt=prompt, sampling=Sampling(), max_new_tokens=4)
        seq = SequenceState(key=key, arrival=key, request=request)
        seq.blocks = [free.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))]
        seqs.append(seq)
    return seqs


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("most", [1000, 9, 1])
@torch.inference_mode()
def test_many_prompts_read_together_are_read_as_each_alone(
    target: Target, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, layers: int, most: int
) -> None:
    """Whole or in chunks of at most `most` tokens, with or without a drafter of one layer or two."""
    use_dense_tables(monkeypatch)
    drafter = None
    if layers:
        config = drafter_config(fc_norm=True, norm_output=True, num_hidden_layers=layers)
        drafter = random_drafter(config).eval()
    prompts = [*prompts[:5], (7,)]
    alone, together = Pair(target, drafter), Pair(target, drafter)
    expected = [read_alone(alone, seq) for seq in sequences(prompts)]
    ends = dict.fromkeys(range(len(prompts)), 0)
    seqs, source, seen = sequences(prompts), random.Random(most), set[int]()
    while len(seen) < len(seqs):
        chunks = []
        for key in source.sample(range(len(seqs)), len(seqs)):
            start, whole = ends[key], len(seqs[key].tokens)
            # Rows of none are among them: of what is read already, and now and then of what waits.
            ends[key] = start if source.random() < 0.2 else min(start + most, whole)
            chunks.append((seqs[key], start, ends[key]))
        total = sum(end - start for _, start, end in chunks)
        read = read_together(together, chunks, rows=len(chunks) + 2, tokens=total + source.choice([0, 3]) or 1)
        assert read.logits_RV.shape[0] == len(chunks) + 2
        for row, (seq, start, end) in enumerate(chunks):
            if end > start and end == len(seq.tokens):
                seen.add(seq.key)
                logits_V, state_X = expected[seq.key]
                torch.testing.assert_close(read.logits_RV[row], logits_V, **CLOSE)
                if state_X is not None:
                    assert read.last_RX is not None
                    torch.testing.assert_close(read.last_RX[row], state_X, **CLOSE)
    for ours, theirs in zip(together.caches(), alone.caches(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
