"""All documents in memory, compactly, and the order in which training meets them.

Five bytes a token: a hundred million tokens are half a gigabyte, so nothing of the data needs a file of its own. Text
is tokenised by several processes at once, because that is what takes the time.
Invariants: the corpus is the same whatever the number of processes, and the packs of an epoch follow from the corpus,
the seed and the epoch alone, so that a resumed run sees what an uninterrupted one would have seen.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerBase

from eyas.data.chat_encoder import ChatEncoder, Encoded
from eyas.data.conversations import Conversation
from eyas.data.files import read_conversations
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.train.augment import Augmenter
from eyas.train.packing import FitCounts, fit, pack
from eyas.train.recipe import MIN_JOIN_LENGTH, Augmentation

CHUNK = 256
"""Conversations that a process is handed at a time: enough to make the handing over cheap."""

Pack = tuple[tuple[int, ...], ...]
"""Documents side by side, each a run of corpus documents: one, or several that are joined and see each other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Documents end to end."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    """Where each document begins, and where the last one ends."""
    conversation: NDArray[np.int64] | None = None
    """Which conversation each document is of: a template that rewrites turns makes several documents of one. None: each
    document is a conversation of its own."""

    def __post_init__(self) -> None:
        assert self.ids.shape == self.mask.shape == (self.offsets[-1],)
        assert self.conversation is None or self.conversation.shape == (len(self),)
        assert self.offsets[0] == 0
        assert (np.diff(self.offsets) > 0).all()

    @classmethod
    def build(
        cls, ids: ArrayLike, mask: ArrayLike, lengths: ArrayLike, conversation: ArrayLike | None = None
    ) -> "Corpus":
        """From documents end to end, and how many tokens each has."""
        return cls(
            ids=np.asarray(ids, dtype=np.int32),
            mask=np.asarray(mask, dtype=np.bool_),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            conversation=None if conversation is None else np.asarray(conversation, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Place of every token within its document."""
        return np.arange(self.tokens) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return len(self.ids)

    @property
    def conversations(self) -> int:
        """Conversations that the documents are of."""
        return len(self) if self.conversation is None else len(np.unique(self.conversation))

    @property
    def trainable(self) -> int:
        """Tokens that count."""
        return int(self.mask.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.max(initial=0))

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "Corpus":
        """A corpus of these documents, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[chosen]
        places = _runs(self.offsets[chosen], lengths)
        conversation = None if self.conversation is None else self.conversation[chosen]
        return Corpus.build(self.ids[places], self.mask[places], lengths, conversation)


def concatenate(corpora: Sequence[Corpus]) -> Corpus:
    """Corpora one behind the other; conversations of two of them are never the same."""
    first, conversations = 0, []
    for corpus in corpora:
        own = np.arange(len(corpus)) if corpus.conversation is None else corpus.conversation
        conversations.append(first + own)
        first += int(own.max(initial=-1)) + 1
    return Corpus.build(
        np.concatenate([corpus.ids for corpus in corpora]),
        np.concatenate([corpus.mask for corpus in corpora]),
        np.concatenate([corpus.lengths for corpus in corpora]),
        np.concatenate(conversations),
    )


def encode_corpus(
    files: Sequence[Path],
    source: str,
    *,
    max_length: int,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    workers: int = 1,
    on_progress: Callable[[int], None] | None = None,
    cache: Path | None = None,
    chat_format: ChatFormat | None = None,
) -> tuple[Corpus, FitCounts]:
    """Read and encode the conversations of `files` with the tokenizer of target `source`."""
    from eyas.target.tokenizer import load_tokenizer

    if not files:
        raise UserError("there are no files of conversations to train on; name at least one in data.files")
    tokenizer, stop_ids = load_tokenizer(source, cache=cache, chat_format=chat_format)
    conversations = chain.from_iterable(read_conversations(file) for file in files)
    return encode_conversations(
        conversations,
        tokenizer,
        stop_ids,
        max_length=max_length,
        augmentation=augmentation,
        seed=seed,
        workers=workers,
        on_progress=on_progress,
        variables=None if chat_format is None else chat_format.variables,
    )


def encode_conversations(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    *,
    max_length: int,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    workers: int = 1,
    on_progress: Callable[[int], None] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[Corpus, FitCounts]:
    """Encode conversations in order, in `workers` processes (0 or 1: in this one).

    `on_progress` is told how many conversations are done; `seed` and its place decide how one is augmented. `variables`
    are the chat template's.
    """
    encoding = _Encoding(tokenizer, stop_ids, max_length, augmentation or Augmentation(), seed, variables)
    counts, parts, done = FitCounts(), [], 0
    for part in _encoded_chunks(encoding, conversations, workers):
        counts += part.counts
        parts.append(part)
        done += part.conversations
        if on_progress is not None:
            on_progress(done)
    if not counts.kept:
        raise UserError(
            f"of {done} conversations none can be trained on: {counts.kept} kept, {counts.cut} cut, {counts.too_long} "
            f"too long for data.max_length {max_length}, {counts.unanswered} unanswered; raise data.max_length for "
            "long ones and let the target answer unanswered ones first"
        )
    corpus = Corpus.build(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.mask for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.conversation for part in parts]),
    )
    return corpus, counts


def split(corpus: Corpus, share: float, seed: int) -> tuple[Corpus, Corpus]:
    """Set a random share of the conversations aside: what remains for training, and what is held out.

    All documents of a conversation stay on one side: they repeat each other's text.
    """
    if not 0 < share < 1:
        raise UserError(f"the held-out share {share} is not between 0 and 1; set data.held_out_share to 0.01, say")
    own = np.arange(len(corpus)) if corpus.conversation is None else corpus.conversation
    conversations, place = np.unique(own, return_inverse=True)
    count = len(conversations)
    if count < 2:
        raise UserError(
            f"{count} conversation cannot be split into training and held-out ones; "
            "give more conversations or a separate file as data.held_out"
        )
    aside = min(max(1, round(share * count)), count - 1)
    held = np.zeros(count, dtype=np.bool_)
    held[np.random.default_rng(seed).permutation(count)[:aside]] = True
    return corpus.take(np.flatnonzero(~held[place])), corpus.take(np.flatnonzero(held[place]))


def packs(
    corpus: Corpus, *, length: int, seed: int, epoch: int, join_share: float = 0.0, join_length: int = 0
) -> list[Pack]:
    """Every document once, in packs of at most `length` tokens, in an order of the epoch's own.

    Documents that make up `join_share` of the tokens are joined into long ones, up to `join_length` tokens: a drafter
    that never saw long contexts drafts badly in them. How long each becomes is drawn evenly from `MIN_JOIN_LENGTH` up.
    """
    chance = np.random.default_rng([seed, epoch])
    order = chance.permutation(len(corpus)).tolist()
    sizes = corpus.lengths.tolist()
    documents: list[tuple[int, ...]] = []
    if join_share:
        if not 0 < join_share <= 1:
            raise UserError(f"data.join_share is {join_share}; it must be a share from 0 to 1")
        if not MIN_JOIN_LENGTH <= join_length <= length:
            raise UserError(
                f"data.join_length {join_length} is not between {MIN_JOIN_LENGTH} and the pack's {length} tokens; "
                "change it or data.pack_length"
            )
        documents, order = _joined(order, sizes, join_share * corpus.tokens, join_length, chance)
    documents += [(index,) for index in order]
    documents = [documents[place] for place in chance.permutation(len(documents)).tolist()]
    packed = list(pack((sum(sizes[index] for index in document) for document in documents), length=length))
    return [tuple(documents[place] for place in packed[number]) for number in chance.permutation(len(packed)).tolist()]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackArrays:
    """A pack as arrays of one length; behind the documents there is padding, which counts as a document of its own."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    position: NDArray[np.int64]
    """Place of a token within its document."""
    starts: NDArray[np.int64]
    """Where each document begins, padding included, and last the length."""


