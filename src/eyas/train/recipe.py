"""What a training run is told: a TOML file, a few overrides, defaults for the rest. No torch: bad recipes fail at once.

Several drafters may be trained side by side on the same batches (`[drafters.NAME]`), which is the fair way to compare
two: same data, same order, same target states. Invariant: a `Recipe` that exists is consistent, its drafters included;
nothing that runs it validates again. Relative paths are relative to the current directory.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from eyas.errors import UserError
from eyas.train.augment import Augmentation
from eyas.train.tables import (
    apply_override,
    build,
    check_types,
    parse_override,
    plain,
    read_value,
    to_text,
    unknown_key,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOSSES = ("cross_entropy", "kl", "total_variation", "acceptance")
SCHEDULES = ("cosine", "wsd")
TRACKERS = ("tensorboard", "wandb", "trackio")
SHORTEST_JOINED = 2048
"""Joining documents into something shorter than this teaches nothing about long contexts."""
ONLY_DRAFTER = "drafter"
"""The name of the drafter of a recipe without [drafters.*]."""

_HUGE = 2**31 - 1
_TAKEN_NAMES = ("checkpoints", "state", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class TargetChoice:
    """[target]: whom the drafter drafts for."""

    source: str = "smollm2"
    """The embedded default, a folder, a GGUF file or a hub id."""
    dtype: str = "auto"
    """Of its weights; auto: as they are stored."""
    device: str = "auto"
    """Where everything runs; auto: on a CUDA device if there is one, otherwise on the CPU."""
    spread: bool = False
    """Lay the target's layers over all GPUs of this machine: for targets that one cannot hold, in one process."""

    def __post_init__(self) -> None:
        check_types(self, "target")
        _require_text("target.source", self.source)
        _require_one_of("target.dtype", self.dtype, DTYPES)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"target.device is {self.device!r}; it must be auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """[data]: which conversations, and how they are laid out."""

    files: tuple[str, ...]
    """JSON lines or Parquet."""
    held_out: str | None = None
    """A file of conversations to evaluate on; none: a share of `files` is set aside."""
    held_out_share: float = 0.01
    """Share of the documents that is set aside when there is no `held_out` file; 0: none."""
    max_length: int = 2048
    """Tokens of a conversation at most; longer ones are cut at turns."""
    pack_length: int = 4096
    """Tokens of a pack."""
    join_share: float = 0.0
    """Share of the tokens in documents that are joined into long ones, to teach long contexts."""
    join_length: int = 0
    """Tokens of a joined document at most; needed with `join_share`."""
    seed: int = 0
    """Of the split, the augmentation and the order."""
    workers: int = 0
    """Processes that encode conversations; 0: one for every core."""
    augment: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        check_types(self, "data")
        if not self.files:
            raise UserError("data.files is empty; name at least one file of conversations")
        for file in self.files:
            _require_text("data.files", file)
        _require_text("data.held_out", self.held_out)
        _require("data.held_out_share", self.held_out_share, 0 <= self.held_out_share < 1, "from 0 to below 1")
        _require_between("data.max_length", self.max_length, 3, _HUGE)
        _require_between("data.pack_length", self.pack_length, 3, _HUGE)
        _require_between("data.join_share", self.join_share, 0, 1)
        _require_between("data.join_length", self.join_length, 0, _HUGE)
        _require_between("data.seed", self.seed, 0, 2**63 - 1)
        _require_between("data.workers", self.workers, 0, 1024)
        if self.max_length > self.pack_length:
            raise UserError(
                f"data.max_length {self.max_length} exceeds data.pack_length {self.pack_length}, so a conversation "
                "might fit no pack; lower the one or raise the other"
            )
        if self.join_length > self.pack_length:
            raise UserError(
                f"data.join_length {self.join_length} exceeds data.pack_length {self.pack_length}, so a joined "
                "document might fit no pack; lower the one or raise the other"
            )
        if self.join_share and self.join_length < SHORTEST_JOINED:
            raise UserError(
                f"data.join_share {self.join_share} needs a data.join_length of at least {SHORTEST_JOINED}, "
                f"not {self.join_length}; raise it or set data.join_share to 0"
            )

    @property
    def processes(self) -> int:
        """How many processes `workers` asks for."""
        if self.workers:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class FeaturesChoice:
    """[features]: where the target's states come from."""

    source: str = "live"
    """live: the target runs along; cache: its states are read from `folder`."""
    folder: str | None = None
    """Of the cache."""
    top_k: int = 64
    """How many of the target's probabilities the cache keeps for each token."""
    dtype: str = "bfloat16"
    """Of the states in the cache."""

    def __post_init__(self) -> None:
        check_types(self, "features")
        _require_one_of("features.source", self.source, ("live", "cache"))
        _require_text("features.folder", self.folder)
        _require_between("features.top_k", self.top_k, 1, 65536)
        _require_one_of("features.dtype", self.dtype, ("bfloat16", "fp8"))
        if self.source == "cache" and self.folder is None:
            raise UserError('features.source is "cache" but there is no features.folder; name the folder of the cache')


