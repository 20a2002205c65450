"""Trains a drafter further, compares it with the old one, and keeps it if it is better."""

import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.data.bad_records import BadRecords
from eyas.data.conversations import Conversation
from eyas.data.files import ConversationReader, expand_files
from eyas.drafter.checkpoint import Checkpoint, build_drafter, fingerprint_drafter, read_checkpoint, write_checkpoint
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.adaptation.judge import (
    REPLAY,
    TRAFFIC,
    AcceptanceChange,
    as_stored_like,
    compare,
    decide_adaptation,
    walk_conversations,
)
from eyas.train.adaptation.recipe import require_held_out
from eyas.train.corpus.encoding import EncodingProgress
from eyas.train.estimate import acceptance_file
from eyas.train.features import OpenSource
from eyas.train.journal import versions, write_text
from eyas.train.load_target import choose_training_device, load_training_target
from eyas.train.pace import Pace, PacedSources, rests_between_modules, threads_of
from eyas.train.plots import plot_adaptation
from eyas.train.ranks import Ranks
from eyas.train.recipe import Recipe
from eyas.train.run import precision_of, run
from eyas.train.run_data import RunData
from eyas.train.sources.live import LiveSource

logger = logging.getLogger(__name__)
SCHEMA = "eyas.adaptation/1"
RECORD = "record.json"
JUDGED_ON_CPU, JUDGED_ELSEWHERE = 64, 400
"""Conversations that are judged on at most."""


class AdaptationStoppedError(Exception):
    """Training was told to stop, and saved its state."""


