"""A corpus as the loop takes it: packs in an order of their own every epoch, each built when its turn comes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.train.batch import TrainingBatch
from eyas.train.corpus.corpus import Corpus, Pack, Replay, packs
from eyas.train.loop import PlannedBatch


@dataclass(frozen=True, kw_only=True)
class CorpusPacks:
    """Epochs of packs."""

    corpus: Corpus
    length: int
    seed: int
    device: torch.device
    padded: bool
    """Whether every pack has the full length: compiled code wants one shape, everything else less work."""
    join_share: float = 0.0
    join_length: int = 0
    first_document: int = 0
    """Number of the corpus's first document among all documents of the run: held-out ones come behind the others."""
    replay: Replay | None = None
    """Which documents are only mixed in; None: none."""

    def epoch(self, number: int) -> Sequence[PlannedBatch]:
        """All packs of one epoch, in order."""
        chosen = packs(
            self.corpus,
            length=self.length,
            seed=self.seed,
            epoch=number,
            join_share=self.join_share,
            join_length=self.join_length,
            replay=self.replay,
        )
        return [
            PlannedBatch(name=self._name(number, place, pack), build=lambda pack=pack: self._build(pack))  # type: ignore[misc]
            for place, pack in enumerate(chosen)
        ]

    def _build(self, pack: Pack) -> TrainingBatch:
        return TrainingBatch.from_pack(
            self.corpus,
            pack,
            self.length if self.padded else None,
            device=self.device,
            first_document=self.first_document,
        )

    def _name(self, epoch: int, place: int, pack: Pack) -> str:
        members = [index for document in pack for index in document]
        shown = ", ".join(str(index + 1) for index in members[:8]) + (", ..." if len(members) > 8 else "")
        return f"pack {place + 1} of epoch {epoch + 1} (conversations {shown} of those kept)"
