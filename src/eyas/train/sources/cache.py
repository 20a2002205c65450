"""Features read from a disk that remembers what the target once said; the target itself does not run any more.

    folder/index.json                  whose cache it is, and which documents each shard holds
    folder/shard-00000.safetensors     whole documents, one behind the other (cache_writer.py writes them)

A document is remembered by its number among all documents of the run, training ones first, held-out ones behind them.
States are rounded to bfloat16, or to float8 with a scale for every token and state: a few tokens have states a thousand
times as large as the others, and one scale for all would leave nothing of the rest. Of the target's distribution the
most likely draft tokens are kept and, exactly, the probability of all other draft tokens together. Their
probabilities are float16: they are right to 1 part in 2048, finer than the bfloat16 scores they came from.
Invariant: a cache is read by the run it was made for (`CacheKey`) or refused, naming the difference.

Shapes: T tokens, M teacher rows, A auxiliary states, E target hidden size, X = A x E, K remembered tokens, C rows of a
chunk, W draft vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import UserError
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features

INDEX = "index.json"
FAILED = "failed"
"""Key of the numbers of documents that could not be had when the cache was made."""
_LARGEST_FP8 = 448.0
_PER_TOKEN, _PER_ROW = ("states", "scales"), ("ids", "probabilities", "rest", "best")


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Whose cache it is: if any of this differs, it is another one's."""

    target: str
    corpus: str
    """Fingerprint of all documents of the run."""
    vocabulary: str
    """Fingerprint of the draft vocabulary."""
    aux_layer_ids: tuple[int, ...]
    top_k: int
    dtype: str

    def as_json(self) -> dict[str, Any]:
        """As it stands in the index and in every shard."""
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}

    def require(self, found: Mapping[str, Any], where: Path) -> None:
        """Refuse what was made for something else."""
        for name, ours in self.as_json().items():
            if found.get(name) != ours:
                raise UserError(
                    f"the cache {where} was made for {name} {found.get(name)!r} and this run has {ours!r}; "
                    "remove it or choose another features.folder"
                )


def fingerprint_vocabulary(target_ids_W: Tensor) -> str:
    """Tells one draft vocabulary from another."""
    digest = hashlib.sha256(target_ids_W.cpu().numpy().astype(np.int64).tobytes()).hexdigest()
    return f"{len(target_ids_W)}-{digest[:16]}"