@dataclass(kw_only=True)
class Adaptation:
    """An adaptation under way: `train` it, then `judge` it."""

    recipe: Recipe
    out: Path
    depth: int
    """Tokens drafted per round where drafters are judged."""
    max_loss: float
    """Share of the acceptance length on replayed conversations that may be lost."""
    device_share: float
    arguments: Mapping[str, Any]
    cache: Path | None

    def __post_init__(self) -> None:
        self._started = time.perf_counter()

    def train(
        self,
        *,
        resume: bool,
        stop: Callable[[], bool],
        on_first_step: Callable[[], None],
        on_encoded: Callable[[EncodingProgress], None],
        screen: AbstractContextManager[Any],
    ) -> None:
        """Train the drafter; `screen` is shown metrics."""
        self._pace = pace = self._new_pace(stop)
        self._target = load_training_target(self.recipe, Ranks(), self.cache)
        pace.rest()
        self._parts = TargetParts.of(self._target)
        live = functools.partial(LiveSource, self._target, chunk=self.recipe.train.chunk)
        self._open_source = PacedSources(open_source=live, pace=pace)

        def encoded(progress: EncodingProgress) -> None:
            on_encoded(progress)
            pace.rest()

        with rests_between_modules(pace, compiled=self.recipe.train.compile), screen as observer:
            outcome = run(
                self.recipe,
                self._parts,
                self._open_source,
                observers=[observer],
                stop=stop,
                on_first_step=on_first_step,
                resuming=resume,
                on_encoded=encoded,
                on_data=functools.partial(require_held_out, self.recipe),
                cache=self.cache,
                clock=pace.seconds_worked,
            )
        if not outcome.finished:
            raise AdaptationStoppedError(f"stopped at step {outcome.step} of {outcome.length}")
        self._outcome, self._trained = outcome, time.perf_counter()

    def judge(self, examine: Callable[[Target, Checkpoint, Pace], dict[str, Any]] | None) -> dict[str, Any]:
        """Compare old and new drafter, `examine` the new one, write what came of it and return the record."""
        started, trained, pace, start = self._started, self._trained, self._pace, self._start
        candidate = as_stored_like(self._outcome.drafters["drafter"], start)
        assert self._outcome.data is not None
        with rests_between_modules(pace):
            changes = self._judge(self._parts, self._open_source, candidate, self._outcome.data)
        verdict = decide_adaptation(changes, self.max_loss)
        judged = time.perf_counter()
        examined = {"skipped": "by --no-doctor"} if examine is None else examine(self._target, candidate, pace)
        record = self._record(self._parts, changes)
        record |= {"kept": verdict.kept, "verdict": verdict.text, "doctor": examined}
        record["device_share"] = {**pace.as_json(), "threads": torch.get_num_threads()}
        record["seconds"] = {
            "until_trained": round(trained - started, 1),
            "training": round(self._training_record()["training_seconds"], 1),
            "judging": round(judged - trained, 1),
            "doctor": round(time.perf_counter() - judged, 1),
            "total": round(time.perf_counter() - started, 1),
        }
        self._write(record, candidate, changes)
        return record

    @property
    def _start(self) -> str:
        assert self.recipe.drafter.init_from is not None
        return self.recipe.drafter.init_from

    def _new_pace(self, stop: Callable[[], bool]) -> Pace:
        """Start to measure the share of the device; on a CPU, leave threads to others too."""
        device = torch.device(choose_training_device(self.recipe.target.device))
        if device.type == "cpu":
            if self.device_share < 1:
                torch.set_num_threads(threads_of(self.device_share, torch.get_num_threads()))
            # Importing torch and reading answers were the processor's work too.
            return Pace(self.device_share, hurry=stop, before=time.process_time())
        return Pace(self.device_share, hurry=stop, synchronize=lambda: torch.accelerator.synchronize(device))

    def _judge(
        self, parts: TargetParts, open_source: OpenSource, candidate: Checkpoint, data: RunData
    ) -> dict[str, AcceptanceChange]:
        """Compare old and new drafter on held-out traffic, and on held-out conversations of --replay."""

        on_cpu = parts.device.type == "cpu"
        dtype = getattr(torch, precision_of(self.recipe, parts))
        drafters = {}
        for name, checkpoint in (("before", read_checkpoint(self._start)), ("after", candidate)):
            model = build_drafter(checkpoint).to(device=parts.device, dtype=dtype)
            drafters[name] = model.share_target(parts.embedding_VD.to(dtype), parts.head.weight_VD)
        changes = {}
        for name, corpus in ((TRAFFIC, data.held_out), (REPLAY, data.replay_held_out)):
            if corpus is None:
                continue
            last = np.unique(corpus.owners)[-(JUDGED_ON_CPU if on_cpu else JUDGED_ELSEWHERE) :]
            corpus = corpus.take(np.flatnonzero(np.isin(corpus.owners, last)))
            logger.info(f"judging old and new drafter on {corpus.conversations} held-out conversations ({name})")
            walked = walk_conversations(
                drafters,
                parts.facts,
                open_source,
                corpus,
                depth=self.depth,
                pack_length=self.recipe.data.pack_length,
                chunk=self.recipe.train.chunk,
                device=parts.device,
            )
            changes[name] = compare(walked["before"], walked["after"])
        return changes

    def _record(self, parts: TargetParts, changes: Mapping[str, AcceptanceChange]) -> dict[str, Any]:
        training = self._training_record()
        return {
            "schema": SCHEMA,
            "versions": versions(),
            "arguments": dict(self.arguments),
            "from": {"drafter": self._start, "fingerprint": fingerprint_drafter(self._start)},
            "target": {**asdict(parts.facts), "fingerprint": parts.fingerprint},
            "data": training["data"],
            "recipe": training["recipe"],
            "steps": training["step"],
            "depth": self.depth,
            "changes": {name: change.as_json() for name, change in changes.items()},
        }

    def _training_record(self) -> dict[str, Any]:
        text = (Path(self.recipe.output.folder) / RECORD).read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
        return record

    def _write(self, record: dict[str, Any], candidate: Checkpoint, changes: Mapping[str, AcceptanceChange]) -> None:
        place = self.out / "drafter"
        if record["kept"]:
            story = {RECORD: json.dumps(record, indent=1) + "\n", **acceptance_file(changes[TRAFFIC].after)}
            write_checkpoint(candidate, place, replace=True, beside=story)
            record["drafter"] = {"folder": str(place), "fingerprint": fingerprint_drafter(str(place))}
        elif (place / RECORD).exists():  # of an earlier adaptation; it must not be taken for this one's
            _remove(place)
        write_text(self.out / RECORD, json.dumps(record, indent=1))
        plot_adaptation(record["changes"], self.out / "adaptation.png")


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is of an earlier adaptation and cannot be removed: {error.strerror or error}; remove it"
        ) from error


def read_all(files: Sequence[str], bad: BadRecords) -> list[Conversation]:
    """Read all conversations in order; bad records are counted in `bad`."""
    return list(ConversationReader(expand_files(files), bad))


def longest_of(conversations: Sequence[Conversation]) -> int | None:
    """Tokens of the longest, where all of them came with their tokens."""
    if not all(conversation.samples for conversation in conversations):
        return None
    return max(
        (len(one.prompt_ids) + len(one.answer_ids) for conversation in conversations for one in conversation.samples),
        default=None,
    )
