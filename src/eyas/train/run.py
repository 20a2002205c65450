"""A training run: from a recipe and parts of a target to trained drafters.

folder/NAME/          the drafter as vLLM loads it, when the run is finished
folder/best/NAME/     the one with the longest acceptance on held-out text so far
folder/checkpoints/   checkpoints from which a stopped run is resumed
folder/encoded/       the conversations as tokens, so that a resumed run need not tokenise
folder/log.jsonl, training.png, record.json, recipe.toml
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.recorded_acceptance import FILE, read_acceptance
from eyas.errors import UserError
from eyas.target.parts import TargetParts
from eyas.train import resume
from eyas.train.attention import require_attention
from eyas.train.batch import CorpusPacks, PlannedBatch, TrainingBatch
from eyas.train.corpus.corpus import Corpus, concatenate
from eyas.train.corpus.encoding import EncodingProgress
from eyas.train.corpus.vocabulary import choose_vocabulary
from eyas.train.estimate import acceptance_file
from eyas.train.features import Features, FeatureSource, FetchingSource, OpenSource
from eyas.train.init import Start, StartMeasure, config_for, init_drafter, scale_down
from eyas.train.journal import BestDrafters, Journal, Observers, write_record, write_text
from eyas.train.loop import LoopConfig, Observer, train
from eyas.train.plots import plot_run
from eyas.train.preflight import check_run
from eyas.train.ranks import Ranks
from eyas.train.recipe import DrafterRecipe, Recipe
from eyas.train.recipe_file import to_toml
from eyas.train.resume import ResumePoint
from eyas.train.run_data import RunData, fingerprint_corpus, read_data
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.sources.cache import CacheKey, CacheSource, fingerprint_vocabulary
from eyas.train.sources.cache_writer import CacheWriter
from eyas.train.state import TrainState
from eyas.train.upgrade import ReadText, init_from_checkpoint

logger = logging.getLogger(__name__)

START_TOKENS = 4096
"""Tokens of text on which untrained drafters are measured, if there is no longer document."""

# Settings that may change when a run is resumed, without changing what is learnt.
_MAY_CHANGE_ON_RESUME = {
    "target": {"device"},
    "data": {"workers", "max_bad_share", "allow_other_authors"},
    "features": {"folder", "servers", "states_folder", "ahead_gb", "in_flight"},
    "train": {"log_every", "eval_every", "eval_packs", "save_every", "compile", "activation_checkpointing"}
    # A run may become longer: its schedule then changes from there on, which is logged.
    | {"steps", "minutes", "epochs", "max_minutes"},
    "output": {"folder", "trackers"},
}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run."""

    step: int
    length: RunLength
    finished: bool
    drafters: dict[str, Path]
    """Folders of the finished drafters; empty if the run was stopped."""
    data: RunData | None = None
    """Conversations that were trained on and held out."""


