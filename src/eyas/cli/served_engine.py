"""What `eyas serve` puts its routes in front of: an engine that is ready, and what is to be said of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from eyas.plan.memory import BlockBudget
    from eyas.serve.drafter_swaps import DrafterSlot
    from eyas.serve.engine_client import EngineClient


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedEngine:
    """An engine, ready to answer."""

    client: "EngineClient"
    slot: "DrafterSlot"
    generation: "GenerationConfig | None"
    """The model's generation config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelInfo` that the engine decides."""
    author: Callable[[], dict[str, str]]
    """Tells who answers, for records of answers: the target by name and, if they can be seen, by its weights."""
    memory: "BlockBudget | str"
    device: str
    """Where and in which precision it computes, for people."""
