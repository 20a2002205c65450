"""Upper bounds of speculative speed on this machine, from measured pass times and replayed answers.

    python benchmarks/suffix_ceiling.py repeating.jsonl --drafter smollm2-eagle3.1 --category rewrite --max-tokens 256

A target answers greedily, one request at a time. At every place of an answer it is noted how many suffix drafts and how
many of the drafter's would have been right. Then passes of 1 to 32 tokens are timed, the drafter's too, and the fastest
way through each answer is found: in every step as many right drafts as pay, no wrong one, from whichever source is
best. No controller can be faster. Ratios are to plain decoding:

    any        every token is drafted rightly: what passes alone allow
    suffix     suffix drafts from the request's own text
    drafter    the drafter's, as deep as is best
    both       one or the other in each step
    behind     the same, and suffix drafts behind the drafter's

Seconds are those that the thread computed, with one thread, so that it may run on a busy machine. With --times they are
those of another machine, in milliseconds, passes between two that are given on the line between them:

    {"verify": {"1": 0.49, "8": 0.70, "32": 0.82}, "first": 0.13, "further": 0.09, "rest": 0.0}
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from engine_speed import OFF, read_drafter, read_prompts, requests_of

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.proposer import DraftPlan, Proposer
from eyas.engine.request import SequenceState, Speculation
from eyas.engine.runner.device_queue import ImmediateQueue, RoundDevice
from eyas.engine.runner.graph_capture import GraphCapture
from eyas.engine.runner.round import Round
from eyas.evaluate.evaluate import looping
from eyas.kernels.suffix_index import SuffixIndex, SuffixLimits
from eyas.loading import load_target

DEPTH, LONGEST, MOST_TOKENS, REPEATS = 7, 24, 32, 7
"""Draft depth, longest suffix match, tokens of the largest pass, and repetitions of timing."""
TIMED = REPEATS * MOST_TOKENS + 2 * MOST_TOKENS
"""Tokens of an answer during timing."""
KINDS = ("any", "suffix", "drafter", "both", "behind")
Move = tuple[int, float]
"""Tokens that a step gives, and its seconds."""


@dataclass(kw_only=True)
class Replayed:
    """An answer, and the number of correct drafts behind each of its tokens but the last."""

    answer: tuple[int, ...]
    loops: bool
    suffix: list[int] = field(default_factory=list)
    drafter: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the parts of a step."""

    verify: Sequence[float]
    """By tokens, from 1 on."""
    verify_followed: Sequence[float]
    """The same where a drafter follows."""
    first: float
    further: float
    rest: float


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--category", action="append", help="only prompts of this category; may be given again")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--times", type=Path, help="a JSON file of times instead of measuring them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    given = None if arguments.times is None else read_times(arguments.times)
    torch.set_num_threads(1)
    target = load_target(arguments.target, dtype="auto", device="cpu", quantization=arguments.quantization)
    prompts = read_prompts(arguments.prompts, target, arguments.limit, arguments.category)
    longest = max(map(len, prompts)) + max(arguments.max_tokens, TIMED)
    config = EngineConfig(max_num_seqs=1, max_model_len=longest, max_depth=MOST_TOKENS - 1, drift_share=0.0)
    engine = Engine(
        target,
        read_drafter(arguments.drafter, target),
        config=config,
        clock=time.thread_time,
        device=refusing_device(target.device),
    )
    answers, drafting = replay(engine, prompts, arguments.max_tokens)
    times = given or time_passes(engine, max(prompts, key=len), drafting)
    print("ms of a pass by tokens: " + ", ".join(f"{n} {1e3 * s:.2f}" for n, s in enumerate(times.verify, 1)))
    print(f"first draft {1e3 * times.first:.2f} ms, further {1e3 * times.further:.2f}, else {1e3 * times.rest:.2f}")
    record = {name: ceilings(some, times) for name, some in _kinds(answers).items() if some}
    for name, row in record.items():
        told = ", ".join(f"{key} {row[key]:.2f}x" for key in KINDS)
        print(f"{name}: {row['answers']} answers, {row['tokens']} tokens, plain {row['plain']:.1f} tokens/s; {told}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1))


def _kinds(answers: Sequence[Replayed]) -> dict[str, list[Replayed]]:
    return {"all": list(answers), "without loops": [answer for answer in answers if not answer.loops]}


def refusing_device(device: torch.device) -> RoundDevice:
    """An engine timed by CPU time of its thread, in which every draft is rejected."""
    capture = GraphCapture(device=device, enabled=False)
    return RoundDevice(capture=capture, queue=ThreadQueue(), synchronous=True, chance=0.0)


class ThreadQueue(ImmediateQueue):
    """Clock of the thread's CPU time."""

    def mark(self) -> "ThreadMark":
        """The present time."""
        return ThreadMark()


class ThreadMark:
    """A point of CPU time."""

    def __init__(self) -> None:
        self._at = time.thread_time()

    def wait(self) -> None:
        """Work is complete when this is called."""

    def seconds_since(self, earlier: "ThreadMark") -> float:
        """CPU seconds since another point."""
        return self._at - earlier._at


@dataclass(kw_only=True)
class Drafting:
    """What the drafter's passes took in each step."""

    first: list[float] = field(default_factory=list)
    """Where one draft was made."""
    whole: list[float] = field(default_factory=list)
    """Where DEPTH were."""
    rest: list[float] = field(default_factory=list)
    """What else such a step took."""


def replay(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[list[Replayed], Drafting]:
    """Answer prompts and draft at every position, one token per step."""
    drafted: dict[int, tuple[int, ...]] = {}
    draft, state = engine.proposer.draft, engine.core.runner.state

    def noted(made: Round, plan: DraftPlan) -> None:
        draft(made, plan)
        if made.depth:
            seq, count = made.rows[0].seq, int(state.depth_R[0])
            drafted[len(seq.tokens) - seq.prompt_length] = tuple(state.drafts_RK[0, :count].tolist())

    drafting, answers = Drafting(), []
    stops, deep = engine.target.stop_ids(), Speculation(mode="fixed", depth=DEPTH)
    engine.proposer.draft = noted  # type: ignore[method-assign]
    try:
        for prompt in prompts:
            drafted.clear()
            engine.submit(*requests_of(engine.target, [prompt], max_tokens, deep))
            tokens: list[int] = []
            while engine.busy:
                began = time.thread_time()
                tokens += [token for piece in engine.step() for token in piece.tokens]
                _note(drafting, engine, time.thread_time() - began)
            answers.append(_compare(prompt, tuple(tokens), dict(drafted), stops))
            print(f"{len(answers)} of {len(prompts)} answers", flush=True)
    finally:
        engine.proposer.draft = draft  # type: ignore[method-assign]
    engine.submit(*requests_of(engine.target, prompts[:1], max_tokens, Speculation(mode="fixed", depth=1)))
    while engine.busy:
        engine.step()
        _note(drafting, engine, 0.0)
    return answers, drafting


def _note(drafting: Drafting, engine: Engine, seconds: float) -> None:
    report = engine.core.last_report
    if report is None or report.target is None:
        return
    made = [drafted for drafted, _ in report.chains]
    if made == [1]:
        drafting.first.append(report.draft_seconds)
    elif made == [DEPTH]:
        drafting.whole.append(report.draft_seconds)
        drafting.rest.append(seconds - report.draft_seconds - report.target.seconds)


def _compare(
    prompt: tuple[int, ...], answer: tuple[int, ...], drafted: dict[int, tuple[int, ...]], stops: frozenset[int]
) -> Replayed:
    text, index = (*prompt, *answer), SuffixIndex(len(prompt) + len(answer), SuffixLimits(longest_match=LONGEST))
    made = Replayed(answer=answer, loops=looping([token for token in answer if token not in stops]))
    index.extend(prompt)
    for at in range(1, len(answer)):
        index.extend(answer[at - 1 : at])
        found = index.propose(text[: len(prompt) + at][-LONGEST:], MOST_TOKENS - 1)
        made.suffix.append(_right(() if found is None else found.tokens, answer[at:]))
        made.drafter.append(_right(drafted.get(at, ()), answer[at:]))
    return made


def _right(drafts: Iterable[int], came: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            break
        count += 1
    return count


class Drafts(Proposer):
    """Drafts random tokens, to time passes of the target."""

    def __init__(self, engine: Engine) -> None:
        self.count, self.layer_ids = 0, engine.proposer.layer_ids
        self._state = engine.core.runner.state

    def plan(self, decoding: Sequence[SequenceState]) -> DraftPlan:
        """Room for so many."""
        return DraftPlan(slots={seq.key: self.count for seq in decoding}, drafter_depth=0)

    def draft(self, made: Round, plan: DraftPlan) -> None:
        """Leave them where the drafter would."""
        if not made.of_prompts:
            self._state.drafts_RK[0, : self.count] = 0
            self._state.depth_R[0] = self.count


def time_passes(engine: Engine, prompt: tuple[int, ...], drafting: Drafting) -> Times:
    """Median times of passes of every size."""
    core, usual, found = engine.core, engine.core.proposer, dict[bool, list[float]]()
    core.proposer = drafts = Drafts(engine)
    try:
        for followed in (False, True):
            seconds: list[list[float]] = [[] for _ in range(MOST_TOKENS)]
            (asked,) = requests_of(engine.target, [prompt], TIMED, Speculation() if followed else OFF)
            key = engine.submit(replace(asked, stop_ids=frozenset()))
            while not engine.scheduler.running or engine.scheduler.running[0].pending > 1:
                engine.step()
            for _ in range(REPEATS):
                for drafts.count in range(MOST_TOKENS):
                    engine.step()
                    report = core.last_report
                    assert report is not None
                    assert report.target is not None
                    assert report.target.tokens == 1 + drafts.count
                    seconds[drafts.count].append(report.target.seconds)
            engine.cancel(key)
            drafts.count = 0
            found[followed] = [statistics.median(some) for some in seconds]
    finally:
        core.proposer = usual
    first = statistics.median(drafting.first)
    return Times(
        verify=found[False],
        verify_followed=found[True],
        first=first,
        further=max(0.0, statistics.median(drafting.whole) - first) / (DEPTH - 1),
        rest=max(0.0, statistics.median(drafting.rest)),
    )


def read_times(path: Path) -> Times:
    """Read times of another machine."""
    told = json.loads(path.read_text())
    known = sorted((int(tokens), ms / 1e3) for tokens, ms in told["verify"].items())
    if not known or known[0][0] != 1 or known[-1][0] < MOST_TOKENS:
        raise SystemExit(
            f"{path}: verify has passes of {[n for n, _ in known]} tokens; give those of 1 and {MOST_TOKENS} at least"
        )
    tokens, seconds = zip(*known, strict=True)
    passes = np.interp(range(1, MOST_TOKENS + 1), tokens, seconds).tolist()
    first, further, rest = (told[name] / 1e3 for name in ("first", "further", "rest"))
    return Times(verify=passes, verify_followed=passes, first=first, further=further, rest=rest)


class Ways:
    """Best steps at a position of a known answer, by draft source."""

    def __init__(self, answer: Replayed, times: Times) -> None:
        self.answer, self.times, self.count = answer, times, len(answer.suffix)

    def any(self, at: int) -> list[Move]:
        """Every draft is right."""
        return self._text(self.count - 1 - at, self.times.verify)

    def suffix(self, at: int) -> list[Move]:
        """Of the text alone."""
        return self._text(self.answer.suffix[at], self.times.verify)

    def drafter(self, at: int) -> list[Move]:
        """Of the drafter alone, or none."""
        return self._text(0, self.times.verify_followed) + self._chains(at)

    def both(self, at: int) -> list[Move]:
        """Of one or the other."""
        return self._text(self.answer.suffix[at], self.times.verify_followed) + self._chains(at)

    def behind(self, at: int) -> list[Move]:
        """The same, and of the text behind the drafter's."""
        moves, followed = self.both(at), self.times.verify_followed
        for own in range(1, 1 + self.answer.drafter[at]):
            more = self.answer.suffix[at + own] if at + own < self.count else 0
            most = min(more, MOST_TOKENS - 1 - own)
            moves += [(1 + own + n, followed[own + n] + self._drafting(own)) for n in range(1, 1 + most)]
        return moves

    def _text(self, right: int, passes: Sequence[float]) -> list[Move]:
        return [(1 + n, passes[n] + self.times.rest) for n in range(1 + min(right, MOST_TOKENS - 1))]

    def _chains(self, at: int) -> list[Move]:
        followed = self.times.verify_followed
        return [(1 + own, followed[own] + self._drafting(own)) for own in range(1, 1 + self.answer.drafter[at])]

    def _drafting(self, depth: int) -> float:
        return self.times.first + (depth - 1) * self.times.further + self.times.rest


def ceilings(answers: Sequence[Replayed], times: Times) -> dict[str, float]:
    """Fastest ways through all answers, relative to plain decoding."""
    tokens = sum(len(answer.suffix) for answer in answers)
    plain, ways = tokens * (times.verify[0] + times.rest), [Ways(answer, times) for answer in answers]
    seconds = {name: sum(_fastest(way.count, getattr(way, name)) for way in ways) for name in KINDS}
    ratios = {name: plain / taken for name, taken in seconds.items()}
    return {"answers": len(answers), "tokens": tokens, "plain": tokens / plain, **ratios}


def _fastest(count: int, moves: Callable[[int], list[Move]]) -> float:
    """Seconds of the fastest way through an answer."""
    left = [0.0] * (count + 1)
    for at in reversed(range(count)):
        left[at] = min(seconds + left[min(count, at + gained)] for gained, seconds in moves(at))
    return left[0]


if __name__ == "__main__":
    main()
