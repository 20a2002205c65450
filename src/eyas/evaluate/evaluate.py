"""Acceptance length of drafters: measured by speculative decoding, and estimated by walking the target's plain answers.

The estimate (`estimate.walk_rounds`) differs from the measurement by the last round of an answer, which decoding
completes and the text does not, and by near-ties whose winner depends on the shape of a matrix product.

A small target often ends in a loop, which every drafter predicts; since such answers flatter, all figures are also
given without them. Everything reported is a sum over the answers of `Group.measured`, so an interrupted evaluation
still holds what was measured.

Shapes: S depths, M teacher rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from eyas.drafter.model import Drafter
from eyas.evaluate.decoders import EngineDecoders
from eyas.evaluate.partings import Parting
from eyas.evaluate.prompts import Answer, Prompt, Questions
from eyas.target.model import Target
from eyas.train.corpus.corpus import Corpus
from eyas.train.estimate import RoundCounts, hits_of_corpus, walk_rounds
from eyas.train.sources.live import LiveSource

LONGEST_PERIOD = 64
SHORTEST_TAIL = 32

Estimates = Mapping[str, Mapping[int, RoundCounts]]
"""By drafter and depth."""


Follow = Callable[[str, Iterable[Answer], int], Iterable[Answer]]
"""Passes answers on and shows progress; takes the name of the task, the answers and their number."""
FindParting = Callable[[Sequence[int], Sequence[int], Sequence[int]], Parting | None]
"""Takes the tokens of a prompt, its plain answer and another answer; returns their first difference, if any."""


@dataclass(kw_only=True)
class Group:
    """All prompts after a prefix of one length, the number skipped as too long, and the results so far."""

    prefix_tokens: int
    prompts: list[Prompt]
    skipped: int
    plain: dict[int, Answer] = field(default_factory=dict)
    measured: dict[tuple[str, int], list[Answer]] = field(default_factory=dict)
    """By drafter and depth."""
    partings: dict[tuple[str, int], dict[int, Parting]] = field(default_factory=dict)
    """Differences from the plain answers: by drafter and depth, then by key."""
    estimates: Estimates = field(default_factory=dict)


def looping(tokens: Sequence[int]) -> bool:
    """Whether an answer ends in a loop: its last max(3p, 32) tokens have a period p of at most 64.

    A stop token belongs to no period: leave it out.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(3 * period, SHORTEST_TAIL)
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


def loops(answer: Answer) -> bool:
    """Whether an answer ends in a loop, its stop token aside."""
    return looping(answer.tokens[:-1] if answer.stopped else answer.tokens)


def count_rounds(rounds: Iterable[int], depth: int) -> RoundCounts:
    """Counts of rounds, given the accepted drafts of each."""
    found = np.bincount(np.fromiter(rounds, dtype=np.int64), minlength=depth + 1)
    assert len(found) == depth + 1
    # A round that accepted k drafts accepted one at every depth up to k.
    at_least = list(accumulate(reversed(found.tolist())))[::-1]
    return RoundCounts(rounds=at_least[0], accepted_at=tuple(at_least[1:]))


def evaluate(
    groups: Sequence[Group],
    questions: Questions,
    decoders: EngineDecoders,
    *,
    drafters: Sequence[str],
    depths: Sequence[int],
    turns: int = 1,
    find_parting: FindParting,
    estimate: Callable[[Corpus], Estimates] | None = None,
    follow: Follow,
) -> None:
    """Fill the groups with plain answers, answers of every drafter at every depth, and estimates."""
    for group in groups:
        behind = f", prefix {group.prefix_tokens}" if len(groups) > 1 else ""
        asked = list(group.prompts)
        for turn in range(turns):
            named = "plainly" if turns == 1 else f"plainly, turn {turn + 1}"
            for answer in follow(f"{named}{behind}", decoders.plainly(asked), len(asked)):
                group.plain[answer.key] = answer
            if turn + 1 < turns:
                said = {p.key: decoders.message(p, group.plain[p.key]) for p in asked if p.key in group.plain}
                # A tool call has no result here to go on with.
                said = {key: message for key, message in said.items() if not message.get("tool_calls")}
                asked, skipped = questions.following(said, asked)
                group.prompts += asked
                group.skipped += skipped
                if not asked:
                    break
        for name in drafters:
            for depth in depths:
                found = group.measured.setdefault((name, depth), [])
                answers = decoders.speculatively(name, depth, group.prompts)
                for answer in follow(f"{name}, depth {depth}{behind}", answers, len(group.prompts)):
                    found.append(answer)
                group.partings[name, depth] = _partings(group, found, find_parting)
        if estimate is not None:
            group.estimates = estimate(corpus_of(group))


def _partings(group: Group, answers: Iterable[Answer], find_parting: FindParting) -> dict[int, Parting]:
    asked = {prompt.key: prompt.ids for prompt in group.prompts}
    found = {a.key: find_parting(asked[a.key], group.plain[a.key].tokens, a.tokens) for a in answers}
    return {key: parting for key, parting in found.items() if parting is not None}


def corpus_of(group: Group) -> Corpus:
    """The target's plain answers as documents."""
    ids, mask, lengths = [], [], []
    for prompt in group.prompts:
        answer = group.plain[prompt.key].tokens
        ids += [*prompt.ids, *answer]
        mask += [False] * len(prompt.ids) + [True] * len(answer)
        lengths.append(len(prompt.ids) + len(answer))
    return Corpus.build(ids, mask, lengths)


