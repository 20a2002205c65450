"""The conversations of a recipe as tokens: what is trained on, what is mixed in, what is held out.

Text is encoded once and kept beside the run, so whoever asks again, as a run that is taken up does, has it at once.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.author_check import AuthorCheck
from eyas.data.files import expand_files
from eyas.errors import UserError
from eyas.target.parts import TargetParts
from eyas.train.batch import teaching_rows
from eyas.train.corpus.cache import load_or_encode
from eyas.train.corpus.corpus import Corpus, Replay, concatenate, split
from eyas.train.corpus.encoding import EncodingProgress, EncodingSettings, encode_corpus, fingerprint_tokenizer
from eyas.train.corpus.packing import FitCounts
from eyas.train.ranks import Ranks
from eyas.train.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    """The conversations of a run."""

    corpus: Corpus
    """Trained on; documents that are only mixed in come last."""
    replay: Replay | None
    """Which those are."""
    held_out: Corpus | None
    """Of the conversations that are trained on, or of a file of their own."""
    replay_held_out: Corpus | None
    """Of those that are mixed in."""
    record: dict[str, Any]


def read_data(
    recipe: Recipe,
    target: TargetParts,
    *,
    on_encoded: Callable[[EncodingProgress], None] | None = None,
    cache: Path | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen, and alone is the common case
) -> RunData:
    """Read and encode what the recipe names; `cache` is where the target was found, if not in the user's."""
    data, settings = recipe.data, EncodingSettings.of(recipe, cache=cache)
    tokenizer = fingerprint_tokenizer(target.tokenizer, target.stop_ids)
    check = AuthorCheck.of(target, allow_others=data.allow_other_authors)
    key = {**settings.as_json(), "tokenizer": tokenizer, "max_bad_share": data.max_bad_share}
    key |= {"author": check.fingerprint, "allow_other_authors": check.allow_others}

    def read(files: Sequence[str], name: str) -> tuple[Corpus, dict[str, Any]]:
        paths = expand_files(files)

        def encode() -> tuple[Corpus, FitCounts]:
            logger.info(f"encoding {', '.join(files)}")
            return encode_corpus(
                paths,
                settings,
                workers=data.workers,
                max_bad_share=data.max_bad_share,
                check=check,
                on_progress=on_encoded,
            )

        place = Path(recipe.output.folder) / "encoded" / f"{name}.safetensors"
        if not ranks.is_main:  # the leader encodes, the others find it done
            ranks.barrier()
        corpus, counts = load_or_encode(place, paths, key, encode)
        if ranks.is_main:
            ranks.barrier()
        return corpus, {"files": list(files), **counts}

    corpus, record = read(data.files, "train")
    if ranks.is_main:
        _report_bad(record)
    held_out: Corpus | None = None
    held_out_record: dict[str, Any] = {}
    if data.held_out is not None:
        held_out, held_out_record = read([data.held_out], "held-out")
    elif data.held_out_share:
        corpus, held_out = split(
            corpus, data.held_out_share, data.seed, newest=data.held_out_newest, least=data.held_out_least
        )
    if not len(teaching_rows(corpus.mask, corpus.positions)):
        raise UserError(
            f"the answers of {corpus.conversations} conversations have one token each, or none, and a draft is of the "
            "second; give longer answers"
        )
    logger.info(
        f"{corpus.conversations:,} conversations, {corpus.tokens:,} tokens, {corpus.trainable:,} of them trained on; "
        f"{record['cut']:,} cut at turns, {record['too_long']:,} too long, {record['unanswered']:,} unanswered; "
        f"{0 if held_out is None else held_out.conversations:,} held out"
    )
    if record["unwritten"]:
        logger.warning(
            f"{record['unwritten']:,} answers call tools that the chat template does not write, and are left out; "
            "answers that the target gives itself (eyas data answer) keep what it said"
        )
    record |= _sizes(corpus) | {"held_out": held_out_record}
    if not data.replay or not data.replay_share:
        record |= {"fingerprint": fingerprint_corpus(corpus)}
        return RunData(corpus=corpus, replay=None, held_out=held_out, replay_held_out=None, record=record)
    mixed_in, replay_record = read(data.replay, "replay")
    if ranks.is_main:
        _report_bad(replay_record)
    replay_held_out: Corpus | None = None
    if data.held_out_share and mixed_in.conversations > 1:
        mixed_in, replay_held_out = split(mixed_in, data.held_out_share, data.seed, least=data.held_out_least)
    logger.info(
        f"{data.replay_share:.0%} of the tokens of an epoch are of {mixed_in.conversations:,} conversations of "
        f"{', '.join(data.replay)}; {0 if replay_held_out is None else replay_held_out.conversations:,} held out"
    )
    replay = Replay(first=len(corpus), share=data.replay_share)
    corpus = concatenate([corpus, mixed_in])
    record |= {"replay": replay_record | _sizes(mixed_in), "fingerprint": fingerprint_corpus(corpus)}
    return RunData(corpus=corpus, replay=replay, held_out=held_out, replay_held_out=replay_held_out, record=record)


def fingerprint_corpus(corpus: Corpus) -> str:
    """Tells one corpus from another."""
    digest = hashlib.sha256()
    for array in (corpus.ids, corpus.mask, corpus.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _sizes(corpus: Corpus) -> dict[str, int]:
    return {
        "conversations": corpus.conversations,
        "rows": len(corpus),
        "tokens": corpus.tokens,
        "trained_on": corpus.trainable,
    }


def _report_bad(record: dict[str, Any]) -> None:
    if bad := record["bad"]["records"]:
        logger.warning(f"{bad:,} of {record['bad']['read']:,} records are bad and skipped:")
        for reason, count in record["bad"]["by_reason"].items():
            logger.warning(f"  {count:,} x {reason}, as {record['bad']['examples'][reason][0]}")
