"""Features read from a cache on disk of what the target computed once, without running it.

    folder/index.json                  key of the cache, and the documents of each shard
    folder/shard-00000.safetensors     whole documents, one after the other (cache_writer.py writes them)

Documents are numbered among all of the run, training ones first, held-out ones after them. States are rounded to
bfloat16, or to float8 with a scale for every token and state: a few tokens have states a thousand times as large as the
others, and with one scale for all nothing would be left of the rest. Of the target's distribution the most likely draft
tokens are kept and, exactly, the probability of all other draft tokens together. Probabilities are float16, right to 1
part in 2048, which is finer than the bfloat16 logits they came from.
Invariant: a cache is read by the run it was made for (`CacheKey`) or refused, naming the difference.

Shapes: T tokens, M teacher rows, A auxiliary states, E target hidden size, X = A x E, K kept tokens, C rows of a chunk,
W draft vocabulary.
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
from eyas.train.features import Features, Teacher

INDEX = "index.json"
FAILED = "failed"
"""Key of the numbers of documents that could not be fetched when the cache was written."""
_LARGEST_FP8 = 448.0
_PER_TOKEN, _PER_ROW = ("states", "scales"), ("ids", "probabilities", "rest", "best")


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Identity of a cache: if any of this differs, it belongs to another run."""

    target: str
    corpus: str
    """Fingerprint of all documents of the run."""
    vocabulary: str
    """Fingerprint of the draft vocabulary."""
    aux_layer_ids: tuple[int, ...]
    top_k: int
    dtype: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}

    def require(self, found: Mapping[str, Any], where: Path) -> None:
        """Refuse a cache with another key."""
        require_key(self.as_json(), found, where)

    def token_tensors(self, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of what a shard holds of each token."""
        states = len(self.aux_layer_ids)
        if self.dtype == "bfloat16":
            return {"states": (torch.bfloat16, (states * hidden_size,))}
        return {"states": (torch.float8_e4m3fn, (states * hidden_size,)), "scales": (torch.float32, (states,))}

    def row_tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of what a shard holds of each teacher row."""
        return {
            "ids": (torch.int32, (self.top_k,)),
            "probabilities": (torch.float16, (self.top_k,)),
            "rest": (torch.float32, ()),
            "best": (torch.int32, ()),
        }


def require_key(ours: Mapping[str, Any], found: Mapping[str, Any], where: Path) -> None:
    """Refuse a cache whose key differs from ours, naming the first difference."""
    for name, value in ours.items():
        if found.get(name) != value:
            raise UserError(
                f"the cache {where} was made for {name} {found.get(name)!r} and this run has {value!r}; "
                "remove it or choose another features.folder"
            )


def fingerprint_vocabulary(target_ids_W: Tensor) -> str:
    """Fingerprint of a draft vocabulary."""
    digest = hashlib.sha256(target_ids_W.cpu().numpy().astype(np.int64).tobytes()).hexdigest()
    return f"{len(target_ids_W)}-{digest[:16]}"


def to_fp8(aux_TX: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """Round to float8 (e4m3) with a scale [T, A] for every token and state, so that each uses the whole range."""
    aux_TAE = aux_TX.float().view(len(aux_TX), states, -1)
    scale_TA = aux_TAE.abs().amax(dim=-1).clamp(min=1e-30) / _LARGEST_FP8
    return (aux_TAE / scale_TA[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale_TA


def from_fp8(aux_TX: Tensor, scale_TA: Tensor) -> Tensor:
    """States from float8, as bfloat16."""
    aux_TAE = aux_TX.float().view(*scale_TA.shape, -1)
    return (aux_TAE * scale_TA[..., None]).flatten(-2).to(torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class TopKDistribution:
    """Distribution that keeps the likely tokens one by one and all others as one bucket.

    The bucket's mass is spread in the drafter's own proportions, p_i = rest x q_i / q_rest, held fixed. Then p_i / q_i
    is the same for all tokens in the bucket, so the KL divergence equals that of distributions in which the bucket is
    one token, and so does the sum of min(p, q). The gradient of every loss by the logits does as well: it pulls q_rest
    towards rest and leaves the proportions within the bucket alone, of which nothing is known. (Cross-entropy alone is
    reported higher, by rest x the entropy of q within the bucket. Accuracy is exact. The overlap is what it would be if
    all tokens of the bucket were the same.)
    """

    ids_CK: Tensor
    """Draft ids."""
    probability_CK: Tensor
    rest_C: Tensor
    best_C: Tensor

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        ids_CK, probability_CK = self.ids_CK, self.probability_CK.to(log_q_CW.dtype)
        if ids_CK.shape[-1] == log_q_CW.shape[-1]:
            return torch.zeros_like(log_q_CW).scatter(-1, ids_CK, probability_CK)
        within_CW = log_q_CW.detach().scatter(-1, ids_CK, float("-inf")).softmax(dim=-1)
        return (within_CW * self.rest_C[:, None]).scatter(-1, ids_CK, probability_CK)


class CacheSource:
    """Reads features from the cache in a folder."""

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
        self._shards: dict[int, tuple[Any, dict[str, list[int]]]] = {}
        self._vocabularies: dict[int, Tensor] = {}

    def prefetch(self, batch: TrainingBatch) -> None:
        """No-op."""

    def available(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch; documents that could not be fetched when the cache was written teach nothing in it."""
        documents = batch.documents or ()
        return batch.without([place for place, number in enumerate(documents) if number in self._failed])

    def __call__(self, batch: TrainingBatch) -> Features:
        if batch.documents is None:
            raise UserError(
                "the cache has documents of the data one by one and this batch has others; "
                'set data.join_share to 0 or features.source to "live"'
            )
        parts = [self._document(number) for number in batch.documents]
        device, tokens = batch.ids_T.device, len(batch.ids_T)
        found = {name: _together([part[name] for part in parts], device) for name in parts[0]}
        aux_TX = from_fp8(found["states"], found["scales"]) if "scales" in found else found["states"]
        assert len(aux_TX) <= tokens
        assert len(found["best"]) == len(batch.run_lengths)
        if len(aux_TX) < tokens:  # padding
            aux_TX = torch.cat([aux_TX, aux_TX.new_zeros(tokens - len(aux_TX), aux_TX.shape[-1])])
        # Rows are found in the order of the documents, which is the order of row_M.
        place_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        place_T[batch.row_M] = torch.arange(len(batch.row_M), device=device)

        def teacher(row_C: Tensor) -> TopKDistribution:
            place_C = place_T[row_C]
            return TopKDistribution(
                ids_CK=found["ids"][place_C].long(),
                probability_CK=found["probabilities"][place_C],
                rest_C=found["rest"][place_C],
                best_C=found["best"][place_C].long(),
            )

        def teacher_of(target_ids_W: Tensor) -> Teacher:
            self._require_vocabulary(target_ids_W)
            return teacher

        return Features(aux_TX=aux_TX, aux_layer_ids=self._key.aux_layer_ids, teachers=teacher_of)

    def _require_vocabulary(self, target_ids_W: Tensor) -> None:
        """Refuse a drafter whose vocabulary is not that of the cache."""
        if id(target_ids_W) in self._vocabularies:
            return
        ours = fingerprint_vocabulary(target_ids_W)
        if ours != self._key.vocabulary:
            raise UserError(
                f"the cache {self._folder} was made for the draft vocabulary {self._key.vocabulary} and a drafter has "
                f'{ours}; give all drafters the same one or set features.source to "live"'
            )
        # The tensor is kept so that its id is not used again.
        self._vocabularies[id(target_ids_W)] = target_ids_W

    def _document(self, number: int) -> dict[str, Tensor]:
        """Tensors of a document; views into its shard, which is mapped into memory."""
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        if place not in self._shards:
            path = self._folder / self._files[place]
            try:
                file = cast(Any, safe_open(path, framework="pt"))  # its methods are not typed
                tokens, rows = (file.get_tensor(f"{kind}_offsets").tolist() for kind in ("token", "row"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read ({error}); start again, and it is written anew") from error
            names = set(file.keys())
            offsets = {**dict.fromkeys(_PER_TOKEN, tokens), **dict.fromkeys(_PER_ROW, rows)}
            self._shards[place] = file, {name: starts for name, starts in offsets.items() if name in names}
        file, starts_of = self._shards[place]
        here = number - int(self._first[place])
        found = {name: file.get_slice(name)[starts[here] : starts[here + 1]] for name, starts in starts_of.items()}
        if number in self._failed:
            found |= {name: found[name][:0] for name in _PER_ROW}
        return found


def _together(pieces: list[Tensor], device: torch.device) -> Tensor:
    whole = torch.cat(pieces)
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole
