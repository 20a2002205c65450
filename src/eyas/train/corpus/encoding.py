"""From files of conversations to a corpus of tokens.

A row that is too long loses whole answers from its end, never half an answer: an answer cut in the middle would teach
the drafter that answers stop there.

Tokenising is the slow part, so several processes share it. Each loads the tokenizer from the target's folder itself,
since pickling a large vocabulary for every process would take longer.
Invariant: the corpus is the same whatever the number of processes.
"""

import hashlib
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from eyas.data.bad_records import MAX_BAD_SHARE, BadRecords
from eyas.data.chat_encoder import ChatEncoder, Encoded
from eyas.data.conversations import Conversation
from eyas.data.files import ConversationReader
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.text import load_tokenizer, local_source
from eyas.train.corpus.augment import Augmenter
from eyas.train.corpus.corpus import Corpus
from eyas.train.recipe import Augmentation, Recipe

CHUNK = 64
"""Conversations that a process gets at a time: enough to make passing them cheap."""
BYTES_PER_WORKER = 8_000_000
"""Bytes of text that are worth another process: encoding them takes longer than starting it."""
COMPRESSION = 4
"""Approximate compression ratio of compressed files."""

Check = Callable[[Conversation], Conversation]
"""Raises at a conversation that must not be in the corpus; returns the others unchanged."""
Inspect = Callable[[Conversation], Any]
"""Inspects a conversation in the process that encodes it; it and its result can be pickled."""


@dataclass(frozen=True, kw_only=True)
class EncodingProgress:
    """Progress of the encoding of files."""

    conversations: int
    bytes_read: int
    """Bytes of the files whose conversations are encoded."""
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
    """Settings that determine how a conversation is encoded; small enough to send to every process."""

    source: str
    """Target whose tokenizer is used."""
    max_length: int
    cache: Path | None = None
    """Folder of converted targets."""
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, *, cache: Path | None = None) -> "EncodingSettings":
        """Settings of a recipe."""
        return cls(
            source=recipe.target.source,
            max_length=recipe.data.max_length,
            cache=cache,
            chat_format=recipe.target.chat_format(),
            augmentation=recipe.data.augment,
            seed=recipe.data.seed,
        )

    def as_json(self) -> dict[str, Any]:
        """Settings that determine the result; the folder of the target does not."""
        return {
            "target": self.source,
            "max_length": self.max_length,
            "chat_format": asdict(self.chat_format),
            "augment": self.augmentation.model_dump(),
            "seed": self.seed,
        }


@dataclass
class FitCounts:
    """Counts of what became of the conversations."""

    kept: int = 0
    cut: int = 0
    """Kept, but without some of their answers."""
    too_long: int = 0
    """Dropped: none of their answers fits."""
    unanswered: int = 0
    """Dropped: nothing to train on."""
    unwritten: int = 0
    """Answers left out because the template does not write the tools that they call."""
    augmented: Counter[str] = field(default_factory=Counter)
    """Kept in another rendering than the template's own, by kind (augment.py)."""
    bad: BadRecords = field(default_factory=BadRecords)
    """Skipped: records that cannot be read or encoded."""

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("kept", "cut", "too_long", "unanswered", "unwritten")}
        return {**own, "augmented": dict(self.augmented), "bad": self.bad.as_json()}

    def __iadd__(self, other: "FitCounts") -> "FitCounts":
        for item in fields(self):
            count = getattr(self, item.name)
            count += getattr(other, item.name)
            setattr(self, item.name, count)
        return self


