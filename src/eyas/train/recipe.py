"""Settings of a training run, with defaults. Imports no torch, so that a bad recipe fails at once.

Each table is a pydantic model; `recipe_file.py` reads them from TOML. Several drafters may be trained side by side on
the same batches (`[drafters.NAME]`), which is the fair way to compare two: same data, same order, same target states.
Invariant: a `Recipe` that exists is consistent, and nothing validates it again. Relative paths start at the current
directory.
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

if TYPE_CHECKING:
    from eyas.target.chat_template import ChatFormat

ModelType = Literal["llama", "qwen3", "deepseek_v2"]
LossName = Literal["cross_entropy", "kl", "total_variation", "acceptance", "lk_hybrid"]
ScheduleName = Literal["cosine", "wsd"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
MIN_JOIN_LENGTH = 2048
"""Shortest joined document: shorter ones teach nothing about long contexts."""
AUTO = "auto"
"""Value of a size that is chosen from the data."""
NONE = "none"
"""Value that stands for "not set": TOML has no null."""
ONLY_DRAFTER = "drafter"
"""Name of the drafter of a recipe without [drafters.*]."""
LENGTHS = ("steps", "minutes", "epochs")
"""Keys of [train] that set the length of a run; one of them does."""
_TAKEN_NAMES = ("best", "checkpoints", "encoded", "state", "tensorboard")
_MAX_LOSS_WEIGHT = 1000.0


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
    # By hand: pydantic reports every member of a union, and none of them in one line.
    known = get_args(LossName)
    weights = list(value.items()) if isinstance(value, Mapping) and value else [(value, 1.0)]
    for name, weight in weights:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{hint}it must be one of {', '.join(known)}, or a table of their weights")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MAX_LOSS_WEIGHT:
            raise ValueError(f"the weight of {name} must be a number above 0, at most {_MAX_LOSS_WEIGHT:g}")
    return {name: float(weight) for name, weight in weights} if isinstance(value, Mapping) else value


def _different(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    if len(set(names)) < len(names):
        raise ValueError("name each tracker once")
    return names


_LIST = Field(strict=False)  # TOML has lists and no tuples
_MAY_BE_NONE = BeforeValidator(lambda value: None if value == NONE else value)
_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_OptionalText = Annotated[_Text | None, _MAY_BE_NONE]
_Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$")]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_OptionalCount = Annotated[_Count | None, _MAY_BE_NONE]
_CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Tokens = Annotated[int, Field(ge=3, le=2**31 - 1)]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
_PositiveShare = Annotated[float, Field(gt=0, le=1)]
_OptionalLength = Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, _MAY_BE_NONE]


class _Table(BaseModel):
    """Table of the recipe: values of exactly its types, no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSettings(_Table):
    """[target]: the model that the drafter drafts for."""

    source: _Text = "smollm2"
    """The embedded default, a folder, a GGUF file or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of its weights; auto: as stored."""
    quantization: Literal["none", "auto", "fp8", "int8", "int4", "gguf"] = "none"
    """Format of its matrices while it computes states, as `--quantization` of other commands; none: dequantised."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Device of the run; auto: a CUDA device if there is one, otherwise the CPU."""
    spread: bool = False
    """Spread the target's layers over all GPUs of this machine, in one process: for targets too large for one."""
    chat_template: _OptionalText = None
    """A Jinja file, or the template itself; none: the target's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking; those of a record win."""
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
        """Chat format that the keys describe; imports transformers."""
        from eyas.target.chat_template import ChatFormat, read_template

        name = self.chat_template
        return ChatFormat(
            template=None if name is None else read_template(name, option="target.chat_template"),
            raw=self.raw,
            variables=self.chat_template_kwargs,
        )


class Augmentation(_Table):
    """[data.augment]: shares of the conversations that are rendered in another way; the rest keeps the template."""

    no_system: _Share = 0.0
    """Without any system turn, even if the template would add one."""
    no_bos: _Share = 0.0
    """Without the BOS token."""
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
        return self.model_dump()

    @property
    def wanted(self) -> bool:
        return any(self.shares.values())

    def kind(self, chance: random.Random) -> str | None:
        """Draw the kind of rendering for one conversation; None: the template's own."""
        point = chance.random()
        for name, share in self.shares.items():
            if point < share:
                return name
            point -= share
        return None


