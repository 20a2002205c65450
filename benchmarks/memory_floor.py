"""Lower bound of step time: the bytes that a step must read, over the memory bandwidth."""

import time
from collections.abc import Callable

import torch
from torch import nn

from eyas.drafter.cost import kv_bytes_per_token
from eyas.drafter.model import Drafter
from eyas.engine.config import weight_bytes
from eyas.plan.kv_cache_dtype import KVCacheKind, kv_element
from eyas.target.model import Target

TRIALS = 5
GIB = 2**30


def bandwidth(device: torch.device) -> float:
    """Measured memory bandwidth: the best of a copy, which reads and writes, and of a sum, which reads.

    A step nearly only reads, and some memories are faster at that than at both.
    """
    size = 4 * GIB if device.type == "cuda" else GIB // 4
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    destination = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(lambda: destination.copy_(source), device)
    summed = source.nbytes / _seconds(lambda: source.sum(), device)
    return max(copied, summed)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several trials, after a warm-up."""
    times = []
    for _ in range(1 + TRIALS):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_bytes(
    target: Target,
    drafter: Drafter | None,
    *,
    users: int,
    context: float,
    depth: int,
    drafter_context: float | None = None,
    kv_cache_dtype: KVCacheKind = "auto",
) -> int:
    """Bytes that a step reads: every weight once in a pass, and keys and values of all users.

    Of experts those that tokens choose, if they choose by chance. With drafts that is one pass of the target and
    `depth` of the drafter, of which only the first reads the target's states. The drafter may see less of a context
    than the target does. Activations are left out: they stay in caches.
    """
    model, seen = target.model, context if drafter_context is None else min(context, drafter_context)
    element = kv_element(kv_cache_dtype, next(model.parameters()).element_size())
    read = weight_bytes(model) + int(users * context * _kv_numbers_of(model) * element)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight.data_ptr() != head.weight.data_ptr():
        read -= embedding.weight.nbytes  # a row per token is looked up in it
    read -= int(_experts_left_out(model, tokens=users * (1 + depth)))
    if drafter is not None and depth:
        own, first = weight_bytes(drafter, beside=model), drafter.fc.weight.nbytes
        computed = str(drafter.fc.weight.dtype).removeprefix("torch.")
        token = kv_bytes_per_token(drafter.config, "fp8" if kv_cache_dtype == "fp8" else computed)
        read += first + depth * (own - first + int(users * seen * token))
    return read


def _experts_left_out(model: nn.Module, *, tokens: int) -> float:
    """Bytes of the experts that no token of a pass is likely to choose."""
    active = getattr(model.config, "num_experts_per_tok", 0)
    experts = [weight for weight in model.parameters() if weight.ndim == 3]
    return sum(weight.nbytes * (1 - active / len(weight)) ** tokens for weight in experts)


def _kv_numbers_of(model: nn.Module) -> int:
    """Keys and values of a token in every layer of a Llama."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim)