def to_fp8(aux_TX: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """Round to float8 (e4m3) with a scale [T, A] for every token and state, so that each uses the whole range."""
    aux_TAE = aux_TX.float().view(len(aux_TX), states, -1)
    scale_TA = aux_TAE.abs().amax(dim=-1).clamp(min=1e-30) / _LARGEST_FP8
    return (aux_TAE / scale_TA[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale_TA


def from_fp8(aux_TX: Tensor, scale_TA: Tensor) -> Tensor:
    """The states again, as bfloat16."""
    aux_TAE = aux_TX.float().view(*scale_TA.shape, -1)
    return (aux_TAE * scale_TA[..., None]).flatten(-2).to(torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class TopKDistribution:
    """A distribution that remembers the likely tokens one by one and all others as one bucket.

    The bucket's mass is spread in the drafter's own proportions, p_i = rest x q_i / q_rest, held fixed. Then p_i / q_i
    is the same for everything in the bucket, so the KL divergence is that of the distributions in which the bucket is
    one token, and so are the sum of min(p, q) and what is made of it. The gradient of every loss by the scores is
    the bucket's too: it pulls q_rest towards rest and leaves the proportions within alone, of which nothing is known.
    (Cross-entropy alone is reported higher, by rest x the entropy of q within the bucket; accuracy is exact, and the
    share of accepted draws is what it would be if any token of the bucket passed for any other.)
    """

    ids_CK: Tensor
    """Draft ids."""
    probability_CK: Tensor
    rest_C: Tensor
    best_C: Tensor

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        """p, its tail in the proportions of q."""
        ids_CK, probability_CK = self.ids_CK, self.probability_CK.to(log_q_CW.dtype)
        if ids_CK.shape[-1] == log_q_CW.shape[-1]:
            return torch.zeros_like(log_q_CW).scatter(-1, ids_CK, probability_CK)
        within_CW = log_q_CW.detach().scatter(-1, ids_CK, float("-inf")).softmax(dim=-1)
        return (within_CW * self.rest_C[:, None]).scatter(-1, ids_CK, probability_CK)


@dataclass(frozen=True, kw_only=True)
class CachedTeacher:
    """Gives distributions from what a cache holds of one batch."""

    place_T: Tensor
    """Where the row of a token is remembered."""
    ids_MK: Tensor
    probability_MK: Tensor
    rest_M: Tensor
    best_M: Tensor

    def distribution(self, row_C: Tensor) -> TopKDistribution:
        """What is remembered of these rows."""
        place_C = self.place_T[row_C]
        return TopKDistribution(
            ids_CK=self.ids_MK[place_C].long(),
            probability_CK=self.probability_MK[place_C],
            rest_C=self.rest_M[place_C],
            best_C=self.best_M[place_C].long(),
        )


@dataclass(frozen=True, kw_only=True)
class CachedTeachers:
    """The teacher of the one vocabulary that the cache was made for."""

    teacher: CachedTeacher
    source: "CacheSource"

    def __call__(self, target_ids_W: Tensor) -> CachedTeacher:
        """The teacher, if it is for this vocabulary."""
        self.source.require_vocabulary(target_ids_W)
        return self.teacher


class _Shard:
    """A shard, mapped into memory: what is not read costs nothing."""

    def __init__(self, path: Path) -> None:
        file = cast(Any, safe_open(path, framework="pt"))  # its methods are not typed
        self._file, self._names = file, set(file.keys())
        self._tokens, self._rows = (file.get_tensor(f"{kind}_offsets").tolist() for kind in ("token", "row"))

    def document(self, number: int) -> dict[str, Tensor]:
        """Everything remembered of its document `number`; views into the file."""
        wanted = [(name, self._tokens) for name in _PER_TOKEN] + [(name, self._rows) for name in _PER_ROW]
        return {
            name: self._file.get_slice(name)[offsets[number] : offsets[number + 1]]
            for name, offsets in wanted
            if name in self._names
        }


class CacheSource:
    """Reads the documents of a batch."""

    def __init__(self, folder: Path, key: CacheKey) -> None:
        self._folder, self._key = folder, key
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            key.require(index["key"], folder)
            self._files = [str(shard["file"]) for shard in index["shards"]]
            self._first = np.array([shard["first_document"] for shard in index["shards"]])
            self._failed = frozenset(int(number) for number in index.get(FAILED, ()))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"the cache {folder} cannot be read ({error}); remove it and let it be made again"
            ) from error
        self._shards: dict[int, _Shard] = {}
        self._vocabularies: dict[int, Tensor] = {}

    def prefetch(self, batch: TrainingBatch) -> None:
        """Nothing: a disk is not asked early."""

    def available(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch without what documents would teach that could not be had when the cache was made."""
        documents = batch.documents or ()
        return batch.without([place for place, number in enumerate(documents) if number in self._failed])

    def __call__(self, batch: TrainingBatch) -> Features:
        """Look a batch up."""
        if batch.documents is None:
            raise UserError(
                "the cache remembers documents of the data one by one and this batch holds others; "
                'set data.join_share to 0 or features.source to "live"'
            )
        parts = [self._document(number) for number in batch.documents]
        device, tokens = batch.ids_T.device, len(batch.ids_T)
        found = {name: _together([part[name] for part in parts], device) for name in parts[0]}
        aux_TX = from_fp8(found["states"], found["scales"]) if "scales" in found else found["states"]
        assert len(aux_TX) <= tokens
        assert len(found["best"]) == len(batch.run_lengths)
        if len(aux_TX) < tokens:  # padding, of which nobody asks anything
            aux_TX = torch.cat([aux_TX, aux_TX.new_zeros(tokens - len(aux_TX), aux_TX.shape[-1])])
        # A document's rows stand in its order and documents in the batch's, so what was found is in the order of row_M.
        place_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        place_T[batch.row_M] = torch.arange(len(batch.row_M), device=device)
        teacher = CachedTeacher(
            place_T=place_T,
            ids_MK=found["ids"],
            probability_MK=found["probabilities"],
            rest_M=found["rest"],
            best_M=found["best"],
        )
        return Features(
            aux_TX=aux_TX,
            aux_layer_ids=self._key.aux_layer_ids,
            teachers=CachedTeachers(teacher=teacher, source=self),
        )

    def require_vocabulary(self, target_ids_W: Tensor) -> None:
        """Refuse a drafter that proposes other tokens than the cache knows."""
        if id(target_ids_W) in self._vocabularies:
            return
        ours = fingerprint_vocabulary(target_ids_W)
        if ours != self._key.vocabulary:
            raise UserError(
                f"the cache {self._folder} was made for the draft vocabulary {self._key.vocabulary} and a drafter has "
                f'{ours}; give all drafters the same one or set features.source to "live"'
            )
        # The tensor is kept so that its id stays its own.
        self._vocabularies[id(target_ids_W)] = target_ids_W

    def _document(self, number: int) -> dict[str, Tensor]:
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        if place not in self._shards:
            path = self._folder / self._files[place]
            try:
                self._shards[place] = _Shard(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read ({error}); start again, it is then made anew") from error
        found = self._shards[place].document(number - int(self._first[place]))
        if number in self._failed:
            found |= {name: found[name][:0] for name in _PER_ROW}
        return found


def _together(pieces: list[Tensor], device: torch.device) -> Tensor:
    whole = torch.cat(pieces)
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole
