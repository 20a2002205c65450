"""Features from the cache train a drafter as the target itself does."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from each import each
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.batch import CorpusPacks, TrainingBatch
from eyas.train.corpus.corpus import Corpus, concatenate
from eyas.train.corpus.encoding import FitCounts
from eyas.train.features import Features, FeatureSource, OpenSource
from eyas.train.loss import LOSSES
from eyas.train.recipe_file import read_recipe
from eyas.train.run import TrainResult, run
from eyas.train.sources import cache_writer
from eyas.train.sources.cache import (
    CacheKey,
    CacheSource,
    TopKDistribution,
    fingerprint_vocabulary,
    from_fp8,
    to_fp8,
)
from eyas.train.sources.cache_writer import CacheWriter, plan_shards
from eyas.train.sources.live import LiveSource
from train.test_loop import Diary, corpus_of, train_state_of

KEPT = torch.arange(80)


def uneven_corpus(documents: int = 40, *, seed: int = 0) -> Corpus:
    """Documents of 8 to 40 tokens with answers here and there."""
    chance = np.random.default_rng(seed)
    whole = corpus_of(documents, seed=seed, length=40)
    pieces = [
        (whole.take([i]).ids[:n], chance.random(n) < 0.8) for i, n in enumerate(chance.integers(8, 41, documents))
    ]
    return Corpus(
        ids=np.concatenate([ids for ids, _ in pieces]),
        mask=np.concatenate([mask for _, mask in pieces]),
        offsets=np.concatenate([[0], np.cumsum([len(ids) for ids, _ in pieces])]),
    )


def key_of(**changes: object) -> CacheKey:
    key = CacheKey(
        target="tiny",
        corpus="a",
        vocabulary=fingerprint_vocabulary(KEPT),
        aux_layer_ids=tiny.AUX_IDS,
        top_k=8,
        dtype="bfloat16",
    )
    return replace(key, **changes)  # type: ignore[arg-type]


def writer_of(
    speaker: Target,
    folder: Path,
    documents: Corpus,
    *,
    live: Callable[[], FeatureSource] | None = None,
    **changes: object,
) -> CacheWriter:
    return CacheWriter(
        folder=folder,
        corpus=documents,
        key=key_of(**changes),
        target_ids_W=KEPT,
        hidden_size=tiny.HIDDEN,
        computed=live or (lambda: LiveSource(speaker, tiny.AUX_IDS)),
        device=torch.device("cpu"),
        pack_length=100,
        padded=False,
        chunk=64,
    )


def cache_of(speaker: Target, folder: Path, documents: Corpus, **changes: object) -> CacheSource:
    writer = writer_of(speaker, folder, documents, **changes)
    writer.write()
    return CacheSource(folder, writer.key)


def batches_of(corpus: Corpus, *, padded: bool = False, first_document: int = 0) -> list[TrainingBatch]:
    packs = CorpusPacks(
        corpus=corpus,
        length=100,
        seed=3,
        device=torch.device("cpu"),
        padded=padded,
        first_document=first_document,
    )
    return [planned.build() for planned in packs.epoch(0)]


def distributions(features: Features, batch: TrainingBatch) -> Any:
    return features.teachers(KEPT)(batch.row_M)


def bucketed(logits_CW: Tensor, distribution: TopKDistribution) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the drafter and p with everything outside the top k summed into one last token."""
    log_q_CW = logits_CW.log_softmax(dim=-1)
    outside_CW = log_q_CW.scatter(-1, distribution.ids_CK, float("-inf")).logsumexp(dim=-1, keepdim=True)
    log_q = torch.cat([log_q_CW.gather(-1, distribution.ids_CK), outside_CW], dim=-1)
    return log_q, torch.cat([distribution.probability_CK.float(), distribution.rest_C[:, None]], dim=-1)


