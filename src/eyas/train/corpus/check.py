"""What training would make of a corpus: read, encoded and cut by the very code that trains, then looked at."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.conversations import Conversation
from eyas.data.files import read_conversations
from eyas.data.overlap import Overlap, PromptIndex, first_prompt, normalise
from eyas.errors import UserError
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.encoding import EncodingProgress, EncodingSettings, encode_corpus, require_usable

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COVERAGES = (0.95, 0.98, 0.99, 0.995, 1.0)
SIZES = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
"""Of draft vocabularies, for the curve of what they cover."""
BINS = 40
EXAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class ConversationTrace:
    """What is remembered of a conversation."""

    where: str
    text: bytes
    """Digest of all that is said."""
    prompt: bytes | None
    """Digest of what is asked first, if anything is."""
    author: str | None
    overlaps: dict[int, Overlap]


@dataclass(frozen=True, kw_only=True)
class Tracer:
    """Looks at conversations where they are encoded."""

    prompts: PromptIndex | None

    def __call__(self, conversation: Conversation) -> ConversationTrace:
        said = "\n".join(normalise(str(message["content"])) for message in conversation.messages)
        return ConversationTrace(
            where=conversation.where,
            text=_digest(said),
            prompt=_digest(normalise(asked)) if (asked := first_prompt(conversation)) else None,
            author=conversation.author,
            overlaps={} if self.prompts is None else self.prompts.find(conversation),
        )


@dataclass(kw_only=True)
class CorpusTraces:
    """What the conversations come to, one after the other."""

    authors: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    """Conversations of which the same text was there before."""
    repeated_prompts: int = 0
    """Conversations whose first question was asked before, repeated ones included."""
    overlapping: Counter[Overlap] = field(default_factory=Counter)
    """Conversations that hold an evaluation prompt, by the strongest overlap."""
    by_prompt: dict[int, tuple[Overlap, str]] = field(default_factory=dict)
    """The strongest overlap of each evaluation prompt, and the first conversation that has it."""
    _texts: set[bytes] = field(default_factory=set)
    _prompts: set[bytes] = field(default_factory=set)

    def add(self, trace: ConversationTrace) -> None:
        """Count one more."""
        self.authors[trace.author or ""] += 1
        self.repeated += trace.text in self._texts
        self.repeated_prompts += trace.prompt in self._prompts
        self._texts.add(trace.text)
        if trace.prompt is not None:
            self._prompts.add(trace.prompt)
        order = list(Overlap)
        if trace.overlaps:
            self.overlapping[min(trace.overlaps.values(), key=order.index)] += 1
        for number, overlap in trace.overlaps.items():
            if number not in self.by_prompt or order.index(overlap) < order.index(self.by_prompt[number][0]):
                self.by_prompt[number] = (overlap, trace.where)


def check_corpus(
    files: Sequence[Path],
    settings: EncodingSettings,
    *,
    max_bad_share: float,
    evaluation: Sequence[Path] = (),
    workers: int = 0,
    on_progress: Callable[[EncodingProgress], None] | None = None,
) -> dict[str, Any]:
    """Read a whole corpus and record what training would make of it, as JSON values.

    `evaluation` are prompts that should not be in it.
    """
    asked = [(file, list(read_conversations(file))) for file in evaluation]
    prompts = PromptIndex([conversation for _, own in asked for conversation in own]) if asked else None
    traces = CorpusTraces()
    corpus, counts = encode_corpus(
        files,
        settings,
        workers=workers,
        max_bad_share=None,
        on_progress=on_progress,
        inspect=Tracer(prompts=prompts),
        on_found=traces.add,
    )
    try:
        require_usable(counts, settings.max_length, max_bad_share)
        refusal = None
    except UserError as error:
        refusal = str(error)
    return {
        "files": [str(file) for file in files],
        **settings.as_json(),
        "max_bad_share": max_bad_share,
        "refused": refusal,
        **counts.as_json(),
        "rows": len(corpus),
        "tokens": corpus.tokens,
        "trained_on": corpus.trainable,
        "lengths": _lengths(corpus),
        "vocabulary": _vocabulary(corpus),
        "duplicates": {"conversations": traces.repeated, "first_prompts": traces.repeated_prompts},
        "authors": dict(traces.authors.most_common()),
        "overlap": _overlap(asked, traces, prompts),
    }


def _lengths(corpus: Corpus) -> dict[str, Any]:
    """Tokens of rows, and how many of them are trained on, by quantile; a histogram of the former."""
    if not len(corpus):
        return {"tokens": {}, "trained_on": {}, "histogram": {"edges": [], "rows": []}}
    trained = np.add.reduceat(corpus.mask, corpus.offsets[:-1], dtype=np.int64)
    rows, edges = np.histogram(corpus.lengths, bins=BINS)

    def quantiles(values: Any) -> dict[str, int]:
        return {f"{q:g}": int(np.quantile(values, q, method="higher")) for q in QUANTILES}

    return {
        "tokens": quantiles(corpus.lengths),
        "trained_on": quantiles(trained),
        "histogram": {"edges": edges.tolist(), "rows": rows.tolist()},
    }


def _vocabulary(corpus: Corpus) -> dict[str, Any]:
    """How many of the most frequent tokens cover what is trained on."""
    counts = np.sort(np.bincount(corpus.ids[corpus.mask]))[::-1] if corpus.trainable else np.zeros(0, dtype=np.int64)
    counts = counts[counts > 0]
    covered = np.cumsum(counts)
    total = corpus.trainable
    needed = {f"{share:g}": int(np.searchsorted(covered, share * total)) + 1 for share in COVERAGES} if total else {}
    return {
        "distinct": len(counts),
        "tokens_for": {share: min(size, len(counts)) for share, size in needed.items()},
        "coverage_of": {str(size): float(covered[min(size, len(counts)) - 1] / total) for size in SIZES}
        if total
        else {},
    }


def _overlap(
    asked: Sequence[tuple[Path, list[Conversation]]], traces: CorpusTraces, prompts: PromptIndex | None
) -> dict[str, Any] | None:
    if prompts is None:
        return None
    by_file, first = [], 0
    for file, own in asked:
        found = {n: traces.by_prompt[n] for n in range(first, first + len(own)) if n in traces.by_prompt}
        first += len(own)
        grades = Counter(overlap for overlap, _ in found.values())
        examples = [
            {"prompt": prompts.where[number], "conversation": where, "overlap": overlap.value}
            for overlap_kind in (Overlap.exact, Overlap.near)
            for number, (overlap, where) in found.items()
            if overlap is overlap_kind
        ]
        by_file.append(
            {
                "file": str(file),
                "prompts": len(own),
                **{grade.value: grades[grade] for grade in Overlap},
                "examples": examples[:EXAMPLES],
            }
        )
    return {"files": by_file, "conversations": {grade.value: traces.overlapping[grade] for grade in Overlap}}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()
