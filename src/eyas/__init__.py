"""eyas trains, checks and serves EAGLE-3.1 drafters.

    from eyas import LLM, SamplingParams

Importing this package imports nothing heavy: torch comes with the first name that needs it.
"""

from typing import TYPE_CHECKING, Any

from eyas.threads import wait_asleep

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.output import RequestOutput
    from eyas.engine.suffix.config import SuffixConfig
    from eyas.errors import UserError
    from eyas.llm import LLM, AsyncLLM
    from eyas.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Drafter",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SuffixConfig",
    "UserError",
    "__version__",
]

_HOME = {
    "LLM": "eyas.llm",
    "AsyncLLM": "eyas.llm",
    "Drafter": "eyas.drafter.model",
    "EngineConfig": "eyas.engine.config",
    "RequestOutput": "eyas.engine.output",
    "SamplingParams": "eyas.sampling_params",
    "SuffixConfig": "eyas.engine.suffix.config",
    "UserError": "eyas.errors",
}

wait_asleep()


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