def pack_arrays(corpus: Corpus, pack: Pack, length: int | None = None) -> PackArrays:
    """Lay out a pack, padded to `length`; None: as long as its documents are."""
    members = np.fromiter(chain.from_iterable(pack), dtype=np.int64)
    lengths = corpus.offsets[members + 1] - corpus.offsets[members]
    used = int(lengths.sum())
    length = used if length is None else length
    if used > length:
        raise UserError(f"a pack of {used} tokens does not fit {length}; make packs of that length")
    places = _runs(corpus.offsets[members], lengths)
    ids, mask = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.bool_)
    ids[:used], mask[:used] = corpus.ids[places], corpus.mask[places]
    ends = lengths.cumsum()[np.cumsum([len(document) for document in pack]) - 1]
    tail = [length] if used < length else []
    starts = np.concatenate([[0], ends, tail]).astype(np.int64)
    position = np.arange(length) - np.repeat(starts[:-1], np.diff(starts))
    return PackArrays(ids=ids, mask=mask, position=position, starts=starts)


def _joined(
    order: list[int], sizes: list[int], tokens: float, longest: int, chance: np.random.Generator
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Join documents from the front of `order` until `tokens` are; return them and the rest of the order."""
    documents, used, place = [], 0, 0
    while used < tokens and place < len(order):
        goal = int(chance.integers(MIN_JOIN_LENGTH, longest, endpoint=True))
        first, size = place, 0
        while place < len(order) and size < goal and (place == first or size + sizes[order[place]] <= longest):
            size += sizes[order[place]]
            place += 1
        documents.append(tuple(order[first:place]))
        used += size
    return documents, order[place:]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The documents of a chunk of conversations."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    conversation: NDArray[np.int64]
    counts: FitCounts
    conversations: int
    """Read, whatever became of them."""


class _Encoding:
    """What is done to a chunk of conversations; travels to the processes whole."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        max_length: int,
        augmentation: Augmentation,
        seed: int,
        variables: Mapping[str, Any] | None,
    ) -> None:
        self._encoder = ChatEncoder(tokenizer, stop_ids, variables=variables)
        self._max_length = max_length
        self._augmenter = Augmenter(self._encoder, tokenizer, augmentation, seed) if augmentation.wanted else None

    def __call__(self, first: int, conversations: Sequence[Conversation]) -> _Part:
        counts = FitCounts()
        encoded: list[Encoded] = []
        numbers: list[int] = []
        for index, conversation in enumerate(conversations, start=first):
            augmented = self._augmenter.encoder_for(index) if self._augmenter else None
            for rows in fit([conversation], augmented or self._encoder, max_length=self._max_length, counts=counts):
                encoded += rows
                numbers += [index] * len(rows)
                if augmented is not None and augmented.applied is not None:
                    counts.augmented[augmented.applied] += 1
        return _Part(
            ids=np.fromiter(chain.from_iterable(e.ids for e in encoded), dtype=np.int32),
            mask=np.fromiter(chain.from_iterable(e.mask for e in encoded), dtype=np.bool_),
            lengths=np.array([len(e.ids) for e in encoded], dtype=np.int64),
            conversation=np.array(numbers, dtype=np.int64),
            counts=counts,
            conversations=len(conversations),
        )


