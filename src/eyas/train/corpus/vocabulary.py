"""Draft vocabulary: the target tokens that occur most often.

A head over a part of the vocabulary is smaller and faster, and tokens that it cannot propose cost a rejection. Tokens
that end an answer are always included; without them every answer would end with a rejection.

The automatic size is the smallest that covers `AUTO_COVERAGE` of the tokens still to come. Coverage on the counted
tokens themselves is too optimistic, above all for few data. So each token is judged by the others: it is covered if its
kind would be frequent enough without it (the Good-Turing estimate, summed). Kinds seen once then count as new, and few
data ask for a large vocabulary, not for a small one.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from eyas.errors import UserError
from eyas.train.corpus.corpus import Corpus
from eyas.train.recipe import AUTO

AUTO_COVERAGE = 0.995
"""Share of new tokens to cover. One draft in two hundred is then impossible: half a per cent of each depth, about what
doubling the head would cost in time."""
MAX_AUTO_SIZE = 32_000
"""Usual maximum of drafters; a target with fewer tokens keeps them all."""
AUTO_SIZE_STEP = 256


def choose_vocabulary(
    corpus: Corpus, size: int | str | None, vocab_size: int, always: Collection[int] = ()
) -> tuple[NDArray[np.int64], float]:
    """Return the target ids of the draft vocabulary, ascending, and the share of trained-on tokens that it covers.

    "auto" chooses the size from the corpus, None is the whole vocabulary. Equally frequent tokens are taken in order of
    their ids, unseen ones last.
    """
    if isinstance(size, int) and not 1 <= size <= vocab_size:
        raise UserError(
            f"draft_vocab_size {size} is not between 1 and the target's {vocab_size}; "
            'choose less, "auto" for what the data need, or "none" for the whole vocabulary'
        )
    spoken = corpus.ids[corpus.mask]
    if not len(spoken):
        raise UserError("the conversations hold no answers to count tokens in; give some with assistant turns")
    highest = int(corpus.ids.max())
    if highest >= vocab_size:
        raise UserError(
            f"the conversations hold token id {highest} but the target's vocabulary ends at {vocab_size - 1}; "
            "encode them with the target's own tokenizer"
        )
    counts = np.bincount(spoken, minlength=vocab_size)
    if size == AUTO:
        size = auto_size(counts, len(set(always)))
    if size is None or size == vocab_size:
        return np.arange(vocab_size, dtype=np.int64), 1.0
    assert isinstance(size, int)
    forced = np.array(sorted(set(always)), dtype=np.int64)
    if len(forced) and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise UserError(f"stop ids {forced.tolist()} are not all between 0 and {vocab_size - 1}; correct them")
    if len(forced) > size:
        raise UserError(f"draft_vocab_size {size} has no room for the {len(forced)} stop ids; choose more")
    rank = counts.copy()
    rank[forced] = len(spoken) + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)
    return chosen, float(counts[chosen].sum() / len(spoken))


def auto_size(counts: NDArray[np.int64], stop_ids: int = 0) -> int:
    """Size of a draft vocabulary from the count of each token; `stop_ids` tokens are always included."""
    if len(counts) <= MAX_AUTO_SIZE:
        return len(counts)
    seen = np.sort(counts[counts > 0])[::-1]
    # At the end of each run of equally frequent kinds: a token is covered if its kind, counted without it, still ranks
    # before the first kind that is left out. Within a run, coverage grows linearly.
    ends = np.append(np.nonzero(np.diff(seen))[0] + 1, len(seen))
    left_out = np.append(seen[ends[:-1]], 0)
    cumulative = np.append(0, np.cumsum(seen))
    covered = cumulative[np.searchsorted(-seen, -(left_out + 2), side="right")] / cumulative[-1]
    coverage = np.interp(np.arange(1, len(seen) + 1), np.append(0, ends), np.append(0.0, covered))
    if coverage[-1] < AUTO_COVERAGE:
        return MAX_AUTO_SIZE
    needed = int(np.argmax(coverage >= AUTO_COVERAGE)) + 1 + stop_ids
    return min(MAX_AUTO_SIZE, -(-needed // AUTO_SIZE_STEP) * AUTO_SIZE_STEP)