def run(
    recipe: Recipe,
    target: TargetParts,
    open_source: OpenSource,
    *,
    observers: Sequence[Observer] = (),
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    stop: Callable[[], bool] = lambda: False,
    on_first_step: Callable[[], None] = lambda: None,
    resuming: bool = False,
    on_encoded: Callable[[EncodingProgress], None] | None = None,
    on_data: Callable[[RunData], None] = lambda _: None,
    cache: Path | None = None,
    source_record: Callable[[], dict[str, Any]] = dict,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainResult:
    """Train the drafters of a recipe.

    `open_source` opens the source that computes states that are not in a cache yet, and `source_record` describes it
    for the record. `cache` is the folder of converted targets, if not the user's. `clock` gives seconds of training.
    `on_data` gets the conversations before they are used, and may refuse them.
    """
    started = time.time()
    folder = Path(recipe.output.folder)
    checkpoints = folder / "checkpoints"
    newest = resume.newest(checkpoints)
    check_run(recipe, target.facts, processes=ranks.world, resuming=resuming)
    require_attention(recipe.data.pack_length, getattr(torch, precision_of(recipe, target)), target.device)
    data = read_data(recipe, target, on_encoded=on_encoded, cache=cache, ranks=ranks)
    on_data(data)
    corpus, held_out, data_record = data.corpus, data.held_out, data.record
    packs = CorpusPacks(
        corpus=corpus,
        length=recipe.data.pack_length,
        seed=recipe.data.seed,
        device=target.device,
        padded=recipe.train.compile,
        join_share=recipe.data.join_share,
        join_length=recipe.data.join_length,
        replay=data.replay,
    )
    states, vocabulary_record, start_record = _train_states(
        recipe, target, open_source, packs, ranks, fresh=newest is None
    )
    start_record = start_record or _recorded_start(folder)
    source = _feature_source(recipe, target, open_source, states, corpus, held_out, stop=stop, ranks=ranks)
    held_out_packs: Sequence[PlannedBatch] = []
    if held_out is not None:
        others = replace(packs, corpus=held_out, join_share=0.0, first_document=len(corpus), replay=None)
        held_out_packs = others.epoch(0)[: recipe.train.eval_packs]
    config = _loop_config(recipe, data_record["fingerprint"], len(packs.epoch(0)), folder)
    logger.info(
        f"{config.length}{_of_epochs(recipe)}, each step {config.packs_per_step} x {recipe.data.pack_length} tokens"
    )
    if newest is not None:
        _log_resumption(resume.read_point(newest, same=config.same), config)
    best = BestDrafters(folder, states)
    journal: list[Observer] = []
    if ranks.is_main:
        write_text(folder / "recipe.toml", to_toml(recipe))
        journal = [Journal(folder, from_step=0 if newest is None else resume.step_of(newest)), best]
    observed = Observers([*journal, *observers])
    ranks.barrier()
    reached = train(
        states,
        packs,
        held_out_packs,
        source,
        config,
        observer=observed,
        ranks=ranks,
        stop=stop,
        on_first_step=on_first_step,
        clock=clock,
    )
    finished: dict[str, Path] = {}
    if ranks.is_main:
        if reached.finished:
            for state in states:
                finished[state.name] = folder / state.name
                counts = observed.estimates.get(state.name)
                beside = _last_acceptance(finished[state.name]) if counts is None else acceptance_file(counts)
                write_checkpoint(checkpoint_of(state.drafter), finished[state.name], replace=True, beside=beside)
        plot_run(folder / "log.jsonl", folder / "training.png")
    # A finished run that is resumed has nothing to add to its record.
    if ranks.is_main and (observed.last is not None or not (folder / "record.json").exists()):
        write_record(
            folder,
            {
                "recipe": recipe.resolved(),
                "target": asdict(target.facts),
                "data": data_record,
                "vocabulary": vocabulary_record,
                "start": start_record,
                "step": reached.step,
                "planned": asdict(config.length),
                "seconds": time.time() - started,
                "training_seconds": reached.seconds,
                "first_step_seconds": reached.first_step_seconds,
                "processes": ranks.world,
                "served": source_record(),
                "last": None if observed.last is None else asdict(observed.last),
                "held_out": {name: counts.as_json() for name, counts in observed.estimates.items()},
                "best": best.record(),
            },
        )
    ranks.barrier()
    return TrainResult(step=reached.step, length=config.length, finished=reached.finished, drafters=finished, data=data)


def _of_epochs(recipe: Recipe) -> str:
    epochs = recipe.train.epochs
    return "" if epochs is None else f" ({epochs:g} epoch{'' if epochs == 1 else 's'})"


def _log_resumption(point: ResumePoint, config: LoopConfig) -> None:
    """Log what resuming means: nothing is left to do, the run goes on as planned, or it has another length now."""
    length, planned = config.length, point.planned
    so_far = f"{point.step:,} steps in {point.seconds / 60:.1f} minutes of training"
    if length.reached(point.step, point.seconds):
        if length != planned and length.steps != point.step:
            raise UserError(
                f"the run in {config.folder} has done {so_far}, and {length} are less; give it more than that, or "
                "choose another output.folder"
            )
        logger.info(
            f"the run in {config.folder} is finished ({so_far}), nothing is left to do; to go on with it, resume with "
            "more train.steps, train.minutes or train.epochs"
        )
        return
    logger.info(f"resuming after step {point.step:,} ({so_far})")
    if length == planned:
        return
    old, new = (config.schedule.share(*of.position(point.step, point.seconds)) for of in (planned, length))
    logger.info(
        f"the run was planned for {planned} and is for {length} now: the learning rate goes on at {new:.1%} of its "
        f"peak (it was at {old:.1%}) and falls towards the new end. A run planned with this length from its start "
        "would have had other rates so far"
    )


def _feature_source(
    recipe: Recipe,
    target: TargetParts,
    open_source: OpenSource,
    states: Sequence[TrainState],
    corpus: Corpus,
    held_out: Corpus | None,
    *,
    stop: Callable[[], bool],
    ranks: Ranks,
) -> FeatureSource:
    """Open the feature source of the recipe; a cache is written first if it is not complete."""
    layer_ids = tuple(sorted({k for state in states for k in state.drafter.config.aux_layer_ids or ()}))
    settings = recipe.features
    opened = functools.partial(open_source, layer_ids, compiled=recipe.train.compile)
    if settings.source != "cache":
        return opened()
    assert settings.folder is not None
    everything = corpus if held_out is None else concatenate([corpus, held_out])
    key = CacheKey(
        target=target.facts.source,
        corpus=fingerprint_corpus(everything),
        vocabulary=_one_vocabulary(states),
        aux_layer_ids=layer_ids,
        top_k=min(settings.top_k, len(states[0].target_ids_W)),
        dtype=settings.dtype,
    )
    CacheWriter(
        folder=Path(settings.folder),
        corpus=everything,
        key=key,
        target_ids_W=states[0].target_ids_W,
        hidden_size=target.facts.hidden_size,
        computed=opened,
        device=target.device,
        pack_length=recipe.data.pack_length,
        padded=recipe.train.compile,
        chunk=recipe.train.chunk,
    ).write(stop=stop, ranks=ranks)
    return CacheSource(Path(settings.folder), key)


def _one_vocabulary(states: Sequence[TrainState]) -> str:
    """Fingerprint of the draft vocabulary, which must be the same for all drafters."""
    first = states[0]
    for other in states[1:]:
        if not torch.equal(other.target_ids_W, first.target_ids_W):
            raise UserError(
                f"a cache is made for one draft vocabulary, but {first.name} has one of {len(first.target_ids_W)} "
                f"tokens and {other.name} another of {len(other.target_ids_W)}; give both the same "
                'drafter.draft_vocab_size, or set features.source to "live"'
            )
    return fingerprint_vocabulary(first.target_ids_W)


def _train_states(
    recipe: Recipe, target: TargetParts, open_source: OpenSource, packs: CorpusPacks, ranks: Ranks, *, fresh: bool
) -> tuple[list[TrainState], dict[str, Any], dict[str, Any]]:
    """Create the drafters; return them with records of their vocabularies and of their first losses (if `fresh`)."""
    corpus = packs.corpus
    some = min(packs.length, max(START_TOKENS, packs.corpus.longest))
    read_text = _text_reader(replace(packs, length=some, padded=False, join_share=0.0, replay=None), open_source)
    dtype = precision_of(recipe, target)
    choose = functools.partial(choose_vocabulary, corpus, vocab_size=target.facts.vocab_size, always=target.stop_ids)
    states, record, starts = [], {}, {}
    for drafter_recipe in recipe.drafter_recipes():
        settings = drafter_recipe.drafter
        if settings.init_from is not None:
            drafter = init_from_checkpoint(
                target,
                settings,
                dtype=dtype,
                seed=drafter_recipe.train.seed,
                read_text=read_text,
                choose_vocabulary=lambda size: torch.from_numpy(choose(size)[0]),
            )
            kept = drafter.vocab().target_ids_W.cpu().numpy()
            coverage = float(np.isin(corpus.ids[corpus.mask], kept).mean())
        else:
            kept, coverage = choose(settings.draft_vocab_size)
            chosen = settings.model_copy(update={"draft_vocab_size": len(kept)})
            config = config_for(target, chosen, dtype=dtype)
            drafter = init_drafter(target, config, torch.from_numpy(kept), seed=drafter_recipe.train.seed)
        config = drafter.config
        if fresh:  # a resumed run loads its weights from the checkpoint
            start = _settle_start(drafter, drafter_recipe, read_text, ranks)
            starts[drafter_recipe.name] = asdict(start)
            if ranks.is_main:
                start.report(drafter_recipe.name)
        # Measured on states, whose last bits differ between servers.
        ranks.copy_from_main([p for p in drafter.parameters() if p.requires_grad])
        states.append(TrainState(drafter_recipe.name, drafter, drafter_recipe.train))
        parameters = sum(master.numel() for master in states[-1].master_weights.values())
        logger.info(
            f"{drafter_recipe.name}: {config.family}, {parameters / 1e6:.1f} M parameters, {config.draft_vocab_size:,} "
            f"draft tokens cover {coverage:.2%} of what is trained on; {_megabytes(states[-1].drafter):,.0f} MB on disk"
            + (f"; it starts from {settings.init_from}" if settings.init_from else "")
        )
        record[drafter_recipe.name] = {"size": len(kept), "coverage": coverage}
    return states, record, starts


def _settle_start(drafter: Drafter, drafter_recipe: DrafterRecipe, read_text: ReadText, ranks: Ranks) -> Start:
    """Measure a drafter's losses; the scores of an untrained one are scaled down first if it is overconfident."""
    assert drafter.config.aux_layer_ids is not None
    batch, features = read_text(drafter.config.aux_layer_ids)
    measure = StartMeasure(drafter, batch, features, depths=drafter_recipe.train.depths)
    if drafter_recipe.drafter.init_from is not None:
        return measure.at(0)
    # All processes follow the main one, since their drafters must be identical.
    found = measure.steps_down() if ranks.is_main else 0
    (steps,) = ranks.sum_counts([found], drafter.fc.weight.device)
    scale_down(drafter, steps)
    return measure.at(0)


def _last_acceptance(folder: Path) -> dict[str, str]:
    """acceptance.json of a finished run that is resumed: its weights do not change and it evaluates nothing."""
    recorded = read_acceptance(folder)
    return {} if recorded is None else {FILE: recorded.to_json()}


def _recorded_start(folder: Path) -> dict[str, Any]:
    """Losses at the start, from the record of a resumed run."""
    try:
        recorded: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8")).get("start", {})
    except (OSError, ValueError):
        return {}  # it was killed before it wrote one
    return recorded


def _megabytes(drafter: Drafter) -> float:
    """Size of its checkpoint's tensors."""
    return sum(tensor.nbytes for tensor in checkpoint_of(drafter).tensors.values()) / 1e6


def _text_reader(packs: CorpusPacks, open_source: OpenSource) -> ReadText:
    """Function that gives a batch of text on which to measure drafters; the target reads it once."""

    @functools.cache
    def read(aux_layer_ids: tuple[int, ...]) -> tuple[TrainingBatch, Features]:
        source = open_source(aux_layer_ids, compiled=False)
        for planned in packs.epoch(0):
            batch = planned.build()
            if isinstance(source, FetchingSource):
                batch = source.available(batch)
            # A pack that teaches nothing cannot be measured; a corpus of such packs was refused before.
            if len(batch.row_M):
                return batch, source(batch)
        raise UserError("no pack of the data could be fetched from the servers; look at their logs")

    return lambda aux_layer_ids: read(tuple(aux_layer_ids))


def precision_of(recipe: Recipe, target: TargetParts) -> str:
    """Type that drafters are computed in."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "bfloat16" if target.device.type == "cuda" else "float32"


def _loop_config(recipe: Recipe, fingerprint: str, packs_in_epoch: int, folder: Path) -> LoopConfig:
    settings = recipe.train
    steps = settings.steps
    if settings.epochs is not None:
        steps = max(1, round(settings.epochs * packs_in_epoch / settings.packs_per_step))
    same = {
        f"{table}.{key}": value
        for table, values in recipe.resolved().items()
        for key, value in values.items()
        if key not in _MAY_CHANGE_ON_RESUME.get(table, ())
    }
    return LoopConfig(
        length=RunLength(steps=steps, minutes=settings.minutes or settings.max_minutes),
        packs_per_step=settings.packs_per_step,
        schedule=LearningRateSchedule(
            name=settings.schedule, warmup=settings.warmup, decay=settings.decay, final=settings.final_lr
        ),
        compiled=settings.compile,
        log_every=settings.log_every,
        eval_every=settings.eval_every,
        save_every=settings.save_every,
        folder=folder,
        same={**same, "the data": fingerprint},
    )
