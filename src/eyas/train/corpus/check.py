"""Check of a corpus: conversations are read, encoded and cut by the code that trains, then counted."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Draft vocabulary sizes for the coverage curve."""
BINS = 40
EXAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationTrace:
    """Digests of a conversation and of its first prompt, its author, and evaluation prompts that it contains."""

    text: bytes
    prompt: bytes | None
    author: str | None
    where: str
    overlaps: dict[int, Overlap] | None


@dataclass(frozen=True, kw_only=True)
class Tracer:
    """Traces conversations in the processes that encode them."""

    prompts: PromptIndex | None

    def __call__(self, conversation: Conversation) -> ConversationTrace:
        said = "\n".join(normalise(str(message["content"])) for message in conversation.messages)
        overlaps = None if self.prompts is None else self.prompts.find(conversation)
        return ConversationTrace(
            text=_digest(said),
            prompt=_digest(normalise(asked)) if (asked := first_prompt(conversation)) else None,
            author=conversation.author,
            where=conversation.where if overlaps else "",
            overlaps=overlaps or None,
        )


def check_corpus(
    files: Sequence[Path],
    settings: EncodingSettings,
    *,
    max_bad_share: float,
    evaluation: Sequence[Path] = (),
    workers: int = 0,
    on_progress: Callable[[EncodingProgress], None] | None = None,
) -> dict[str, Any]:
    """Read a whole corpus and describe what training would make of it, as JSON values.

    `evaluation` are files of prompts that should not be in it.
    """
    asked = [(file, list(read_conversations(file))) for file in evaluation]
    prompts = PromptIndex([conversation for _, own in asked for conversation in own]) if asked else None
    traces = list[ConversationTrace]()
    corpus, counts = encode_corpus(
        files,
        settings,
        workers=workers,
        max_bad_share=None,
        on_progress=on_progress,
        inspect=Tracer(prompts=prompts),
        on_found=traces.append,
    )
    try:
        require_usable(counts, settings.max_length, max_bad_share)
        refusal = None
    except UserError as error:
        refusal = str(error)
    first_prompts = [trace.prompt for trace in traces if trace.prompt is not None]
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
        "duplicates": {
            "conversations": len(traces) - len({trace.text for trace in traces}),
            "first_prompts": len(first_prompts) - len(set(first_prompts)),
        },
        "authors": dict(Counter(trace.author or "" for trace in traces).most_common()),
        "overlap": _overlap(asked, traces, prompts),
    }


def _lengths(corpus: Corpus) -> dict[str, Any]:
    """Quantiles of the tokens of rows and of those trained on, and a histogram of the former."""
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
    """Coverage of the trained-on tokens by the most frequent ones."""
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
    asked: Sequence[tuple[Path, list[Conversation]]], traces: Sequence[ConversationTrace], prompts: PromptIndex | None
) -> dict[str, Any] | None:
    """Evaluation prompts found in the corpus, by file, and conversations that contain one, by the strongest overlap."""
    if prompts is None:
        return None
    strength = list(Overlap).index
    conversations: Counter[Overlap] = Counter()
    by_prompt: dict[int, tuple[Overlap, str]] = {}
    for trace in traces:
        if trace.overlaps:
            conversations[min(trace.overlaps.values(), key=strength)] += 1
            for number, overlap in trace.overlaps.items():
                if number not in by_prompt or strength(overlap) < strength(by_prompt[number][0]):
                    by_prompt[number] = (overlap, trace.where)
    by_file, first = [], 0
    for file, own in asked:
        found = {n: by_prompt[n] for n in range(first, first + len(own)) if n in by_prompt}
        first += len(own)
        grades = Counter(overlap for overlap, _ in found.values())
        examples = [
            {"prompt": prompts.where[number], "conversation": where, "overlap": overlap.value}
            for number, (overlap, where) in sorted(found.items(), key=lambda item: strength(item[1][0]))
            if overlap in (Overlap.exact, Overlap.near)
        ]
        counted = {grade.value: grades[grade] for grade in Overlap}
        by_file.append({"file": str(file), "prompts": len(own), **counted, "examples": examples[:EXAMPLES]})
    return {"files": by_file, "conversations": {grade.value: conversations[grade] for grade in Overlap}}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()
