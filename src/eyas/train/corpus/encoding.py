"""From files of conversations to a corpus of tokens.

Text is tokenised by several processes at once, because that is what takes the time. Each loads the tokenizer from the
target's folder itself: handing it over would cost as much as a large vocabulary is long, once for each process.
Invariant: the corpus is the same whatever the number of processes.
"""

import hashlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from eyas.data.bad_records import MAX_BAD_SHARE
from eyas.data.chat_encoder import ChatEncoder, Encoded
from eyas.data.conversations import Conversation
from eyas.data.files import ConversationReader
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.tokenizer import load_tokenizer, local_source
from eyas.train.corpus.augment import Augmenter
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.packing import FitCounts, fit
from eyas.train.recipe import Augmentation, Recipe

CHUNK = 64
"""Conversations that a process is handed at a time: enough to make the handing over cheap."""
BYTES_PER_WORKER = 8_000_000
"""Text that is worth a process of its own: it takes longer to encode than the process to start."""
COMPRESSION = 4
"""How much smaller text is in files that are compressed, roughly."""

Check = Callable[[Conversation], Conversation]
"""Refuses the whole corpus at a conversation that must not be in it; returns the others as they are."""
Inspect = Callable[[Conversation], Any]
"""Looks at a conversation in whichever process encodes it; both it and what it returns can be pickled."""


@dataclass(frozen=True, kw_only=True)
class EncodingProgress:
    """How far the encoding of files is."""

    conversations: int
    bytes_read: int
    """Of the files, as far as their conversations are encoded."""
    bytes_total: int
    seconds: float
    workers: int

    def __str__(self) -> str:
        if not self.conversations:
            own = "1 process" if self.workers == 1 else f"{self.workers} processes"
            return f"encoding {self.bytes_total / 1e6:,.1f} MB of conversations in {own}"
        share = self.bytes_read / max(1, self.bytes_total)
        rate = self.conversations / max(1e-9, self.seconds)
        return f"encoded {self.conversations:,} conversations ({share:.0%}, {rate:,.0f}/s)"


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """All that decides how a conversation is encoded; small enough to send to every process."""

    source: str
    """The target, whose tokenizer is used."""
    max_length: int
    cache: Path | None = None
    """Where converted targets are kept."""
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, *, cache: Path | None = None) -> "EncodingSettings":
        """What a recipe says."""
        return cls(
            source=recipe.target.source,
            max_length=recipe.data.max_length,
            cache=cache,
            chat_format=recipe.target.chat_format(),
            augmentation=recipe.data.augment,
            seed=recipe.data.seed,
        )

    def as_json(self) -> dict[str, Any]:
        """What decides the result: where the target is kept does not."""
        return {
            "target": self.source,
            "max_length": self.max_length,
            "chat_format": asdict(self.chat_format),
            "augment": self.augmentation.model_dump(),
            "seed": self.seed,
        }


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> str:
    """Tells tokenizers and their chat templates apart: a folder's may change while its name does not."""
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    parts = (vocabulary, tokenizer.chat_template, sorted(stop_ids), sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def encode_corpus(
    files: Sequence[Path],
    settings: EncodingSettings,
    *,
    workers: int = 0,
    max_bad_share: float | None = MAX_BAD_SHARE,
    check: Check | None = None,
    on_progress: Callable[[EncodingProgress], None] | None = None,
    inspect: Inspect | None = None,
    on_found: Callable[[Any], None] | None = None,
) -> tuple[Corpus, FitCounts]:
    """Read and encode the conversations of `files`; bad ones are skipped and counted.

    `workers` processes do it (0: as many as pay). A larger share of bad records than `max_bad_share` is refused, as is
    a corpus without anything to train on; None refuses nothing. What `inspect` returns for each conversation is handed
    to `on_found`, in order.
    """
    if not files:
        raise UserError("there are no files of conversations to train on; name at least one in data.files")
    counts = FitCounts()
    reader = ConversationReader(files, counts.bad)
    workers = workers or _worthwhile_workers(files)
    started, parts, done = time.monotonic(), list[_Part](), 0

    def tell(bytes_read: int) -> None:
        if on_progress is not None:
            seconds = time.monotonic() - started
            on_progress(
                EncodingProgress(
                    conversations=done,
                    bytes_read=bytes_read,
                    bytes_total=reader.bytes_total,
                    seconds=seconds,
                    workers=workers,
                )
            )

    tell(0)
    for part in _encoded_chunks(settings, inspect, _chunks(reader, check), workers):
        counts += part.counts
        parts.append(part)
        done += part.conversations
        tell(part.bytes_read)
        if on_found is not None:
            for found in part.found:
                on_found(found)
    if max_bad_share is not None:
        require_usable(counts, settings.max_length, max_bad_share)
    return _joined(parts), counts


def encode_conversations(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    *,
    max_length: int,
    variables: Mapping[str, Any] | None = None,
    augmentation: Augmentation | None = None,
    seed: int = 0,
) -> tuple[Corpus, FitCounts]:
    """Encode conversations in order, in this process; one that cannot be encoded ends it.

    `variables` are the chat template's; `seed` and its place decide how a conversation is augmented.
    """
    encode = _Encoding(tokenizer, stop_ids, max_length, variables, augmentation or Augmentation(), seed, None)
    given = list(conversations)
    part = encode(_Chunk(first=0, conversations=given, bytes_read=0), strict=True)
    require_usable(part.counts, max_length)
    return _joined([part]), part.counts


def require_usable(counts: FitCounts, max_length: int, max_bad_share: float = 1.0) -> None:
    """Refuse conversations of which too many are bad, or none can be trained on."""
    counts.bad.require_few(max_bad_share, "data.max_bad_share")
    if not counts.kept:
        done = counts.too_long + counts.unanswered + len(counts.bad)
        raise UserError(
            f"of {done} conversations none can be trained on: {counts.too_long} too long for data.max_length "
            f"{max_length}, {counts.unanswered} unanswered, {len(counts.bad)} bad; raise data.max_length for long ones "
            "and let the target answer unanswered ones first"
        )


def _joined(parts: Sequence["_Part"]) -> Corpus:
    def all_of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts]) if parts else np.zeros(0, dtype=np.int64)

    return Corpus.build(all_of("ids"), all_of("mask"), all_of("lengths"), all_of("conversation"))


