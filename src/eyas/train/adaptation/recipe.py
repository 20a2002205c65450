"""Recipe of an adaptation, and checks that there are enough conversations to adapt to and to judge by.

It is an ordinary recipe, which can be printed, changed and run with `eyas train`. It starts from a drafter and keeps
that drafter's shape, holds out the newest conversations, is bounded in passes and in time, stays near its start
(`train.anchor`) and mixes in other conversations if there are any (`data.replay`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.data.bad_records import BadRecords
from eyas.drafter.config import DrafterConfig
from eyas.errors import UserError
from eyas.train.recipe import Recipe
from eyas.train.recipe_file import apply_override, parse_override, read_recipe
from eyas.train.run_data import RunData

DEPTHS = 7
LEAST_ON_CPU = 512
"""Minimum tokens of a pack on a CPU, where a step is one pack and takes a second per few dozen tokens."""
PACK_ELSEWHERE = 8192
LONGEST_ON_CPU, LONGEST_ELSEWHERE = 2048, 4096
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096
LEAST_HELD_OUT = 16
"""Minimum of held-out conversations; fewer would give a wide interval."""
LEAST_ANSWERED = 2 * LEAST_HELD_OUT
LEAST_REPLAYED = 2
"""Minimum of replayed conversations: one to mix in and one to judge on."""


@dataclass(frozen=True, kw_only=True)
class AdaptationSettings:
    """Settings of an adaptation."""

    drafter: str
    """Drafter to start from."""
    answers: Sequence[str]
    """Files of conversations, oldest first."""
    replay: Sequence[str] = ()
    replay_share: float = 0.25
    held_out_share: float = 0.1
    lr: float = 1e-4
    """Of 1e-4, 3e-4 and 1e-3 the rate that forgets nothing and gains nearly as much (docs/training.md)."""
    anchor: float = 0.01
    epochs: float = 4.0
    minutes: float = 3.0
    device_share: float = 1.0
    """Share of the device's time; below 1, one process encodes conversations instead of one per core."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Table [target] of the recipe."""
    folder: str
    overrides: Sequence[str] = ()
    """Overrides of the recipe, `table.key=value`."""


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
    """Recipe for a drafter with this config, a target with this context, and `answered` conversations.

    `bad` and `bad_replay` are records that cannot be read; more than the recipe allows are refused. `longest` is the
    number of tokens of the longest conversation, if known, and bounds the packs on a CPU.
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
            # Other flags would turn the drafter into another one.
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


def require_answers(files: Sequence[str], *, answered: int, unanswered: int, bad: BadRecords) -> None:
    """Refuse too few conversations with an answer; the message says what else the files hold."""
    if answered >= LEAST_ANSWERED:
        return
    others = [f"{count:,} {what}" for count, what in ((unanswered, "without an answer"), (len(bad), "bad")) if count]
    why = f": {'; '.join(bad.lines())}" if bad else ""
    beside = f" (beside {' and '.join(others)}{why})" if others else ""
    raise UserError(
        f"there are {answered} conversations in {', '.join(files)}{beside}, and to adapt to them and to judge that "
        f"takes {LEAST_ANSWERED} at least, better a thousand; collect more"
    )


def require_judgement(recipe: Recipe) -> None:
    """Refuse a recipe that holds out nothing of the traffic, or nothing of the replayed conversations."""
    data = recipe.data
    if data.held_out is None and not data.held_out_share:
        raise UserError(
            "data.held_out_share is 0 and there is no data.held_out, so nothing is left to judge by; leave "
            "--set data.held_out_share out, or name a file by --set data.held_out=FILE"
        )
    if data.replay and not data.replay_share:
        raise UserError(
            "--replay-share is 0, so nothing of --replay is mixed in or judged on; give a share above 0, or leave "
            "--replay out"
        )
    if data.replay and not data.held_out_share:
        raise UserError(
            "data.held_out_share is 0, so nothing of --replay is left to judge by; leave --set "
            "data.held_out_share out, or leave --replay out"
        )


def require_held_out(recipe: Recipe, data: RunData) -> None:
    """Refuse too few held-out conversations, after those that do not fit were dropped."""
    settings, record = recipe.data, data.record
    held_out = 0 if data.held_out is None else data.held_out.conversations
    # The size of a file that is named for judging is the user's choice.
    if settings.held_out is None and held_out < LEAST_HELD_OUT:
        raise UserError(
            f"{record['kept']:,} conversations fit data.max_length {settings.max_length} ({_dropped(record)}), and to "
            f"adapt to them and to judge that takes {LEAST_ANSWERED} at least; --set a higher data.max_length, or "
            "collect more"
        )
    if settings.replay and data.replay_held_out is None:
        replay = record["replay"]
        raise UserError(
            f"{replay['kept']:,} conversations of --replay fit data.max_length {settings.max_length}, and to mix some "
            f"in and judge on others takes {LEAST_REPLAYED} at least ({_dropped(replay)}); give more, --set a higher "
            "data.max_length, or leave --replay out"
        )


def _dropped(record: Mapping[str, Any]) -> str:
    too_long, unanswered, bad = record["too_long"], record["unanswered"], record["bad"]["records"]
    return f"{too_long:,} are too long, {unanswered:,} unanswered, {bad:,} bad"
