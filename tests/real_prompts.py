"""Real prompts for the lossless tests, and what they say where two answers part."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from eyas.target.model import Target


def read_prompts(path: str, target: Target) -> list[list[int]]:
    """The tokens of every prompt of a file: JSONL with `turns`, of which the first is taken, or `prompt`."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    texts = [str(line["turns"][0] if "turns" in line else line["prompt"]) for line in lines]
    return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]


def spread(prompts: Sequence[list[int]], count: int, tokens: int) -> list[list[int]]:
    """So many prompts of at most so many tokens, spread evenly over those that are short enough."""
    short = [ids for ids in prompts if len(ids) <= tokens]
    assert len(short) >= count, f"there are {len(short)} prompts of at most {tokens} tokens, not {count}"
    print(f"\n{count} of {len(prompts)} prompts; {len(prompts) - len(short)} are longer than {tokens} tokens")
    return [short[i * len(short) // count] for i in range(count)]


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two answers differ, one that has ended included; None if they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
