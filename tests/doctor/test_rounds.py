"""Rounds drafted side by side are those of serving, also with a probe."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import tiny
from each import each
from eyas.doctor.measures import Drift, PromptMeasures, measure_prompt, summarise
from eyas.doctor.rounds import Noise, Rounds, round_starts, run_rounds
from eyas.doctor.transcripts import Answering, Asked, Transcriber, Transcript
from eyas.drafter.attention_mass import REGIONS, AttentionProbe
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws

DEPTH = 6


def pooled_length(rounds: Sequence[Rounds], depth: int) -> float:
    """Acceptance length of serving with this depth: 1 + accepted / rounds, pooled over prompts."""
    accepted = [count for one in rounds for count in one.accepted(depth)]
    return 1 + sum(accepted) / max(1, len(accepted))


def prompts(count: int = 4) -> list[Asked]:
    ids = tiny.language(count, 24, torch.Generator().manual_seed(11)).tolist()
    return [Asked(key=key, ids=tuple(row[: 10 + 3 * key])) for key, row in enumerate(ids)]


@pytest.fixture(scope="module")
def transcripts(tiny_target: Target) -> list[Transcript]:
    found = answered(tiny_target, Answering(max_new_tokens=24, overshoot=DEPTH))
    return [found[key] for key in sorted(found)]


def answered(target: Target, how: Answering, asked: list[Asked] | None = None) -> dict[int, Transcript]:
    return {one.key: one for one in Transcriber(target, tiny.AUX_IDS).answer(asked or prompts(), how)}


def rounds_of(drafter: Drafter, transcripts: Sequence[Transcript], **options: object) -> list[Rounds]:
    found = [run_rounds(drafter, one, depth=DEPTH, layer_ids=tiny.AUX_IDS, **options) for one in transcripts]  # type: ignore[arg-type]
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


def test_transcripts_equal_plain_decoding(tiny_target: Target, transcripts: list[Transcript]) -> None:
    dense, stop_ids = DenseTarget(tiny_target, tiny.drafter_config()), tiny_target.stop_ids()
    plain = {
        p.key: decode_plainly(dense, p.ids, draws=SeededDraws(0), max_new_tokens=24, stop_ids=stop_ids)
        for p in prompts()
    }
    assert {one.key: one.answer for one in transcripts} == plain
    for one in transcripts:
        assert len(one.ids) == one.prompt_length + one.answer_length + DEPTH
        whole = tiny_target.forward(torch.tensor([one.ids]), tiny.AUX_IDS).aux_hidden_BTX[0, :-1]
        torch.testing.assert_close(one.aux_TX, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@each("depth", [1, 3, DEPTH])
def test_the_walk_accepts_the_drafts_of_serving(
    tiny_target: Target, tiny_drafter: Drafter, transcripts: list[Transcript], depth: int
) -> None:
    dense, eagle = DenseTarget(tiny_target, tiny_drafter.config), EagleDraft(tiny_drafter)
    how = {"shape": Chain(depth=depth), "max_new_tokens": 24, "stop_ids": tiny_target.stop_ids()}
    accepted = {}
    for p in prompts():
        served = decode_speculatively(dense, eagle, p.ids, draws=SeededDraws(0), **how)
        accepted[p.key] = [one.accepted for one in served.rounds]
    rounds = rounds_of(tiny_drafter, transcripts)
    assert {one.key: one.accepted(depth) for one in rounds} == accepted
    total = [count for counts in accepted.values() for count in counts]
    assert pooled_length(rounds, depth) == pytest.approx(1 + sum(total) / len(total))


@each("layers", [1, 2])
def test_each_round_drafts_as_the_reference_also_past_a_miss(
    tiny_target: Target, transcripts: list[Transcript], layers: int
) -> None:
    drafter = tiny.random_drafter(tiny.drafter_config(norm_output=True, num_hidden_layers=layers))
    reference = EagleDraft(drafter)
    transcript = transcripts[1]
    rounds = rounds_of(drafter, [transcript])[0]
    assert not rounds.hit_SR.all()
    for place, start in enumerate(round_starts(transcript)):
        state = reference.start(list(transcript.ids[: start + 2]), transcript.aux_TX[: start + 1])
        expected = reference.logits(state).log_softmax(dim=-1)[transcript.ids[start + 2]]
        assert rounds.surprise_R[place] == pytest.approx(-float(expected), abs=1e-3)
        drafted = []
        for _ in range(DEPTH):
            drafted.append(int(reference.logits(state).argmax()))
            state = reference.extend(state, drafted[-1])
        assert rounds.token_SR[:, place].tolist() == drafted


def test_ending_rounds_at_the_first_miss_keeps_acceptance(tiny_drafter: Drafter, transcripts: list[Transcript]) -> None:
    for whole, ended in zip(
        rounds_of(tiny_drafter, transcripts), rounds_of(tiny_drafter, transcripts, to_first_miss=True), strict=True
    ):
        assert np.array_equal(whole.accepted_R, ended.accepted_R)
        drafted = ~np.isnan(ended.rms_SR)
        assert np.array_equal(whole.token_SR[drafted], ended.token_SR[drafted])
        assert drafted.sum() == np.minimum(whole.accepted_R + 1, DEPTH).sum()


def test_a_probe_changes_no_bit(tiny_drafter: Drafter, transcripts: list[Transcript]) -> None:
    for transcript in transcripts:
        start_R = torch.tensor(list(round_starts(transcript)))
        probe = AttentionProbe(start_R, prompt_length=transcript.prompt_length, depth=DEPTH)
        watched = rounds_of(tiny_drafter, [transcript], watcher=probe)[0]
        alone = rounds_of(tiny_drafter, [transcript])[0]
        for name in ("token_SR", "hit_SR", "confidence_SR", "rms_SR"):
            assert np.array_equal(getattr(watched, name), getattr(alone, name)), name
        seen = probe.statistics()
        total = np.sum([seen.mass[region] for region in REGIONS], axis=0)
        np.testing.assert_allclose(total, 1.0, atol=1e-5)
        assert (seen.mass["own"][0] == 0).all()
        assert (seen.mass["own"][1:] > 0).all()
        assert (seen.entropy_SR >= 0).all()
        assert (seen.spread_SR <= 1 + 1e-6).all()


def test_noise_is_repeatable_and_small_noise_does_little(tiny_drafter: Drafter, transcripts: list[Transcript]) -> None:
    calm = pooled_length(rounds_of(tiny_drafter, transcripts), 3)
    loud = [pooled_length(rounds_of(tiny_drafter, transcripts, noise=Noise(size=3.0)), 3) for _ in range(2)]
    quiet = pooled_length(rounds_of(tiny_drafter, transcripts, noise=Noise(size=1e-4)), 3)
    assert loud[0] == loud[1] < calm
    assert quiet == pytest.approx(calm, abs=0.1)


def test_a_prefix_is_read_once_and_answers_are_the_same(tiny_target: Target) -> None:
    base = tiny.language(1, 40, torch.Generator().manual_seed(5))[0].tolist()
    asked = [Asked(key=0, ids=(*base[:20], 7)), Asked(key=1, ids=(*base[:30], 9, 8))]
    how = Answering(max_new_tokens=8, overshoot=3)
    alone = answered(tiny_target, how, asked)
    reader = Transcriber(tiny_target, tiny.AUX_IDS)
    for prompt in asked:
        (transcript,) = reader.answer([prompt], how)
        assert transcript.ids == alone[prompt.key].ids
        torch.testing.assert_close(transcript.aux_TX, alone[prompt.key].aux_TX, rtol=1e-4, atol=1e-4)
    shared = 16  # of 20, in whole blocks
    assert reader.read == 21 + 32 - shared
    reader.forget()
    assert next(reader.answer(asked[1:], how)).ids == alone[1].ids
    assert reader.read == 21 + 32 - shared + 32


def test_decoding_past_a_stop_token_gives_the_same_tokens(tiny_target: Target) -> None:
    sampled = Sampling(temperature=0.9)
    for sampling in (Sampling(), sampled):
        how = Answering(max_new_tokens=20, overshoot=7, sampling=sampling, seed=5)
        open_ended = Transcriber(tiny_target, tiny.AUX_IDS)
        open_ended._stop_ids = frozenset()
        whole = {one.key: one for one in open_ended.answer(prompts(), how)}
        for early in (0, 6):
            stopping = Transcriber(tiny_target, tiny.AUX_IDS)
            stopping._stop_ids = frozenset({whole[1].answer[early]})
            for one in stopping.answer(prompts(), how):
                stops = [i + 1 for i, token in enumerate(whole[one.key].answer) if token in stopping._stop_ids]
                assert one.answer_length == min(stops, default=20)
                assert one.ids == whole[one.key].ids[: one.prompt_length + one.answer_length + 7]
                states = whole[one.key].aux_TX[: len(one.ids) - 1]
                torch.testing.assert_close(one.aux_TX, states, rtol=1e-4, atol=1e-4)


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(tiny_target: Target) -> None:
    how = Answering(max_new_tokens=20, overshoot=7)
    whole = answered(tiny_target, how)
    stop = tiny_target.decode(whole[1].answer[4:6])
    for one in Transcriber(tiny_target, tiny.AUX_IDS, [stop]).answer(prompts(), how):
        said = whole[one.key].answer
        ends = [i for i in range(1, len(said) + 1) if stop in tiny_target.decode(said[:i])]
        assert one.answer_length == min(ends, default=len(said))
        assert one.ids == whole[one.key].ids[: one.prompt_length + one.answer_length + 7]
        assert one.key != 1 or one.answer_length <= 6


def test_longer_prompts_get_a_larger_engine(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.doctor.transcripts.SHORTEST", 16)
    how = Answering(max_new_tokens=8, overshoot=3)
    expected = {key: one.ids for key, one in answered(tiny_target, how).items()}
    one_by_one = Transcriber(tiny_target, tiny.AUX_IDS)
    assert {p.key: next(one_by_one.answer([p], how)).ids for p in prompts()} == expected
    assert list(one_by_one.answer([], how)) == []
    with pytest.raises(UserError, match="prompt 9 has 0 tokens"):
        next(one_by_one.answer([Asked(key=9, ids=())], how))


def test_a_drawn_answer_depends_on_its_own_seed_only(tiny_target: Target) -> None:
    how = Answering(max_new_tokens=12, overshoot=2, sampling=Sampling(temperature=0.9), seed=3)
    alone = answered(tiny_target, how, prompts()[2:3])[2].ids
    assert answered(tiny_target, how)[2].ids == alone
    assert answered(tiny_target, Answering(max_new_tokens=12, overshoot=2), prompts()[2:3])[2].ids != alone


def drift_of(drafter: Drafter, transcripts: list[Transcript]) -> tuple[Drift, list[PromptMeasures]]:
    measured = [measure_prompt(drafter, one, depth=DEPTH, layer_ids=tiny.AUX_IDS) for one in transcripts]
    found = [one for one in measured if one is not None]
    return summarise(found, DEPTH), found


def test_summaries_match_the_rounds_of_each_prompt(tiny_drafter: Drafter, transcripts: list[Transcript]) -> None:
    drift, found = drift_of(tiny_drafter, transcripts)
    rounds = [one.rounds for one in found]
    for depth in (1, 3, DEPTH):
        assert drift.length[depth - 1].value == pytest.approx(pooled_length(rounds, depth))
        assert drift.length[depth - 1].low <= drift.length[depth - 1].value <= drift.length[depth - 1].high
    joint = np.cumprod(drift.conditional.value)
    np.testing.assert_allclose(joint, drift.joint.value, rtol=1e-6)
    assert sum(estimate.value for estimate in drift.share) == pytest.approx(1.0)
    assert abs(drift.growth.value) < 0.05  # EAGLE-3.1 feeds back a normed state
    assert drift.outside_share == 0


def test_the_feedback_of_an_unnormed_drafter_grows(transcripts: list[Transcript]) -> None:
    drift, _ = drift_of(tiny.random_drafter(tiny.drafter_config()), transcripts)
    assert drift.growth.low > 0.01