@each("loss", LOSSES)
def test_the_gradient_of_every_loss_treats_the_tail_as_one_token(loss: str) -> None:
    torch.manual_seed(0)
    logits_CW = (torch.randn(6, 20) * 2).requires_grad_()
    p_CW = (torch.randn(6, 20) * 2).softmax(dim=-1) * 0.9
    probability_CK, ids_CK = p_CW.topk(5)
    rest_C = p_CW.scatter(-1, ids_CK, 0.0).sum(dim=-1)
    distribution = TopKDistribution(ids_CK=ids_CK, probability_CK=probability_CK, rest_C=rest_C, best_C=ids_CK[:, 0])
    log_q_CW = logits_CW.detach().log_softmax(dim=-1)
    value_C, gradient_CW = LOSSES[loss](log_q_CW, distribution.probabilities(log_q_CW))
    log_q, p = bucketed(logits_CW, distribution)
    theirs_C, _ = LOSSES[loss](log_q, p)
    theirs_C.sum().backward()
    assert logits_CW.grad is not None
    torch.testing.assert_close(gradient_CW, logits_CW.grad, rtol=1e-4, atol=1e-6)
    if loss == "cross_entropy":  # reports the entropy of q within the bucket on top
        assert bool((value_C > theirs_C).all())
    else:
        torch.testing.assert_close(value_C, theirs_C, rtol=1e-4, atol=1e-6)


def test_float8_keeps_a_sixteenth_of_every_number_even_beside_outliers() -> None:
    torch.manual_seed(0)
    aux_TX = torch.randn(50, 3 * 64)
    aux_TX[7, 70] = 2.5e4  # in the second state of one token
    back_TX = from_fp8(*to_fp8(aux_TX, 3)).float()
    largest_TX = aux_TX.view(50, 3, 64).abs().amax(dim=-1, keepdim=True).expand(-1, -1, 64).reshape(50, -1)
    # Half a step of the 3-bit mantissa and bfloat16's own rounding; below the normal range, half of its smallest step.
    bound_TX = (aux_TX.abs() * (2**-4 + 2**-8)).maximum(largest_TX / 448 * 2**-9)
    assert bool(((back_TX - aux_TX).abs() <= bound_TX).all())
    assert float(back_TX[7, 70]) == pytest.approx(2.5e4, rel=2**-7)
    assert to_fp8(torch.zeros(2, 6), 3)[0].float().abs().sum() == 0


@each("padded", [False, True])
@each("dtype", ["bfloat16", "fp8"])
def test_cached_features_are_those_of_the_target(tiny_target: Target, tmp_path: Path, dtype: str, padded: bool) -> None:
    corpus = uneven_corpus()
    cache, live = cache_of(tiny_target, tmp_path, corpus, dtype=dtype, top_k=80), LiveSource(tiny_target, tiny.AUX_IDS)
    error = 2**-8 if dtype == "bfloat16" else 2**-4 + 2**-8
    for batch in batches_of(corpus, padded=padded):
        ours, theirs = cache(batch), live(batch)
        used = len(batch.ids_T) if not padded else sum(int(corpus.lengths[i]) for i in batch.documents or ())
        a, b = ours.aux_TX[:used].float(), theirs.aux_TX[:used]
        largest = b.view(used, 3, -1).abs().amax(dim=-1).amax()
        assert ours.aux_TX.shape == theirs.aux_TX.shape
        assert bool(((a - b).abs() <= b.abs() * error + largest / 448 * 2**-9).all())
        mine, live_distribution = distributions(ours, batch), distributions(theirs, batch)
        log_q = torch.zeros(len(batch.row_M), 80).log_softmax(dim=-1)
        torch.testing.assert_close(
            mine.probabilities(log_q), live_distribution.probabilities(log_q), rtol=2**-11, atol=2**-25
        )
        assert torch.equal(mine.best_C, live_distribution.best_C)


