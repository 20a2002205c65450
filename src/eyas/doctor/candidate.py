"""Loading of drafters under examination, including ones with a wrong flag that strict readers refuse.

Only tensors that the config does not mention are allowed (a norm that was trained and whose flag was lost); they are
kept aside for the repairs. Everything else that is wrong with a checkpoint is refused here as everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from eyas.doctor.rounds import Noise, Rounds, run_rounds
from eyas.doctor.transcripts import Transcript
from eyas.drafter.check import check
from eyas.drafter.checkpoint import Checkpoint, build_drafter, read_unchecked, tensor_problems
from eyas.drafter.model import Drafter
from eyas.drafter.tensors import expected_tensors
from eyas.errors import UserError
from eyas.target.model import Target

FORGIVEN = ("fc_norm.", "input_norm.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A drafter ready to run: name, weights and the target's layers that it reads."""

    name: str
    drafter: Drafter
    layer_ids: tuple[int, ...]

    def rounds(self, transcripts: Sequence[Transcript], depth: int, noise: Noise | None = None) -> dict[int, Rounds]:
        """Draft all transcripts, by key; answers too short for any round are left out."""
        found = (
            run_rounds(self.drafter, transcript, depth=depth, layer_ids=self.layer_ids, noise=noise, to_first_miss=True)
            for transcript in transcripts
        )
        return {one.key: one for one in found if one is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterCandidate:
    """A drafter, the tensors of its files that it does not use, and remarks on its files."""

    source: str
    subject: Subject
    unused: Mapping[str, Tensor]
    remarks: tuple[str, ...]


def share(drafter: Drafter, target: Target) -> Drafter:
    """Give a drafter the target's tensors that it borrows; of a packed head it gets a plain copy."""
    embedding_VD = target.embedding()
    return drafter.share_target(
        embedding_VD, target.head() if drafter.shares_head else embedding_VD, target.last_norm()
    )


def load_candidate(source: str, name: str, target: Target) -> DrafterCandidate:
    """Read a drafter from disk and prepare it for the target."""
    remarks = tuple(
        found.message for found in check(source, target=target.facts).findings if found.severity == "warning"
    )
    return prepare_candidate(read_unchecked(source), name, target, source=source, remarks=remarks)


def prepare_candidate(
    checkpoint: Checkpoint, name: str, target: Target, *, source: str = "memory", remarks: tuple[str, ...] = ()
) -> DrafterCandidate:
    """Build the drafter and set aside unused tensors; refuse everything else that is wrong."""
    if checkpoint.config.eagle1:
        raise UserError(
            f"{source} is an EAGLE-1 drafter; the doctor looks for faults of EAGLE-3 drafters, in norms and fusions "
            "that this one has not: measure it with `eyas eval`"
        )
    expected = expected_tensors(checkpoint.config)
    unused = {n: t for n, t in checkpoint.tensors.items() if n not in expected and n.startswith(FORGIVEN)}
    used = {n: t for n, t in checkpoint.tensors.items() if n not in unused}
    problems = tensor_problems(checkpoint.config, used)
    config, facts = checkpoint.config, target.facts
    if config.vocab_size != facts.vocab_size or config.target_hidden_size != facts.hidden_size:
        problems.append(
            f"it was made for a target of vocabulary {config.vocab_size} and width {config.target_hidden_size}, and "
            f"{facts.source} has {facts.vocab_size} and {facts.hidden_size}; choose its own target"
        )
    if problems:
        raise UserError(f"{source}: {problems[0]}")
    drafter = build_drafter(replace(checkpoint, tensors=used)).to(device=target.device, dtype=target.dtype)
    layer_ids = config.layers_read(facts)
    if layer_ids[-1] > facts.num_hidden_layers:
        raise UserError(
            f"{source}: auxiliary layer id {layer_ids[-1]} is above the {facts.num_hidden_layers} layers of "
            f"{facts.source}; choose its own target"
        )
    subject = Subject(name=name, drafter=share(drafter, target), layer_ids=tuple(layer_ids))
    if unused:
        remarks = (*remarks, f"ships {', '.join(sorted(unused))}, which its config.json does not ask for")
    return DrafterCandidate(source=source, subject=subject, unused=unused, remarks=remarks)
