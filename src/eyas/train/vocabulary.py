"""Which target tokens the drafter may propose: those that the target says most often.

A head over a part of the vocabulary is smaller and quicker, and what it cannot propose is simply turned down. The
tokens that end an answer are always in: without them every answer would end with a rejection.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from eyas.errors import UserError
from eyas.train.corpus import Corpus


def choose_vocabulary(
    corpus: Corpus, size: int | None, vocab_size: int, always: Collection[int] = ()
) -> tuple[NDArray[np.int64], float]:
    """Return the target ids of the draft vocabulary, ascending, and the share of trained-on tokens among them.

    None asks for the whole vocabulary. Equally frequent tokens come in by their id, unseen ones last.
    """
    if size is not None and not 1 <= size <= vocab_size:
        raise UserError(
            f"draft_vocab_size {size} is not between 1 and the target's {vocab_size}; "
            "choose less, or leave it out for the whole vocabulary"
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
    if size is None or size == vocab_size:
        return np.arange(vocab_size, dtype=np.int64), 1.0
    forced = np.array(sorted(set(always)), dtype=np.int64)
    if len(forced) and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise UserError(f"stop ids {forced.tolist()} are not all between 0 and {vocab_size - 1}; correct them")
    if len(forced) > size:
        raise UserError(f"draft_vocab_size {size} has no room for the {len(forced)} stop ids; choose more")
    counts = np.bincount(spoken, minlength=vocab_size)
    rank = counts.copy()
    rank[forced] = len(spoken) + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)
    return chosen, float(counts[chosen].sum() / len(spoken))