@dataclass(frozen=True, kw_only=True)
class DrafterChoice:
    """[drafter]: what is trained."""

    fc_norm: bool = True
    """EAGLE 3.1, part one: a norm on each target state before the fusion."""
    norm_output: bool = True
    """EAGLE 3.1, part two: the next depth is fed the normed state."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    layers: int = 1
    draft_vocab_size: int | None = None
    """How many tokens it can propose; none: the target's whole vocabulary."""
    intermediate_size: int | None = None
    """Width of its MLP; none: the target's."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Which target states it reads; none: the target's default."""
    init_from: str | None = None
    """A drafter checkpoint to start from; none: from scratch."""

    def __post_init__(self) -> None:
        check_types(self, "drafter")
        _require_between("drafter.layers", self.layers, 1, 256)
        _require_between("drafter.draft_vocab_size", self.draft_vocab_size, 1, _HUGE)
        _require_between("drafter.intermediate_size", self.intermediate_size, 1, _HUGE)
        _require_text("drafter.init_from", self.init_from)
        ids = self.aux_layer_ids
        if ids is not None and (not ids or min(ids) < 0 or list(ids) != sorted(set(ids))):
            raise UserError(
                f"drafter.aux_layer_ids is {list(ids)}; it must be a list of ascending whole numbers from 0, "
                "at least one"
            )


