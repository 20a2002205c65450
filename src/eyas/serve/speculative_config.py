"""Reads `--speculative-config`, vLLM's JSON with vLLM's meaning, and the shorter `--depth` and `--tree`."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Literal

from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.engine.request import Speculation
    from eyas.engine.speculation.draft import Tree
    from eyas.engine.suffix.config import SuffixConfig
    from eyas.plan.depth_table import DepthTable

EXAMPLE = '{"model": "my-drafter", "method": "eagle3", "num_speculative_tokens": 3}'
TABLE = "num_speculative_tokens_per_batch_size"
DRAFTERS = ("eagle3", "eagle")
"""Methods of drafters: EAGLE-3, and EAGLE-1, which is EAGLE-2 too."""
KEYS = ("model", "method", "num_speculative_tokens")
"""Keys for both engines; vLLM also takes `TABLE`."""
OF_SUFFIX = "suffix_decoding_"
SUFFIX_KEYS = tuple(
    f"{OF_SUFFIX}{name}"
    for name in (
        "max_tree_depth",
        "max_spec_factor",
        "min_token_prob",
        "max_cached_requests",
        "max_cached_tokens",
        "max_callers",
        "max_age_seconds",
    )
)
"""Keys of suffix drafts, which eyas' own engine makes; the first four are vLLM's."""
METHODS = ("auto", *DRAFTERS, "suffix")
SHOWN = 120
"""Characters of invalid JSON that an error shows."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafter, and how deep it drafts for requests that do not say."""

    drafter: str | None
    depth: int | None
    """Depth of the drafter; None: as deep as pays."""
    method: Literal["auto", "eagle3", "suffix"] = "auto"
    """Method for requests that do not say; `eagle3` is the drafter, of any method."""
    drafter_method: str | None = None
    """The method that was given for the drafter, one of `DRAFTERS`; None: any."""
    suffix: "SuffixConfig | None" = None
    """How suffix drafts are made; None: there are none."""
    table: "DepthTable | None" = None
    """Depths by batch size, for vLLM."""

    @property
    def speculation(self) -> "Speculation":
        """The speculation of requests that do not say."""
        from eyas.engine.request import Speculation

        if self.depth is None:
            return Speculation(method=self.method)
        return Speculation(mode="fixed", depth=self.depth, method=self.method)

    def require_method(self, method: str) -> None:
        """Refuse a drafter of another method than was given."""
        if self.drafter_method is not None and self.drafter_method != method:
            raise UserError(
                f"--speculative-config asks for method {self.drafter_method!r}, and {self.drafter} is a drafter of "
                f"method {method!r}; say that, or leave method out"
            )


def read_speculative_config(text: str | None, target: str, *, with_table: bool = False) -> SpeculativeConfig:
    """Read the option; without it, the target's own drafter and suffix drafts are used where they pay."""
    keys = (*KEYS, TABLE) if with_table else (*KEYS, *SUFFIX_KEYS)
    if text is None or text == NO_DRAFTER:
        suffix = None if text == NO_DRAFTER or with_table else _suffix({}, None)
        return SpeculativeConfig(drafter=choose_drafter(text, target), depth=None, suffix=suffix)
    given = _object(text)
    for key in given:
        if key not in keys:
            near = get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
            hint = "it goes with --engine vllm; eyas' own engine measures what pays" if key == TABLE else hint
            raise UserError(f"--speculative-config has no key {key!r}; {hint}")
    method = given.get("method", "eagle3" if with_table else "auto")
    if with_table and method not in DRAFTERS:
        raise UserError(f"--speculative-config asks for method {method!r}; eyas has vLLM draft by 'eagle3' or 'eagle'")
    if method not in METHODS:
        raise UserError(f"--speculative-config asks for method {method!r}; there are {', '.join(METHODS)}")
    drafter_method = given["method"] if given.get("method") in DRAFTERS else None
    if drafter_method is not None:
        method = "eagle3"
    model, depth = given.get("model"), _depth(given, bounded=not with_table)
    if model is not None and not isinstance(model, str):
        raise UserError(f"--speculative-config names model {shortened(model)}; give a drafter's name, folder or hub id")
    if method == "suffix":
        if model is not None:
            raise UserError(f"--speculative-config names model {model!r}, and suffix drafts have none; use method auto")
        return SpeculativeConfig(drafter=None, depth=None, method="suffix", suffix=_suffix(given, depth))
    suffix = _suffix(given, None) if method == "auto" else None
    of_suffix = [key for key in given if key in SUFFIX_KEYS]
    if method == "eagle3" and of_suffix:
        raise UserError(
            f"--speculative-config has {of_suffix[0]} with method {drafter_method}; use method auto or suffix"
        )
    if model == NO_DRAFTER:
        _require_no_drafter(given)
        # Nothing is drafted, unless suffix drafts were asked for too.
        asked = "method" in given or bool(of_suffix)
        return SpeculativeConfig(drafter=None, depth=None, suffix=suffix if asked else None)
    drafter = choose_drafter(model, target)
    if drafter is None and method == "auto" and depth is None:
        return SpeculativeConfig(drafter=None, depth=None, suffix=suffix)
    if drafter is None:
        raise UserError(f"--speculative-config names no model, and none is shipped for {target}; add one: {EXAMPLE}")
    return SpeculativeConfig(
        drafter=drafter,
        depth=depth,
        method=method,
        drafter_method=drafter_method,
        suffix=suffix,
        table=_table(given, depth),
    )


