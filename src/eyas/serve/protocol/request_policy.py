"""The operator's options for request bodies."""

from dataclasses import dataclass
from typing import Literal

UnknownFields = Literal["refuse", "report"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class RequestPolicy:
    """Options for reading bodies."""

    unknown_fields: UnknownFields = "refuse"
    """refuse: an unknown field is a 400; report: it is ignored and named in a response header."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """fcfs: first come, first served; priority: requests may have a priority."""
    trust_request_chat_template: bool = False
    """Whether a request may contain a chat template, which is a program."""
