"""Loading a drafter that may be ill: what a strict reader refuses for a flag, the doctor wants to see.

Only tensors that the config does not mention are forgiven (a norm that was trained and whose flag was lost); they are
kept aside for the repairs. Everything else that is wrong with a checkpoint stops here as it does everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from eyas.doctor.subject import Subject, share
from eyas.drafter.check import check
from eyas.drafter.checkpoint import Checkpoint, build_drafter, read_unchecked, tensor_problems
from eyas.drafter.tensors import expected_tensors
from eyas.errors import UserError
from eyas.target.model import Target

FORGIVEN = ("fc_norm.", "input_norm.")


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterCandidate:
    """A drafter, what it ships unused, and what is strange about it at first sight."""

    source: str
    subject: Subject
    unused: Mapping[str, Tensor]
    remarks: tuple[str, ...]


def load_candidate(source: str, name: str, target: Target) -> DrafterCandidate:
    """Read from disk and prepare for the target."""
    remarks = tuple(
        found.message for found in check(source, target=target.facts).findings if found.severity == "warning"
    )
    return prepare_candidate(read_unchecked(source), name, target, source=source, remarks=remarks)


def prepare_candidate(
    checkpoint: Checkpoint, name: str, target: Target, *, source: str = "memory", remarks: tuple[str, ...] = ()
) -> DrafterCandidate:
    """Build what can be built, set aside what is not used, refuse the rest."""
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
