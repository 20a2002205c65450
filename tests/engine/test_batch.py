"""Many at once give what the reference decoder gives one at a time."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from scipy import stats

from eyas.drafter.model import Drafter
from eyas.engine import batch
from eyas.engine.batch import Answer, Pull, Request, answer_plainly, answer_speculatively
from eyas.errors import UserError
from eyas.sampling import Sampling, SeededDraws, probabilities
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.plain import generate_plainly
from oracle.reference import Chain, decode_plainly, decode_speculatively
from tiny import VOCAB, drafter_config, language, random_drafter, trained_drafter

NEW_TOKENS = 14
LENGTH = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve prompts of 3 to 14 tokens."""
    rows = language(12, 14, torch.Generator().manual_seed(21)).tolist()
    return [row[: 3 + i] for i, row in enumerate(rows)]


def puller(requests: Iterable[Request]) -> Pull:
    waiting = iter(requests)
    return lambda: next(waiting, None)


def requests(prompts: Sequence[Sequence[int]], max_new_tokens: int = NEW_TOKENS) -> list[Request]:
    return [Request(key=i, prompt=tuple(p), max_new_tokens=max_new_tokens) for i, p in enumerate(prompts)]


def by_key(answers: Iterable[Answer]) -> list[Answer]:
    found = sorted(answers, key=lambda answer: answer.key)
    assert [answer.key for answer in found] == list(range(len(found))), "each once"
    return found


def plain(target: Target, prompt: Sequence[int], *, stop_ids: frozenset[int], max_new_tokens: int) -> tuple[int, ...]:
    dense = DenseTarget(target, drafter_config())
    draws = SeededDraws(0)
    return decode_plainly(dense, prompt, draws=draws, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


@pytest.fixture(scope="module")
def stop_ids(tiny_target: Target, prompts: list[list[int]]) -> frozenset[int]:
    """A token that some answers hold in the middle and others do not hold."""
    answers = [plain(tiny_target, p, stop_ids=frozenset(), max_new_tokens=NEW_TOKENS) for p in prompts]
    for token in range(VOCAB):
        holding = sum(token in answer for answer in answers)
        if 3 <= holding <= 9 and not any(answer[0] == token for answer in answers):
            return frozenset({token, VOCAB + 5})
    raise AssertionError("no such token")


def test_plain_batches_equal_the_reference_with_refills_and_stops(
    tiny_target: Target, prompts: list[list[int]], stop_ids: frozenset[int]
) -> None:
    answers = by_key(
        answer_plainly(
            tiny_target,
            puller(requests(prompts)),
            sampling=Sampling(),
            slots=3,
            max_length=LENGTH,
            stop_ids=stop_ids,
        )
    )
    expected = [plain(tiny_target, p, stop_ids=stop_ids, max_new_tokens=NEW_TOKENS) for p in prompts]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.stopped for answer in answers] == [tokens[-1] in stop_ids for tokens in expected]
    assert {answer.stopped for answer in answers} == {True, False}
    assert all(answer.accepted == () for answer in answers)


