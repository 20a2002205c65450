"""Healthy drafters of the tiny target and the ten ways to break one without any shape to show it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

import tiny
from eyas.drafter.checkpoint import Checkpoint, checkpoint_of
from eyas.drafter.model import Drafter
from eyas.drafter.vocab import membership_from_target_ids, offsets_from_target_ids

KEPT = torch.arange(tiny.VOCAB)[torch.arange(tiny.VOCAB) % 12 != 11]
"""A pruned vocabulary: every twelfth token cannot be drafted."""


def broken(drafter: Drafter, embedding_VD: Tensor) -> dict[str, Checkpoint]:
    """A checkpoint for each fault, by the name that the verdict must give it; `drafter` is a pruned EAGLE-3.1 one."""
    healthy = checkpoint_of(drafter)
    generator = torch.Generator().manual_seed(0)

    def with_tensors(**tensors: Tensor | None) -> Checkpoint:
        changed: Mapping[str, Tensor | None] = {
            **healthy.tensors,
            **{name.replace("__", "."): tensor for name, tensor in tensors.items()},
        }
        return replace(healthy, tensors={name: tensor for name, tensor in changed.items() if tensor is not None})

    def with_config(**changes: object) -> Checkpoint:
        return replace(healthy, config=replace(healthy.config, **changes))  # type: ignore[arg-type]

    fc = healthy.tensors["fc.weight"]
    blocks = fc.chunk(3, dim=-1)
    moved = drafter.vocab().target_ids_W + 1
    rope = {**healthy.config.rope_parameters, "rope_theta": 3.0}
    ids = healthy.config.aux_layer_ids
    assert ids is not None
    return {
        # The flag alone is turned: the norms are still shipped, and a lenient server would drop them.
        "fc_norm": with_config(fc_norm=False),
        "norm_output": with_config(norm_output=False),
        "norm_before_residual": with_config(norm_before_residual=True),
        "aux_layers": with_config(aux_layer_ids=tuple(k + 1 for k in ids)),
        "fc_columns": with_tensors(fc__weight=torch.cat([blocks[1], blocks[2], blocks[0]], dim=-1)),
        "embeddings": with_tensors(embed_tokens__weight=embedding_VD[torch.randperm(len(embedding_VD))]),
        "d2t": with_tensors(
            d2t=offsets_from_target_ids(moved), t2d=membership_from_target_ids(moved, healthy.config.vocab_size)
        ),
        "rope_base": with_config(rope_parameters=rope),
        "fc_damaged": with_tensors(fc__weight=fc + 2 * fc.std() * torch.randn(fc.shape, generator=generator)),
        "wrong_target": healthy,
    }
