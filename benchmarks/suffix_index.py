"""Measures the suffix index on a long text: memory, and CPU time per token.

    python benchmarks/suffix_index.py --tokens 100000

The text is random, with quotes of itself, as a prompt of files or passages and its answer are. `at once` is a prompt
that is read, `one by one` an answer that grows, `look-up` what every step asks.
"""

import argparse
import time
from dataclasses import dataclass
from random import Random

from eyas.kernels import suffix_index
from eyas.kernels.suffix_index import SuffixIndex

VOCABULARY, LONGEST, MOST = 49_152, 24, 24


@dataclass(frozen=True, kw_only=True)
class IndexCost:
    """Results of one text; times are CPU microseconds per token."""

    name: str
    tokens: int
    bytes: int
    at_once: float
    one_by_one: float
    look_up: float

    def __str__(self) -> str:
        return (
            f"{self.name:>6}  {self.tokens:,} tokens: {self.bytes / 2**20:.1f} MiB, at once {self.at_once:.2f} us a "
            f"token, one by one {self.one_by_one:.1f} us, look-up {self.look_up:.1f} us"
        )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--answer", type=int, default=2000, help="of these, tokens that come one by one")
    arguments = parser.parse_args()
    text = quoting_text(arguments.tokens, seed=0)
    library, why = suffix_index.load_library()
    print(f"compiled: {why}")
    for name in ("C", "Python") if library is not None else ("Python",):
        if name == "Python":
            suffix_index.load_library = lambda: (None, "not wanted here")
        print(measure(name, text, arguments.answer))


def quoting_text(tokens: int, seed: int) -> list[int]:
    """Random tokens distributed like words, then quotations of them."""
    draw = Random(seed)
    text = [min(int(draw.paretovariate(0.7)), VOCABULARY - 1) for _ in range(tokens * 6 // 10)]
    while len(text) < tokens:
        start = draw.randrange(len(text))
        text += text[start : start + draw.randrange(20, 300)]
    return text[:tokens]


def measure(name: str, text: list[int], answer: int) -> IndexCost:
    """Index a text at once, except for some tokens that are added one by one."""
    began = time.thread_time()
    index, prompt = SuffixIndex(len(text)), len(text) - answer
    index.extend(text[:prompt])
    at_once = (time.thread_time() - began) / prompt
    one_by_one = look_up = 0.0
    for at in range(prompt, len(text)):
        started = time.thread_time()
        index.extend(text[at : at + 1])
        extended = time.thread_time()
        index.propose(text[at + 1 - LONGEST : at + 1], MOST)
        one_by_one += extended - started
        look_up += time.thread_time() - extended
    return IndexCost(
        name=name,
        tokens=len(text),
        bytes=index.bytes,
        at_once=1e6 * at_once,
        one_by_one=1e6 * one_by_one / answer,
        look_up=1e6 * look_up / answer,
    )


if __name__ == "__main__":
    main()
