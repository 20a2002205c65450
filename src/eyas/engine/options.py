"""What an engine is told, and what it makes of it before it starts: the longest context and the number of pages."""

from dataclasses import dataclass

from eyas.drafter.model import Drafter
from eyas.engine.draft import Tree
from eyas.engine.memory import PageBudget, free_bytes, plan_pages
from eyas.engine.paged import PageCache
from eyas.engine.paged_target import PagedTarget
from eyas.errors import UserError
from eyas.target.model import Target

LONGEST = 8192
"""Tokens of prompt and answer, unless told, for targets that could hold more."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much an engine takes on at once, and how it drafts."""

    max_rows: int = 64
    """Requests at the same time."""
    max_length: int | None = None
    """Tokens of prompt and answer; unless told, the target's context, but no more than 8192."""
    token_budget: int = 512
    """Tokens of one target pass: what decoding leaves of it, chunks of prompts may fill."""
    page_size: int = 16
    memory: int | None = None
    """Bytes for pages; half of what is free unless told."""
    prefix_cache: bool = True
    max_depth: int = 7
    tree: Tree | None = None
    """Draft trees of this shape wherever there is drafting, instead of chains."""
    drafter_window: int | None = None
    """Let the drafter see the last tokens only, and `drafter_sinks` first ones: a remedy for long contexts."""
    drafter_sinks: int = 4
    graphs: bool = True
    """On CUDA, record steps that only decode and replay them; without, every operation is launched by itself."""

    drift_share: float = 0.005
    """Of all time, the part that looking for drift may take (`checkup.py`); 0 leaves the drift alarm out."""

    def __post_init__(self) -> None:
        if not 0 <= self.drift_share < 1:
            raise UserError(f"drift_share is {self.drift_share}; it must be 0 or more and below 1")
        for name, least in (("max_rows", 1), ("token_budget", 1), ("max_depth", 1), ("drafter_sinks", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} or more")


def choose_length(asked: int | None, target: Target) -> int:
    """The longest context that is served: what was asked for, if the target was made for it."""
    most = target.facts.max_position_embeddings
    if asked is None:
        return min(LONGEST, most or LONGEST)
    if most is not None and asked > most:
        raise UserError(
            f"max_length {asked} is above the {most} tokens that {target.facts.source} was made for; lower it"
        )
    return asked


def plan_budget(target: Target, drafter: Drafter | None, options: EngineOptions, max_length: int) -> PageBudget:
    """How many pages there will be, from what one token really takes."""
    trial = PageCache(pages=1, page_size=options.page_size)
    PagedTarget(target, trial)
    per_token = trial.bytes_per_page // options.page_size
    if drafter is not None:
        config = drafter.config
        width = config.num_key_value_heads * config.head_dim
        per_token += 2 * config.num_hidden_layers * width * drafter.fc.weight.element_size()
    return plan_pages(
        bytes_per_token=per_token,
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_length=max_length,
        free_bytes=free_bytes(target.device),
        memory=options.memory,
    )