def test_rest_is_the_mass_outside_the_likely_tokens(tiny_target: Target, tmp_path: Path) -> None:
    corpus = uneven_corpus()
    cache, live = cache_of(tiny_target, tmp_path, corpus, top_k=4), LiveSource(tiny_target, tiny.AUX_IDS)
    batch = batches_of(corpus)[0]
    p_MW = distributions(live(batch), batch).probabilities(torch.empty(0))
    outside_M = p_MW.sort(dim=-1).values[:, :-4].sum(dim=-1)
    torch.testing.assert_close(distributions(cache(batch), batch).rest_C, outside_M, rtol=1e-4, atol=1e-9)


def _learnt(target: Target, source: FeatureSource, batch: TrainingBatch) -> tuple[float, dict[str, Tensor], Tensor]:
    state = train_state_of(target)
    state.backward(batch, source(batch), batch.counts(3))
    loss = float(state.metrics_3S[0].sum()) / batch.counts(1)[0]
    return (
        loss,
        {name: m.grad.clone() for name, m in state.master_weights.items() if m.grad is not None},
        state.metrics_3S[1],
    )


@each(("dtype", "top_k", "most"), [("bfloat16", 80, 0.01), ("bfloat16", 16, 0.15), ("fp8", 80, 0.08)])
def test_loss_and_gradient_are_close_to_those_of_the_target(
    tiny_target: Target, tmp_path: Path, dtype: str, top_k: int, most: float
) -> None:
    corpus = uneven_corpus()
    cache = cache_of(tiny_target, tmp_path, corpus, dtype=dtype, top_k=top_k)
    batch = batches_of(corpus)[0]
    ours, our_gradients, _ = _learnt(tiny_target, cache, batch)
    theirs, their_gradients, _ = _learnt(tiny_target, LiveSource(tiny_target, tiny.AUX_IDS), batch)
    if top_k == 80:  # with fewer the loss differs, since the shape of the tail is unknown
        assert ours == pytest.approx(theirs, rel=most / 10)
    assert our_gradients.keys() == their_gradients.keys()
    a, b = (torch.cat([g.flatten() for g in gradients.values()]) for gradients in (our_gradients, their_gradients))
    assert float((a - b).norm() / b.norm()) < most


@pytest.mark.slow
def test_the_size_is_predicted_before_writing(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    corpus = uneven_corpus(200)
    for dtype in ("bfloat16", "fp8"):
        caplog.clear()
        folder = tmp_path / dtype
        monkeypatch.setattr(cache_writer, "SHARD_BYTES", 600_000)
        writer = writer_of(tiny_target, folder, corpus, dtype=dtype)
        shards = plan_shards(corpus, writer.key, tiny.HIDDEN)
        assert len(shards) > 1
        writer.write()
        found = sum(path.stat().st_size for path in folder.iterdir())
        assert sum(shard.state_bytes + shard.teacher_bytes for shard in shards) == pytest.approx(found, rel=0.02)
        assert max(path.stat().st_size for path in folder.iterdir()) < 610_000
        assert "the cache needs" in caplog.messages[0]
        assert f"states of {corpus.tokens:,} tokens" in caplog.messages[0]


def test_a_disk_that_is_too_small_is_refused_before_the_target_runs(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = uneven_corpus()
    folder = tmp_path / "not" / "there"

    def never() -> FeatureSource:
        raise AssertionError

    writer = writer_of(tiny_target, folder, corpus, live=never)
    shards = plan_shards(corpus, writer.key, tiny.HIDDEN)
    needed = sum(shard.state_bytes + shard.teacher_bytes for shard in shards)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.04)))
    with pytest.raises(UserError, match=r"the cache needs .* are free in .*too little.*features\.folder"):
        writer.write()
    assert not folder.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(needed * 1.06)))
    with pytest.raises(AssertionError):
        writer.write()