def estimate_corpus(
    drafters: Mapping[str, Drafter],
    target: Target,
    corpus: Corpus,
    *,
    depths: Sequence[int],
    pack_length: int,
    chunk: int = 4096,
) -> dict[str, dict[int, RoundCounts]]:
    """Walk rounds of every drafter at every depth through the answers of a corpus."""
    layer_ids = {name: drafter.config.layers_read(target.facts) for name, drafter in drafters.items()}
    source = LiveSource(target, sorted({k for ids in layer_ids.values() for k in ids}), chunk=chunk)
    counts = {name: {k: RoundCounts(rounds=0, accepted_at=(0,) * k) for k in depths} for name in drafters}
    found = hits_of_corpus(
        drafters,
        layer_ids,
        source,
        corpus,
        depths=max(depths),
        pack_length=pack_length,
        chunk=chunk,
        device=target.device,
    )
    for batch, hits in found:
        for name, hit_SM in hits.items():
            for k in depths:
                counts[name][k] += walk_rounds(batch, hit_SM[:k])
    return counts


Json = dict[str, Any]


def summarise(answers: Sequence[Answer], depth: int) -> Json:
    """Acceptance of several answers: pooled over all rounds, by answer, by depth."""
    counts = count_rounds((accepted for answer in answers for accepted in answer.accepted), depth)
    # An answer of one token takes no round.
    by_prompt = [1 + sum(answer.accepted) / len(answer.accepted) for answer in answers if answer.accepted]
    return {
        **_with_rates(counts),
        "answers": len(answers),
        "mean_by_answer": sum(by_prompt) / len(by_prompt) if by_prompt else None,
    }


def record_groups(groups: Sequence[Group]) -> list[Json]:
    """All results as JSON."""
    recorded = []
    for group in groups:
        keys = {prompt.key for prompt in group.prompts}
        recorded.append(
            {
                "prefix_tokens": group.prefix_tokens,
                "prompts": len(group.prompts),
                "skipped": group.skipped,
                "prompt_tokens": sum(len(prompt.ids) for prompt in group.prompts),
                "plain": {
                    "answers": len(group.plain),
                    "tokens": sum(len(answer.tokens) for answer in group.plain.values()),
                    "looping": sum(loops(answer) for answer in group.plain.values()),
                },
                "asked": [
                    {"key": p.key, "where": p.where, "category": p.category, "turn": p.turn, "tokens": len(p.ids)}
                    for p in group.prompts
                ],
                "measured": [
                    _record_measured(name, depth, [a for a in answers if a.key in keys], group, groups[0])
                    for (name, depth), answers in group.measured.items()
                ],
            }
        )
    return recorded


def record_estimates(estimates: Estimates) -> list[Json]:
    """Estimates as JSON."""
    return [
        {"drafter": name, "depth": depth, **_with_rates(counts)}
        for name, by_depth in estimates.items()
        for depth, counts in by_depth.items()
    ]


def _record_measured(name: str, depth: int, answers: list[Answer], group: Group, first: Group) -> Json:
    category = {prompt.key: prompt.category for prompt in group.prompts}
    by_category: dict[str, list[Answer]] = defaultdict(list)
    looped = {answer.key for answer in answers if loops(answer)}
    for answer in answers:
        by_category[category[answer.key]].append(answer)
    whole = summarise(answers, depth)
    walked = group.estimates.get(name, {}).get(depth)
    estimated = None if walked is None else _with_rates(walked)
    same = {a.key for a in answers if a.key in group.plain and a.tokens == group.plain[a.key].tokens}
    partings = group.partings.get((name, depth), {})
    return {
        "drafter": name,
        "depth": depth,
        **whole,
        "looping": len(looped),
        "without_loops": summarise([a for a in answers if a.key not in looped], depth),
        "by_category": {label: summarise(own, depth) for label, own in sorted(by_category.items())},
        "identical": len(same),
        "largest_margin": max((abs(parting.margin) for parting in partings.values()), default=None),
        "estimate": estimated,
        "estimate_difference": _ratio(
            None if estimated is None else estimated["acceptance_length"], whole["acceptance_length"], less=1
        ),
        "ratio_to_first_prefix": _ratio_to_first(depth, answers, first.measured.get((name, depth), [])),
        "by_answer": [
            {
                "key": answer.key,
                "tokens": len(answer.tokens),
                "stopped": answer.stopped,
                "looping": answer.key in looped,
                "identical": answer.key in same,
                "parting": asdict(partings[answer.key]) if answer.key in partings else None,
                "accepted": list(answer.accepted),
            }
            for answer in sorted(answers, key=lambda answer: answer.key)
        ],
    }


def _with_rates(counts: RoundCounts) -> Json:
    """Counts with the rates that follow; None where nothing was counted."""
    before = (counts.rounds, *counts.accepted_at)
    return {
        **counts.as_json(),
        "acceptance_length": counts.acceptance_length if counts.rounds else None,
        "acceptance_by_depth": [_ratio(n, counts.rounds) for n in counts.accepted_at],
        "acceptance_by_depth_given_all_before": [
            _ratio(n, m) for n, m in zip(counts.accepted_at, before, strict=False)
        ],
    }


def _ratio_to_first(depth: int, answers: Sequence[Answer], first: Sequence[Answer]) -> float | None:
    """Ratio of acceptance lengths over the prompts that both groups answered; long prefixes skip some."""
    common = {answer.key for answer in answers} & {answer.key for answer in first}
    lengths = [summarise([a for a in side if a.key in common], depth)["acceptance_length"] for side in (answers, first)]
    return _ratio(*lengths)


def _ratio(over: float | None, under: float | None, *, less: float = 0.0) -> float | None:
    return None if over is None or not under else over / under - less