def fit(rows: Iterable[Encoded], *, max_length: int, counts: FitCounts) -> tuple[Encoded, ...]:
    """Rows of a conversation, shortened or dropped if they exceed `max_length` tokens; counted."""
    rows = [row for row in rows if row.trainable]
    fitting = tuple(short for row in rows if (short := row.shortened(max_length)) is not None)
    if not rows:
        counts.unanswered += 1
    elif not fitting:
        counts.too_long += 1
    else:
        counts.kept += 1
        counts.cut += sum(row.trainable for row in fitting) < sum(row.trainable for row in rows)
    return fitting


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> str:
    """Fingerprint of a tokenizer and its chat template, which may change while the folder's name does not."""
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

    `workers` processes do it (0: as many as are worth starting). A larger share of bad records than `max_bad_share` is
    refused, as is a corpus without anything to train on; None refuses nothing. `on_found` gets the results of
    `inspect`, in order.
    """
    if not files:
        raise UserError("there are no files of conversations to train on; name at least one in data.files")
    counts = FitCounts()
    reader = ConversationReader(files, counts.bad)
    workers = workers or _worthwhile_workers(files)
    started, parts, done = time.monotonic(), list[_Part](), 0

    def report(bytes_read: int) -> None:
        if on_progress is not None:
            seconds, total = time.monotonic() - started, reader.bytes_total
            on_progress(
                EncodingProgress(
                    conversations=done, bytes_read=bytes_read, bytes_total=total, seconds=seconds, workers=workers
                )
            )

    report(0)
    for part in _encoded_chunks(settings, inspect, _chunks(reader, check), workers):
        counts += part.counts
        parts.append(part)
        done += part.conversations
        report(part.bytes_read)
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
    """Encode conversations in order, in this process; raise if one cannot be encoded.

    `variables` are the chat template's; `seed` and its index determine how a conversation is augmented.
    """
    settings = EncodingSettings(
        source="", max_length=max_length, augmentation=augmentation or Augmentation(), seed=seed
    )
    encode = _Encoding(settings, ChatEncoder(tokenizer, stop_ids, variables=variables), tokenizer)
    part = encode(_Chunk(first=0, conversations=list(conversations), bytes_read=0), strict=True)
    require_usable(part.counts, max_length)
    return _joined([part]), part.counts


def require_usable(counts: FitCounts, max_length: int, max_bad_share: float = 1.0) -> None:
    """Refuse conversations if too many are bad, or none can be trained on."""
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
        return np.concatenate([part.arrays[name] for part in parts]) if parts else np.zeros(0, dtype=np.int64)

    return Corpus.build(*(all_of(name) for name in ("ids", "mask", "lengths", "conversation")))


def _worthwhile_workers(files: Sequence[Path]) -> int:
    """Number of processes: one per core, fewer if there is little text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = ((file.stat().st_size, file.suffix) for file in files if file.is_file())
    text = sum(size * (COMPRESSION if suffix in (".gz", ".zst", ".zstd", ".parquet") else 1) for size, suffix in sizes)
    return max(1, min(cores, text // BYTES_PER_WORKER))


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Conversations that are encoded together."""

    first: int
    """Index of the first one among all."""
    conversations: list[Conversation]
    bytes_read: int
    """Bytes of the files up to the end of these."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Documents of a chunk of conversations."""

    arrays: dict[str, NDArray[Any]]
    """Arguments of `Corpus.build`."""
    counts: FitCounts
    conversations: int
    """Number of conversations read."""
    found: list[Any]
    bytes_read: int


class _Encoding:
    """Encodes chunks of conversations."""

    def __init__(
        self,
        settings: EncodingSettings,
        encoder: ChatEncoder,
        tokenizer: PreTrainedTokenizerBase,
        inspect: Inspect | None = None,
    ) -> None:
        self._encoder, self._max_length, self._inspect = encoder, settings.max_length, inspect
        self._augmenter = Augmenter(encoder, tokenizer, settings.augmentation, settings.seed)

    @classmethod
    def load(cls, settings: EncodingSettings, inspect: Inspect | None) -> "_Encoding":
        tokenizer, stop_ids = load_tokenizer(settings.source, cache=settings.cache, chat_format=settings.chat_format)
        encoder = ChatEncoder(tokenizer, stop_ids, variables=settings.chat_format.variables)
        return cls(settings, encoder, tokenizer, inspect)

    def __call__(self, chunk: _Chunk, *, strict: bool = False) -> _Part:
        counts = FitCounts()
        unwritten = self._encoder.unwritten
        encoded: list[Encoded] = []
        numbers: list[int] = []
        for index, conversation in enumerate(chunk.conversations, start=chunk.first):
            try:
                rows, applied = self._augmenter.encode(conversation, index)
            except UserError as error:
                if strict:
                    raise
                counts.bad.add(error, "refused by the chat template")
                continue
            fitting = fit(rows, max_length=self._max_length, counts=counts)
            encoded += fitting
            numbers += [index] * len(fitting)
            if fitting and applied is not None:
                counts.augmented[applied] += 1
        counts.unwritten = self._encoder.unwritten - unwritten
        return _Part(
            arrays={
                "ids": np.fromiter(chain.from_iterable(e.ids for e in encoded), dtype=np.int32),
                "mask": np.fromiter(chain.from_iterable(e.mask for e in encoded), dtype=np.bool_),
                "lengths": np.array([len(e.ids) for e in encoded], dtype=np.int64),
                "conversation": np.array(numbers, dtype=np.int64),
            },
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
    # This process reports errors of the target once, and downloads what the others then find.
    load_tokenizer(settings.source, cache=settings.cache, chat_format=settings.chat_format)
    settings = replace(settings, source=local_source(settings.source, cache=settings.cache))
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_start, initargs=(settings, inspect))
    waiting: deque[Future[_Part]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_chunk, chunk))
            if len(waiting) > 4 * workers:  # bounds the conversations in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} processes that encode conversations died, perhaps for lack of memory; "
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
    """Start method that does not fork this process, whose threads and GPU a copy could not use."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once for all of them: modules that loading a tokenizer needs.
    loading = ("transformers.models.auto.tokenization_auto", "transformers.generation.configuration_utils")
    context.set_forkserver_preload([__name__, *loading])
    return context


_encoding: _Encoding | None = None


def _start(settings: EncodingSettings, inspect: Inspect | None) -> None:
    # One thread each: the tokenizer would start a thread per core in every process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    global _encoding
    _encoding = _Encoding.load(settings, inspect)


def _encode_chunk(chunk: _Chunk) -> _Part:
    assert _encoding is not None
    return _encoding(chunk)