@dataclass(frozen=True, kw_only=True)
class TrainChoice:
    """[train]: how it is trained."""

    depths: int = 5
    """How many tokens ahead the drafter is unrolled."""
    gamma: float = 0.8
    """Weight of a depth relative to the one before it."""
    loss: str = "cross_entropy"
    lr: float = 1e-3
    """Peak learning rate."""
    head_lr_scale: float = 0.3
    """Learning rate of the head relative to `lr`; 0: the head stays as it is."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the gradient."""
    schedule: str = "cosine"
    """cosine, or wsd: warm up, stay, decay."""
    warmup: float = 0.03
    """Share of the steps in which the rate rises."""
    decay: float = 0.2
    """Share of the steps in which the rate falls; wsd only."""
    final_lr: float = 0.02
    """Where the rate ends, relative to its peak."""
    steps: int | None = None
    """Optimiser steps; none: what `epochs` makes."""
    epochs: float = 1.0
    packs_per_step: int = 1
    """Packs that a step sums gradients over."""
    compile: bool = False
    checkpoint: bool = False
    """Recompute activations in the backward pass: slower, much less memory for long packs."""
    precision: str = "auto"
    """Of the drafter's computation; its weights are always kept in float32. auto: bfloat16 on CUDA."""
    chunk: int = 4096
    """Rows whose scores over the vocabulary are held at once."""
    seed: int = 0
    """Of the drafter's first weights."""
    log_every: int = 10
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_packs: int = 8
    """Held-out packs in an evaluation, at most."""
    save_every: int = 500
    """Steps between saves; 0: only at the end."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        _require_between("train.depths", self.depths, 1, 64)
        _require("train.gamma", self.gamma, 0 < self.gamma <= 1, "above 0 and at most 1")
        _require_one_of("train.loss", self.loss, LOSSES)
        _require("train.lr", self.lr, 0 < self.lr <= 1, "above 0 and at most 1")
        _require_between("train.head_lr_scale", self.head_lr_scale, 0, 100)
        _require("train.betas", list(self.betas), all(0 <= beta < 1 for beta in self.betas), "two from 0 to below 1")
        _require("train.eps", self.eps, 0 < self.eps < 1, "above 0 and below 1")
        _require_between("train.weight_decay", self.weight_decay, 0, 10)
        _require("train.clip", self.clip, 0 < self.clip < math.inf, "above 0")
        _require_one_of("train.schedule", self.schedule, SCHEDULES)
        _require("train.warmup", self.warmup, 0 <= self.warmup < 1, "from 0 to below 1")
        _require_between("train.decay", self.decay, 0, 1)
        _require_between("train.final_lr", self.final_lr, 0, 1)
        _require_between("train.steps", self.steps, 1, _HUGE)
        _require("train.epochs", self.epochs, 0 < self.epochs <= 1e6, "above 0 and at most 1000000")
        _require_between("train.packs_per_step", self.packs_per_step, 1, _HUGE)
        _require_one_of("train.precision", self.precision, ("auto", "float32", "bfloat16"))
        _require_between("train.chunk", self.chunk, 1, _HUGE)
        _require_between("train.seed", self.seed, 0, 2**63 - 1)
        for name, least in (("log_every", 1), ("eval_every", 0), ("eval_packs", 1), ("save_every", 0)):
            _require_between(f"train.{name}", getattr(self, name), least, _HUGE)
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"train.warmup {self.warmup} and train.decay {self.decay} exceed all steps together; lower one of them"
            )


@dataclass(frozen=True, kw_only=True)
class OutputChoice:
    """[output]: where results go."""

    folder: str
    trackers: tuple[str, ...] = ()
    """Who else is told of the losses: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        check_types(self, "output")
        _require_text("output.folder", self.folder)
        for tracker in self.trackers:
            _require_one_of("output.trackers", tracker, TRACKERS)
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError(f"output.trackers is {list(self.trackers)}; name each tracker once")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the drafters that are trained side by side, with what is its own."""

    name: str
    drafter: DrafterChoice
    lr: float
    head_lr_scale: float
    depths: int
    gamma: float
    loss: str
    weight_decay: float


_OWN_TRAIN_KEYS = tuple(field.name for field in fields(Candidate) if field.name not in ("name", "drafter"))
_DRAFTER_HINTS = get_type_hints(DrafterChoice)
_OVERRIDE_HINTS = _DRAFTER_HINTS | {
    key: hint for key, hint in get_type_hints(TrainChoice).items() if key in _OWN_TRAIN_KEYS
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run is told."""

    target: TargetChoice = field(default_factory=TargetChoice)
    data: DataChoice
    features: FeaturesChoice = field(default_factory=FeaturesChoice)
    drafter: DrafterChoice = field(default_factory=DrafterChoice)
    train: TrainChoice = field(default_factory=TrainChoice)
    drafters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name, what a drafter has otherwise than [drafter] and [train] say."""
    output: OutputChoice

    def __post_init__(self) -> None:
        for name, table in self.drafters.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise UserError(
                    f"a drafter cannot be called {name!r}, its folder bears the name; use letters, digits, - and _"
                )
            if name in _TAKEN_NAMES:
                raise UserError(
                    f"a drafter cannot be called {name!r}, the run has a folder of that name; choose another"
                )
            if not isinstance(table, Mapping):
                raise UserError(f"drafters.{name} is {table!r}; it must be a table: write [drafters.{name}]")
            for key in table:
                if key not in _OVERRIDE_HINTS:
                    raise unknown_key(key, f"[drafters.{name}]", _OVERRIDE_HINTS, _tables_with(key))
        drafters = {
            name: {key: read_value(value, _OVERRIDE_HINTS[key], key) for key, value in table.items()}
            for name, table in self.drafters.items()
        }
        object.__setattr__(self, "drafters", drafters)
        self.candidates()
        if self.features.source == "cache" and self.data.join_share:
            raise UserError(
                f"data.join_share is {self.data.join_share} and joined documents see each other, which a cache of "
                'single ones cannot know; set data.join_share to 0 or features.source to "live"'
            )

    def candidates(self) -> tuple[Candidate, ...]:
        """The drafters to train, in the order of the recipe."""
        return tuple(self._candidate(name, own) for name, own in (self.drafters or {ONLY_DRAFTER: {}}).items())

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON knows them."""
        tables: dict[str, Any] = plain(self)
        return tables

    def _candidate(self, name: str, own: Mapping[str, Any]) -> Candidate:
        shape = {key: value for key, value in own.items() if key in _DRAFTER_HINTS}
        train = {key: value for key, value in own.items() if key not in _DRAFTER_HINTS}
        try:
            drafter = DrafterChoice(**{**vars(self.drafter), **shape})
            trained = TrainChoice(**{**vars(self.train), **train})
        except UserError as error:
            raise UserError(f"in [drafters.{name}]: {error}") from error
        return Candidate(name=name, drafter=drafter, **{key: getattr(trained, key) for key in _OWN_TRAIN_KEYS})


