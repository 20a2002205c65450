"""What a training run is told, with defaults for what is not said. No torch: bad recipes fail at once.

Each table is a pydantic model; `recipe_file.py` reads them from TOML. Several drafters may be trained side by side on
the same batches (`[drafters.NAME]`), which is the fair way to compare two: same data, same order, same target states.
Invariant: a `Recipe` that exists is consistent; nothing that runs it validates again. Relative paths are relative to
the current directory.
"""

import difflib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)

from eyas.data.bad_records import MAX_BAD_SHARE
from eyas.errors import UserError
from eyas.train.toml import NONE

if TYPE_CHECKING:
    from eyas.target.chat_template import ChatFormat

ModelType = Literal["llama", "qwen3", "deepseek_v2"]
LossName = Literal["cross_entropy", "kl", "total_variation", "acceptance", "lk_hybrid"]
ScheduleName = Literal["cosine", "wsd"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
MIN_JOIN_LENGTH = 2048
"""Joining documents into something shorter than this teaches nothing about long contexts."""
AUTO = "auto"
"""A size that is chosen from the data."""
ONLY_DRAFTER = "drafter"
"""The name of the drafter of a recipe without [drafters.*]."""

_TAKEN_NAMES = ("best", "checkpoints", "encoded", "state", "tensorboard")
_MOST_WEIGHT = 1000.0
LENGTHS = ("steps", "minutes", "epochs")
"""Keys of [train] that say how long a run is; one of them does."""


def _ascending(ids: tuple[int, ...]) -> tuple[int, ...]:
    if not ids or min(ids) < 0 or list(ids) != sorted(set(ids)):
        raise ValueError("it must be a list of ascending whole numbers from 0, at least one")
    return ids


def _size_or_auto(value: object) -> int | str | None:
    if value is None or value == NONE:
        return None
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return value
    raise ValueError(f'it must be a whole number from 1, "{AUTO}" or "{NONE}"')


def _loss(value: object) -> object:
    """The name of a loss, or weights by name."""
    known = get_args(LossName)
    weights = list(value.items()) if isinstance(value, Mapping) and value else [(value, 1.0)]
    for name, weight in weights:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{hint}it must be one of {', '.join(known)}, or a table of their weights")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MOST_WEIGHT:
            raise ValueError(f"the weight of {name} must be a number above 0, at most {_MOST_WEIGHT:g}")
    return {name: float(weight) for name, weight in weights} if isinstance(value, Mapping) else value


def _different(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    if len(set(names)) < len(names):
        raise ValueError("name each tracker once")
    return names


_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$")]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Tokens = Annotated[int, Field(ge=3, le=2**31 - 1)]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
_PositiveShare = Annotated[float, Field(gt=0, le=1)]
# TOML has lists and no tuples.
_LIST = Field(strict=False)
_MAY_BE_NONE = BeforeValidator(lambda value: None if value == NONE else value)


class _Table(BaseModel):
    """A table of the recipe: values of exactly its types, no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSettings(_Table):
    """[target]: whom the drafter drafts for."""

    source: _Text = "smollm2"
    """The embedded default, a folder, a GGUF file or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of its weights; auto: as they are stored."""
    quantization: Literal["none", "auto", "fp8", "int8", "int4", "gguf"] = "none"
    """What its matrices are while it makes states, as `--quantization` of other commands; none: dequantised."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where everything runs; auto: on a CUDA device if there is one, otherwise on the CPU."""
    spread: bool = False
    """Lay the target's layers over all GPUs of this machine: for targets that one cannot hold, in one process."""
    chat_template: Annotated[_Text | None, _MAY_BE_NONE] = None
    """A Jinja file, or the template itself; none: the target's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking; a record's own go over them."""
    raw: bool = False
    """Plain text and its continuation instead of a chat template: for base models."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.raw and self.chat_template is not None:
            raise UserError("target.raw and target.chat_template are two ways to write a conversation; set one of them")
        if self.spread and self.quantization != "none":
            raise UserError(
                f"target.quantization {self.quantization} runs on one device and target.spread lays the target over "
                "several; leave one of them out"
            )
        return self

    def chat_format(self) -> "ChatFormat":
        """What the keys of the chat template say; imports transformers."""
        from eyas.target.chat_template import ChatFormat
        from eyas.target.template_override import read_template

        name = self.chat_template
        return ChatFormat(
            template=None if name is None else read_template(name, option="target.chat_template"),
            raw=self.raw,
            variables=self.chat_template_kwargs,
        )


class Augmentation(_Table):
    """[data.augment]: which share of the conversations is rendered otherwise; the rest as the template has it."""

    no_system: _Share = 0.0
    """Without any system turn, also where the template would add one of its own."""
    no_bos: _Share = 0.0
    """Without the token that begins every text."""
    no_template: _Share = 0.0
    """As bare text: the contents, joined by newlines."""
    varied_system: _Share = 0.0
    """With a system prompt drawn from `augment.SYSTEM_PROMPTS`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = sum(self.shares.values())
        if total > 1 + 1e-9:
            raise UserError(
                f"the shares of data.augment sum to {total:g}; they may sum to 1 at most, so lower one of them"
            )
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Share by kind."""
        return self.model_dump()

    @property
    def wanted(self) -> bool:
        """Whether anything is rendered otherwise at all."""
        return any(self.shares.values())

    def kind(self, chance: random.Random) -> str | None:
        """Draw what to do to one conversation; None: nothing."""
        point = chance.random()
        for name, share in self.shares.items():
            if point < share:
                return name
            point -= share
        return None


class DataSettings(_Table):
    """[data]: which conversations, and how they are laid out."""

    files: Annotated[tuple[_Text, ...], _LIST, Field(min_length=1)]
    """Files, folders or globs; docs/training.md says which formats."""
    max_bad_share: _Share = MAX_BAD_SHARE
    """Share of records that may be bad and are skipped; more of them are refused. 0: not a single one."""
    allow_other_authors: bool = False
    """Train on answers that another model than the target gave."""
    held_out: Annotated[_Text | None, _MAY_BE_NONE] = None
    """A file or folder of conversations to evaluate on; none: a share of `files` is set aside."""
    held_out_share: _ShareBelowOne = 0.01
    """Share of the documents that is set aside when there is no `held_out` file; 0: none."""
    held_out_least: _CountOrZero = 0
    """Conversations that are set aside at least, or half of all where these are too few, whatever share it is; of those
    of `replay` too."""
    held_out_newest: bool = False
    """Set the last conversations of the files aside, which are the newest of a log, instead of any."""
    replay: Annotated[tuple[_Text, ...], _LIST] = ()
    """Files of other conversations that are mixed in, so that what they teach is not forgotten."""
    replay_share: _ShareBelowOne = 0.25
    """Share of the tokens of an epoch that is of `replay`; others of its conversations in every epoch."""
    max_length: _Tokens = 2048
    """Tokens of a conversation at most; longer ones are cut at turns."""
    pack_length: _Tokens = 4096
    """Tokens of a pack."""
    join_share: _Share = 0.0
    """Share of the tokens in documents that are joined into long ones, to teach long contexts."""
    join_length: _CountOrZero = 0
    """Tokens of a joined document at most; needed with `join_share`."""
    seed: _Seed = 0
    """Of the split, the augmentation and the order."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that encode conversations; 0: as many as there are cores, fewer for little text."""
    augment: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, length in (("max_length", self.max_length), ("join_length", self.join_length)):
            if length > self.pack_length:
                raise UserError(
                    f"data.{name} {length} exceeds data.pack_length {self.pack_length}, so a document might fit no "
                    "pack; lower the one or raise the other"
                )
        if self.join_share and self.join_length < MIN_JOIN_LENGTH:
            raise UserError(
                f"data.join_share {self.join_share} needs a data.join_length of at least {MIN_JOIN_LENGTH}, "
                f"not {self.join_length}; raise it or set data.join_share to 0"
            )
        return self


class FeatureSettings(_Table):
    """[features]: where the target's states come from."""

    source: Literal["live", "served", "cache"] = "live"
    """live: the target runs along; served: vLLM servers run it; cache: its states are read from `folder`."""
    servers: Annotated[tuple[_Url, ...], _LIST] = ()
    """vLLM servers that hand out states (`eyas features serve`); with a cache, they fill it."""
    states_folder: _Text = "/dev/shm/eyas-states"
    """Where servers leave states and this process takes them: memory they share, or a shared disk."""
    ahead_gb: Annotated[float, Field(gt=0, le=1e5)] = 4.0
    """Gigabytes of states that are fetched ahead at most, on their way and in memory together."""
    in_flight: Annotated[int, Field(ge=1, le=1024)] = 16
    """Documents that each server is asked for at once."""
    folder: Annotated[_Text | None, _MAY_BE_NONE] = None
    """Of the cache."""
    top_k: Annotated[int, Field(ge=1, le=65536)] = 64
    """How many of the target's probabilities the cache keeps for each token."""
    dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Of the states in the cache."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source == "cache" and self.folder is None:
            raise UserError('features.source is "cache" but there is no features.folder; name the folder of the cache')
        if self.source == "served" and not self.servers:
            raise UserError(
                'features.source is "served" but there are no features.servers; name their addresses, such as '
                "http://localhost:8000 (`eyas features serve` starts one)"
            )
        if self.source == "live" and self.servers:
            raise UserError(
                'features.servers are named but features.source is "live", which runs the target here; set it to '
                '"served", or to "cache" to fill a cache from them'
            )
        return self


class DrafterSettings(_Table):
    """[drafter]: what is trained."""

    fc_norm: bool = True
    """EAGLE 3.1, part one: a norm on each target state before the fusion."""
    norm_output: bool = True
    """EAGLE 3.1, part two: the next depth is fed the normed state."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    layers: Annotated[int, Field(ge=1, le=256)] = 1
    model_type: ModelType = "llama"
    """What its layers are; qwen3: every head of queries and keys is normed, deepseek_v2: latent attention (MLA)."""
    draft_vocab_size: Annotated[int | str | None, PlainValidator(_size_or_auto)] = AUTO
    """How many tokens it can propose; auto: what the data need, none: the target's whole vocabulary."""
    intermediate_size: Annotated[_Count | None, _MAY_BE_NONE] = None
    """Width of its MLP; none: the target's."""
    aux_layer_ids: Annotated[Annotated[tuple[int, ...], _LIST, AfterValidator(_ascending)] | None, _MAY_BE_NONE] = None
    """Which target states it reads; none: the target's default."""
    init_from: Annotated[_Text | None, _MAY_BE_NONE] = None
    """A drafter checkpoint to start from; none: from scratch."""


class Hyperparameters(_Table):
    """What decides how one drafter learns: the keys of [train] that drafters side by side may have each for itself."""

    depths: Annotated[int, Field(ge=1, le=64)] = 5
    """How many tokens ahead the drafter is unrolled."""
    gamma: _PositiveShare = 0.8
    """Weight of a depth relative to the one before it."""
    first_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Weight of the first depth, times what gamma gives it: above 1, more is learnt about the first draft."""
    loss: Annotated[LossName | dict[LossName, float], PlainValidator(_loss)] = "cross_entropy"
    """The name of a loss, or a table of weights for several: { cross_entropy = 0.1, total_variation = 0.9 }."""
    noise: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Noise on the target's states while training, in parts of the RMS of each state; 0: none."""
    lr: _PositiveShare = 1e-3
    """Peak learning rate."""
    head_lr_scale: Annotated[float, Field(ge=0, le=100)] = 0.3
    """Learning rate of the head relative to `lr`; 0: the head stays as it is."""
    betas: Annotated[tuple[_ShareBelowOne, _ShareBelowOne], _LIST] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    seed: _Seed = 0
    """Of the drafter's first weights and of the noise on states."""
    anchor: _ShareBelowOne = 0.0
    """Share of the way back to the weights of `drafter.init_from` that every step goes, times the learning rate's share
    of its peak: weight decay towards what the drafter was, so that it forgets less."""


class TrainSettings(Hyperparameters):
    """[train]: how it is trained."""

    schedule: ScheduleName = "cosine"
    """cosine, or wsd: warm up, stay, decay."""
    warmup: _ShareBelowOne = 0.03
    """Share of the run in which the rate rises."""
    decay: _Share = 0.2
    """Share of the run in which the rate falls; wsd only."""
    final_lr: _Share = 0.02
    """Where the rate ends, relative to its peak."""
    steps: Annotated[_Count | None, _MAY_BE_NONE] = None
    """Optimizer steps. One of `steps`, `minutes` and `epochs` says how long a run is; without any it is one epoch."""
    minutes: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, _MAY_BE_NONE] = None
    """Minutes of training; what comes before it (loading, encoding, compiling) is not counted."""
    epochs: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, _MAY_BE_NONE] = None
    """Passes over the data."""
    max_minutes: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, _MAY_BE_NONE] = None
    """Minutes after which a run of `steps` or `epochs` ends all the same; the rate falls towards the nearer end."""
    packs_per_step: _Count = 1
    """Packs that a step sums gradients over."""
    compile: bool = False
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory for long packs."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the drafter's computation; its weights are always kept in float32. auto: bfloat16 on CUDA."""
    chunk: _Count = 4096
    """Rows whose scores over the vocabulary are held at once."""
    log_every: _Count = 10
    eval_every: _CountOrZero = 0
    """Steps between evaluations; 0: only at the end."""
    eval_packs: _Count = 8
    """Held-out packs in an evaluation, at most."""
    save_every: _CountOrZero = 500
    """Steps between saves; 0: only at the end."""

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_said(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and all(values.get(key) in (None, NONE) for key in LENGTHS):
            return {**values, "epochs": 1.0}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        said = [f"train.{key} {getattr(self, key):g}" for key in LENGTHS if getattr(self, key) is not None]
        if len(said) > 1:
            raise UserError(
                f"the recipe has {' and '.join(said)}, but only one of them can say how long the run is; remove the "
                f'others, or set them to "{NONE}"'
            )
        if self.minutes is not None and self.max_minutes is not None:
            raise UserError(
                f"the recipe has train.minutes {self.minutes:g} and train.max_minutes {self.max_minutes:g}; the first "
                "says how long the run is already, so remove the other"
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"train.warmup {self.warmup} and train.decay {self.decay} exceed all steps together; lower one of them"
            )
        return self


class DrafterOverrides(DrafterSettings, Hyperparameters):
    """[drafters.NAME]: what one drafter has otherwise than [drafter] and [train] say. What is not set is theirs."""


class OutputSettings(_Table):
    """[output]: where results go."""

    folder: _Text
    trackers: Annotated[tuple[TrackerName, ...], _LIST, AfterValidator(_different)] = ()
    """Who else is told of the losses: tensorboard, wandb, trackio."""


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """One of the drafters that are trained side by side, with what is its own."""

    name: str
    drafter: DrafterSettings
    train: TrainSettings


class Recipe(_Table):
    """Everything a training run is told."""

    target: TargetSettings = TargetSettings()
    data: DataSettings
    features: FeatureSettings = FeatureSettings()
    drafter: DrafterSettings = DrafterSettings()
    train: TrainSettings = TrainSettings()
    drafters: Mapping[str, DrafterOverrides] = {}
    output: OutputSettings

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.drafters:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise UserError(
                    f"a drafter cannot be called {name!r}, its folder bears the name; use letters, digits, - and _"
                )
            if name in _TAKEN_NAMES:
                raise UserError(
                    f"a drafter cannot be called {name!r}, the run has a folder of that name; choose another"
                )
        if self.features.servers and (self.target.quantization != "none" or self.target.spread):
            key = "spread" if self.target.spread else "quantization"
            raise UserError(
                f"target.{key} says how the target runs here, but features.servers run it; leave it out and tell the "
                "servers"
            )
        for drafter in self.drafter_recipes():
            if drafter.train.anchor and drafter.drafter.init_from is None:
                raise UserError(
                    f"train.anchor of {drafter.name} is {drafter.train.anchor:g} but it starts from scratch, and "
                    "random weights are nothing to stay near; set drafter.init_from, or train.anchor to 0"
                )
        if self.features.source == "cache" and self.data.join_share:
            raise UserError(
                f"data.join_share is {self.data.join_share} and joined documents see each other, which a cache of "
                'single ones cannot know; set data.join_share to 0 or features.source to "live"'
            )
        return self

    def drafter_recipes(self) -> tuple[DrafterRecipe, ...]:
        """The drafters to train, in the order of the recipe."""
        recipes = []
        for name, overrides in (self.drafters or {ONLY_DRAFTER: DrafterOverrides()}).items():
            own = overrides.model_dump(exclude_unset=True)
            shape = {key: own.pop(key) for key in DrafterSettings.model_fields if key in own}
            recipes.append(
                DrafterRecipe(
                    name=name, drafter=self.drafter.model_copy(update=shape), train=self.train.model_copy(update=own)
                )
            )
        return tuple(recipes)

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON knows them."""
        own = {name: overrides.model_dump(mode="json", exclude_unset=True) for name, overrides in self.drafters.items()}
        return {**self.model_dump(mode="json"), "drafters": own}
