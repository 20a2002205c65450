"""What the operator decided about request bodies."""

from dataclasses import dataclass
from typing import Literal

UnknownFields = Literal["refuse", "report"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class RequestPolicy:
    """How bodies are read, beyond what the target decides."""

    unknown_fields: UnknownFields = "refuse"
    """refuse: a field that is not known is a 400; report: it is ignored and named in a response header."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """fcfs: first come, first served; priority: a request may say that it goes before or behind others."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own, which is a program."""