def test_looking_only_now_and_then_changes_no_answer(
    tiny_target: Target, prompts: list[list[int]], stop_ids: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph does: ended slots go on computing until the host looks, and bounds are those of the cache."""

    def advance_blindly(self: batch._PlainBatch) -> None:
        for _ in range(batch.STEPS_BETWEEN_LOOKS):
            self._step(longest_k=self._length)

    length = max(map(len, prompts)) + 6
    options = {"sampling": Sampling(), "slots": 5, "max_length": length, "stop_ids": stop_ids}
    looking = by_key(answer_plainly(tiny_target, puller(requests(prompts)), **options))  # type: ignore[arg-type]
    monkeypatch.setattr(batch._PlainBatch, "advance", advance_blindly)
    blindly = by_key(answer_plainly(tiny_target, puller(requests(prompts)), **options))  # type: ignore[arg-type]
    assert blindly == looking


@pytest.mark.parametrize("room", [1, 2, 5])
def test_answers_end_where_the_longest_context_ends(tiny_target: Target, prompts: list[list[int]], room: int) -> None:
    length = max(map(len, prompts)) + room
    given = requests(prompts)
    options = {"slots": 4, "max_length": length, "stop_ids": frozenset[int]()}
    drafter = random_drafter(drafter_config(), own_embedding=True)
    for answers in (
        by_key(answer_plainly(tiny_target, puller(given), sampling=Sampling(), **options)),  # type: ignore[arg-type]
        by_key(answer_speculatively(tiny_target, drafter, puller(given), depth=3, **options)),  # type: ignore[arg-type]
    ):
        assert [len(a.tokens) for a in answers] == [min(NEW_TOKENS, length - len(p)) for p in prompts]
        assert not any(a.stopped for a in answers)


def test_an_answer_of_one_token_frees_its_slot(tiny_target: Target, prompts: list[list[int]]) -> None:
    answers = by_key(
        answer_plainly(
            tiny_target,
            puller(requests(prompts, 1)),
            sampling=Sampling(),
            slots=2,
            max_length=LENGTH,
            stop_ids=(),
        )
    )
    assert [a.tokens for a in answers] == [
        plain(tiny_target, p, stop_ids=frozenset(), max_new_tokens=1) for p in prompts
    ]


def test_prompts_are_read_in_passes_of_bounded_size(
    tiny_target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sampling": Sampling(), "slots": 12, "max_length": LENGTH, "stop_ids": frozenset[int]()}
    whole = by_key(answer_plainly(tiny_target, puller(requests(prompts)), **options))  # type: ignore[arg-type]
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 20)
    packs = [[len(r.prompt) for _, r in pack] for pack in batch._packs(list(enumerate(requests(prompts))))]
    assert len(packs) > 3
    assert all(len(pack) == 1 or sum(pack) <= 20 for pack in packs)
    assert by_key(answer_plainly(tiny_target, puller(requests(prompts)), **options)) == whole  # type: ignore[arg-type]


def test_an_answer_may_lead_to_the_next_request(tiny_target: Target, prompts: list[list[int]]) -> None:
    waiting = requests(prompts[:3], 5)
    seen: dict[int, tuple[int, ...]] = {r.key: r.prompt for r in waiting}
    answers = []
    for answer in answer_plainly(
        tiny_target,
        lambda: waiting.pop(0) if waiting else None,
        sampling=Sampling(),
        slots=2,
        max_length=LENGTH,
        stop_ids=(),
    ):
        answers.append(answer)
        if answer.key < 6:  # two more turns each
            prompt = (*seen[answer.key], *answer.tokens, 3)
            waiting.append(Request(key=answer.key + 3, prompt=prompt, max_new_tokens=5))
            seen[answer.key + 3] = prompt
    assert len(answers) == 9
    for answer in answers:
        expected = plain(tiny_target, seen[answer.key], stop_ids=frozenset(), max_new_tokens=5)
        assert answer.tokens == expected


def test_sampled_tokens_have_the_targets_distribution_and_repeat_by_seed(tiny_target: Target) -> None:
    prompt = language(1, 8, torch.Generator().manual_seed(3))[0].tolist()
    sampling = Sampling(temperature=1.3, top_k=6)
    draws = 1500

    def sample(seed: int) -> list[tuple[int, ...]]:
        given = requests([prompt] * draws, 2)
        answers = answer_plainly(
            tiny_target, puller(given), sampling=sampling, slots=100, max_length=16, stop_ids=(), seed=seed
        )
        return [answer.tokens for answer in by_key(answers)]

    first = sample(0)
    logits = tiny_target.model(torch.tensor([prompt])).logits[0, -1]
    p = probabilities(logits, sampling).double()
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in first]), minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    common = p * draws >= 5
    expected, found = p[common] * draws, counts[common].double()
    chance = stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue
    assert chance > 1e-4
    # The second token is drawn by the decode step, not by the prefill.
    likely = int(counts.argmax())
    after = probabilities(tiny_target.model(torch.tensor([[*prompt, likely]])).logits[0, -1], sampling).double()
    seconds = torch.bincount(torch.tensor([t[1] for t in first if t[0] == likely]), minlength=VOCAB)
    assert seconds[after == 0].sum() == 0
    assert float((seconds / seconds.sum() - after).abs().max()) < 0.12
    assert sample(0) == first
    assert sample(1) != first


@pytest.fixture(scope="module")
def eagle3(tiny_target: Target) -> Drafter:
    return trained_drafter(tiny_target.model, drafter_config(), steps=60)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pruned(tiny_target: Target) -> Drafter:
    kept = torch.tensor([token for token in range(VOCAB) if token % 3])
    config = drafter_config(draft_vocab_size=len(kept), fc_norm=True, norm_output=True, num_hidden_layers=2)
    return trained_drafter(tiny_target.model, config, steps=60, kept=kept)  # type: ignore[arg-type]


@pytest.mark.parametrize(("which", "depth"), [("tiny_drafter", 1), ("tiny_drafter", 4), ("eagle3", 3), ("pruned", 3)])
def test_speculative_batches_equal_the_reference_in_tokens_and_in_every_round(
    tiny_target: Target,
    prompts: list[list[int]],
    stop_ids: frozenset[int],
    which: str,
    depth: int,
    request: pytest.FixtureRequest,
) -> None:
    drafter: Drafter = request.getfixturevalue(which)
    prompts = prompts[::2]
    answers = by_key(
        answer_speculatively(
            tiny_target, drafter, puller(requests(prompts)), depth=depth, slots=3, max_length=LENGTH, stop_ids=stop_ids
        )
    )
    dense, draft = DenseTarget(tiny_target, drafter.config), EagleDraft(drafter)
    for answer, prompt in zip(answers, prompts, strict=True):
        theirs = decode_speculatively(
            dense,
            draft,
            prompt,
            shape=Chain(depth=depth),
            draws=SeededDraws(0),
            max_new_tokens=NEW_TOKENS,
            stop_ids=stop_ids,
        )
        assert answer.tokens == theirs.tokens
        assert answer.accepted == tuple(r.accepted for r in theirs.rounds)
        assert answer.stopped == (theirs.tokens[-1] in stop_ids)
    assert sum(map(sum, (answer.accepted for answer in answers))) > 10, "drafts are accepted, so both paths are walked"


def test_the_targets_attention_is_left_as_it_was(tiny_target: Target, prompts: list[list[int]]) -> None:
    before = tiny_target.model.config._attn_implementation
    running = answer_plainly(
        tiny_target, puller(requests(prompts, 3)), sampling=Sampling(), slots=2, max_length=LENGTH, stop_ids=()
    )
    next(running)
    assert tiny_target.model.config._attn_implementation == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_what_cannot_be_answered_is_refused(tiny_target: Target, tiny_drafter: Drafter) -> None:
    long = [Request(key=41, prompt=(1,) * 16, max_new_tokens=2)]
    options = {"slots": 2, "max_length": 16, "stop_ids": frozenset[int]()}
    with pytest.raises(UserError, match=r"request 41 has 16 tokens, above the 15 .* longest context 16"):
        list(answer_plainly(tiny_target, puller(long), sampling=Sampling(), **options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="request 41 has 16 tokens, above the 15"):
        list(answer_speculatively(tiny_target, tiny_drafter, puller(long), depth=2, **options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"depth is 0; .* answer_plainly"):
        list(answer_speculatively(tiny_target, tiny_drafter, puller([]), depth=0, **options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="slots is 0"):
        list(answer_plainly(tiny_target, puller([]), sampling=Sampling(), **{**options, "slots": 0}))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="request 3 has 0 tokens"):
        Request(key=3, prompt=(), max_new_tokens=1)
    with pytest.raises(UserError, match="max_new_tokens of request 3 is 0"):
        Request(key=3, prompt=(1,), max_new_tokens=0)


def test_no_requests_give_no_answers(tiny_target: Target, tiny_drafter: Drafter) -> None:
    options = {"slots": 2, "max_length": 16, "stop_ids": frozenset[int]()}
    assert list(answer_plainly(tiny_target, puller([]), sampling=Sampling(), **options)) == []  # type: ignore[arg-type]
    assert list(answer_speculatively(tiny_target, tiny_drafter, puller([]), depth=1, **options)) == []  # type: ignore[arg-type]


@pytest.mark.default
def test_the_default_target_answers_in_batches_as_alone(default_target: Target) -> None:
    questions = ["What is the capital of France?", "Count from 1 to 5.", "Say hello in Spanish, please."]
    prompts = [default_target.encode_chat([{"role": "user", "content": q}]) for q in questions]
    answers = by_key(
        answer_plainly(
            default_target,
            puller(requests(prompts, 6)),
            sampling=Sampling(),
            slots=2,
            max_length=128,
            stop_ids=default_target.stop_ids(),
        )
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.tokens == generate_plainly(default_target, prompt, sampling=Sampling(), max_new_tokens=6)
