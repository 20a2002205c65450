"""Has every document read once, by whatever source, and writes down what the target said (cache.py reads it).

How large the cache becomes is known to the byte before the target runs, and logged; a disk that would not hold it is
refused then, not after hours. Which documents a shard holds follows from the data alone and a shard appears whole or
not at all, so writing that was interrupted goes on behind the shards that are there; the index comes last. Several
processes take every n-th shard each.

Shapes: T tokens of a shard, M teacher rows of a shard, C rows of a chunk, W draft vocabulary, X concatenated
auxiliary states.
"""

import json
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.atomic import new_file
from eyas.errors import UserError
from eyas.train.batch import TrainingBatch, teaching_rows
from eyas.train.corpus.corpus import Corpus
from eyas.train.features import FeatureSource, FetchingSource, InterruptedWaitError
from eyas.train.ranks import Ranks
from eyas.train.sources.cache import FAILED, INDEX, CacheKey, to_fp8

logger = logging.getLogger(__name__)

SHARD_BYTES = 512 * 10**6
"""Of a shard, about; a longer document has one to itself. It is put together in memory."""
MARGIN = 1.05
"""Free space that is asked for, relative to what is written."""
FETCHED_BATCHES = 16
"""Batches that a source is told of ahead."""
_HEADER_BYTES = 800
"""Of a safetensors file with the tensors of a shard, besides the key."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Documents first .. first + documents - 1."""

    number: int
    first: int
    documents: int
    tokens: int
    rows: int

    @property
    def file(self) -> str:
        """Its name."""
        return f"shard-{self.number:05d}.safetensors"

    @property
    def last(self) -> int:
        """Behind its last document."""
        return self.first + self.documents


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """What a token, a teacher row, a document and a shard take on disk, in bytes."""

    token: int
    row: int
    document: int
    shard: int

    @classmethod
    def of(cls, key: CacheKey, hidden_size: int) -> "CacheSizes":
        """Sizes of a cache with this key."""
        states = len(key.aux_layer_ids)
        token = states * hidden_size * 2 if key.dtype == "bfloat16" else states * (hidden_size + 4)
        key_bytes = len(json.dumps(json.dumps(key.as_json())))
        # Draft id and probability of each remembered token, the remainder, the most likely token; two offsets.
        return cls(
            token=token, row=key.top_k * (4 + 2) + 4 + 4, document=2 * 8, shard=_HEADER_BYTES + key_bytes + 2 * 8
        )

    def bytes_of(self, shard: Shard) -> int:
        """The whole shard."""
        return self.token * shard.tokens + self.row * shard.rows + self.document * shard.documents + self.shard


