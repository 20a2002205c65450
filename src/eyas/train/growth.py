"""A drafter that starts as a smaller one does: more layers, a wider MLP, more target states, other draft tokens.

What is new says nothing at first. Added channels of an MLP have gates of their own and a way out of zeros; an added
layer has zeros behind its attention and behind its MLP, so its residual passes through; fc has columns of zeros for an
added state of the target. Scores are those of the checkpoint, to the last bits of a sum, and gradients reach the zeros
from the first step on. So shapes can be compared without training each from scratch, and a drafter that has learnt for
hours need not start over to become larger.

The head keeps its rows for tokens that stay in the draft vocabulary. Rows of new tokens are made of the target's by the
linear map that comes nearest to turning the target's rows of those that stay into the drafter's (least squares): a
trained head has moved away from the target's, and rows as the target has them would shout all others down.

Shapes: D drafter state, E target state, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.vocab import DraftVocab, membership_from_target_ids, offsets_from_target_ids
from eyas.target.parts import TargetParts


def grown(checkpoint: Checkpoint, *, layers: int, intermediate_size: int, seed: int) -> Checkpoint:
    """The checkpoint with so many layers, at least its own, of MLPs so wide; weights are drawn by `seed`."""
    config = replace(checkpoint.config, num_hidden_layers=layers, intermediate_size=intermediate_size)
    if config == checkpoint.config:
        return checkpoint
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        newborn = new_drafter(config, own_embedding=False, own_head=False).state_dict()
    tensors = dict(checkpoint.tensors)
    for name, new in newborn.items():
        old = tensors.get(name)
        if old is not None and old.shape == new.shape:
            continue
        if name.rpartition(".")[0].endswith(("down_proj", "o_proj")):
            new = torch.zeros_like(new)
        if old is not None:
            new[tuple(slice(size) for size in old.shape)] = old
        tensors[name] = new
    return replace(checkpoint, config=config, tensors=tensors)


def with_layers_read(checkpoint: Checkpoint, layer_ids: Sequence[int]) -> Checkpoint:
    """The checkpoint reading the target's states `layer_ids` (ascending), which hold all that it has read."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    had = config.aux_layer_ids
    assert had is not None
    if tuple(layer_ids) == had:
        return checkpoint
    assert not config.norm_before_fc, "a norm over all states depends on which they are"
    columns = dict(zip(had, tensors["fc.weight"].chunk(len(had), dim=1), strict=True))
    nothing = torch.zeros_like(columns[had[0]])
    tensors["fc.weight"] = torch.cat([columns.get(k, nothing) for k in layer_ids], dim=1)
    if config.fc_norm:
        norms = {k: tensors.pop(f"fc_norm.{i}.weight") for i, k in enumerate(had)}
        for i, k in enumerate(layer_ids):
            tensors[f"fc_norm.{i}.weight"] = norms[k] if k in norms else torch.ones_like(norms[had[0]])
    config = replace(config, aux_layer_ids=tuple(layer_ids), num_aux_hidden_states=len(layer_ids))
    return replace(checkpoint, config=config, tensors=tensors)


def with_vocabulary(checkpoint: Checkpoint, target_ids_W: Tensor, target: TargetParts) -> Checkpoint:
    """The checkpoint, which has a head of its own, proposing these target ids (ascending)."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    head_WD = tensors["lm_head.weight"]
    vocab_size = config.vocab_size
    had_W = (
        DraftVocab.from_offsets(tensors["d2t"], vocab_size).target_ids_W if config.pruned else torch.arange(vocab_size)
    )
    row_V = torch.full((vocab_size,), -1)
    row_V[had_W] = torch.arange(len(had_W))
    row_W = row_V[target_ids_W]
    stays_W = row_W >= 0
    new_WD = head_WD.new_empty(len(target_ids_W), head_WD.shape[1])
    new_WD[stays_W] = head_WD[row_W[stays_W]]
    if not bool(stays_W.all()):
        theirs_VE = target.head.weight_VD.detach().double().cpu()
        map_ED = torch.linalg.lstsq(theirs_VE[had_W], head_WD.double(), driver="gelsd").solution
        new_WD[~stays_W] = (theirs_VE[target_ids_W[~stays_W]] @ map_ED).to(new_WD)
    tensors["lm_head.weight"] = new_WD
    config = replace(config, draft_vocab_size=len(target_ids_W))
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    if config.pruned:
        tensors["d2t"] = offsets_from_target_ids(target_ids_W)
        tensors["t2d"] = membership_from_target_ids(target_ids_W, vocab_size)
    return replace(checkpoint, config=config, tensors=tensors)
