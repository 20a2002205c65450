"""An adaptation stays near its start, mixes in replayed conversations, and is judged with an interval."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from each import each
from eyas.data.bad_records import BadRecords
from eyas.drafter.drift import Estimate
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.train.adaptation.judge import AcceptanceChange, compare, decide_adaptation, walk_conversations
from eyas.train.adaptation.recipe import AdaptationSettings, adaptation_recipe
from eyas.train.corpus.corpus import Corpus, Replay, concatenate, packs, split
from eyas.train.estimate import RoundCounts
from eyas.train.features import OpenSource
from eyas.train.recipe import TrainSettings
from eyas.train.recipe_file import load_recipe, read_recipe, to_toml
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.sources.live import LiveSource
from eyas.train.state import TrainState
from train.test_loop import corpus_of


def settings_of(tmp_path: Path, **changes: Any) -> AdaptationSettings:
    given: dict[str, Any] = {"drafter": "some", "answers": ["answers.jsonl"], "folder": str(tmp_path / "run")}
    return AdaptationSettings(**given | changes)


def state_of(drafter: Drafter, *, anchor: float) -> TrainState:
    return TrainState("drafter", drafter.requires_grad_(True), TrainSettings(depths=1, lr=1e-2, anchor=anchor))


def distance_after(steps: int, *, anchor: float, scale: float = 1.0) -> float:
    """Distance that weights move if every gradient is one."""
    state = state_of(tiny.random_drafter(tiny.drafter_config(), own_embedding=False), anchor=anchor)
    start = {name: master.detach().clone() for name, master in state.master_weights.items()}
    for _ in range(steps):
        for master in state.master_weights.values():
            master.grad = torch.ones_like(master)
        state.optimizer_step(torch.tensor(1.0), scale)
    return max(float((master.detach() - start[name]).abs().max()) for name, master in state.master_weights.items())


def test_an_anchored_drafter_moves_at_most_one_step_over_the_anchor() -> None:
    assert distance_after(60, anchor=0.0) == pytest.approx(0.6, rel=0.02)  # Adam's step is the learning rate
    assert distance_after(60, anchor=0.2) <= 0.01 / 0.2
    assert distance_after(60, anchor=0.2) == pytest.approx(0.04, rel=0.02)  # (1 - a) of it, after the pull


def test_the_anchor_scales_with_the_learning_rate() -> None:
    assert distance_after(200, anchor=0.2, scale=0.5) == pytest.approx(0.005 * 0.9 / 0.1, rel=0.02)


def test_a_resumed_state_is_anchored_to_the_start_of_the_run() -> None:
    begun = state_of(tiny.random_drafter(tiny.drafter_config(), own_embedding=False), anchor=0.5)
    first = begun.master_weights["fc.weight"].detach().clone()
    stored = {name: tensor.clone() for name, tensor in begun.state_dict().items()}
    stored["master.fc.weight"] += 1.0
    begun.load_state_dict(stored)
    begun.optimizer_step(begun.gradient_norm(), 1.0)
    assert torch.allclose(begun.master_weights["fc.weight"], first + 0.5, atol=1e-5)


def test_an_anchor_needs_a_drafter_to_start_from() -> None:
    tables = {"data": {"files": ["a"]}, "output": {"folder": "b"}, "train": {"anchor": 0.1}}
    with pytest.raises(UserError, match=r"train\.anchor of drafter is 0\.1 but it starts from scratch.*init_from"):
        read_recipe(tables)


@each("share", [0.2, 0.6])
def test_an_epoch_has_every_document_once_and_the_replay_share(share: float) -> None:
    corpus = concatenate([corpus_of(40), corpus_of(10, seed=1)])
    replay = Replay(first=40, share=share)
    met = [
        [index for pack in packs(corpus, length=100, seed=0, epoch=epoch, replay=replay) for (index,) in pack]
        for epoch in (0, 1)
    ]
    for epoch in met:
        assert sorted(index for index in epoch if index < 40) == list(range(40))
        assert sum(index >= 40 for index in epoch) / len(epoch) == pytest.approx(share, abs=0.02)
    if share == 0.2:  # all ten are drawn
        assert sorted(met[0]) == sorted(met[1]) == list(range(50))
        assert met[0] != met[1]


def test_the_newest_conversations_are_held_out_with_all_their_documents() -> None:
    corpus = corpus_of(6)
    corpus = Corpus(ids=corpus.ids, mask=corpus.mask, offsets=corpus.offsets, conversation=np.array([0, 0, 1, 2, 3, 3]))
    kept, held = split(corpus, 0.5, 0, newest=True)
    assert kept.conversation is not None
    assert held.conversation is not None
    assert (kept.conversation.tolist(), held.conversation.tolist()) == ([0, 0, 1], [2, 3, 3])


def test_a_run_of_steps_and_minutes_ends_at_the_nearer_end() -> None:
    length = RunLength(steps=100, minutes=1.0)
    assert length.position(50, 6.0) == (50, 100)
    assert length.position(10, 30.0) == (30_000, 60_000)
    assert length.reached(100, 1.0)
    assert length.reached(3, 60.0)
    assert not length.reached(99, 59.0)
    schedule = LearningRateSchedule(name="cosine", warmup=0.1, decay=0.2, final=0.0)
    for step, seconds in ((50, 6.0), (10, 30.0)):
        assert schedule.share(*length.position(step, seconds)) == pytest.approx(schedule.share(50, 100), abs=1e-3), (
            "half of the run by either"
        )
    assert str(length) == "100 steps or 1 minute"


def counts_of(*rows: tuple[int, ...]) -> Any:
    return np.array(rows, dtype=np.int64)


def test_the_same_drafter_has_a_gain_of_exactly_zero() -> None:
    walked = counts_of((10, 5, 2), (20, 4, 0), (7, 7, 7))
    change = compare(walked, walked)
    assert (change.gain.value, change.gain.low, change.gain.high) == (0, 0, 0)
    assert change.before == change.after == RoundCounts(rounds=37, accepted_at=(16, 9))


def test_the_interval_is_over_conversations_not_rounds() -> None:
    chance = np.random.default_rng(0)
    before = np.stack([np.full(40, 100), np.full(40, 50)], axis=1)
    steady, torn = before.copy(), before.copy()
    steady[:, 1] += 5
    torn[:, 1] += np.where(chance.random(40) < 0.5, 45, -35)  # about the same on average, up here and down there
    assert compare(before, steady).gain.low == pytest.approx(0.05 / 1.5)
    assert compare(before, torn).gain.low < 0 < compare(before, torn).gain.high


def test_counts_of_conversations_sum_up_to_the_corpus(tiny_target: Target, tiny_drafter: Drafter) -> None:
    from eyas.evaluate.evaluate import estimate_corpus

    corpus = corpus_of(5)
    corpus = Corpus(ids=corpus.ids, mask=corpus.mask, offsets=corpus.offsets, conversation=np.array([3, 3, 5, 7, 9]))

    def open_source(layer_ids: Any, *, compiled: bool) -> LiveSource:
        return LiveSource(tiny_target, layer_ids, compiled=compiled)

    opened: OpenSource = open_source
    sizes: dict[str, Any] = {"depth": 3, "pack_length": 60, "chunk": 64, "device": torch.device("cpu")}
    found = walk_conversations({"it": tiny_drafter}, tiny_target.facts, opened, corpus, **sizes)["it"]
    assert found.shape == (4, 4)
    whole = estimate_corpus({"it": tiny_drafter}, tiny_target, corpus, depths=[3], pack_length=60)["it"][3]
    assert found.sum(axis=0).tolist() == [whole.rounds, *whole.accepted_at]
    alone = walk_conversations({"it": tiny_drafter}, tiny_target.facts, opened, corpus.take([2]), **sizes)["it"]
    assert found[1].tolist() == alone[0].tolist()


def change_of(value: float, low: float, high: float) -> AcceptanceChange:
    counts = RoundCounts(rounds=1, accepted_at=(1,))
    gain = Estimate(value=value, low=low, high=high)
    return AcceptanceChange(conversations=50, before=counts, after=counts, gain=gain)


@each(
    ("traffic", "replay", "kept", "said"),
    [
        ((0.1, 0.02, 0.2), None, True, "the new drafter is better: +10.0% on 50"),
        ((0.1, 0.0, 0.2), None, False, "not better beyond the interval"),
        ((-0.1, -0.2, -0.05), None, False, "the old drafter stays: the new one is worse"),
        ((0.1, 0.02, 0.2), (-0.019, -0.03, 0.0), True, "-1.9% on replayed ones (-3.0% to +0.0%)"),
        ((0.1, 0.02, 0.2), (-0.03, -0.05, 0.01), False, "but forgets: -3.0% on 50 replayed ones"),
    ],
)
def test_a_drafter_is_kept_if_its_interval_is_above_zero_and_it_forgets_little(
    traffic: tuple[float, float, float], replay: tuple[float, float, float] | None, *, kept: bool, said: str
) -> None:
    changes = {"traffic": change_of(*traffic)} | ({} if replay is None else {"replay": change_of(*replay)})
    verdict = decide_adaptation(changes, max_loss=0.02)
    assert verdict.kept is kept
    assert said in verdict.text


def test_the_allowed_loss_is_printed_without_a_sign() -> None:
    changes = {"traffic": change_of(0.1, 0.02, 0.2), "replay": change_of(-0.03, -0.05, 0.01)}
    assert decide_adaptation(changes, max_loss=0.0).text.endswith("and a loss of 0.0% is the limit")
    assert decide_adaptation(changes, max_loss=0.02).text.endswith("and a loss of 2.0% is the limit")


def test_an_adaptation_recipe_keeps_the_drafters_flags_and_can_be_reloaded(tmp_path: Path) -> None:
    config = tiny.drafter_config(fc_norm=False, norm_output=False)
    settings = settings_of(tmp_path, overrides=["train.depths=3", "data.seed=4"], replay=["general.jsonl"])
    recipe = adaptation_recipe(settings, config, answered=2000, context=512, on_cpu=True)
    assert (recipe.drafter.fc_norm, recipe.drafter.norm_output, recipe.drafter.init_from) == (False, False, "some")
    assert (recipe.train.depths, recipe.data.seed, recipe.data.max_length) == (3, 4, 512)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe


def test_packs_on_a_cpu_are_no_longer_than_the_answers(tmp_path: Path) -> None:
    for longest, length in ((None, 2048), (100, 512), (700, 700), (5000, 2048)):
        recipe = adaptation_recipe(
            settings_of(tmp_path), tiny.drafter_config(), answered=99, context=8192, on_cpu=True, longest=longest
        )
        assert (recipe.data.max_length, recipe.data.pack_length) == (length, length)


def test_too_few_conversations_to_judge_by_are_refused(tmp_path: Path) -> None:
    config = tiny.drafter_config()
    recipe = adaptation_recipe(settings_of(tmp_path), config, answered=32, context=512, on_cpu=True)
    assert (recipe.data.held_out_share, recipe.data.held_out_least) == (0.1, 16)
    with pytest.raises(UserError, match=r"31 conversations in answers\.jsonl.*32 at least"):
        adaptation_recipe(settings_of(tmp_path), config, answered=31, context=512, on_cpu=True)


def test_bad_records_are_refused_or_named(
    tmp_path: Path,
) -> None:
    config, bad = tiny.drafter_config(), BadRecords(read=60)
    for line in range(8):
        bad.add(UserError(f"answers.jsonl:{line}: oh"), "odd")
    given: dict[str, Any] = {"context": 512, "on_cpu": True}
    with pytest.raises(
        UserError, match=r"8 of 60 records are bad, above .* 0\.05 that --set data\.max_bad_share allows"
    ):
        adaptation_recipe(settings_of(tmp_path), config, answered=20, unanswered=32, bad=bad, **given)
    with pytest.raises(UserError, match="8 of 60 records are bad"):
        adaptation_recipe(settings_of(tmp_path), config, answered=50, bad_replay=bad, **given)
    lenient = settings_of(tmp_path, overrides=["data.max_bad_share=0.2"])
    with pytest.raises(
        UserError, match=r"20 conversations .*beside 32 without an answer and 8 bad: 8 x odd, as answers"
    ):
        adaptation_recipe(lenient, config, answered=20, unanswered=32, bad=bad, **given)
    assert adaptation_recipe(lenient, config, answered=50, bad=bad, **given).data.max_bad_share == 0.2


@each(
    ("changes", "said"),
    [
        ({"overrides": ["data.held_out_share=0"]}, "held_out_share is 0 and there is no data.held_out"),
        ({"replay": ["general.jsonl"], "replay_share": 0.0}, "--replay-share is 0.*leave --replay out"),
        (
            {"replay": ["general.jsonl"], "overrides": ["data.held_out=a.jsonl", "data.held_out_share=0"]},
            "nothing of --replay is left to judge by",
        ),
    ],
)
def test_an_adaptation_without_held_out_conversations_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        adaptation_recipe(
            settings_of(tmp_path, **changes), tiny.drafter_config(), answered=50, context=512, on_cpu=True
        )


def test_held_out_conversations_may_come_from_a_file_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, overrides=["data.held_out=a.jsonl", "data.held_out_share=0"], replay_share=0.0)
    assert adaptation_recipe(settings, tiny.drafter_config(), answered=50, context=512, on_cpu=True).data.replay == ()


def test_one_drafter_is_adapted_at_a_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, overrides=["drafters.fast.lr=0.1"])
    with pytest.raises(UserError, match=r"drafters\.fast is set, but one drafter is adapted at a time"):
        adaptation_recipe(settings, tiny.drafter_config(), answered=50, context=512, on_cpu=True)
