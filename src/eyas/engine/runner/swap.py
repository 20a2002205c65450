"""Another drafter for an engine at work: what must hold before, so that nothing is lost if it cannot be done.

The engine takes it between two steps (`Engine.swap_drafter`). No token depends on it: requests under way go on, and
those that the drafter follows read their tokens once more, since the target's states were kept for the old one alone.

Shapes: G key heads, K head dim.
"""

import torch

from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.memory import free_bytes
from eyas.errors import UserError
from eyas.kernels.attention.metadata import KVCache
from eyas.target.model import Target


def require_fit(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was made for another target, or does not lie where this one does."""
    config, facts = drafter.config, target.facts
    for name, has, needs in (
        ("vocab_size", config.vocab_size, facts.vocab_size),
        ("target_hidden_size", config.target_hidden_size, facts.hidden_size),
    ):
        if has != needs:
            raise UserError(f"the drafter's {name} is {has}, the target's is {needs}; choose one made for it")
    deepest = max(config.aux_layer_ids or (0,))
    if deepest > facts.num_hidden_layers:
        raise UserError(
            f"the drafter reads layer {deepest}, the target has {facts.num_hidden_layers}; choose one made for it"
        )
    weight = drafter.fc.weight
    if (weight.device, weight.dtype) != (target.device, target.dtype):
        raise UserError(
            f"the drafter is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}; move it"
        )


def reserve_cache(drafter: Drafter, *, blocks: int, block_size: int) -> KVCache:
    """Blocks for another drafter, all taken at once beside the old ones, or a refusal."""
    config, weight = drafter.config, drafter.fc.weight
    per_slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * weight.element_size()
    needed, free = per_slot * (blocks + 1) * block_size, free_bytes(weight.device)
    if needed > free:
        raise UserError(
            f"blocks for the drafter need {needed / 2**20:.1f} MiB, above the {free / 2**20:.1f} MiB that are free; "
            "choose a smaller one, or restart with less memory for blocks"
        )
    cache = KVCache(blocks=blocks, block_size=block_size)
    like_1GK = torch.empty(1, config.num_key_value_heads, config.head_dim, device=weight.device, dtype=weight.dtype)
    for layer in range(config.num_hidden_layers):
        cache.memory(layer, like_1GK, like_1GK)
    return cache