def _encoded_chunks(encoding: _Encoding, conversations: Iterable[Conversation], workers: int) -> Iterator[_Part]:
    chunks = _numbered_chunks(iter(conversations))
    head = list(islice(chunks, 2))
    chunks = chain(head, chunks)
    if workers <= 1 or len(head) < 2:
        yield from (encoding(first, chunk) for first, chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_set_encoding, initargs=(encoding,))
    waiting: deque[Future[_Part]] = deque()
    try:
        for first, chunk in chunks:
            waiting.append(pool.submit(_encode_chunk, first, chunk))
            if len(waiting) > 4 * workers:  # no more conversations in memory than keep everyone busy
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} processes that encode conversations died, perhaps for want of memory; "
            "use fewer: data.workers = 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _numbered_chunks(conversations: Iterator[Conversation]) -> Iterator[tuple[int, list[Conversation]]]:
    first = 0
    while chunk := list(islice(conversations, CHUNK)):
        yield first, chunk
        first += len(chunk)


def _context() -> multiprocessing.context.BaseContext:
    """A way to start processes that does not copy this one, whose threads and GPU a copy could not use."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


_encoding: _Encoding | None = None


def _set_encoding(encoding: _Encoding) -> None:
    # One thread each: the tokenizer would start as many as there are cores in every process, and they would wait
    # for each other.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _encoding
    _encoding = encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one


def _encode_chunk(first: int, conversations: Sequence[Conversation]) -> _Part:
    assert _encoding is not None
    return _encoding(first, conversations)


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places start, start + 1, ... of every run, one run behind the other."""
    before = lengths.cumsum() - lengths
    places: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return places
