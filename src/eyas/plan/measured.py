"""Read the steps that a bench measured: how long they took and how many tokens they gave.

There are two forms. One is the record of `eyas bench` (`eyas.bench/1`) for the pair that is planned: rows of its first
server with a fixed number of users. The other is a list of steps, from anywhere, perhaps of another pair:

    {"target": "smollm2", "drafter": "smollm2-eagle3.1", "quantisation": "float32",
     "steps": [{"users": 1, "depth": 3, "length": 2.2, "tokens_per_second": 44.6, "context": 300}, ...]}

Tokens per second are of all users together while they decode, without prompts; length is tokens per round; context is
the mean number of tokens that a user's newest token looks back to. A step may also have `accepted`, shares of rounds by
position, and `draft_seconds`, of the drafter's first pass and of all others together. `halved` beside the steps says
that the processor keeps bfloat16 matrices as they are and multiplies them as float32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.plan.acceptance import AcceptanceProfile, profile_of_rounds
from eyas.plan.calibrate import MeasuredStep

Json = Mapping[str, Any]
BENCH = "eyas.bench/1"
FIXED = 0.1
"""Rounds whose mean depth is this near to a whole number are of that depth; the last round of an answer is short."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Steps of a bench and the pair that they are of."""

    target: str | None = None
    """None: the target that is planned for."""
    drafter: str | None = None
    quantisation: str | None = None
    halved: bool = False
    """Whether the processor kept matrices of float32 in half the bytes."""
    steps: tuple[MeasuredStep, ...]
    profile: AcceptanceProfile | None
    """None where accepted drafts were not counted."""


def read_json(path: Path, where: str, give: str) -> Any:
    """Read a JSON file; `where` is how the user named it, `give` what it should be."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}); give {give}") from error


def read_measured(path: Path) -> Measurements:
    """Read the JSON of a bench."""
    where = f"--measured {path}"
    raw = read_json(path, where, "the JSON of a bench")
    if not isinstance(raw, dict):
        raise UserError(f"{where} holds a {type(raw).__name__}; give the JSON of a bench, which is an object")
    if "schema" in raw:
        return _of_bench(raw, where)
    rows = raw.get("steps")
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{where} holds no steps; docs/plan.md says what is read from a bench")
    steps = tuple(_step(row, f"step {number} of {where}") for number, row in enumerate(rows, 1))
    shares = [_shares(row.get("accepted"), where) for row in rows]
    names = {key: raw.get(key) for key in ("target", "drafter", "quantisation")}
    return Measurements(**names, halved=raw.get("halved") is True, steps=steps, profile=_profile(shares, steps, where))


def _step(row: Any, where: str) -> MeasuredStep:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {row!r}; it must be an object")
    users, depth = (_number(row, key, where, least) for key, least in (("users", 1), ("depth", 0)))
    length = _number(row, "length", where, 1) if depth else 1.0
    seconds = users * length / _number(row, "tokens_per_second", where, 1e-9)
    if length > depth + 1:
        raise UserError(
            f"{where} has length {length:g} at depth {depth:g}, where {depth + 1:g} is the most; correct it"
        )
    return MeasuredStep(
        users=int(users),
        depth=depth,
        length=length,
        seconds=seconds,
        context=_number(row, "context", where, 0),
        draft_seconds=_draft_seconds(row.get("draft_seconds"), seconds, where),
    )


def _draft_seconds(found: Any, step: float, where: str) -> tuple[float, float] | None:
    """Seconds of the first pass and of the others; a step takes longer than its drafts."""
    if found is None:
        return None
    numbers = isinstance(found, list) and all(type(x) in (int, float) and x >= 0 for x in found)
    if not numbers or len(found) != 2 or not found[0] > 0 or not sum(found) < step:
        raise UserError(
            f"{where} has draft_seconds {found!r}; seconds of the drafter's first pass and of all others are needed, "
            f"less than the {step:.4g} of the step"
        )
    return float(found[0]), float(found[1])


def _of_bench(raw: Json, where: str) -> Measurements:
    """Read a record of `eyas bench`; its passes are its output tokens less the accepted drafts."""
    if raw["schema"] != BENCH:
        raise UserError(f"{where} has schema {raw['schema']!r}; {BENCH!r} is read here")
    steps, shares = list[MeasuredStep](), list[list[float]]()
    rows = [row for row in raw.get("rows") or () if isinstance(row, dict)]
    for row in rows:
        per_token = (row.get("time_per_output_token_ms") or {}).get("mean")
        if row.get("server") != rows[0].get("server") or not row.get("users") or not per_token or row.get("failed"):
            continue
        name = f"row {row['server']}, {row.get('mode')}, {row['users']} users of {where}"
        drafting = row.get("acceptance") or {}
        requests, tokens = _number(row, "requests", name, 1), _number(row, "output_tokens", name, 1)
        accepted = drafting.get("accepted_tokens") or 0
        if accepted >= tokens:
            raise UserError(
                f"{name} counts {accepted} accepted tokens among {tokens:.0f}: others used the server meanwhile; "
                "measure it alone"
            )
        passes = tokens - accepted
        length = tokens / passes
        steps.append(
            MeasuredStep(
                users=int(_number(row, "users", name, 1)),
                depth=(drafting.get("drafted_tokens") or 0) / passes,
                length=length,
                seconds=per_token / 1e3 * length,
                context=(_number(row, "prompt_tokens", name, 0) + tokens / 2) / requests,
            )
        )
        if drafting.get("drafts"):
            shares.append(_shares(drafting.get("by_depth"), name))
    if not steps:
        raise UserError(f"{where} has no row with a number of users and a time per token; measure with --users")
    return Measurements(steps=tuple(steps), profile=_profile(shares, steps, where))


def _number(row: Json, key: str, where: str, least: float) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
        raise UserError(f"{where} has {key} {value!r}; a number from {least:g} is needed")
    return float(value)


def _shares(found: Any, where: str) -> list[float]:
    """Shares of rounds by position, up to the first position that was never accepted."""
    shares = [] if found is None else found
    if not isinstance(shares, list) or not all(isinstance(x, int | float) and 0 <= x <= 1 for x in shares):
        raise UserError(f"{where} has accepted {shares!r}; shares of rounds by position are needed")
    return shares[: shares.index(0)] if 0 in shares else shares


def _profile(shares: Sequence[list[float]], steps: Sequence[MeasuredStep], where: str) -> AcceptanceProfile | None:
    """Combine the shares of the deepest rounds with the mean lengths by depth."""
    deepest = max(shares, key=len, default=[])
    if not deepest:
        return None
    lengths: dict[int, list[float]] = {}
    for step in steps:
        if step.depth and abs(step.depth - round(step.depth)) < FIXED:
            lengths.setdefault(round(step.depth), []).append(step.length)
    means = {depth: sum(found) / len(found) for depth, found in lengths.items()}
    return profile_of_rounds(deepest, means, f"measured: {where.removeprefix('--measured ')}")
