"""The recipe of an adaptation: an ordinary one, so that whoever wants it otherwise changes it and runs `eyas train`.

What is particular: it starts from a drafter and keeps that drafter's shape, holds out the newest conversations, is
bounded in passes and in time, and stays near its start (`train.anchor`) and, where there are other conversations,
mixes them in (`data.replay`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.data.bad_records import BadRecords
from eyas.drafter.config import DrafterConfig
from eyas.errors import UserError
from eyas.train.adaptation.enough import LEAST_HELD_OUT, require_answers, require_judgement
from eyas.train.recipe import Recipe
from eyas.train.recipe_file import read_recipe
from eyas.train.toml import apply_override, parse_override

LR = 1e-4
"""Of 1e-4, 3e-4 and 1e-3 the one that forgets nothing and gains nearly as much (docs/training.md)."""
ANCHOR = 0.01
EPOCHS = 4.0
MINUTES = 3.0
DEVICE_SHARE = 1.0
DEPTHS = 7
REPLAY_SHARE = 0.25
HELD_OUT_SHARE = 0.1
LEAST_ON_CPU = 512
"""Tokens of a pack on a CPU, where a pack is a step and takes a second for some tens of tokens."""
PACK_ELSEWHERE = 8192
LONGEST_ON_CPU, LONGEST_ELSEWHERE = 2048, 4096
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096


@dataclass(frozen=True, kw_only=True)
class AdaptationSettings:
    """What an adaptation is told."""

    drafter: str
    """The one to start from."""
    answers: Sequence[str]
    """Files of conversations, oldest first."""
    replay: Sequence[str] = ()
    replay_share: float = REPLAY_SHARE
    held_out_share: float = HELD_OUT_SHARE
    lr: float = LR
    anchor: float = ANCHOR
    epochs: float = EPOCHS
    minutes: float = MINUTES
    device_share: float = DEVICE_SHARE
    """Of the device's time; where it is not all, one process encodes conversations and not one for each core."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """[target] of the recipe."""
    folder: str
    overrides: Sequence[str] = ()
    """`table.key=value` over all of it."""


def adaptation_recipe(
    settings: AdaptationSettings,
    config: DrafterConfig,
    *,
    answered: int,
    unanswered: int = 0,
    bad: BadRecords | None = None,
    bad_replay: BadRecords | None = None,
    context: int | None,
    on_cpu: bool,
    longest: int | None = None,
) -> Recipe:
    """The recipe for a drafter of this config, a target of this context, and so many conversations.

    `bad` and `bad_replay` are records that cannot be read, which are refused where the recipe says that they are too
    many. `longest` has as many tokens as any conversation, if that is known: on a CPU, packs are then no longer than
    need be.
    """
    most = min(LONGEST_ON_CPU if on_cpu else LONGEST_ELSEWHERE, context or LONGEST_ELSEWHERE)
    if on_cpu and longest is not None:
        most = min(most, max(LEAST_ON_CPU, longest))
    tables: dict[str, Any] = {
        "target": dict(settings.target),
        "data": {
            "files": list(settings.answers),
            "held_out_share": settings.held_out_share,
            "held_out_least": LEAST_HELD_OUT,
            "held_out_newest": True,
            "replay": list(settings.replay),
            "replay_share": settings.replay_share,
            "max_length": most,
            "pack_length": most if on_cpu else max(most, PACK_ELSEWHERE),
            "workers": 0 if settings.device_share == 1 else 1,
        },
        "drafter": {
            "init_from": settings.drafter,
            # Flags that the drafter has not would turn it into another one.
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
        },
        "train": {
            "lr": settings.lr,
            "anchor": settings.anchor,
            "depths": DEPTHS,
            "gamma": 0.9,
            "epochs": settings.epochs,
            "max_minutes": settings.minutes,
            "warmup": 0.1,
            "chunk": CHUNK_ON_CPU if on_cpu else CHUNK_ELSEWHERE,
            "log_every": 5 if on_cpu else 20,
            "eval_packs": 1,
        },
        "output": {"folder": settings.folder},
    }
    for override in settings.overrides:
        apply_override(tables, *parse_override(override))
    recipe = read_recipe(tables)
    if recipe.drafters:
        raise UserError(
            f"drafters.{next(iter(recipe.drafters))} is set, but one drafter is adapted at a time; leave it out, or "
            "print the recipe with --dry-run, add to it and run it with `eyas train`"
        )
    bad = bad or BadRecords()
    for found in (bad, bad_replay or BadRecords()):
        found.require_few(recipe.data.max_bad_share, "--set data.max_bad_share")
    require_answers(settings.answers, answered=answered, unanswered=unanswered, bad=bad)
    require_judgement(recipe)
    return recipe
