"""Measures how quantisation changes a target: distribution, answers, acceptance of its drafter.

    python benchmarks/quantisation_cost.py prompts.jsonl --limit 50 --quantization none --quantization gguf
    python benchmarks/quantisation_cost.py prompts.jsonl --limit 50 --device cuda --dtype bfloat16 \\
        --quantization none --quantization fp8 --quantization int4

The first kind answers all prompts greedily, and every kind reads these answers: targets that are quantised otherwise
answer otherwise, and other texts have other acceptance, by more than what quantisation does. For every kind:

    tokens per verification   the drafter's drafts count as accepted where they are this target's most likely token;
                              rounds are walked as decoding goes (`train/estimate.py`)
    against the first         with an interval of 95 %, by drawing prompts anew, both kinds together
    KL                        of the first kind's distribution to this one's, mean over the answers' tokens, in nats
    top 1                     how often both have the same most likely token
    same answers              greedy answers of its own that are the first kind's, token by token

The first kind's distributions are kept: 200 KB for every token of an answer with a vocabulary of 50,000.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from eyas.evaluate.evaluate import estimate_corpus
from eyas.llm import LLM
from eyas.loading import load_drafter_for, load_target
from eyas.sampling_params import SamplingParams
from eyas.target.model import Target
from eyas.train.corpus.corpus import Corpus
from eyas.train.estimate import RoundCounts

DRAWS = 4000


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer."""

    prompt: list[int]
    answer: list[int]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help=".jsonl with a `prompt` in every line")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3.1")
    parser.add_argument("--quantization", action="append", required=True)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    with options.prompts.open() as stream:
        prompts = [json.loads(line)["prompt"] for line in islice(stream, options.limit)]
    texts: list[Answered] = []
    first: list[RoundCounts] = []
    logprobs: list[Tensor] = []
    for kind in options.quantization:
        answered = answers(options, kind, prompts)
        texts = texts or answered
        target = load_target(options.target, dtype=options.dtype, device=options.device, quantization=kind)
        found = acceptance(options, target, texts)
        first = first or found
        low, high = interval(found, first)
        line = (
            f"{kind:6} {length(found):.3f} tokens per verification, "
            f"{length(found) / length(first) - 1:+.2%} [{low:+.2%}, {high:+.2%}] against {options.quantization[0]}"
        )
        if logprobs:
            divergence, agreement = distance(target, texts, logprobs)
            same = sum(one.answer == other.answer for one, other in zip(answered, texts, strict=True))
            line += f"; KL {divergence:.5f}, top 1 {agreement:.2%}, same answers {same} of {len(texts)}"
        else:
            logprobs = [answer_logprobs(target, text) for text in texts]
        print(f"{line}; {sum(counts.rounds for counts in found)} rounds", flush=True)


def answers(options: argparse.Namespace, kind: str, prompts: Sequence[str]) -> list[Answered]:
    """Greedy answers of this target."""
    llm = LLM(options.target, drafter="none", quantization=kind, device=options.device, dtype=options.dtype)
    ids = [llm.target.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    made = llm.generate(ids, SamplingParams(max_tokens=options.max_tokens))
    return [Answered(list(asked), list(one.tokens)) for asked, one in zip(ids, made, strict=True)]


def acceptance(options: argparse.Namespace, target: Target, texts: Sequence[Answered]) -> list[RoundCounts]:
    """Rounds of every text."""
    drafters = {"drafter": load_drafter_for(target, options.drafter).eval()}
    depth = options.depth
    return [
        estimate_corpus(drafters, target, corpus_of(text), depths=[depth], pack_length=1)["drafter"][depth]
        for text in texts
    ]


def corpus_of(text: Answered) -> Corpus:
    """A document of one answer."""
    counted = [False] * len(text.prompt) + [True] * len(text.answer)
    return Corpus.build([*text.prompt, *text.answer], counted, [len(counted)])


def answer_logprobs(target: Target, text: Answered) -> Tensor:
    """Log probabilities of the whole vocabulary at every position of the answer."""
    ids = torch.tensor([[*text.prompt, *text.answer]])
    with torch.no_grad():
        logits_BTV = target.model(input_ids=ids.to(target.device), use_cache=False).logits
    return functional.log_softmax(logits_BTV[0, len(text.prompt) - 1 : -1].float(), dim=-1)


def distance(target: Target, texts: Sequence[Answered], logprobs: Sequence[Tensor]) -> tuple[float, float]:
    """Mean KL divergence from the first kind, and the share of equal most likely tokens."""
    divergence = agreed = places = 0.0
    for text, expected_TV in zip(texts, logprobs, strict=True):
        found_TV = answer_logprobs(target, text)
        divergence += float((expected_TV.exp() * (expected_TV - found_TV)).sum())
        agreed += float((expected_TV.argmax(-1) == found_TV.argmax(-1)).sum())
        places += len(found_TV)
    return divergence / places, agreed / places


def length(found: Sequence[RoundCounts]) -> float:
    """Tokens per verification, pooled."""
    return 1 + sum(sum(counts.accepted_at) for counts in found) / max(1, sum(counts.rounds for counts in found))


def interval(found: Sequence[RoundCounts], first: Sequence[RoundCounts]) -> tuple[float, float]:
    """Bootstrap interval of the ratio minus 1."""
    draw = random.Random(0)
    ratios = []
    for _ in range(DRAWS):
        chosen = draw.choices(range(len(found)), k=len(found))
        ratios.append(length([found[k] for k in chosen]) / length([first[k] for k in chosen]) - 1)
    ratios.sort()
    return ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS)]


if __name__ == "__main__":
    main()