def _worthwhile_workers(files: Sequence[Path]) -> int:
    """As many processes as there are cores, unless there is too little text to keep them busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = ((file.stat().st_size, file.suffix) for file in files if file.is_file())
    text = sum(size * (COMPRESSION if suffix in (".gz", ".zst", ".zstd", ".parquet") else 1) for size, suffix in sizes)
    return max(1, min(cores, text // BYTES_PER_WORKER))


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Conversations that are encoded together."""

    first: int
    """Place of the first among all, from 0."""
    conversations: list[Conversation]
    bytes_read: int
    """Of the files, up to and with these."""


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
    found: list[Any]
    bytes_read: int


class _Encoding:
    """What is done to a chunk of conversations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        max_length: int,
        variables: Mapping[str, Any] | None,
        augmentation: Augmentation,
        seed: int,
        inspect: Inspect | None,
    ) -> None:
        self._encoder = ChatEncoder(tokenizer, stop_ids, variables=variables)
        self._max_length = max_length
        self._augmenter = Augmenter(self._encoder, tokenizer, augmentation, seed) if augmentation.wanted else None
        self._inspect = inspect

    @classmethod
    def load(cls, settings: EncodingSettings, inspect: Inspect | None) -> "_Encoding":
        tokenizer, stop_ids = load_tokenizer(settings.source, cache=settings.cache, chat_format=settings.chat_format)
        return cls(
            tokenizer,
            stop_ids,
            settings.max_length,
            settings.chat_format.variables,
            settings.augmentation,
            settings.seed,
            inspect,
        )

    def __call__(self, chunk: _Chunk, *, strict: bool = False) -> _Part:
        counts = FitCounts()
        unwritten = self._encoder.unwritten
        encoded: list[Encoded] = []
        numbers: list[int] = []
        for index, conversation in enumerate(chunk.conversations, start=chunk.first):
            augmented = self._augmenter.encoder_for(index) if self._augmenter else None
            try:
                fitting = list(
                    fit([conversation], augmented or self._encoder, max_length=self._max_length, counts=counts)
                )
            except UserError as error:
                if strict:
                    raise
                counts.bad.add(error, "refused by the chat template")
                continue
            for rows in fitting:
                encoded += rows
                numbers += [index] * len(rows)
                if augmented is not None and augmented.applied is not None:
                    counts.augmented[augmented.applied] += 1
        counts.unwritten = self._encoder.unwritten - unwritten
        return _Part(
            ids=np.fromiter(chain.from_iterable(e.ids for e in encoded), dtype=np.int32),
            mask=np.fromiter(chain.from_iterable(e.mask for e in encoded), dtype=np.bool_),
            lengths=np.array([len(e.ids) for e in encoded], dtype=np.int64),
            conversation=np.array(numbers, dtype=np.int64),
            counts=counts,
            conversations=len(chunk.conversations),
            found=[self._inspect(conversation) for conversation in chunk.conversations] if self._inspect else [],
            bytes_read=chunk.bytes_read,
        )


def _encoded_chunks(
    settings: EncodingSettings, inspect: Inspect | None, chunks: Iterator[_Chunk], workers: int
) -> Iterator[_Part]:
    head = list(islice(chunks, 2))
    chunks = chain(head, chunks)
    if workers <= 1 or len(head) < 2:
        encode = _Encoding.load(settings, inspect)
        yield from (encode(chunk) for chunk in chunks)
        return
    # What is wrong with the target is said once, by this process, which also fetches what the others then find.
    load_tokenizer(settings.source, cache=settings.cache, chat_format=settings.chat_format)
    settings = replace(settings, source=local_source(settings.source, cache=settings.cache))
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_start, initargs=(settings, inspect))
    waiting: deque[Future[_Part]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_chunk, chunk))
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


def _chunks(reader: ConversationReader, check: Check | None) -> Iterator[_Chunk]:
    first, conversations = 0, iter(reader) if check is None else map(check, reader)
    while chunk := list(islice(conversations, CHUNK)):
        yield _Chunk(first=first, conversations=chunk, bytes_read=reader.bytes_read)
        first += len(chunk)


def _context() -> multiprocessing.context.BaseContext:
    """A way to start processes that does not copy this one, whose threads and GPU a copy could not use."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # What loading a tokenizer imports at its first time is imported once for all of them.
    loading = ("transformers.models.auto.tokenization_auto", "transformers.generation.configuration_utils")
    context.set_forkserver_preload([__name__, *loading])
    return context


_encoding: _Encoding | None = None


def _start(settings: EncodingSettings, inspect: Inspect | None) -> None:
    # One thread each: the tokenizer would start as many as there are cores in every process, and they would wait
    # for each other.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    global _encoding
    _encoding = _Encoding.load(settings, inspect)


def _encode_chunk(chunk: _Chunk) -> _Part:
    assert _encoding is not None
    return _encoding(chunk)
