"""Writing of the feature cache (cache.py reads it): every document is run once, and what the target computed is saved.

The size of the cache is known before the target runs, and logged; a disk that is too small is refused at once. Which
documents a shard holds follows from the data alone, a shard appears whole or not at all, and the index comes last. So
interrupted writing continues after the existing shards. Of several processes each takes every n-th shard.

Shapes: T tokens of a shard, M teacher rows of a shard, C rows of a chunk, W draft vocabulary, X concatenated
auxiliary states.
"""

import json
import logging
import math
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
"""Approximate bytes of a shard, which is built in memory; a longer document has its own."""
MARGIN = 1.05
"""Required free space, relative to what is written."""
FETCHED_BATCHES = 16
"""Batches that are announced to a source ahead of time."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Documents first .. first + documents - 1."""

    number: int
    first: int
    documents: int
    tokens: int
    rows: int
    state_bytes: int
    teacher_bytes: int

    @property
    def file(self) -> str:
        return f"shard-{self.number:05d}.safetensors"

    @property
    def last(self) -> int:
        return self.first + self.documents


def plan_shards(corpus: Corpus, key: CacheKey, hidden_size: int) -> list[Shard]:
    """Divide the documents, in order, into shards."""
    token_bytes, row_bytes = (
        sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())
        for tensors in (key.token_tensors(hidden_size), key.row_tensors())
    )
    token_counts, row_counts = corpus.lengths, np.diff(_row_offsets(corpus))
    shards = list[Shard]()
    for first, last in _groups(token_counts * token_bytes + row_counts * row_bytes, SHARD_BYTES):
        tokens, rows = (int(counts[first:last].sum()) for counts in (token_counts, row_counts))
        shard = Shard(
            number=len(shards),
            first=first,
            documents=last - first,
            tokens=tokens,
            rows=rows,
            state_bytes=tokens * token_bytes,
            teacher_bytes=rows * row_bytes,
        )
        shards.append(shard)
    return shards


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheWriter:
    """Writes the cache of a run."""

    folder: Path
    corpus: Corpus
    """All documents of the run: training ones, then held-out ones."""
    key: CacheKey
    target_ids_W: Tensor
    hidden_size: int
    computed: Callable[[], FeatureSource]
    """Opens the source whose features are saved; called only if something is missing."""
    device: torch.device
    pack_length: int
    """Tokens that the target reads at once."""
    padded: bool
    chunk: int

    def write(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
    ) -> None:
        """Write the missing shards; nothing if the cache is complete."""
        if (index := _read_index(self.folder)) is not None:
            self.key.require(index, self.folder)
        shards = plan_shards(self.corpus, self.key, self.hidden_size)
        missing = [shard for shard in shards if self._metadata(shard) is None]
        if missing:
            self._require_space(shards, missing)
        ranks.barrier()
        self._write_shards(missing[ranks.rank :: ranks.world], len(shards), stop)
        ranks.barrier()
        if ranks.is_main and (missing or index is None):
            self._write_index(shards)
        ranks.barrier()

    def _require_space(self, shards: Sequence[Shard], missing: Sequence[Shard]) -> None:
        states, teacher = sum(shard.state_bytes for shard in shards), sum(shard.teacher_bytes for shard in shards)
        tokens, rows = sum(shard.tokens for shard in shards), sum(shard.rows for shard in shards)
        whole, needed = states + teacher, sum(shard.state_bytes + shard.teacher_bytes for shard in missing)
        existing = next(place for place in [self.folder, *self.folder.absolute().parents] if place.exists())
        free = shutil.disk_usage(existing).free
        there = "" if needed == whole else f" ({_size(whole - needed)} are there already)"
        sentence = (
            f"the cache needs {_size(whole)}{there}: {_size(states)} for the states of {tokens:,} tokens in "
            f"{self.key.dtype}, {_size(teacher)} for the {self.key.top_k} most likely draft tokens for {rows:,} of "
            f"them; {_size(free)} are free in {existing}"
        )
        logger.info(sentence)
        if free < needed * MARGIN:
            raise UserError(
                f"{sentence}, which is too little; free some, choose another features.folder, lower features.top_k "
                f'(now {self.key.top_k}), set features.dtype to "fp8" or features.source to "live"'
            )

    def _metadata(self, shard: Shard) -> dict[str, Any] | None:
        """Metadata of a complete shard; one of another cache is refused, never overwritten."""
        try:
            with safe_open(self.folder / shard.file, framework="pt") as file:
                metadata: dict[str, Any] = json.loads((file.metadata() or {})["shard"])
        except (OSError, SafetensorError, ValueError, LookupError):
            return None
        self.key.require(metadata["key"], self.folder)
        return metadata if (metadata["first"], metadata["documents"]) == (shard.first, shard.documents) else None

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
                    f"{len(failed)} documents of shard {shard.number + 1} could not be fetched; remove "
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
        """Tensors of the shard's documents, and the numbers of those that could not be fetched."""
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
                distribution = teacher(row_C)
                # An exact teacher ignores the drafter's scores.
                p_CW = distribution.probabilities(
                    torch.zeros((), device=row_C.device).expand(len(row_C), len(self.target_ids_W))
                )
                probability_CK, ids_CK = p_CW.topk(self.key.top_k, dim=-1)
                tensors["ids"][rows] = ids_CK.to("cpu", torch.int32)
                tensors["probabilities"][rows] = probability_CK.to("cpu", torch.float16)
                # Summed over the other tokens, since 1 - sum would lose it in rounding.
                tensors["rest"][rows] = p_CW.scatter(-1, ids_CK, 0.0).sum(dim=-1).cpu()
                tensors["best"][rows] = distribution.best_C.to("cpu", torch.int32)
        assert (token, row) == (shard.tokens, shard.rows)
        return tensors, failed

    def _batches(self, shard: Shard, source: FeatureSource) -> Iterator[TrainingBatch]:
        """Batches of the shard's documents, in order; some are announced to a source that fetches ahead."""
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
            f"stopped while the cache {self.folder} was being written; its finished shards stay; start again to go on"
        )

    def _empty(self, shard: Shard) -> dict[str, Tensor]:
        tokens, rows = self.key.token_tensors(self.hidden_size), self.key.row_tensors()
        among = slice(shard.first, shard.last + 1)
        offsets = {"token_offsets": self.corpus.offsets[among], "row_offsets": _row_offsets(self.corpus)[among]}
        return {
            **{name: torch.empty(shard.tokens, *shape, dtype=dtype) for name, (dtype, shape) in tokens.items()},
            # Rows of documents that could not be fetched stay zero.
            **{name: torch.zeros(shard.rows, *shape, dtype=dtype) for name, (dtype, shape) in rows.items()},
            **{name: torch.from_numpy(values - values[0]) for name, values in offsets.items()},
        }

    def _write_index(self, shards: Sequence[Shard]) -> None:
        listed = [{"file": s.file, "first_document": s.first, "documents": s.documents} for s in shards]
        index = {"key": self.key.as_json(), "documents": len(self.corpus), "shards": listed}
        if failed := [number for shard in shards for number in (self._metadata(shard) or {}).get(FAILED, [])]:
            index[FAILED] = failed
        text = json.dumps(index, indent=1)
        with new_file(self.folder / INDEX) as staging:
            staging.write_text(text + "\n", encoding="utf-8")


def _documents_at(batch: TrainingBatch, row_M: Tensor) -> list[int]:
    """Numbers of the documents that contain these rows."""
    assert batch.documents is not None
    places = torch.searchsorted(batch.starts.cpu().long(), row_M, right=True) - 1
    return [batch.documents[place] for place in sorted(set(places.tolist()))]


def _row_offsets(corpus: Corpus) -> NDArray[np.int64]:
    """Number of teacher rows before each document."""
    return np.searchsorted(teaching_rows(corpus.mask, corpus.positions), corpus.offsets).astype(np.int64)


def _groups(weights: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Group neighbours up to the limit, as (first, end); one beyond the limit is alone."""
    first, weight = 0, 0
    for place, own in enumerate(weights.tolist()):
        if place > first and weight + own > limit:
            yield first, place
            first, weight = place, 0
        weight += own
    yield first, len(weights)


def _read_index(folder: Path) -> dict[str, Any] | None:
    """Key in the index; None if there is no readable index."""
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
