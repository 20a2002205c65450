"""Real prompts for the lossless tests, and the first difference of two answers."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from eyas.target.model import Target


def read_prompts(path: str, target: Target) -> list[list[int]]:
    """Token ids of every prompt of a JSONL file with `turns` (the first is used) or `prompt`."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    texts = [str(line["turns"][0] if "turns" in line else line["prompt"]) for line in lines]
    return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]


def spread(prompts: Sequence[list[int]], count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of at most `tokens` tokens, spread evenly over the file."""
    short = [ids for ids in prompts if len(ids) <= tokens]
    assert len(short) >= count, f"there are {len(short)} prompts of at most {tokens} tokens, not {count}"
    print(f"\n{count} of {len(prompts)} prompts; {len(prompts) - len(short)} are longer than {tokens} tokens")
    return [short[i * len(short) // count] for i in range(count)]


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first difference between two answers, also where one has ended; None if they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
