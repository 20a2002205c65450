"""On a GPU in bfloat16 the kernel attends as dense attention does, and batches decode as one request alone does."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import tiny
from eyas.drafter.model import Drafter
from eyas.engine.batch import Answer, Pull, Request, answer_plainly, answer_speculatively
from eyas.engine.slots import SlotAttention, SlotCache, Spans
from eyas.sampling import Sampling, probabilities
from eyas.target.facts import facts_of
from eyas.target.model import Target

pytestmark = pytest.mark.gpu
NEW_TOKENS = 40


def puller(requests: Iterable[Request]) -> Pull:
    waiting = iter(requests)
    return lambda: next(waiting, None)


def by_key(answers: Iterable[Answer]) -> list[Answer]:
    found = sorted(answers, key=lambda answer: answer.key)
    assert [answer.key for answer in found] == list(range(len(found)))
    return found


def share_of_equal(ours: Iterable[tuple[int, ...]], theirs: Iterable[tuple[int, ...]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rows = tiny.language(40, 30, torch.Generator().manual_seed(8)).tolist()
    return [row[: 3 + i % 28] for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def target(tiny_target: Target) -> Target:
    """The tiny target in bfloat16."""
    return replace(tiny_target, model=copy.deepcopy(tiny_target.model).to("cuda", torch.bfloat16))


def greedy(target: Target, prompt: list[int], count: int) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = target.model(torch.tensor([ids], device="cuda"), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


ROWS = [(6, 0, 6), (2, 30, 1), (0, 11, 6), (5, 63, 1), (3, 90, 6), (1, 0, 1)]


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 128), (8, 1, 32)])
@pytest.mark.parametrize("rows", [ROWS, [(s, p, 1) for s, p, _ in ROWS], [(s, p, 6) for s, p, _ in ROWS]])
def test_the_kernel_attends_as_dense_attention_does(
    heads: int,
    key_heads: int,
    size: int,
    rows: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int, several: int) -> Tensor:
        return torch.randn(count, several, size, device="cuda", generator=generator).bfloat16()

    cache = SlotCache(slots=7, length=100)
    device = torch.device("cuda")
    full = Spans.of([(slot, 0, 100) for slot in range(7)], device)
    SlotAttention(cache, full)(0, draw(700, heads), draw(700, key_heads), draw(700, key_heads))
    spans = Spans.of(rows, device)
    count = len(spans.slot_N)
    new = draw(count, heads), draw(count, key_heads), draw(count, key_heads)
    by_kernel = SlotAttention(cache, spans)(0, *new)
    monkeypatch.setattr("eyas.engine.slots.flash_serves", lambda q, v: False)
    densely = SlotAttention(cache, spans)(0, *new)
    assert by_kernel.shape == densely.shape == (count, heads, size)
    torch.testing.assert_close(by_kernel.float(), densely.float(), atol=0.02, rtol=0.02)


def random_llama(tiny_target: Target) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = LlamaForCausalLM(tiny.target_config(**sizes)).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    return replace(tiny_target, facts=facts_of(model.config, "random"), model=model)


@pytest.mark.parametrize("which", ["tiny", "random"])
@pytest.mark.parametrize("graph", [True, False])
def test_plain_batches_decode_as_each_request_alone(
    tiny_target: Target, target: Target, prompts: list[list[int]], which: str, graph: bool
) -> None:
    chosen = target if which == "tiny" else random_llama(tiny_target)
    # Lengths differ, so slots end between two looks and are filled again at different times.
    requests = [Request(key=i, prompt=tuple(p), max_new_tokens=NEW_TOKENS - i % 5) for i, p in enumerate(prompts)]
    expected = [greedy(chosen, p, NEW_TOKENS - i % 5) for i, p in enumerate(prompts)]
    stop = frozenset({max(range(tiny.VOCAB), key=lambda token: sum(token in e[5:] for e in expected))})
    cut = [e[: e.index(min(stop)) + 1] if min(stop) in e else e for e in expected]
    for stop_ids, theirs in ((frozenset[int](), expected), (stop, cut)):
        answers = by_key(
            answer_plainly(
                chosen,
                puller(requests),
                sampling=Sampling(),
                slots=16,
                max_length=128,
                stop_ids=stop_ids,
                graph=graph,
            )
        )
        assert share_of_equal([a.tokens for a in answers], theirs) > 0.8
        assert sum(len(a.tokens) == len(t) for a, t in zip(answers, theirs, strict=True)) > 0.8 * len(theirs)
        assert all(a.stopped == (a.tokens[-1] in stop_ids) for a in answers)
        assert all(len(a.tokens) == r.max_new_tokens for a, r in zip(answers, requests, strict=True) if not a.stopped)


def test_tokens_sampled_inside_the_graph_have_the_targets_distribution(
    target: Target, prompts: list[list[int]]
) -> None:
    sampling, prompt = Sampling(temperature=1.2, top_k=8, top_p=0.95), prompts[20]

    def sample(seed: int) -> list[tuple[int, ...]]:
        requests = (Request(key=i, prompt=tuple(prompt), max_new_tokens=2) for i in range(4000))
        answers = answer_plainly(
            target, puller(requests), sampling=sampling, slots=500, max_length=64, stop_ids=(), seed=seed
        )
        return [answer.tokens for answer in by_key(answers)]

    found = sample(0)
    assert sample(0) == found != sample(1)
    first = torch.bincount(torch.tensor([t[0] for t in found]), minlength=tiny.VOCAB)
    likely = int(first.argmax())
    second = torch.bincount(torch.tensor([t[1] for t in found if t[0] == likely]), minlength=tiny.VOCAB)
    with torch.no_grad():
        logits = target.model(torch.tensor([[*prompt, likely]], device="cuda"), use_cache=False).logits[0].float().cpu()
    for counts, row in ((first, logits[-2]), (second, logits[-1])):
        assert float((counts / counts.sum() - probabilities(row, sampling)).abs().max()) < 0.08


@pytest.mark.parametrize("half", [True, False], ids=["bfloat16", "float32"])
def test_speculative_batches_decode_as_plain_ones(
    tiny_target: Target, tiny_drafter: Drafter, target: Target, prompts: list[list[int]], half: bool
) -> None:
    torch.set_float32_matmul_precision("highest")
    chosen = target if half else replace(tiny_target, model=copy.deepcopy(tiny_target.model).cuda())
    drafter = copy.deepcopy(tiny_drafter).to("cuda", chosen.dtype)
    requests = [Request(key=i, prompt=tuple(p), max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
    options = {"slots": 16, "max_length": 128, "stop_ids": frozenset({7})}
    plain: Callable[..., Iterable[Answer]] = answer_plainly
    speculative: Callable[..., Iterable[Answer]] = answer_speculatively
    expected = by_key(plain(chosen, puller(requests), sampling=Sampling(), **options))
    answers = by_key(speculative(chosen, drafter, puller(requests), depth=4, **options))
    equal = share_of_equal([a.tokens for a in answers], [a.tokens for a in expected])
    assert equal > 0.8 if half else equal == 1
    rounds = [n for a in answers for n in a.accepted]
    assert sum(rounds) > len(rounds), "more than one draft is accepted per round"
