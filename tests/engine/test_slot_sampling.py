"""Sampling by slots gives the tokens of the oracle's `choose`, without the host reading anything from the device."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from each import each
from eyas.engine.logprobs import logprob_columns, tell_logprobs
from eyas.engine.request import Request, SequenceState
from eyas.engine.runner import slot_sampling
from eyas.engine.runner.sampling_needs import NO_LOGPROBS, Needs, needs_mask
from eyas.engine.runner.slot_sampling import SlotSampling
from eyas.kernels.round_outcome import accepted_drafts
from eyas.sampling import Sampling
from oracle.draft import Draft
from oracle.sampler import choose, draw, log_probabilities
from oracle.verify import accepted_nodes, sampling_metadata

CPU = torch.device("cpu")
EVERYTHING = Needs(
    sampled=True, min_p=True, top_k=512, top_p=True, biased=True, penalised=True, early=True, logprobs=20
)


def random_sampling(chance: random.Random, size: int) -> Sampling:
    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if chance.random() < 0.35 else otherwise

    def some_tokens(most: int) -> list[int]:
        return chance.sample(range(size), min(most, size))

    return Sampling(
        temperature=chance.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=sometimes(chance.choice([1, 3, 20, size, size + 7]), 0),
        top_p=sometimes(chance.uniform(0.05, 0.999), 1.0),
        min_p=sometimes(chance.uniform(0.001, 0.5), 0.0),
        repetition_penalty=sometimes(chance.uniform(0.5, 2.0), 1.0),
        presence_penalty=sometimes(chance.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(chance.uniform(-2, 2), 0.0),
        logit_bias=sometimes({token: chance.uniform(-9, 9) for token in some_tokens(5)}, ()),
        allowed_tokens=sometimes(frozenset(some_tokens(chance.randint(6, 40))), None),
    )


def random_sequence(chance: random.Random, size: int, key: int) -> SequenceState:
    sampling = random_sampling(chance, size)
    prompt = tuple(chance.randrange(size) for _ in range(chance.randint(1, 9)))
    stops = frozenset(chance.sample(range(size), chance.randint(0, 3)))
    shortest = chance.choice([0, 0, 3, 6])
    words = tuple((chance.randrange(size),) for _ in range(2)) if sampling.allowed_tokens is None else ()
    seq = SequenceState(
        key=key,
        arrival=key,
        request=Request(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=50,
            min_new_tokens=shortest,
            stop_ids=stops,
            bad_words=words if chance.random() < 0.3 else (),
            seed=chance.randrange(-(2**63), 2**63),
            logprobs=chance.choice([None, None, 0, 3]),
        ),
    )
    seq.tokens += [chance.choice([*seq.tokens, chance.randrange(size)]) for _ in range(chance.randint(0, 8))]
    return seq


@dataclass
class Batch:
    """Requests in slots, with a step's inputs."""

    sampling: SlotSampling
    seqs: list[SequenceState]
    slots: list[int]
    drafts_RK: Tensor
    logits_NV: Tensor
    device: torch.device

    @property
    def slot_R(self) -> Tensor:
        return torch.tensor(self.slots)

    @property
    def position_R(self) -> Tensor:
        return torch.tensor([len(seq.tokens) for seq in self.seqs])

    def choose(self, needs: Needs | None = None, mask_NV: Tensor | None = None) -> Tensor:
        needs = self.sampling.needs(self.seqs) if needs is None else needs
        inputs = [x.to(self.device) for x in (self.logits_NV, self.slot_R, self.position_R, self.drafts_RK)]
        mask_NV = None if mask_NV is None else mask_NV.to(self.device)
        return self.sampling.choose(inputs[0], inputs[1], inputs[2], inputs[3], needs, mask_NV).cpu()

    def expected(self, mask_NV: Tensor | None = None) -> Tensor:
        """Tokens by the oracle."""
        depth = self.drafts_RK.shape[1]
        wanted = [
            sampling_metadata(seq, drafts[:q])
            for seq, drafts in zip(self.seqs, self.drafts_RK.tolist(), strict=True)
            for q in range(1 + depth)
        ]
        if mask_NV is not None:
            wanted = [replace(one, mask_V=mask_V) for one, mask_V in zip(wanted, mask_NV, strict=True)]
        return choose(self.logits_NV, wanted).view(-1, 1 + depth)


