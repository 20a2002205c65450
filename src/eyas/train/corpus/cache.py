"""A corpus that was encoded before: kept beside the run, so that taking it up again does not tokenise everything anew.

A file belongs to the very input it was made from: contents of the files, target and settings are part of its key, and
one that belongs to something else is made again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eyas.atomic import new_file
from eyas.checksum import sha256_of
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.packing import FitCounts

Encode = Callable[[], tuple[Corpus, FitCounts]]


def load_or_encode(
    place: Path, files: Sequence[Path], settings: Mapping[str, Any], encode: Encode
) -> tuple[Corpus, dict[str, Any]]:
    """The corpus in `place` if it was made from these files with these settings; otherwise encode and put it there.

    Comes with the counts of what became of the conversations.
    """
    key = json.dumps({"files": [sha256_of(file) for file in files], **settings}, sort_keys=True)
    if (found := _read(place, key)) is not None:
        return found
    corpus, counts = encode()
    counted = counts.as_json()
    metadata = {"key": key, "counts": json.dumps(counted)}
    own = corpus.owners
    tensors = {"ids": corpus.ids, "mask": corpus.mask, "offsets": corpus.offsets, "conversation": own}
    with new_file(place) as staging:
        try:
            save_file(tensors, staging, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    return corpus, counted


def _read(place: Path, key: str) -> tuple[Corpus, dict[str, Any]] | None:
    try:
        with safe_open(place, framework="numpy") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("key") != key:
                return None
            names = ("ids", "mask", "offsets", "conversation")
            ids, mask, offsets, conversation = (np.asarray(stored.get_tensor(name)) for name in names)
    except (OSError, SafetensorError):
        return None
    corpus = Corpus(ids=ids, mask=mask, offsets=offsets, conversation=conversation)
    return corpus, json.loads(metadata["counts"])