class Counting:
    """Source that records the documents requested of it, and may fail."""

    def __init__(self, source: FeatureSource, *, fails_at: int | None = None, error: Exception | None = None) -> None:
        self._source, self._fails_at, self._error = source, fails_at, error
        self.documents: list[int] = []
        self._asked = 0

    def __call__(self, batch: TrainingBatch) -> Features:
        self._asked += 1
        if self._asked == self._fails_at:
            assert self._error is not None
            raise self._error
        self.documents += batch.documents or ()
        return self._source(batch)


@pytest.mark.slow
def test_interrupted_writing_continues_after_the_finished_shards(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_writer, "SHARD_BYTES", 100_000)
    corpus = uneven_corpus(120)
    live = LiveSource(tiny_target, tiny.AUX_IDS)
    broken = Counting(live, fails_at=12, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        writer_of(tiny_target, tmp_path / "cache", corpus, live=lambda: broken).write()
    finished = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert finished[0] == "shard-00000.safetensors"
    assert "index.json" not in finished
    times = {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in finished}
    second = Counting(live)
    writer = writer_of(tiny_target, tmp_path / "cache", corpus, live=lambda: second)
    writer.write()
    assert times == {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in finished}
    assert second.documents == list(range(second.documents[0], 120))
    assert 0 < second.documents[0] < max(broken.documents)
    third = Counting(live)
    writer_of(tiny_target, tmp_path / "cache", corpus, live=lambda: third).write()
    assert third.documents == []
    cache_of(tiny_target, tmp_path / "whole", corpus)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cache" / path.name).read_bytes()


def test_a_disk_error_loses_no_finished_shard(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_writer, "SHARD_BYTES", 100_000)
    real, calls = cache_writer.save_file, list[Path]()

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(cache_writer, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*shard-00002.*No space left on device"):
        writer_of(tiny_target, tmp_path, uneven_corpus(120)).write()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"shard-0000{i}.safetensors" for i in (0, 1)]


@each(
    "changes",
    [
        {"target": "other"},
        {"corpus": "b"},
        {"vocabulary": "80-0"},
        {"aux_layer_ids": (1, 2, 4)},
        {"top_k": 9},
        {"dtype": "fp8"},
    ],
)
def test_a_cache_of_another_run_is_refused_by_name(
    tiny_target: Target, tmp_path: Path, changes: dict[str, object]
) -> None:
    corpus = uneven_corpus(10)
    cache_of(tiny_target, tmp_path, corpus)
    (name,) = changes
    with pytest.raises(UserError, match=rf"was made for {name} .*features\.folder"):
        CacheSource(tmp_path, key_of(**changes))
    (tmp_path / "index.json").unlink()  # as if it had been interrupted
    with pytest.raises(UserError, match=rf"was made for {name} .*features\.folder"):
        writer_of(tiny_target, tmp_path, corpus, **changes).write()


def test_a_drafter_with_another_vocabulary_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    corpus = uneven_corpus(10)
    features = cache_of(tiny_target, tmp_path, corpus)(batches_of(corpus)[0])
    with pytest.raises(UserError, match="same one"):
        features.teachers(torch.arange(1, 81))


def test_held_out_documents_are_numbered_after_the_others(tiny_target: Target, tmp_path: Path) -> None:
    corpus, held_out = uneven_corpus(20), uneven_corpus(6, seed=5)
    cache = cache_of(tiny_target, tmp_path, concatenate([corpus, held_out]))
    live = LiveSource(tiny_target, tiny.AUX_IDS)
    for batch in batches_of(held_out, first_document=20):
        torch.testing.assert_close(cache(batch).aux_TX.float(), live(batch).aux_TX, rtol=2**-8, atol=1e-6)


def recipe_of(output: Path, **features: object) -> Any:
    file = output.parent / "conversations.jsonl"
    file.touch()  # `trained` replaces its contents
    return read_recipe(
        {
            "data": {"files": [str(file)], "pack_length": 100, "max_length": 100, "held_out_share": 0.1},
            "drafter": {"aux_layer_ids": list(tiny.AUX_IDS), "draft_vocab_size": 80},
            "train": {"steps": 40, "lr": 4e-3, "depths": 3, "eval_every": 20, "save_every": 20, "log_every": 1},
            "features": features,
            "output": {"folder": str(output)},
        }
    )


def opened_source(target: Target) -> OpenSource:
    """Opens the live source."""
    return partial(LiveSource, target)


def trained(monkeypatch: pytest.MonkeyPatch, target: Target, recipe: Any, **options: Any) -> tuple[TrainResult, Diary]:
    def encoded(files: Sequence[Path], settings: object, **_: object) -> tuple[Corpus, FitCounts]:
        return corpus_of(120), FitCounts(kept=120)

    monkeypatch.setattr("eyas.train.run_data.encode_corpus", encoded)
    monkeypatch.setattr("eyas.train.run_data.fingerprint_tokenizer", lambda *_: "letters")  # it has no vocabulary
    monkeypatch.setattr(Target, "stop_ids", lambda self: frozenset({1}))
    diary = Diary()
    return run(recipe, TargetParts.of(target), opened_source(target), observers=[diary], **options), diary


@pytest.mark.slow
def test_a_run_from_the_cache_learns_what_a_live_one_does(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, live = trained(monkeypatch, tiny_target, recipe_of(tmp_path / "live"))
    recipe = recipe_of(tmp_path / "remembering", source="cache", folder=str(tmp_path / "cache"), top_k=80)
    outcome, remembering = trained(monkeypatch, tiny_target, recipe)
    assert (outcome.step, outcome.finished) == (40, True)
    assert remembering.losses()[-1] < remembering.losses()[0] - 0.3
    np.testing.assert_allclose(remembering.losses(), live.losses(), rtol=0.002)
    for step, counts in live.estimates.items():
        theirs, ours = (c["drafter"].acceptance_length for c in (counts, remembering.estimates[step]))
        assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.slow
def test_a_resumed_run_reads_the_existing_cache(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path / "run", source="cache", folder=str(tmp_path / "cache"), top_k=16)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 50  # some while the cache is written, the rest one per step

    stopped, first = trained(monkeypatch, tiny_target, recipe, stop=stop)
    assert (0 < stopped.step < 40, stopped.finished) == (True, False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("train.test_cache.LiveSource", never)
    finished, second = trained(monkeypatch, tiny_target, recipe, resuming=True)
    assert finished.step == 40
    assert [report.step for report in first.reports + second.reports] == list(range(1, 41))


def test_writing_can_be_stopped(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stopped while the cache .* start again to go on"):
        writer_of(tiny_target, tmp_path, uneven_corpus()).write(stop=lambda: True)


def test_joined_documents_cannot_be_cached(tiny_target: Target, tmp_path: Path) -> None:
    tables = recipe_of(tmp_path, source="cache", folder="x").resolved()
    tables["data"] |= {"join_share": 0.5, "join_length": 2048, "pack_length": 4096}
    with pytest.raises(UserError, match=r"data\.join_share is 0\.5.*features\.source"):
        read_recipe(json.loads(json.dumps(tables)))
    corpus = uneven_corpus(10)
    batch = replace(batches_of(corpus)[0], documents=None)
    with pytest.raises(UserError, match=r"one by one.*data\.join_share"):
        cache_of(tiny_target, tmp_path, corpus)(batch)


def test_drafters_with_one_cache_must_share_their_vocabulary(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = recipe_of(tmp_path / "run", source="cache", folder=str(tmp_path / "cache")).resolved()
    tables["drafters"] = {"small": {"draft_vocab_size": 40}, "large": {}}
    with pytest.raises(UserError, match=r"one draft vocabulary.*small has one of 40.*large another of 80"):
        trained(monkeypatch, tiny_target, read_recipe(json.loads(json.dumps(tables))))
