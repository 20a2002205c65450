"""Whether there is enough to adapt to and to judge by: what is too little is refused before anything is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.data.bad_records import BadRecords
from eyas.errors import UserError
from eyas.train.recipe import Recipe
from eyas.train.run_data import RunData

LEAST_HELD_OUT = 16
"""Conversations that are held out at least: of fewer, the interval would say little."""
LEAST_ANSWERED = 2 * LEAST_HELD_OUT
LEAST_REPLAYED = 2
"""Conversations of a replay: one to mix in and one to judge on."""


def require_answers(files: Sequence[str], *, answered: int, unanswered: int, bad: BadRecords) -> None:
    """Refuse too few conversations with an answer, and say what else the files hold."""
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
    """Refuse a recipe that holds nothing out to judge by, be it the traffic or what is replayed."""
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
    """Refuse what is too little to judge by, as far as it fits and can be encoded."""
    settings, record = recipe.data, data.record
    held_out = 0 if data.held_out is None else data.held_out.conversations
    # Whoever names a file to judge by has chosen how many are in it.
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
