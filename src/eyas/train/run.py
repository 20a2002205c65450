"""From a recipe and a target to trained drafters: everything around the loop.

folder/NAME/          the drafter as vLLM loads it
folder/checkpoints/   what a stopped run is taken up from
folder/encoded/       the conversations as tokens: a run taken up again need not tokenise
folder/log.jsonl, training.png, record.json, recipe.toml
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.train import resume
from eyas.train.batch import TrainingBatch, teaching_rows
from eyas.train.corpus import Corpus, encode_corpus, split
from eyas.train.encoded import encoded_once
from eyas.train.estimate import RoundCounts
from eyas.train.features import FeatureSource
from eyas.train.journal import Journal, counted, read_log, write_record, write_text
from eyas.train.loop import LoopPlan, Observer, PlannedBatch, Report, train
from eyas.train.newborn import config_for, newborn
from eyas.train.packing import FitCounts
from eyas.train.plot import plot_run
from eyas.train.ranks import Ranks
from eyas.train.recipe import Candidate, Recipe, to_toml
from eyas.train.sources.cache import CacheKey, CacheSource, fingerprint_vocabulary
from eyas.train.sources.cache_writer import CacheWriter, combined
from eyas.train.sources.live import LiveSource
from eyas.train.stream import CorpusPacks
from eyas.train.trainee import Regime, Trainee
from eyas.train.upgrade import ReadText, inherit
from eyas.train.vocabulary import choose_vocabulary

Say = Callable[[str], None]

# What may change between a run and its resumption without changing what is learnt.
_FREE = {
    "target": {"device"},
    "data": {"workers"},
    "features": {"folder"},
    "train": {"log_every", "eval_every", "eval_packs", "save_every", "compile", "checkpoint"},
    "output": {"folder", "trackers"},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    step: int
    steps: int
    drafters: dict[str, Path]
    """Where the finished drafters are; empty while the run is not at its end."""


class Observers:
    """Tells several."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.last: Report | None = None
        self.estimates: dict[str, RoundCounts] = {}

    def progressed(self, report: Report) -> None:
        """Every report."""
        self.last = report
        for observer in self._observers:
            observer.progressed(report)

    def estimated(self, step: int, counts: dict[str, RoundCounts]) -> None:
        """Every estimate."""
        self.estimates = counts
        for observer in self._observers:
            observer.estimated(step, counts)

    def saved(self, step: int, place: Path) -> None:
        """Every checkpoint."""
        for observer in self._observers:
            observer.saved(step, place)


def run(
    recipe: Recipe,
    target: Target,
    *,
    observers: Sequence[Observer] = (),
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda message: None,
    resuming: bool = False,
    encoded: Callable[[int], None] | None = None,
    cache: Path | None = None,
) -> Outcome:
    """Train what the recipe asks for; `cache` is where the target was found, if not in the user's."""
    started = time.time()
    folder = Path(recipe.output.folder)
    checkpoints = folder / "checkpoints"
    newest = resume.newest(checkpoints)
    _check_folder(recipe, folder, newest, resuming)
    corpus, held_out, data_record = _read_data(recipe, say, encoded, cache, ranks)
    trainees, vocabulary_record = _trainees(recipe, target, corpus, say)
    source = feature_source(recipe, target, trainees, corpus, held_out, say=say, stop=stop, ranks=ranks)
    packs = CorpusPacks(
        corpus=corpus,
        length=recipe.data.pack_length,
        seed=recipe.data.seed,
        device=target.device,
        padded=recipe.train.compile,
        join_share=recipe.data.join_share,
        join_length=recipe.data.join_length,
    )
    plan = _plan(recipe, data_record["fingerprint"], len(packs.epoch(0)), folder)
    if newest is not None:
        resume.require_same(newest, plan.same)
    say(f"{plan.steps} steps of {plan.packs_per_step} x {recipe.data.pack_length} tokens")
    journal: list[Observer] = []
    if ranks.leads:
        write_text(folder / "recipe.toml", to_toml(recipe))
        journal = [Journal(folder, from_step=0 if newest is None else resume.step_of(newest))]
    told = Observers([*journal, *observers])
    ranks.wait()
    step = train(
        trainees,
        packs,
        _held_out_packs(held_out, recipe, target, first_document=len(corpus)),
        source,
        plan,
        observer=told,
        ranks=ranks,
        stop=stop,
    )
    finished: dict[str, Path] = {}
    if ranks.leads:
        if step == plan.steps:
            for trainee in trainees:
                finished[trainee.name] = folder / trainee.name
                write_checkpoint(checkpoint_of(trainee.drafter), finished[trainee.name], replace=True)
        plot_run(folder / "log.jsonl", folder / "training.png")
    if ranks.leads and (told.last is not None or not (folder / "record.json").exists()):  # else all was done before
        write_record(
            folder,
            {
                "recipe": recipe.resolved(),
                "target": asdict(target.facts),
                "data": data_record,
                "vocabulary": vocabulary_record,
                "step": step,
                "steps": plan.steps,
                "seconds": time.time() - started,
                "processes": ranks.world,
                "last": None if told.last is None else asdict(told.last),
                "held_out": {name: counted(counts) for name, counts in told.estimates.items()},
            },
        )
    ranks.wait()
    return Outcome(step=step, steps=plan.steps, drafters=finished)


