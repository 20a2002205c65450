"""Requests of a bench: bodies of OpenAI's API for the turns of a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.bench.client import Client
from eyas.bench.stream import StreamedAnswer
from eyas.bench.workload import Task
from eyas.errors import UserError

Endpoint = Literal["chat", "completions"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MINE = ("model", "messages", "prompt", "stream", "stream_options")
"""Fields that only the bench may set."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of all requests."""

    endpoint: Endpoint = "chat"
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in MINE:
            if name in self.extra:
                raise UserError(f"--extra-body sets {name!r}, which is the bench's own; leave it out")

    def body(self, model: str, task: Task, said: Sequence[Mapping[str, Any]], place: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a turn; `said` are the messages up to it."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature > 0:
            body["seed"] = self.seed + place  # differs by request, equal in all repetitions
        body |= self.extra
        if task.ids:
            return COMPLETIONS, body | {"prompt": list(task.ids)}
        if self.endpoint == "completions":
            return COMPLETIONS, body | {"prompt": task.turns[0]}
        return CHAT, body | {"messages": list(said)}


async def converse(
    client: Client,
    options: RequestOptions,
    model: str,
    task: Task,
    place: int,
    turns: int,
    answers: list[StreamedAnswer],
) -> None:
    """Ask turn by turn, each after the server's earlier answers; append each answer to `answers`."""
    said = list(task.context)
    if task.ids or options.endpoint == "completions":
        turns = 1
    for turn in range(turns):
        if task.turns:
            said.append({"role": "user", "content": task.turns[turn]})
        path, body = options.body(model, task, said, place)
        answer = await client.ask(path, body, key=task.key, category=task.category, turn=turn + 1)
        answers.append(answer)
        if answer.error is not None:
            return  # the next turn would refer to a missing answer
        said.append({"role": "assistant", "content": answer.text})
