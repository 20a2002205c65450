"""Repairs of what could be wrong with a checkpoint: a flag, a layer, a table, a rope base.

A fault that leaves every shape intact gives no error, only a lower acceptance length. Each known fault has a repair
that undoes it in memory; if acceptance jumps under a repair, that names the fault. Nothing on disk is changed.

How much a drafter resembles the target is evidence besides acceptance. Drafters mostly start from the target's own head
rows and embeddings. Then each row of the draft head resembles the row of its target token; a wrong table of ids, or
another target, breaks that.

Shapes: H drafter hidden, D hidden, X = A * target hidden, V target vocabulary, W draft vocabulary, N sampled rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor
from torch.nn import functional

from eyas.doctor.candidate import Subject, share
from eyas.drafter.checkpoint import build_drafter, checkpoint_of
from eyas.drafter.model import Drafter
from eyas.drafter.vocab import membership_from_target_ids, offsets_from_target_ids
from eyas.target.model import Target

ROPE_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
MOST_PERMUTED = 4
"""States of which every order is tried; of more states, only their reversal."""
SAMPLED = 512
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class Resemblance:
    """Median cosines between tensors of drafter and target; None where there is nothing to compare."""

    embedding: float | None
    """Of the drafter's own embeddings with the target's, row by row."""
    head: float | None
    """Of rows of the draft head with the rows of their target tokens by d2t."""
    head_best: float | None
    """Of rows of the draft head with the most similar row of the target."""
    head_agreement: float | None
    """Share of the sampled rows whose most similar row is the one that d2t names."""


@torch.inference_mode()
def measure_resemblance(drafter: Drafter, target: Target) -> Resemblance:
    """Compare the drafter's own tensors with the target's."""
    embedding = head = best = agreement = None
    if not drafter.shares_embedding and drafter.embed_tokens is not None:
        ours_VD, theirs_VD = drafter.embed_tokens.weight, target.embedding()
        if ours_VD.shape == theirs_VD.shape:
            embedding = float(functional.cosine_similarity(ours_VD.float(), theirs_VD.float(), dim=-1).median())
    if not drafter.shares_head and drafter.lm_head is not None:
        ours_WD, theirs_VD = drafter.lm_head.weight, target.head()
        if ours_WD.shape[1] == theirs_VD.shape[1]:
            ids_W = drafter.vocab().target_ids_W
            rows_N = torch.linspace(0, len(ids_W) - 1, min(SAMPLED, len(ids_W)), device=ids_W.device).long()
            named = functional.cosine_similarity(ours_WD[rows_N].float(), theirs_VD[ids_W[rows_N]].float(), dim=-1)
            similar_N, index_N = _most_similar(ours_WD[rows_N], theirs_VD)
            head, best = float(named.median()), float(similar_N.median())
            agreement = float((index_N == ids_W[rows_N]).float().mean())
    return Resemblance(embedding=embedding, head=head, head_best=best, head_agreement=agreement)


@torch.inference_mode()
def _vocabulary_by_head(drafter: Drafter, target: Target) -> Tensor | None:
    """Match target ids [W] to the rows of the head; None where the match is weak or not unique."""
    if drafter.lm_head is None or drafter.lm_head.weight.shape[1] != target.head().shape[1]:
        return None
    similar_W, index_W = _most_similar(drafter.lm_head.weight, target.head())
    doubles = len(index_W) - len(torch.unique(index_W))
    return None if float(similar_W.median()) < 0.5 or doubles else index_W


def _most_similar(ours_ND: Tensor, theirs_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Largest cosine of each row with the target's rows, and the index of that row."""
    theirs = functional.normalize(theirs_VD.float(), dim=-1)
    found = [
        (functional.normalize(rows.float(), dim=-1) @ theirs.T).max(dim=-1) for rows in torch.split(ours_ND, CHUNK)
    ]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


@dataclass(frozen=True, kw_only=True, eq=False)
class Repair:
    """A drafter with one thing changed."""

    fault: str
    """Fault that is there if this helps: a key of `verdict.FAULTS`."""
    about: str
    """The change, in words that complete "acceptance rises when ..."."""
    advice: str
    subject: Subject
    suspected: bool = False
    """Whether there is evidence besides acceptance; then a smaller jump suffices."""


def repairs(
    subject: Subject, target: Target, resemblance: Resemblance, unused: Mapping[str, Tensor] | None = None
) -> Iterator[Repair]:
    """Make all repairs that apply to this drafter; `unused` are tensors that it has and its config does not mention."""
    yield from _flags(subject, target, unused or {})
    yield from _layers(subject, target)
    yield from _columns(subject, target)
    yield from _embeddings(subject, target, resemblance)
    yield from _vocabularies(subject, target, resemblance)
    yield from _ropes(subject, target)


def variant(
    subject: Subject, target: Target, *, tensors: Mapping[str, Tensor | None] | None = None, **config: object
) -> Subject:
    """Change tensors (None removes one) and config of a drafter; borrowed tensors stay borrowed."""
    stored = checkpoint_of(subject.drafter)
    changed = {**stored.tensors, **(tensors or {})}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    made = build_drafter(replace(stored, config=replace(stored.config, **config), tensors=kept))  # type: ignore[arg-type]
    made = made.to(device=target.device, dtype=subject.drafter.fc.weight.dtype)
    return replace(subject, drafter=share(made, target))