class DataSettings(_Table):
    """[data]: which conversations, and how they are packed."""

    files: Annotated[tuple[_Text, ...], _LIST, Field(min_length=1)]
    """Files, folders or globs; docs/training.md lists the formats."""
    max_bad_share: _Share = MAX_BAD_SHARE
    """Share of bad records that is skipped; a larger one is refused. 0: no bad record is allowed."""
    allow_other_authors: bool = False
    """Train on answers that another model than the target gave."""
    held_out: _OptionalText = None
    """A file or folder of conversations to evaluate on; none: a share of `files` is held out."""
    held_out_share: _ShareBelowOne = 0.01
    """Share of the documents that is held out if there is no `held_out` file; 0: none."""
    held_out_least: _CountOrZero = 0
    """Minimum of held-out conversations, or half of all if there are too few. Holds for `replay` too."""
    held_out_newest: bool = False
    """Hold out the last conversations of the files, which are the newest of a log, instead of random ones."""
    replay: Annotated[tuple[_Text, ...], _LIST] = ()
    """Files of other conversations that are mixed in, so that the drafter does not forget them."""
    replay_share: _ShareBelowOne = 0.25
    """Share of an epoch's tokens taken from `replay`; each epoch draws other conversations of it."""
    max_length: _Tokens = 2048
    """Maximum tokens of a conversation; longer ones are cut at turns."""
    pack_length: _Tokens = 4096
    """Tokens of a pack."""
    join_share: _Share = 0.0
    """Share of the tokens in documents that are joined into long ones, to teach long contexts."""
    join_length: _CountOrZero = 0
    """Maximum tokens of a joined document; needed with `join_share`."""
    seed: _Seed = 0
    """Seed of the split, the augmentation and the order."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that encode conversations; 0: one per core, fewer for little text."""
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
    """[features]: the source of the target's states."""

    source: Literal["live", "served", "cache"] = "live"
    """live: this process runs the target; served: vLLM servers run it; cache: states are read from `folder`."""
    servers: Annotated[tuple[_Url, ...], _LIST] = ()
    """vLLM servers that hand out states (`eyas features serve`); with a cache, they fill it."""
    states_folder: _Text = "/dev/shm/eyas-states"
    """Folder in which servers leave states for this process: memory they share, or a shared disk."""
    ahead_gb: Annotated[float, Field(gt=0, le=1e5)] = 4.0
    """Maximum gigabytes of states fetched ahead, in transit and in memory together."""
    in_flight: Annotated[int, Field(ge=1, le=1024)] = 16
    """Concurrent requests to each server."""
    folder: _OptionalText = None
    """Folder of the cache."""
    top_k: Annotated[int, Field(ge=1, le=65536)] = 64
    """Number of the target's probabilities that the cache keeps per token."""
    dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Type of the states in the cache."""

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
    """[drafter]: the drafter that is trained."""

    fc_norm: bool = True
    """EAGLE 3.1, part one: a norm on each target state before the fusion."""
    norm_output: bool = True
    """EAGLE 3.1, part two: the next depth is fed the normed state."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    layers: Annotated[int, Field(ge=1, le=256)] = 1
    model_type: ModelType = "llama"
    """Kind of its layers; qwen3: every query and key head is normed, deepseek_v2: latent attention (MLA)."""
    draft_vocab_size: Annotated[int | str | None, PlainValidator(_size_or_auto)] = AUTO
    """Number of tokens it can propose; auto: chosen from the data, none: the target's whole vocabulary."""
    intermediate_size: _OptionalCount = None
    """Width of its MLP; none: the target's."""
    aux_layer_ids: Annotated[Annotated[tuple[int, ...], _LIST, AfterValidator(_ascending)] | None, _MAY_BE_NONE] = None
    """Target layers whose states it reads; none: the target's default."""
    init_from: _OptionalText = None
    """Drafter checkpoint to start from; none: from scratch."""


class Hyperparameters(_Table):
    """Keys of [train] that drafters trained side by side may set for themselves."""

    depths: Annotated[int, Field(ge=1, le=64)] = 5
    """Number of tokens ahead that the drafter is unrolled."""
    gamma: _PositiveShare = 0.8
    """Weight of a depth relative to the one before it."""
    first_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor on the weight of the first depth: above 1, the first draft counts more."""
    loss: Annotated[LossName | dict[LossName, float], PlainValidator(_loss)] = "cross_entropy"
    """Name of a loss, or a table of weights for several: { cross_entropy = 0.1, total_variation = 0.9 }."""
    noise: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Noise on the target's states while training, relative to the RMS of each state; 0: none."""
    lr: _PositiveShare = 1e-3
    """Peak learning rate."""
    head_lr_scale: Annotated[float, Field(ge=0, le=100)] = 0.3
    """Learning rate of the head relative to `lr`; 0: the head is not trained."""
    betas: Annotated[tuple[_ShareBelowOne, _ShareBelowOne], _LIST] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm."""
    seed: _Seed = 0
    """Seed of the drafter's first weights and of the noise on states."""
    anchor: _ShareBelowOne = 0.0
    """Weight decay towards the weights of `drafter.init_from`, so that the drafter forgets less. Each step goes this
    share of the way back, times the current learning rate over its peak."""