_SECTIONS: Mapping[str, type[Any]] = {
    "target": TargetChoice,
    "data": DataChoice,
    "features": FeaturesChoice,
    "drafter": DrafterChoice,
    "train": TrainChoice,
    "output": OutputChoice,
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and set `overrides` of the form `train.lr=1e-3` over it."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the recipe {path} is not UTF-8 text ({error.reason}); give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the recipe {path} is not TOML ({error}); mend it") from error
    named = tuple(tables["drafters"]) if isinstance(tables.get("drafters"), dict) else ()
    for override in overrides:
        keys, value = parse_override(override)
        if keys[0] == "drafters" and len(keys) > 2 and keys[1] not in named:  # a new one would be a slip of the pen
            if named:
                raise unknown_key(keys[1], "[drafters] of the recipe", named)
            raise UserError(f"the recipe has no [drafters.{keys[1]}]; add it, or set keys of drafter and train")
        apply_override(tables, keys, value)
    return read_recipe(tables)


def read_recipe(tables: Mapping[str, Any]) -> Recipe:
    """Make a recipe of nested tables."""
    known = [*_SECTIONS, "drafters"]
    for name in tables:
        if name not in known:
            raise unknown_key(name, "the recipe", known, _tables_with(name))
    sections = {name: build(kind, tables.get(name, {}), name, belongs=_tables_with) for name, kind in _SECTIONS.items()}
    drafters = tables.get("drafters", {})
    if not isinstance(drafters, Mapping):
        raise UserError(f"drafters is {drafters!r}; it must hold a table for every drafter: write [drafters.NAME]")
    return Recipe(**sections, drafters=drafters)


def to_toml(recipe: Recipe) -> str:
    """Print every value, such that `load_recipe` gives the same recipe again."""
    return to_text(recipe.resolved())


def _tables_with(key: str) -> list[str]:
    """The tables that know a key."""
    tables = [name for name, kind in _SECTIONS.items() if key in get_type_hints(kind)]
    return tables + ["data.augment"] * (key in get_type_hints(Augmentation))


def _require(name: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}; it must be {limit}")


def _require_between(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None:
        _require(name, value, least <= value <= most, f"from {least} to {most}")


def _require_text(name: str, value: str | None) -> None:
    if value is not None and not value.strip():
        raise UserError(f"{name} is empty; give a name or a path")


def _require_one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{name} is {value!r}; {hint}it must be one of {', '.join(known)}")
