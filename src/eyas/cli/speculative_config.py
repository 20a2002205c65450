"""`--speculative-config`: vLLM's JSON, read with its meaning, so that one line serves both."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.engine.request import Speculation
    from eyas.plan.depth_table import DepthTable

EXAMPLE = '{"model": "my-drafter", "method": "eagle3", "num_speculative_tokens": 3}'
TABLE = "num_speculative_tokens_per_batch_size"
KEYS = ("model", "method", "num_speculative_tokens")
"""Of both engines; vLLM also takes `TABLE`."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter, and how deep where a request does not say."""

    drafter: str | None
    depth: int | None
    """None: as deep as pays."""
    table: "DepthTable | None" = None
    """Depths by batch size, for vLLM."""

    @property
    def speculation(self) -> "Speculation":
        """For requests that say nothing."""
        from eyas.engine.request import Speculation

        return Speculation() if self.depth is None else Speculation(mode="fixed", depth=self.depth)


def read_speculative_config(text: str | None, target: str, *, with_table: bool = False) -> SpeculativeConfig:
    """What a user wants drafted by whom; without words, the target's own drafter as deep as pays."""
    keys = (*KEYS, TABLE) if with_table else KEYS
    if text is None or text == NO_DRAFTER:
        return SpeculativeConfig(drafter=choose_drafter(text, target), depth=None)
    given = _object(text)
    for key in given:
        if key not in keys:
            near = get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
            hint = "it goes with --engine vllm; eyas' own engine measures what pays" if key == TABLE else hint
            raise UserError(f"--speculative-config has no key {key!r}; {hint}")
    if given.get("method", "eagle3") != "eagle3":
        raise UserError(f"--speculative-config asks for method {given['method']!r}; eyas drafts by 'eagle3' alone")
    model, depth = given.get("model"), given.get("num_speculative_tokens")
    if model is not None and not isinstance(model, str):
        raise UserError(f"--speculative-config names model {model!r}; give a drafter's name, folder or hub id")
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise UserError(f"--speculative-config drafts {depth!r} tokens; give 1 or more, or leave it out for auto")
    drafter = choose_drafter(model, target)
    if drafter is None and model != NO_DRAFTER:
        raise UserError(f"--speculative-config names no model, and none is shipped for {target}; add one: {EXAMPLE}")
    if drafter is None:
        return SpeculativeConfig(drafter=None, depth=None)
    return SpeculativeConfig(drafter=drafter, depth=depth, table=_table(given, depth))


def _table(given: dict[str, Any], depth: int | None) -> "DepthTable | None":
    from eyas.plan.depth_table import checked_table

    if TABLE not in given:
        return None
    table = checked_table(given[TABLE], f"--speculative-config {TABLE}")
    deepest = max(row[2] for row in table)
    if depth is not None and depth < deepest:
        raise UserError(
            f"--speculative-config has num_speculative_tokens {depth} and depth {deepest} in its table, which vLLM "
            "would cut; raise the number, or leave it out"
        )
    return table


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--speculative-config {text!r} is no JSON ({error}); for example {EXAMPLE}") from error
    if not isinstance(given, dict):
        raise UserError(f"--speculative-config {text!r} is no JSON object; for example {EXAMPLE}")
    return given
