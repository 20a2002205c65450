"""Requests, options and runs of small engines, which most tests of the engine share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, RequestOutput
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.target.model import Target
from oracle.dense import DenseTarget, EagleDraft
from oracle.reference import Chain, decode_plainly, decode_speculatively
from oracle.rejection import SeededDraws
from tiny import VOCAB, drafter_config

Prompts = list[tuple[int, ...]]
Build = Callable[..., Engine]
"""Makes an engine from a target, a drafter and changes of the options."""

NEW_TOKENS = 14
OFF, AUTO = Speculation(mode="off"), Speculation()
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8, min_p=0.02),
    Sampling(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, logit_bias={5: 3.0, 7: -4.0}, allowed_tokens=frozenset(range(0, VOCAB, 2))),
]


def at_depth(depth: int) -> Speculation:
    return Speculation(mode="fixed", depth=depth)


def request(prompt: Sequence[int], **changes: Any) -> Request:
    values: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": NEW_TOKENS}
    return Request(prompt=tuple(prompt), **{**values, **changes})


def requests(prompts: Iterable[Sequence[int]], **changes: Any) -> list[Request]:
    return [request(prompt, **changes) for prompt in prompts]


def options(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "memory": 2**22,
    }
    return EngineConfig(**{**values, **changes})


def run(
    engine: Engine, asked: Iterable[Request], *, after_step: Callable[[], object] = lambda: None
) -> list[RequestOutput]:
    """Answers of requests that are submitted together; the scheduler is checked after every step."""
    deltas: dict[int, list[OutputDelta]] = {engine.submit(one): [] for one in asked}
    stats_by_key = {key: engine.stats_of(key) for key in deltas}
    while engine.busy:
        for delta in engine.step():
            deltas[delta.key].append(delta)
        engine.scheduler.check()
        after_step()
    assert engine.block_manager.used == 0
    return [RequestOutput.of(of_one, stats_by_key[key]) for key, of_one in deltas.items()]


def run_preempted(engine: Engine, asked: Iterable[Request]) -> list[RequestOutput]:
    """Answers from an engine with so few blocks that it must preempt requests."""
    preempted = set[int]()
    answers = run(
        engine, asked, after_step=lambda: preempted.update(x.key for x in engine.scheduler.requests if x.preemptions)
    )
    assert preempted, "blocks were short enough for a preemption"
    return answers


def bytes_for(blocks: int, target: Target, drafter: Drafter | None, config: EngineConfig | None = None) -> int:
    """Memory of so many blocks."""
    return blocks * Engine(target, drafter, config=config or options()).budget.bytes_per_block


def tokens_of(answers: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def depths_of(answers: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    return [answer.depths for answer in answers]


def plain(target: Target, prompt: Sequence[int], *, max_new_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
    """The answer of the reference decoder without drafts."""
    dense = DenseTarget(target, drafter_config())
    return decode_plainly(dense, prompt, draws=SeededDraws(0), max_new_tokens=max_new_tokens)


def reference_depths(target: Target, drafter: Drafter, prompt: Sequence[int], depth: int, *, new: int) -> list[int]:
    """The depths that the reference decoder accepted tokens from, where it still drafts as the engine does.

    Near the end of an answer the engine drafts only what can be used; the reference does not.
    """
    reference = decode_speculatively(
        DenseTarget(target, drafter.config),
        EagleDraft(drafter),
        prompt,
        shape=Chain(depth=depth),
        draws=SeededDraws(0),
        max_new_tokens=new,
    )
    depths = [0]
    for round_ in reference.rounds:
        depths += [*range(1, round_.accepted + 1), 0]
    return depths[: new - depth]
