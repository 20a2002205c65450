"""Records the drafts of every round as they were verified."""

from collections.abc import Callable
from typing import NamedTuple

from eyas.engine.engine import Engine
from eyas.engine.runner.round import Round
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.step_report import StepReport


class Drafted(NamedTuple):
    """Drafts of one request in one round."""

    key: int
    behind: tuple[int, ...]
    """The request's tokens before the drafts."""
    drafts: tuple[int, ...]
    depth: int


def note_drafts(engine: Engine, note: Callable[[Drafted], object]) -> Callable[[], None]:
    """Record drafts until the returned function is called. Trees only in synchronous engines, where no later step
    overwrites them.
    """
    core, commit = engine.core, engine.core._commit_round

    def noted(made: Round, report: StepReport) -> None:
        assert made.landed is not None
        made.landed.wait()
        for number, row in enumerate(made.rows):
            if not made.of_prompts and made.depth and row.seq.finished is None:
                drafts, depth = _drafts_of(made, number, row)
                if drafts:
                    note(Drafted(row.seq.key, tuple(row.seq.tokens), drafts, depth))
        commit(made, report)

    def end() -> None:
        core._commit_round = commit  # type: ignore[method-assign]

    core._commit_round = noted  # type: ignore[method-assign]
    return end


def _drafts_of(made: Round, number: int, row: ScheduledRow) -> tuple[tuple[int, ...], int]:
    if made.trees is not None:
        trees, count = made.trees, int(made.trees.kept_count_R[number])
        depths = trees.kept_depth_RQ[number, 1 : 1 + count].tolist()
        return tuple(trees.kept_token_RQ[number, 1 : 1 + count].tolist()), max(depths, default=0)
    assert made.output is not None
    count = max(0, min(row.drafts, made.depth, row.seq.limit - len(row.seq.tokens) - 1))
    first = made.line.drafts
    return tuple(made.output[number, first : first + count].tolist()), count
