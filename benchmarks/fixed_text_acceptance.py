"""How much a quantised target costs its drafter in acceptance, told on one text for all.

    python benchmarks/fixed_text_acceptance.py prompts.jsonl --limit 120 --quantization none --quantization gguf

Targets that are quantised otherwise answer otherwise, and other texts have other acceptance: between two evaluations
that is more than what quantisation does. So the first kind answers all prompts greedily, and every kind reads these
answers; its drafter's drafts count as accepted where they are the most likely token of this very target. Rounds are
walked as decoding goes (`train/estimate.py`). Intervals are of 95 %, by drawing prompts anew, both kinds together.
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from eyas.evaluate.evaluate import estimate_corpus
from eyas.llm import LLM
from eyas.loading import load_drafter_for, load_target
from eyas.sampling_params import SamplingParams
from eyas.train.corpus.corpus import Corpus
from eyas.train.estimate import RoundCounts

DRAWS = 4000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help=".jsonl with a `prompt` in every line")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--quantization", action="append", required=True)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    with options.prompts.open() as stream:
        prompts = [json.loads(line)["prompt"] for line in islice(stream, options.limit)]
    texts = answers(options, prompts)
    first: list[RoundCounts] = []
    for kind in options.quantization:
        found = acceptance(options, kind, texts)
        first = first or found
        low, high = interval(found, first)
        print(
            f"{kind:6} {length(found):.3f}  {length(found) / length(first) - 1:+.2%} [{low:+.2%}, {high:+.2%}]  "
            f"{len(texts)} answers, {sum(counts.rounds for counts in found)} rounds",
            flush=True,
        )


def answers(options: argparse.Namespace, prompts: Sequence[str]) -> list[Corpus]:
    """Greedy answers of the first kind, each a document."""
    llm = LLM(options.target, drafter="none", quantization=options.quantization[0])
    ids = [llm.target.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    made = llm.generate(ids, SamplingParams(max_tokens=options.max_tokens))
    return [
        Corpus.build(
            [*asked, *one.tokens], [False] * len(asked) + [True] * len(one.tokens), [len(asked) + len(one.tokens)]
        )
        for asked, one in zip(ids, made, strict=True)
    ]


def acceptance(options: argparse.Namespace, kind: str, texts: Sequence[Corpus]) -> list[RoundCounts]:
    """The rounds of every text."""
    target = load_target(options.target, dtype="auto", device="cpu", quantization=kind)
    drafters = {"drafter": load_drafter_for(target, options.drafter).eval()}
    depth = options.depth
    return [estimate_corpus(drafters, target, text, depths=[depth], pack_length=1)["drafter"][depth] for text in texts]


def length(found: Sequence[RoundCounts]) -> float:
    """Tokens per verification, pooled."""
    return 1 + sum(sum(counts.accepted_at) for counts in found) / max(1, sum(counts.rounds for counts in found))


def interval(found: Sequence[RoundCounts], first: Sequence[RoundCounts]) -> tuple[float, float]:
    """Between what the ratio of both, less 1, lies when prompts are drawn anew."""
    draw = random.Random(0)
    ratios = []
    for _ in range(DRAWS):
        chosen = draw.choices(range(len(found)), k=len(found))
        ratios.append(length([found[k] for k in chosen]) / length([first[k] for k in chosen]) - 1)
    ratios.sort()
    return ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS)]


if __name__ == "__main__":
    main()
