"""Times an engine's steps by users and depth, in about a minute, for `eyas plan --calibrate`."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError
from eyas.plan.cards import Card, find_card

if TYPE_CHECKING:
    from eyas.engine.engine import Engine
    from eyas.engine.output import OutputDelta
    from eyas.target.model import Target

DEPTHS: Mapping[int, Sequence[int]] = {
    1: (0, 1, 2, 3, 5, 7),
    2: (0, 1, 2, 3, 5),
    3: (0,),
    4: (0, 1, 2, 3, 5),
    5: (0,),
    8: (0, 1, 2, 3, 5),
    16: (0, 1, 2, 3, 5, 7),
}
"""Depths by users. Most numbers of verified tokens come up for several numbers of users, so that their effects can be
told apart; up to 8, where kernels change, only 7 is left out."""
SECONDS = 40.0
"""Seconds of all measured steps together; loading and reading prompts come on top."""
ROUNDS, LEAST_STEPS = 3, 3
ANSWER = 512
"""Tokens after which another request takes the place of a measured one."""
TEXTS = (
    "Write a short story about a hawk that learns to hunt.",
    "Explain in simple words how a steam engine works.",
    "Write a Python function that returns the prime numbers below n.",
    "What should I see in Lisbon in three days?",
)
CPU_BANDWIDTH, CPU_TFLOPS_OF_CORE = 20.0, 0.05
"""Where a fit begins."""


def this_processor() -> Card:
    """Describe the machine's processor: its memory, and guesses that are fitted later."""
    if not hasattr(os, "sysconf"):
        raise UserError("--calibrate cannot see the memory of this machine; give --memory, --bandwidth and --tflops")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    tflops = CPU_TFLOPS_OF_CORE * (os.cpu_count() or 1)
    return find_card("cpu", memory=memory, bandwidth=CPU_BANDWIDTH, tflops=tflops)


def calibrate(
    target: str,
    drafter: str | None,
    out: Path,
    *,
    quantisation: str | None,
    device: str,
    show: Callable[..., None],
) -> None:
    """Load the pair, time its steps and write them to `out`; `show` is given how many of how many are done."""
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.loading import load_pair

    plain = quantisation in ("float32", "bfloat16", "float16")
    loaded, model = load_pair(
        target,
        drafter,
        dtype=str(quantisation) if plain else "auto",
        device=device,
        quantization="none" if plain else quantisation or "auto",
    )
    length = min(1024, loaded.facts.max_position_embeddings or 1024)
    engine = Engine(loaded, model, config=EngineConfig(max_num_seqs=max(DEPTHS), max_model_len=length))
    rows = [
        TimedSteps(users=users, depth=depth)
        for users, depths in DEPTHS.items()
        for depth in depths
        if model is not None or not depth
    ]
    turns = [row for _ in range(ROUNDS) for row in rows]  # in turn, so that a slow minute slows all of them
    for place, row in enumerate(turns):
        show(place, len(turns), note=f"{row.users} users, depth {row.depth}")
        measure(engine, row, seconds=SECONDS / len(turns))
    show(len(turns), len(turns))
    first = {row.users: median(row.draft_seconds) for row in rows if row.depth == 1 and row.draft_seconds}
    steps = [row.record(first.get(row.users)) for row in rows]
    record: dict[str, Any] = {"target": target, "drafter": drafter or "none", **_weights(loaded), "steps": steps}
    try:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; give --calibrate another place") from error


@dataclass(kw_only=True)
class TimedSteps:
    """Steps of some users, all drafting at one depth."""

    users: int
    depth: int
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    looked_back: float = 0.0
    """Tokens before the newest of a user, summed over steps."""
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    """Drafts whose token of each depth was accepted, depth 1 first."""
    draft_seconds: list[float] = field(default_factory=list)
    """Seconds of the drafter's passes."""

    def add(self, seconds: float, pieces: "Sequence[OutputDelta]", context: float, draft_seconds: float = 0.0) -> None:
        """Count a step that gave every user a token."""
        self.seconds.append(seconds)
        if draft_seconds:
            self.draft_seconds.append(draft_seconds)
        self.looked_back += context
        self.accepted = self.accepted or [0] * self.depth
        for piece in pieces:
            self.tokens += len(piece.tokens)
            self.drafts += piece.drafted > 0
            for place in range(piece.accepted):
                self.accepted[place] += 1

    def record(self, first_draft: float | None) -> dict[str, Any]:
        """Return the medians, as `--measured` reads them.

        `first_draft` is the time of drafting one token deep for as many users, if known.
        """
        steps = len(self.seconds)
        length = self.tokens / steps / self.users
        drafted: dict[str, list[float]] = {}
        if self.drafts:
            drafted["accepted"] = [count / self.drafts for count in self.accepted]
        if self.draft_seconds and first_draft is not None:
            drafted["draft_seconds"] = [first_draft, max(0.0, median(self.draft_seconds) - first_draft)]
        return {
            "users": self.users,
            "depth": self.depth,
            **({"length": length} if self.depth else {}),
            "tokens_per_second": self.users * length / median(self.seconds),
            "context": self.looked_back / steps,
            **drafted,
        }


def measure(engine: "Engine", times: TimedSteps, *, seconds: float) -> None:
    """Decode for `seconds`, once all users have begun."""
    from eyas.engine.request import Request, Speculation
    from eyas.sampling import Sampling

    mode = Speculation(mode="fixed", depth=times.depth) if times.depth else Speculation(mode="off")
    room = min(ANSWER, engine.max_model_len // 2)
    texts = cycle(TEXTS)
    lengths: dict[int, int] = {}  # of prompts
    begun: dict[int, int] = {}  # tokens of requests that have begun to answer, with their prompts

    def submit() -> None:
        prompt = tuple(engine.target.encode_chat([{"role": "user", "content": next(texts)}]))[-room:]
        request = Request(prompt=prompt, sampling=Sampling(), max_new_tokens=room, speculation=mode, detokenize=False)
        lengths[engine.submit(request)] = len(prompt)

    for _ in range(times.users):
        submit()
    passed, spent = 0, 0.0
    while spent < seconds or passed < LEAST_STEPS:
        ready, started = len(begun) == times.users, time.perf_counter()
        pieces = engine.step()
        took = time.perf_counter() - started
        ended = [piece.key for piece in pieces if piece.finished is not None]
        # Count steps of decoding alone: none that reads a prompt or ends an answer.
        if ready and not ended and len(pieces) == times.users:
            passed, spent = passed + 1, spent + took
            report = engine.core.last_report
            drafting = 0.0 if report is None else report.draft_seconds
            times.add(took, pieces, sum(begun.values()) / times.users, drafting)
        for piece in pieces:
            begun[piece.key] = begun.get(piece.key, lengths[piece.key]) + len(piece.tokens)
        for key in ended:
            del begun[key], lengths[key]
            submit()
    for key in lengths:
        engine.cancel(key)


def _weights(target: "Target") -> dict[str, Any]:
    """The type of the matrices, as `--quantization` has it, and whether a CPU keeps them in half the bytes."""
    from eyas.kernels.linear.packed_linear import PackedLinear

    kind, dtype = target.quantization, str(target.dtype).removeprefix("torch.")
    halved = any(isinstance(part, PackedLinear) and part.halved for part in target.model.modules())
    return {"quantisation": dtype if kind == "none" else kind, "halved": halved}