def random_batch(
    seed: int, rows: int = 8, size: int = 97, depth: int | None = None, device: torch.device = CPU
) -> Batch:
    """Mixed requests in random slots that have had other requests before."""
    chance = random.Random(seed)
    sampling = SlotSampling(rows + 3, size, device)
    slots = chance.sample(range(rows + 3), rows)
    for turn in range(2):
        seqs = [random_sequence(chance, size, 100 * turn + row) for row in range(rows)]
        sampling.admit(slots, seqs)()
    depth = chance.randint(0, 3) if depth is None else depth
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 3 * torch.randn(rows * (1 + depth), size, generator=generator)
    drafts_RK = torch.randint(size, (rows, depth), generator=generator)
    return Batch(sampling, seqs, slots, drafts_RK, logits_NV.bfloat16() if seed % 2 else logits_NV, device)


@each("seed", range(40))
def test_mixed_batches_choose_as_the_oracle_does(seed: int) -> None:
    batch = random_batch(seed, size=random.Random(seed).choice([41, 97, 700]))
    before = batch.logits_NV.clone()
    expected = batch.expected()
    assert torch.equal(batch.choose(), expected)
    assert torch.equal(batch.choose(EVERYTHING | batch.sampling.needs(batch.seqs)), expected), "needs may be larger"
    assert torch.equal(batch.logits_NV, before), "the raw logits are left as they were"


def test_large_vocabularies_and_batches_in_parts_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(3, rows=5, size=5000, depth=2)
    expected = batch.expected()
    assert torch.equal(batch.choose(), expected)
    monkeypatch.setattr(slot_sampling, "MOST_AT_ONCE", 2 * 3 * 5000)
    assert torch.equal(batch.choose(), expected)


def test_padding_rows_do_not_affect_others() -> None:
    batch = random_batch(5, depth=1)
    needs, chosen = batch.sampling.needs(batch.seqs), batch.choose()
    dummy = torch.tensor([11, 11])
    logits_NV = torch.cat([batch.logits_NV, torch.zeros(4, 97, dtype=batch.logits_NV.dtype)])
    slot_R, position_R = (
        torch.cat([batch.slot_R, dummy]),
        torch.cat([batch.position_R, torch.zeros(2, dtype=torch.int64)]),
    )
    drafts_RK = torch.cat([batch.drafts_RK, torch.full((2, 1), -1)])
    token_RQ = batch.sampling.choose(logits_NV, slot_R, position_R, drafts_RK, needs)
    assert torch.equal(token_RQ[:-2], chosen)
    batch.sampling.note(slot_R, token_RQ, torch.zeros_like(slot_R), needs)
    assert torch.equal(batch.choose(), chosen)