class TrainSettings(Hyperparameters):
    """[train]: how it is trained."""

    schedule: ScheduleName = "cosine"
    """cosine, or wsd: warm up, stay, decay."""
    warmup: _ShareBelowOne = 0.03
    """Share of the run in which the rate rises."""
    decay: _Share = 0.2
    """Share of the run in which the rate falls; wsd only."""
    final_lr: _Share = 0.02
    """Learning rate at the end, relative to the peak."""
    steps: _OptionalCount = None
    """Optimizer steps. One of `steps`, `minutes` and `epochs` sets the length of a run; without any it is one epoch."""
    minutes: _OptionalLength = None
    """Minutes of training; loading, encoding and compiling are not counted."""
    epochs: _OptionalLength = None
    """Passes over the data."""
    max_minutes: _OptionalLength = None
    """Time limit for a run of `steps` or `epochs`; the rate falls towards whichever end is nearer."""
    packs_per_step: _Count = 1
    """Packs over which a step sums gradients."""
    compile: bool = False
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory for long packs."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that the drafter computes in; its weights are always kept in float32. auto: bfloat16 on CUDA."""
    chunk: _Count = 4096
    """Rows whose logits over the vocabulary are held at once."""
    log_every: _Count = 10
    eval_every: _CountOrZero = 0
    """Steps between evaluations; 0: only at the end."""
    eval_packs: _Count = 8
    """Maximum held-out packs of an evaluation."""
    save_every: _CountOrZero = 500
    """Steps between saves; 0: only at the end."""

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and all(values.get(key) in (None, NONE) for key in LENGTHS):
            return {**values, "epochs": 1.0}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        said = [f"train.{key} {getattr(self, key):g}" for key in LENGTHS if getattr(self, key) is not None]
        if len(said) > 1:
            raise UserError(
                f"the recipe has {' and '.join(said)}, but only one of them can set the length of the run; remove the "
                f'others, or set them to "{NONE}"'
            )
        if self.minutes is not None and self.max_minutes is not None:
            raise UserError(
                f"the recipe has train.minutes {self.minutes:g} and train.max_minutes {self.max_minutes:g}, and both "
                "limit the run; remove one of them"
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"train.warmup {self.warmup} and train.decay {self.decay} exceed the whole run together; lower one of "
                "them"
            )
        return self


class DrafterOverrides(DrafterSettings, Hyperparameters):
    """[drafters.NAME]: keys in which one drafter differs from [drafter] and [train]."""


class OutputSettings(_Table):
    """[output]: where results go."""

    folder: _Text
    trackers: Annotated[tuple[TrackerName, ...], _LIST, AfterValidator(_different)] = ()
    """Dashboards that the losses are sent to: tensorboard, wandb, trackio."""


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
    """One drafter of the run with its own settings."""

    name: str
    drafter: DrafterSettings
    train: TrainSettings


class Recipe(_Table):
    """All settings of a training run."""

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
                    f"a drafter cannot be called {name!r}, its folder has that name; use letters, digits, - and _"
                )
            if name in _TAKEN_NAMES:
                raise UserError(
                    f"a drafter cannot be called {name!r}, the run has a folder of that name; choose another"
                )
        if self.features.servers and (self.target.quantization != "none" or self.target.spread):
            key = "spread" if self.target.spread else "quantization"
            raise UserError(
                f"target.{key} sets how the target runs here, but features.servers run it; leave it out and configure "
                "the servers"
            )
        for drafter in self.drafter_recipes():
            if drafter.train.anchor and drafter.drafter.init_from is None:
                raise UserError(
                    f"train.anchor of {drafter.name} is {drafter.train.anchor:g} but it starts from scratch, and there "
                    "is no use in staying near random weights; set drafter.init_from, or train.anchor to 0"
                )
        if self.features.source == "cache" and self.data.join_share:
            raise UserError(
                f"data.join_share is {self.data.join_share} and joined documents see each other, but a cache has the "
                'states of single ones; set data.join_share to 0 or features.source to "live"'
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
        """All values as JSON types, defaults included."""
        own = {name: overrides.model_dump(mode="json", exclude_unset=True) for name, overrides in self.drafters.items()}
        return {**self.model_dump(mode="json"), "drafters": own}