def _flags(subject: Subject, target: Target, unused: Mapping[str, Tensor]) -> Iterator[Repair]:
    config, drafter = subject.drafter.config, subject.drafter
    states, size = config.num_aux_hidden_states, config.target_hidden_size

    def flipped(flag: str, *, suspected: bool = False, tensors: Mapping[str, Tensor | None] | None = None) -> Repair:
        now = bool(getattr(config, flag))
        about = f"{flag} is {'false' if now else 'true'} instead of {'true' if now else 'false'}"
        return Repair(
            fault=flag,
            about=about,
            advice=f"set {flag} to {'false' if now else 'true'} in config.json, or export the drafter again",
            subject=variant(subject, target, tensors=tensors, **{flag: not now}),
            suspected=suspected,
        )

    yield flipped("norm_output")
    yield flipped("norm_before_residual")
    ones = torch.ones(size, dtype=drafter.fc.weight.dtype)
    norms = {f"fc_norm.{i}.weight": unused.get(f"fc_norm.{i}.weight", ones) for i in range(states)}
    shipped = any(name.startswith("fc_norm.") for name in unused)
    if config.fc_norm:
        yield flipped("fc_norm", tensors=dict.fromkeys(norms))
    elif not config.norm_before_fc:
        yield flipped("fc_norm", tensors=norms, suspected=shipped)
    if config.norm_before_fc:
        yield flipped("norm_before_fc", tensors={"input_norm.weight": None})
    elif not config.fc_norm and config.mla is None:
        whole = unused.get("input_norm.weight", ones.repeat(states))
        yield flipped("norm_before_fc", tensors={"input_norm.weight": whole}, suspected="input_norm.weight" in unused)


def _layers(subject: Subject, target: Target) -> Iterator[Repair]:
    most, ids = target.facts.num_hidden_layers, subject.layer_ids
    tried = [tuple(k + by for k in ids) for by in (1, -1, 2, -2)]
    if most >= 7 and len(ids) == 3:
        tried.append(target.facts.default_aux_layer_ids())
    for others in dict.fromkeys(tried):
        if others != ids and others[0] >= 0 and others[-1] <= most:
            yield Repair(
                fault="aux_layers",
                about=f"the states are read after layers {list(others)} instead of {list(ids)}",
                advice=f"write {list(others)} as eagle_aux_hidden_state_layer_ids, at both places of config.json",
                subject=replace(subject, layer_ids=others),
            )


def _columns(subject: Subject, target: Target) -> Iterator[Repair]:
    states = subject.drafter.config.num_aux_hidden_states
    columns = subject.drafter.fc.weight.detach().chunk(states, dim=-1)
    orders = list(permutations(range(states))) if states <= MOST_PERMUTED else [tuple(reversed(range(states)))]
    for order in orders:
        if order != tuple(range(states)):
            yield Repair(
                fault="fc_columns",
                about=f"the blocks of fc's columns are taken in the order {list(order)}",
                advice="export fc.weight with its columns in ascending order of the layers, as every server reads them",
                subject=variant(subject, target, tensors={"fc.weight": torch.cat([columns[i] for i in order], dim=-1)}),
            )


def _embeddings(subject: Subject, target: Target, resemblance: Resemblance) -> Iterator[Repair]:
    drafter = subject.drafter
    if drafter.shares_embedding or drafter.embed_tokens is None:
        return
    table_VH = target.embedding()
    if drafter.embed_tokens.weight.shape == table_VH.shape:
        yield Repair(
            fault="embeddings",
            about="the target's embeddings are used instead of the shipped ones",
            advice="leave embed_tokens.weight out of the checkpoint, or export the target's table",
            subject=variant(subject, target, tensors={"embed_tokens.weight": table_VH}),
            suspected=resemblance.embedding is not None and resemblance.embedding < 0.9,
        )


def _vocabularies(subject: Subject, target: Target, resemblance: Resemblance) -> Iterator[Repair]:
    drafter = subject.drafter
    if drafter.d2t is None:
        return
    ids_W, size = drafter.vocab().target_ids_W, drafter.config.vocab_size
    suspected = resemblance.head_agreement is not None and resemblance.head_agreement < 0.5
    by_head = _vocabulary_by_head(drafter, target) if suspected else None
    tried = {
        "draft ids are moved by one row": ids_W.roll(-1),
        "draft ids are moved back by one row": ids_W.roll(1),
        "target ids are one lower": (ids_W - 1).clamp(min=0),
        "target ids are one higher": (ids_W + 1).clamp(max=size - 1),
    }
    if by_head is not None:
        tried["every draft id stands for the target token whose head row it resembles"] = by_head
    for about, other_W in tried.items():
        offsets = {"d2t": offsets_from_target_ids(other_W), "t2d": membership_from_target_ids(other_W, size)}
        if len(torch.unique(other_W)) == len(other_W):
            yield Repair(
                fault="d2t",
                about=about,
                advice="rebuild d2t (target id minus draft id) from the vocabulary the drafter was trained with",
                subject=variant(subject, target, tensors=offsets),
                suspected=suspected,
            )


def _ropes(subject: Subject, target: Target) -> Iterator[Repair]:
    own = subject.drafter.config.rope_parameters
    theirs = getattr(target.model.config.get_text_config(), "rope_parameters", None) or {}
    of_target = theirs.get("rope_theta")
    bases = [float(base) for base in (of_target, *ROPE_BASES) if isinstance(base, int | float)]
    for base in dict.fromkeys(bases):
        if base != float(own["rope_theta"]):
            yield Repair(
                fault="rope_base",
                about=f"rope_theta is {base:g} instead of {float(own['rope_theta']):g}",
                advice=f"write rope_theta {base:g} into config.json (rope_parameters), if the drafter was trained so",
                subject=variant(subject, target, rope_parameters={**own, "rope_theta": base}),
                suspected=base == of_target,
            )