def test_masks_of_the_host_are_applied() -> None:
    batch = random_batch(7)
    mask_NV = torch.rand(batch.logits_NV.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for row, seq in enumerate(batch.seqs):  # leave some token
        for token in seq.request.sampling.allowed_tokens or ():
            mask_NV.view(len(batch.seqs), -1, 97)[row, :, token] = True
    assert torch.equal(batch.choose(mask_NV=mask_NV), batch.expected(mask_NV))
    plain = SlotSampling(1, 4, CPU)
    only_V = torch.tensor([[False, False, True, False]])
    token = plain.choose(
        torch.tensor([[4.0, 3, 2, 1]]), *torch.zeros(2, 1, dtype=torch.int64), NO_DRAFTS, Needs(), only_V
    )
    assert token.tolist() == [[2]]


NO_DRAFTS = torch.empty(1, 0, dtype=torch.int64)


@each("seed", range(6))
def test_rounds_of_drafts_and_acceptance_count_tokens_as_the_host_does(seed: int) -> None:
    """Several steps without input from the host: each gives what the host would have computed."""
    batch = random_batch(seed, depth=3)
    chance = random.Random(seed)
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        batch.logits_NV = 3 * torch.randn(batch.logits_NV.shape, generator=generator)
        for row in range(len(batch.seqs)):  # drafts that are often right
            for place in range(3):
                if chance.random() < 0.8:
                    batch.drafts_RK[row, place] = batch.expected()[row, place]
        needs = batch.sampling.needs(batch.seqs)
        token_RQ = batch.choose(needs)
        assert torch.equal(token_RQ, batch.expected())
        depth_R = torch.tensor([chance.randint(0, 3) for _ in batch.seqs])
        accepted_R = accepted_drafts(token_RQ, batch.drafts_RK, depth_R)
        batch.sampling.note(batch.slot_R, token_RQ, accepted_R + 1, needs)
        for row, seq in enumerate(batch.seqs):
            tokens = tuple(batch.drafts_RK[row, : depth_R[row]].tolist())
            same = accepted_nodes(
                Draft(tokens=tokens, parents=tuple(range(-1, len(tokens) - 1))), token_RQ[row].tolist()
            )
            assert accepted_R[row] == len(same)
            seq.tokens += token_RQ[row, : len(same) + 1].tolist()


def test_without_drafts_nothing_is_accepted() -> None:
    token_RQ, drafts_RK = torch.tensor([[4], [5]]), torch.empty(2, 0, dtype=torch.int64)
    assert accepted_drafts(token_RQ, drafts_RK, torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]


def test_a_readmitted_request_is_counted_by_its_tokens() -> None:
    batch = random_batch(11)
    batch.choose()
    moved = list(reversed(batch.slots))
    for seq in batch.seqs:
        seq.tokens += [1, 2, 2]
    send = batch.sampling.admit(moved, batch.seqs)
    send()
    batch.slots = moved
    assert torch.equal(batch.choose(), batch.expected())


def test_options_are_read_at_once_and_written_when_sent() -> None:
    sampling = SlotSampling(1, 4, CPU)
    logits, zero = torch.tensor([[4.0, 3, 2, 1]]), torch.zeros(1, dtype=torch.int64)

    def owner(key: int, **options: Any) -> SequenceState:
        return SequenceState(
            key=key, arrival=key, request=Request(prompt=(0,), sampling=Sampling(**options), max_new_tokens=9)
        )

    first = owner(0, logit_bias={3: 9.0})
    sends = [sampling.admit([0], [first]), sampling.admit([0], [second := owner(1)])]
    sends[0]()
    assert int(sampling.choose(logits, zero, zero, NO_DRAFTS, sampling.needs([first]))) == 3
    sends[1]()
    assert int(sampling.choose(logits, zero, zero, NO_DRAFTS, Needs(biased=True))) == 0, "no bias is left in the slot"
    assert sampling.needs([second]) == Needs()


@each("seed", range(6))
def test_drafts_are_drawn_as_by_the_oracle(seed: int) -> None:
    batch = random_batch(seed, depth=0, size=300)
    token_W = torch.randperm(300, generator=torch.Generator().manual_seed(seed))[:120].sort().values
    q_logits_RW = batch.logits_NV[:, :120]
    wanted = [replace(sampling_metadata(seq, ()), mask_V=None) for seq in batch.seqs]
    needs = batch.sampling.needs(batch.seqs)
    drawn = batch.sampling.draw(q_logits_RW, batch.slot_R, batch.position_R, token_W, needs)
    assert torch.equal(drawn, draw(q_logits_RW, wanted, token_W).index)


# What a batch needs ---------------------------------------------------------------------------------------------


def asked(**options: Any) -> Needs:
    fields = {name: options.pop(name) for name in tuple(options) if name in Request.__dataclass_fields__}
    request = Request(prompt=(1, 2), sampling=Sampling(**options), max_new_tokens=9, **fields)
    seq = SequenceState(key=0, arrival=0, request=request)
    sampling = SlotSampling(1, 1000, CPU)
    sampling.admit([0], [seq])
    return sampling.needs([seq])


def test_needs_are_what_requests_use() -> None:
    assert asked() == asked(top_k=5, top_p=0.5, min_p=0.1) == Needs()
    assert Needs().greedy
    assert asked(temperature=1.0) == Needs(sampled=True)
    assert asked(temperature=1.0, top_k=50, top_p=0.9) == Needs(sampled=True, top_k=64, top_p=True)
    assert asked(temperature=1.0, top_k=65) == Needs(sampled=True, top_k=512)
    assert asked(temperature=1.0, top_k=600) == Needs(sampled=True, top_k=1000)
    assert asked(temperature=1.0, top_k=1000) == Needs(sampled=True)
    assert asked(temperature=1.0, min_p=0.1) == Needs(sampled=True, min_p=True)
    assert asked(logit_bias={1: 2.0}) == asked(allowed_tokens=frozenset({3})) == asked(bad_words=((3,),))
    assert asked(logit_bias={1: 2.0}) == Needs(biased=True)
    assert asked(repetition_penalty=1.1) == Needs(penalised=True)
    assert asked(logprobs=0) == Needs(logprobs=0)
    assert asked(logprobs=3) == asked(logprobs=7) == Needs(logprobs=20)
    assert NO_LOGPROBS == Needs().logprobs < 0
    assert Needs(sampled=True, top_k=64) | Needs(early=True, logprobs=0) == Needs(
        sampled=True, top_k=64, early=True, logprobs=0
    )


def test_stop_tokens_matter_until_the_minimum_length() -> None:
    request = Request(
        prompt=(1,),
        sampling=Sampling(),
        max_new_tokens=9,
        min_new_tokens=2,
        stop_ids=frozenset({0}),
        bad_words=((1, 2),),
    )
    seq = SequenceState(key=0, arrival=0, request=request)
    sampling = SlotSampling(1, 9, CPU)
    sampling.admit([0], [seq])()
    assert needs_mask(seq)
    assert sampling.needs([seq]) == Needs(early=True, masked=True)
    seq.tokens += [5, 6]
    assert sampling.needs([seq]) == Needs(masked=True)


# Logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_of_tensors_are_those_of_each_row_alone() -> None:
    logits_NV = 3 * torch.randn(5, 60, generator=torch.Generator().manual_seed(2))
    token_N, asked_for = torch.tensor([3, 0, 59, 7, 7]), [0, 1, 5, 20, 2]
    told_NC = logprob_columns(logits_NV, token_N, 20)
    for row, most in enumerate(asked_for):
        (told,) = tell_logprobs(token_N[row : row + 1], told_NC[row : row + 1], most)
        (alone,) = log_probabilities(logits_NV[row : row + 1], token_N[row : row + 1], most)
        assert (told.token, told.rank, [t for t, _ in told.top]) == (alone.token, alone.rank, [t for t, _ in alone.top])
        assert told.logprob == pytest.approx(alone.logprob, abs=1e-5)
        assert len(told.top) == most


# Nothing is asked of the device ---------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts operations that launch kernels: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in ("aten::_unsafe_view", "aten::empty"):
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


NEEDS = {
    "greedy": Needs(),
    "sampled": Needs(sampled=True),
    "cut": Needs(sampled=True, min_p=True, top_k=64, top_p=True),
    "shaped": Needs(biased=True, penalised=True, early=True),
    "everything": EVERYTHING,
}


def whole_sample(sampling: SlotSampling, needs: Needs, device: torch.device, rows: int = 4, depth: int = 2) -> None:
    def numbers(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.int64, device=device)

    logits_NV = torch.ones(rows * (1 + depth), 97, device=device)
    mask_NV = torch.ones(rows * (1 + depth), 97, dtype=torch.bool, device=device)
    slot_R, drafts_RK = numbers(rows), numbers(rows, depth)
    sampling.choose(logits_NV, slot_R, numbers(rows), drafts_RK, needs, mask_NV)
    sampling.draw(logits_NV[:rows], slot_R, numbers(rows), numbers(97), needs)
    token_RQ = sampling.choose(logits_NV, slot_R, numbers(rows), drafts_RK, needs)
    accepted_R = accepted_drafts(token_RQ, drafts_RK, numbers(rows))
    sampling.note(slot_R, token_RQ, accepted_R + 1, needs)
    logprob_columns(logits_NV, token_RQ.flatten(), 20)


def shaping_owner() -> SequenceState:
    sampling = Sampling(repetition_penalty=1.2, logit_bias={1: 2.0})
    request = Request(prompt=(1, 2), sampling=sampling, max_new_tokens=9, min_new_tokens=4, stop_ids=frozenset({3, 97}))
    return SequenceState(key=0, arrival=0, request=request)


@each("needs", NEEDS.values())
def test_nothing_is_read_on_the_host(needs: Needs) -> None:
    """Tensors of the meta device have no values: reading one, or a shape that depends on one, fails."""
    meta = torch.device("meta")
    sampling = SlotSampling(4, 97, meta)
    sampling.admit([0], [shaping_owner()])()
    whole_sample(sampling, needs, meta)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(2, device=meta).tolist()


def operations_of(needs: Needs, rows: int = 4, depth: int = 2) -> Counter[str]:
    sampling = SlotSampling(4, 97, CPU)
    sampling.admit([0], [shaping_owner()])()
    logits_NV, drafts_RK = torch.ones(rows * (1 + depth), 97), torch.ones(rows, depth, dtype=torch.int64)
    slot_R = torch.ones(rows, dtype=torch.int64)
    with Operations() as operations:
        sampling.choose(logits_NV, slot_R, slot_R, drafts_RK, needs)
    return operations.counts


def test_greedy_batches_cost_an_argmax_and_sampled_ones_no_sort() -> None:
    assert operations_of(Needs()) == {"argmax": 1}
    for needs in (Needs(sampled=True), Needs(sampled=True, min_p=True), Needs(sampled=True, top_k=64)):
        assert not {"sort"} & set(operations_of(needs))
    assert "topk" not in operations_of(Needs(sampled=True, top_p=True, min_p=True))
