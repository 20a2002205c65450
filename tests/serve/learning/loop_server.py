"""A tiny server that learns, by an adaptation that a test scripts, and whose loop a test steps by hand."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.loading import load_another
from eyas.serve.access.policy import ANY, AccessRules
from eyas.serve.learning.answer_ring import LEAST_BYTES, AnswerRing
from eyas.serve.learning.collector import LearnFolder
from eyas.serve.learning.learner import LEAST_ANSWERS, LearnerSettings
from eyas.target.parts import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from eyas.drafter.model import Drafter
    from eyas.serve.learning.loop import LearningLoop
    from eyas.target.model import Target

FAKE = Path(__file__).with_name("fake_adapt.py")
ANSWERS = LEAST_ANSWERS
PROMPTS = [f"{first}{second}" for first in "abcdefgh" for second in "ijklmnopq"]
DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class ScriptedSettings(LearnerSettings):
    plan: Path

    def command(self, drafter: str, answers: Path, out: Path) -> list[str]:
        return [sys.executable, "-S", "-E", str(FAKE), str(self.plan), drafter, str(answers), str(out)]


@dataclass(kw_only=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def write(drafter: Drafter, folder: Path) -> str:
    write_checkpoint(checkpoint_of(drafter), folder)
    return str(folder)


def noisy(drafter: Drafter, amount: float) -> Drafter:
    """Of the same shape and worse, the more noise the worse; 1 leaves nothing of it."""
    worse, generator = deepcopy(drafter), torch.Generator().manual_seed(5)
    for name, weight in worse.named_parameters():
        if name.startswith(("layers.", "midlayer.", "fc.", "lm_head.")):
            noise = torch.randn(weight.shape, generator=generator) * weight.std()
            weight.data.mul_(1 - amount).add_(noise, alpha=amount)
    return worse


@dataclass(kw_only=True)
class LearningServer:
    """A learning server and its parts."""

    client: Any
    loop: LearningLoop
    folder: Path
    plan_file: Path
    clock: Clock
    fingerprint: str
    asked: int = field(default=0)

    def plan(self, **plan: Any) -> None:
        self.plan_file.write_text(json.dumps({"target": self.fingerprint, **plan}))

    async def ask(self, count: int, *, key: str | None = None, **fields: Any) -> list[str]:
        """Ask for answers with drafts, and wait until all are written."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        bodies = []
        for number in range(self.asked, self.asked + count):
            body = {"prompt": PROMPTS[number % len(PROMPTS)] * 3, "max_tokens": 16, "ignore_eos": True, "seed": number}
            bodies.append(body | {"speculative": {"mode": "fixed", "depth": DEPTH}} | fields)
        self.asked += count
        replies = []
        for first in range(0, count, 4):
            sent = [
                self.client.send("POST", "/v1/completions", json=body, headers=headers)
                for body in bodies[first : first + 4]
            ]
            replies += await asyncio.gather(*sent)
        assert {reply.status for reply in replies} == {200}, replies[0].text
        return [reply.json["choices"][0]["text"] for reply in replies]

    async def until(self, done: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> dict[str, Any]:
        """Tick until the learner's status is so."""
        deadline = time.monotonic() + seconds
        while True:
            await self.loop.tick()
            status = (await self.learning())["learner"]
            if done(status):
                return status
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.01)

    async def learning(self) -> dict[str, Any]:
        told: dict[str, Any] = (await self.client.send("GET", "/status")).json["learning"]
        return told

    async def changes(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = (await self.client.send("GET", "/status")).json["drafter_changes"]
        return told

    async def settled(self, count: int) -> None:
        """Wait until so many answers are written."""
        deadline = time.monotonic() + 10
        while (await self.learning())["collected"] < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def story(self, number: int) -> dict[str, Any]:
        record = json.loads((self.folder / "drafters" / f"{number:04d}" / "record.json").read_text())
        service: dict[str, Any] = record["service"]
        return service


@contextmanager
def learning_server(
    new_server: Any, target: Target, source: str, folder: Path, **settings: Any
) -> Iterator[LearningServer]:
    """A server that serves the drafter of a folder and learns into another, from so many answers that are `kept`."""
    ring = AnswerRing(folder, LEAST_BYTES)
    author = {"target": target.facts.source, "target_fingerprint": fingerprint(target.model)}
    for _ in range(settings.pop("kept", 0)):
        ring.append(json.dumps(author).encode() + b"\n")
    plan, clock = folder.with_name("plan.json"), Clock()
    keys = settings.pop("keys", AccessRules(learn_keys=(ANY,)))
    learner = ScriptedSettings(**{"share": 0.5, "answers": ANSWERS, "interval": 0.0, "plan": plan} | settings)
    arguments = {
        "load": lambda name: load_another(target, name),
        "source": source,
        "drafter": load_another(target, source),
    }
    try:
        with new_server(
            access=keys, learn_folder=LearnFolder(ring=ring, author=author, learner=learner), **arguments
        ) as client:
            loop = client.application.context.learning_loop
            loop._learner._clock = loop._schedule.clock = clock
            loop._schedule._not_before = clock()
            server = LearningServer(
                client=client,
                loop=loop,
                folder=folder,
                plan_file=plan,
                clock=clock,
                fingerprint=author["target_fingerprint"],
            )
            server.plan()
            asyncio.run(loop.take_up())
            yield server
    finally:
        ring.close()