def plan_shards(corpus: Corpus, sizes: CacheSizes) -> list[Shard]:
    """Documents in order, as many to a shard as fit it."""
    tokens, rows = corpus.lengths, np.diff(_row_offsets(corpus))
    weights = tokens * sizes.token + rows * sizes.row + sizes.document
    return [
        Shard(
            number=number,
            first=first,
            documents=last - first,
            tokens=int(tokens[first:last].sum()),
            rows=int(rows[first:last].sum()),
        )
        for number, (first, last) in enumerate(_groups(weights, SHARD_BYTES))
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheWriter:
    """Everything that writing needs."""

    folder: Path
    corpus: Corpus
    """All documents of the run: training ones, then held-out ones."""
    key: CacheKey
    target_ids_W: Tensor
    hidden_size: int
    computed: Callable[[], FeatureSource]
    """Gives the source that is remembered; asked only if something is missing."""
    device: torch.device
    pack_length: int
    """Tokens that the target is given at once."""
    padded: bool
    chunk: int

    def write(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    ) -> None:
        """Write what is missing; nothing, if the cache is whole."""
        if (index := _read_index(self.folder)) is not None:
            self.key.require(index, self.folder)
        sizes = CacheSizes.of(self.key, self.hidden_size)
        shards = plan_shards(self.corpus, sizes)
        missing = [shard for shard in shards if not self._finished(shard)]
        if missing:
            self._require_space(shards, missing, sizes)
        ranks.barrier()
        self._write_shards(missing[ranks.rank :: ranks.world], len(shards), stop)
        ranks.barrier()
        if ranks.is_main and (missing or index is None):
            self._write_index(shards)
        ranks.barrier()

    def _require_space(self, shards: Sequence[Shard], missing: Sequence[Shard], sizes: CacheSizes) -> None:
        tokens, rows = (sum(getattr(shard, name) for shard in shards) for name in ("tokens", "rows"))
        whole, needed = (sum(sizes.bytes_of(shard) for shard in some) for some in (shards, missing))
        existing = next(place for place in [self.folder, *self.folder.absolute().parents] if place.exists())
        free = shutil.disk_usage(existing).free
        states, teacher = tokens * sizes.token, rows * sizes.row
        there = "" if needed == whole else f" ({_size(whole - needed)} are there already)"
        sentence = (
            f"the cache needs {_size(whole)}{there}: {_size(states)} for the states of {tokens:,} tokens in "
            f"{self.key.dtype}, {_size(teacher)} for the {self.key.top_k} likeliest draft tokens behind {rows:,} of "
            f"them, {_size(whole - states - teacher)} around it; {_size(free)} are free in {existing}"
        )
        logger.info(sentence)
        if free < needed * MARGIN:
            raise UserError(
                f"{sentence}, which is too little; free some, choose another features.folder, lower features.top_k "
                f'(now {self.key.top_k}), set features.dtype to "fp8" or features.source to "live"'
            )

    def _finished(self, shard: Shard) -> bool:
        """Whether the shard is there; one that belongs to another cache is refused, never overwritten."""
        path = self.folder / shard.file
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})["shard"])
        except (OSError, SafetensorError, ValueError, LookupError):
            return False
        self.key.require(metadata["key"], self.folder)
        return (metadata["first"], metadata["documents"]) == (shard.first, shard.documents)

    def _write_shards(self, shards: Sequence[Shard], of: int, stop: Callable[[], bool]) -> None:
        if not shards:
            return
        source = self.computed()
        for shard in shards:
            tensors, failed = self._fill(shard, source, stop)
            metadata = {"key": self.key.as_json(), "first": shard.first, "documents": shard.documents}
            if failed:
                metadata[FAILED] = failed
                logger.warning(
                    f"{len(failed)} documents of shard {shard.number + 1} could not be had and teach nothing; remove "
                    f"{self.folder / shard.file} and {INDEX} to try them again"
                )
            path = self.folder / shard.file
            with new_file(path) as staging:
                try:
                    save_file(tensors, staging, metadata={"shard": json.dumps(metadata)})
                except SafetensorError as error:  # a full disk, for one
                    raise OSError(str(error)) from error
            logger.info(f"shard {shard.number + 1} of {of} is written: {path}")

    @torch.no_grad()
    def _fill(
        self, shard: Shard, source: FeatureSource, stop: Callable[[], bool]
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Let the target read the shard's documents; the numbers of those that could not be had come beside them."""
        tensors, failed = self._empty(shard), list[int]()
        token = row = 0
        for batch in self._batches(shard, source):
            if stop():
                raise self._stopped()
            assert batch.documents is not None
            used = int(self.corpus.lengths[list(batch.documents)].sum())
            had, place_M = batch, torch.arange(len(batch.row_M)) + row
            if isinstance(source, FetchingSource):
                try:
                    had = source.available(batch)
                except InterruptedWaitError as error:
                    raise self._stopped() from error
                is_had_M = torch.isin(batch.row_M, had.row_M).cpu()
                place_M = place_M[is_had_M]
                failed += _documents_at(batch, batch.row_M.cpu()[~is_had_M])
            features = source(had)
            aux_TX = features.aux_of(self.key.aux_layer_ids)[:used]
            tokens = slice(token, token + used)
            if "scales" in tensors:
                states_TX, scale_TA = to_fp8(aux_TX, len(self.key.aux_layer_ids))
                tensors["states"][tokens], tensors["scales"][tokens] = states_TX.cpu(), scale_TA.cpu()
            else:
                tensors["states"][tokens] = aux_TX.to("cpu", torch.bfloat16)
            token += used
            teacher = features.teachers(self.target_ids_W)
            row += len(batch.row_M)
            for row_C, rows in zip(torch.split(had.row_M, self.chunk), torch.split(place_M, self.chunk), strict=True):
                distribution = teacher.distribution(row_C)
                # The scores of a drafter are of no consequence to a teacher that remembers everything.
                p_CW = distribution.probabilities(
                    torch.zeros((), device=row_C.device).expand(len(row_C), len(self.target_ids_W))
                )
                probability_CK, ids_CK = p_CW.topk(self.key.top_k, dim=-1)
                tensors["ids"][rows] = ids_CK.to("cpu", torch.int32)
                tensors["probabilities"][rows] = probability_CK.to("cpu", torch.float16)
                # Summed over the others themselves: a difference from the whole would be lost in rounding.
                tensors["rest"][rows] = p_CW.scatter(-1, ids_CK, 0.0).sum(dim=-1).cpu()
                tensors["best"][rows] = distribution.best_C.to("cpu", torch.int32)
        assert (token, row) == (shard.tokens, shard.rows)
        return tensors, failed

    def _batches(self, shard: Shard, source: FeatureSource) -> Iterator[TrainingBatch]:
        """The shard's documents in order; a source that fetches ahead is told of some before they are read."""
        lengths = self.corpus.lengths[shard.first : shard.last]
        waiting: deque[TrainingBatch] = deque()
        for first, last in _groups(lengths, self.pack_length):
            documents = tuple((index,) for index in range(shard.first + first, shard.first + last))
            length = max(int(lengths[first:last].sum()), self.pack_length) if self.padded else None
            waiting.append(TrainingBatch.from_pack(self.corpus, documents, length, device=self.device))
            if isinstance(source, FetchingSource):
                source.prefetch(waiting[-1])
                if len(waiting) <= FETCHED_BATCHES:
                    continue
            yield waiting.popleft()
        yield from waiting

    def _stopped(self) -> UserError:
        return UserError(
            f"stopped while the cache {self.folder} was being written; its finished shards stay, start again to go on "
            "behind them"
        )

    def _empty(self, shard: Shard) -> dict[str, Tensor]:
        states, top_k = len(self.key.aux_layer_ids), self.key.top_k
        fp8 = self.key.dtype == "fp8"
        among = slice(shard.first, shard.last + 1)
        offsets = {"token_offsets": self.corpus.offsets[among], "row_offsets": _row_offsets(self.corpus)[among]}
        return {
            "states": torch.empty(
                shard.tokens, states * self.hidden_size, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16
            ),
            **({"scales": torch.empty(shard.tokens, states)} if fp8 else {}),
            # Zeros stay where a document could not be had.
            "ids": torch.zeros(shard.rows, top_k, dtype=torch.int32),
            "probabilities": torch.zeros(shard.rows, top_k, dtype=torch.float16),
            "rest": torch.zeros(shard.rows),
            "best": torch.zeros(shard.rows, dtype=torch.int32),
            **{name: torch.from_numpy(values - values[0]) for name, values in offsets.items()},
        }

    def _write_index(self, shards: Sequence[Shard]) -> None:
        listed = [{"file": s.file, "first_document": s.first, "documents": s.documents} for s in shards]
        index = {"key": self.key.as_json(), "documents": len(self.corpus), "shards": listed}
        if failed := [number for shard in shards for number in self._failed(shard)]:
            index[FAILED] = failed
        text = json.dumps(index, indent=1)
        with new_file(self.folder / INDEX) as staging:
            staging.write_text(text + "\n", encoding="utf-8")

    def _failed(self, shard: Shard) -> list[int]:
        """Numbers of documents that a shard lacks."""
        with safe_open(self.folder / shard.file, framework="pt") as file:
            failed: list[int] = json.loads(file.metadata()["shard"]).get(FAILED, [])
        return failed


def _documents_at(batch: TrainingBatch, row_M: Tensor) -> list[int]:
    """Numbers of the documents that these rows are in."""
    assert batch.documents is not None
    places = torch.searchsorted(batch.starts.cpu().long(), row_M, right=True) - 1
    return [batch.documents[place] for place in sorted(set(places.tolist()))]


def _row_offsets(corpus: Corpus) -> NDArray[np.int64]:
    """How many rows teach before each document."""
    return np.searchsorted(teaching_rows(corpus.mask, corpus.positions), corpus.offsets).astype(np.int64)


def _groups(weights: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Neighbours together up to the limit, from first to behind last; who is beyond it stays alone."""
    first, weight = 0, 0
    for place, own in enumerate(weights.tolist()):
        if place > first and weight + own > limit:
            yield first, place
            first, weight = place, 0
        weight += own
    yield first, len(weights)


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The key in the index; none where there is no readable index, whose shards then speak for themselves."""
    try:
        key = json.loads((folder / INDEX).read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return key if isinstance(key, dict) else None


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
