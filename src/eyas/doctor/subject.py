"""A drafter under examination, ready to run."""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.doctor.rounds import Noise, Rounds, run_rounds
from eyas.doctor.transcripts import Transcript
from eyas.drafter.model import Drafter
from eyas.target.model import Target


def share(drafter: Drafter, target: Target) -> Drafter:
    """Give a drafter what it takes from its target, and only that: a packed head is copied to be read."""
    embedding_VD = target.embedding()
    return drafter.share_target(
        embedding_VD, target.head() if drafter.shares_head else embedding_VD, target.last_norm()
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """Name, weights and the target's layers it reads."""

    name: str
    drafter: Drafter
    layer_ids: tuple[int, ...]

    def rounds(self, transcripts: Sequence[Transcript], depth: int, noise: Noise | None = None) -> dict[int, Rounds]:
        """By key; answers too short for any round are left out."""
        found = (
            run_rounds(self.drafter, transcript, depth=depth, layer_ids=self.layer_ids, noise=noise, to_first_miss=True)
            for transcript in transcripts
        )
        return {one.key: one for one in found if one is not None}