def _depth(given: dict[str, Any], *, bounded: bool) -> int | None:
    """Read how many tokens to draft; `bounded` is for eyas' own engine."""
    depth = given.get("num_speculative_tokens")
    if depth is None:
        return None
    from eyas.engine.speculation.draft import MOST_IN_CHAIN

    whole = isinstance(depth, int) and not isinstance(depth, bool)
    if not whole or depth < 1 or (bounded and depth > MOST_IN_CHAIN):
        bounds = f"1 to {MOST_IN_CHAIN}" if bounded else "1 or more"
        raise UserError(
            f"--speculative-config drafts {shortened(depth)} tokens; give {bounds}, or leave it out for auto"
        )
    return int(depth)


def _require_no_drafter(given: dict[str, Any]) -> None:
    """Refuse options that need a drafter."""
    told = [f"method {given['method']}"] if given.get("method") in DRAFTERS else []
    told += [key for key in ("num_speculative_tokens", TABLE) if given.get(key) is not None]
    if told:
        raise UserError(
            f"--speculative-config names model {NO_DRAFTER}, and {told[0]} is for a drafter; leave it out or name a "
            "drafter"
        )


def _suffix(given: dict[str, Any], most: int | None) -> "SuffixConfig":
    """Make the config of suffix drafts."""
    from eyas.engine.suffix.config import SuffixConfig

    values = {key.removeprefix(OF_SUFFIX): given[key] for key in SUFFIX_KEYS if key in given}
    return SuffixConfig(**values, num_speculative_tokens=most)


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
    shown = repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits, or brackets too deep, too
        raise UserError(f"--speculative-config {shown} is no JSON ({error}); for example {EXAMPLE}") from error
    if not isinstance(given, dict):
        raise UserError(f"--speculative-config {shown} is no JSON object; for example {EXAMPLE}")
    return given


def read_depth(text: str, drafter: str | None) -> "Speculation":
    """Read how deep to draft: auto, 0 or a number."""
    from eyas.engine.request import Speculation
    from eyas.engine.speculation.draft import MOST_IN_CHAIN

    shortened = text if len(text) < 20 else f"{text[:20]}..."
    if text == "auto":
        return Speculation()
    if not text.isdigit():
        raise UserError(f"--depth {shortened} is neither a number from 0 nor auto")
    if len(text) > 4 or int(text) > MOST_IN_CHAIN:
        raise UserError(f"--depth {shortened} is above the {MOST_IN_CHAIN} tokens of a chain; lower it, or say auto")
    if int(text) == 0:
        return Speculation(mode="off")
    if drafter is None:
        raise UserError(f"--depth {text} needs a drafter to draft; give --drafter or leave --depth out")
    return Speculation(mode="fixed", depth=int(text))


def read_tree(text: str | None, drafter: str | None) -> "Tree | None":
    """Read the shape of trees: DEPTHxWIDTHxBUDGET."""
    from eyas.engine.speculation.draft import Tree

    if text is None:
        return None
    if drafter is None:
        raise UserError(f"--tree {text} needs a drafter to draft; give --drafter or leave --tree out")
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise UserError(f"--tree {text} is no DEPTHxWIDTHxBUDGET such as 5x4x24")
    depth, width, budget = map(int, parts)
    return Tree(depth=depth, width=width, budget=budget)