def feature_source(
    recipe: Recipe,
    target: Target,
    trainees: Sequence[Trainee],
    corpus: Corpus,
    held_out: Corpus | None,
    *,
    say: Say = lambda message: None,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
) -> FeatureSource:
    """Where the recipe says features come from; a cache is made first, unless it is there."""
    layer_ids = tuple(sorted({k for trainee in trainees for k in trainee.drafter.config.aux_layer_ids or ()}))
    choice = recipe.features

    def live() -> LiveSource:
        return LiveSource(target, layer_ids, compiled=recipe.train.compile, chunk=recipe.train.chunk)

    if choice.source == "live":
        return live()
    assert choice.folder is not None
    everything = corpus if held_out is None else combined([corpus, held_out])
    key = CacheKey(
        target=target.facts.source,
        corpus=_fingerprint(everything),
        vocabulary=_one_vocabulary(trainees),
        aux_layer_ids=layer_ids,
        top_k=min(choice.top_k, len(trainees[0].kept_W)),
        dtype=choice.dtype,
    )
    CacheWriter(
        folder=Path(choice.folder),
        corpus=everything,
        key=key,
        kept_W=trainees[0].kept_W,
        hidden_size=target.facts.hidden_size,
        live=live,
        device=target.device,
        pack_length=recipe.data.pack_length,
        padded=recipe.train.compile,
        chunk=recipe.train.chunk,
    ).write(say=say, stop=stop, ranks=ranks)
    return CacheSource(Path(choice.folder), key)


def _one_vocabulary(trainees: Sequence[Trainee]) -> str:
    """Fingerprint of the draft vocabulary that all drafters have."""
    first = trainees[0]
    for other in trainees[1:]:
        if not torch.equal(other.kept_W, first.kept_W):
            raise UserError(
                f"a cache is made for one draft vocabulary, but {first.name} has one of {len(first.kept_W)} tokens and "
                f"{other.name} another of {len(other.kept_W)}; give both the same drafter.draft_vocab_size, or set "
                'features.source to "live"'
            )
    return fingerprint_vocabulary(first.kept_W)


def _check_folder(recipe: Recipe, folder: Path, newest: Path | None, resuming: bool) -> None:
    if resuming and newest is None:
        raise UserError(f"there is no checkpoint in {folder / 'checkpoints'} to go on from; leave out --resume")
    if resuming:
        return
    if newest is not None:
        raise UserError(f"{folder} already holds a run; pass --resume to go on with it, or set another output.folder")
    if read_log(folder / "log.jsonl"):
        raise UserError(
            f"{folder} holds the log of a run that saved no checkpoint; remove {folder / 'log.jsonl'} to start over, "
            "or set another output.folder"
        )
    for candidate in recipe.candidates():
        if (place := folder / candidate.name).exists():
            raise UserError(f"{place} exists and would be overwritten; remove it or set another output.folder")


def _read_data(
    recipe: Recipe, say: Say, encoded: Callable[[int], None] | None, cache: Path | None, ranks: Ranks
) -> tuple[Corpus, Corpus | None, dict[str, Any]]:
    data = recipe.data

    settings = {"target": recipe.target.source, "max_length": data.max_length, "seed": data.seed}
    settings |= {"augment": asdict(data.augment)}

    def read(files: Sequence[str], name: str) -> tuple[Corpus, dict[str, Any]]:
        paths = [Path(file) for file in files]

        def encode() -> tuple[Corpus, FitCounts]:
            return encode_corpus(
                paths,
                recipe.target.source,
                max_length=data.max_length,
                augmentation=data.augment,
                seed=data.seed,
                workers=data.processes,
                report=encoded,
                cache=cache,
            )

        place = Path(recipe.output.folder) / "encoded" / f"{name}.safetensors"
        if not ranks.leads:  # the leader encodes, the others find it done
            ranks.wait()
        corpus, counts = encoded_once(place, paths, settings, encode)
        if ranks.leads:
            ranks.wait()
        return corpus, {"files": list(files), **counts}

    corpus, record = read(data.files, "train")
    held_out: Corpus | None = None
    held_out_record: dict[str, Any] = {}
    if data.held_out is not None:
        held_out, held_out_record = read([data.held_out], "held-out")
    elif data.held_out_share:
        corpus, held_out = split(corpus, data.held_out_share, data.seed)
    if not len(teaching_rows(corpus.mask, _positions(corpus))):
        raise UserError(
            f"the answers of {len(corpus)} conversations have one token each, or none, and a draft is of the second; "
            "give longer answers"
        )
    say(
        f"{len(corpus):,} conversations, {corpus.tokens:,} tokens, {corpus.trainable:,} of them trained on; "
        f"{record['cut']:,} cut at turns, {record['too_long']:,} too long, {record['unanswered']:,} unanswered; "
        f"{0 if held_out is None else len(held_out):,} held out"
    )
    record |= {"conversations": len(corpus), "tokens": corpus.tokens, "trained_on": corpus.trainable}
    record |= {"fingerprint": _fingerprint(corpus), "held_out": held_out_record}
    return corpus, held_out, record


