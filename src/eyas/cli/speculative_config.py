"""`--speculative-config`: vLLM's JSON, read with its meaning, so that one line serves both."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.engine.request import Speculation
    from eyas.engine.suffix.config import SuffixConfig
    from eyas.plan.depth_table import DepthTable

EXAMPLE = '{"model": "my-drafter", "method": "eagle3", "num_speculative_tokens": 3}'
TABLE = "num_speculative_tokens_per_batch_size"
DRAFTERS = ("eagle3", "eagle")
"""Methods of drafters: EAGLE-3, and EAGLE-1, which is EAGLE-2 too."""
KEYS = ("model", "method", "num_speculative_tokens")
"""Of both engines; vLLM also takes `TABLE`."""
OF_SUFFIX = "suffix_decoding_"
SUFFIX_KEYS = {
    f"{OF_SUFFIX}{name}": kind
    for name, kind in {
        "max_tree_depth": int,
        "max_spec_factor": float,
        "min_token_prob": float,
        "max_cached_requests": int,
        "max_cached_tokens": int,
        "max_callers": int,
        "max_age_seconds": float,
    }.items()
}
"""Of suffix drafts, which eyas' own engine makes; the first four are vLLM's."""
METHODS = ("auto", *DRAFTERS, "suffix")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts, and how deep where a request does not say."""

    drafter: str | None
    depth: int | None
    """Of the drafter; None: as deep as pays."""
    method: Literal["auto", "eagle3", "suffix"] = "auto"
    """Who drafts where a request does not say; `eagle3` is the drafter, whatever it is."""
    drafter_method: str | None = None
    """What the drafter was called, one of `DRAFTERS`; None: whatever it is."""
    suffix: "SuffixConfig | None" = None
    """How suffix drafts are made; None: there are none."""
    table: "DepthTable | None" = None
    """Depths by batch size, for vLLM."""

    @property
    def speculation(self) -> "Speculation":
        """For requests that say nothing."""
        from eyas.engine.request import Speculation

        if self.depth is None:
            return Speculation(method=self.method)
        return Speculation(mode="fixed", depth=self.depth, method=self.method)

    def require_method(self, method: str) -> None:
        """Refuse a drafter that is something else than was said."""
        if self.drafter_method is not None and self.drafter_method != method:
            raise UserError(
                f"--speculative-config asks for method {self.drafter_method!r}, and {self.drafter} is a drafter of "
                f"method {method!r}; say that, or leave method out"
            )


def read_speculative_config(text: str | None, target: str, *, with_table: bool = False) -> SpeculativeConfig:
    """What a user wants drafted by whom; without words whatever pays: the target's own drafter, and suffix drafts."""
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
    model, depth = given.get("model"), given.get("num_speculative_tokens")
    if model is not None and not isinstance(model, str):
        raise UserError(f"--speculative-config names model {model!r}; give a drafter's name, folder or hub id")
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise UserError(f"--speculative-config drafts {depth!r} tokens; give 1 or more, or leave it out for auto")
    if method == "suffix":
        if model is not None:
            raise UserError(f"--speculative-config names model {model!r}, and suffix drafts have none; use method auto")
        return SpeculativeConfig(drafter=None, depth=None, method="suffix", suffix=_suffix(given, depth))
    suffix = _suffix(given, None) if method == "auto" else None
    if method == "eagle3" and (wrong := [key for key in given if key in SUFFIX_KEYS]):
        raise UserError(f"--speculative-config has {wrong[0]} with method {drafter_method}; use method auto or suffix")
    drafter = choose_drafter(model, target)
    if drafter is None and model is None and method == "auto" and depth is None and not with_table:
        return SpeculativeConfig(drafter=None, depth=None, suffix=suffix)
    if drafter is None and model != NO_DRAFTER:
        raise UserError(f"--speculative-config names no model, and none is shipped for {target}; add one: {EXAMPLE}")
    if drafter is None:  # which was asked for, and is all that was, unless a method was named too
        return SpeculativeConfig(drafter=None, depth=None, suffix=suffix if "method" in given else None)
    return SpeculativeConfig(
        drafter=drafter,
        depth=depth,
        method=method,
        drafter_method=drafter_method,
        suffix=suffix,
        table=_table(given, depth),
    )


def _suffix(given: dict[str, Any], most: int | None) -> "SuffixConfig":
    """How suffix drafts are made, by what was given."""
    from eyas.engine.suffix.config import SuffixConfig

    values: dict[str, Any] = {}
    for key, kind in SUFFIX_KEYS.items():
        if key in given:
            value = given[key]
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                what = "a whole number" if kind is int else "a number"
                raise UserError(f"--speculative-config has {key} {value!r}; give {what}")
            values[key.removeprefix(OF_SUFFIX)] = value
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
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--speculative-config {text!r} is no JSON ({error}); for example {EXAMPLE}") from error
    if not isinstance(given, dict):
        raise UserError(f"--speculative-config {text!r} is no JSON object; for example {EXAMPLE}")
    return given