def _trainees(recipe: Recipe, target: Target, corpus: Corpus, say: Say) -> tuple[list[Trainee], dict[str, Any]]:
    dtype = _precision(recipe, target)
    trainees, record = [], {}
    for candidate in recipe.candidates():
        choice = candidate.drafter
        if choice.init_from is not None:
            drafter = inherit(target, choice, dtype=dtype, read_text=_text_reader(recipe, target, corpus))
            kept = drafter.vocab().target_ids_W.cpu().numpy()
            coverage = float(np.isin(corpus.ids[corpus.mask], kept).mean())
        else:
            kept, coverage = choose_vocabulary(
                corpus, choice.draft_vocab_size, target.facts.vocab_size, always=target.stop_ids()
            )
            config = config_for(
                target,
                draft_vocab_size=choice.draft_vocab_size,
                intermediate_size=choice.intermediate_size,
                layers=choice.layers,
                aux_layer_ids=choice.aux_layer_ids,
                dtype=dtype,
                fc_norm=choice.fc_norm,
                norm_output=choice.norm_output,
                norm_before_residual=choice.norm_before_residual,
                norm_before_fc=choice.norm_before_fc,
            )
            drafter = newborn(target, config, torch.from_numpy(kept), seed=recipe.train.seed)
        config = drafter.config
        trainees.append(Trainee(candidate.name, drafter, _regime(recipe, candidate)))
        parameters = sum(master.numel() for master in trainees[-1].masters.values())
        say(
            f"{candidate.name}: {config.family}, {parameters / 1e6:.1f} M parameters, {config.draft_vocab_size:,} "
            f"draft tokens cover {coverage:.2%} of what is trained on"
            + (f"; it starts from {choice.init_from}" if choice.init_from else "")
        )
        record[candidate.name] = {"size": len(kept), "coverage": coverage}
    return trainees, record


def _text_reader(recipe: Recipe, target: Target, corpus: Corpus) -> ReadText:
    """Gives an upgrade some of the text to measure states on."""

    def read(aux_layer_ids: Sequence[int]) -> tuple[TrainingBatch, Tensor]:
        packs = CorpusPacks(
            corpus=corpus, length=recipe.data.pack_length, seed=recipe.data.seed, device=target.device, padded=False
        )
        batch = packs.epoch(0)[0].build()
        return batch, LiveSource(target, aux_layer_ids)(batch).aux_TX

    return read


def _regime(recipe: Recipe, candidate: Candidate) -> Regime:
    choice = recipe.train
    return Regime(
        depths=candidate.depths,
        gamma=candidate.gamma,
        loss=candidate.loss,
        lr=candidate.lr,
        head_lr_scale=candidate.head_lr_scale,
        betas=choice.betas,
        eps=choice.eps,
        weight_decay=candidate.weight_decay,
        clip=choice.clip,
        chunk=choice.chunk,
        checkpointed=choice.checkpoint,
        compiled=choice.compile,
    )


def _precision(recipe: Recipe, target: Target) -> str:
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "bfloat16" if target.device.type == "cuda" else "float32"


def _plan(recipe: Recipe, fingerprint: str, packs_in_epoch: int, folder: Path) -> LoopPlan:
    choice = recipe.train
    steps = choice.steps or max(1, round(choice.epochs * packs_in_epoch / choice.packs_per_step))
    same = {
        f"{table}.{key}": value
        for table, values in recipe.resolved().items()
        for key, value in values.items()
        if key not in _FREE.get(table, ())
    }
    return LoopPlan(
        steps=steps,
        packs_per_step=choice.packs_per_step,
        schedule=choice.schedule,
        warmup=choice.warmup,
        decay=choice.decay,
        final_lr=choice.final_lr,
        log_every=choice.log_every,
        eval_every=choice.eval_every,
        save_every=choice.save_every,
        folder=folder,
        same={**same, "steps": steps, "the data": fingerprint},
    )


def _held_out_packs(
    held_out: Corpus | None, recipe: Recipe, target: Target, *, first_document: int
) -> Sequence[PlannedBatch]:
    if held_out is None:
        return []
    packs = CorpusPacks(
        corpus=held_out,
        length=recipe.data.pack_length,
        seed=recipe.data.seed,
        device=target.device,
        padded=recipe.train.compile,
        first_document=first_document,
    )
    return packs.epoch(0)[: recipe.train.eval_packs]


def _positions(corpus: Corpus) -> NDArray[np.int64]:
    """Place of every token within its document."""
    return np.arange(corpus.tokens) - np.repeat(corpus.offsets[:-1], corpus.lengths)


def _fingerprint(corpus: Corpus) -> str:
    """Tells one corpus from another."""
    digest = hashlib.sha256()
    for array in (corpus.ids, corpus.mask, corpus.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
