"""Engine configuration, and what is derived from it at start: the longest context and the number of blocks."""

from dataclasses import dataclass

import torch
from torch import nn

from eyas.drafter.cost import kv_bytes_per_token
from eyas.drafter.model import Drafter
from eyas.engine.kv_cache.cache import KVCache, free_bytes
from eyas.engine.runner.target import TargetRunner
from eyas.engine.speculation.draft import MOST_IN_CHAIN, Tree
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.kernels.attention.choose import has_triton
from eyas.kernels.attention.kv_dtype import FP8
from eyas.kernels.linear.served_linear import packed_tensors
from eyas.plan.footprint import CUDA_RUNTIME, Room, default_batched_tokens, recorded_bytes, working_bytes
from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
from eyas.plan.memory import BlockBudget, Footprint, plan_blocks, size
from eyas.plan.shapes import OFFERED
from eyas.target.model import Target

FP8_CAPABILITY = 8, 9
"""Compute capability from which GPUs convert 8-bit floats (Ada, Hopper)."""
LONGEST = 8192
"""Default limit of prompt and answer tokens, for targets with a longer context."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Capacity and drafting options of an engine."""

    max_num_seqs: int = 64
    """Most requests running at the same time."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer; by default the target's context, at most 8192."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one target pass; prompt chunks fill what decoding leaves. By default 512 on a CPU; on a GPU 2048,
    or 8 per request of `max_num_seqs` if that is more."""
    block_size: int = 16
    memory: int | None = None
    """Bytes for KV cache blocks; by default half of the free memory."""
    gpu_memory_utilization: float | None = None
    """As in vLLM: the share of the GPU's memory that this engine may use, for weights and passes too."""
    kv_cache_dtype: str = "auto"
    """Element type of both KV caches: as computed, or fp8 (e4m3), which doubles their capacity and halves the bytes
    read per token."""
    prefix_cache: bool = True
    max_depth: int = 7
    tree: Tree | None = None
    """Verify draft trees of this shape instead of chains."""
    drafter_window: int | None = None
    """Limit the drafter's attention to this many last tokens and `drafter_sinks` first ones, for long contexts."""
    drafter_sinks: int = 4
    graphs: bool = True
    """On CUDA, capture passes as CUDA graphs and replay them; otherwise launch each operation."""
    async_scheduling: bool = True
    """On CUDA, launch each step before the tokens of the previous one have arrived (`core.py`)."""
    capture_ahead: bool = False
    """Capture the common CUDA graphs before the first request, as servers do, instead of on first use."""
    hidden_state_layers: tuple[int, ...] | None = None
    """Return the target's hidden states of these layers (`target/capture.py`) for all tokens but the last. They are
    stored in the blocks, beside keys and values."""
    suffix: SuffixConfig | None = None
    """Also draft tokens that followed similar text earlier, in the request or in answers to the same caller, where that
    pays; None: never."""
    drift_share: float = 0.005
    """Largest share of the time of drafting steps spent on drift check-ups (`drift_probe.py`); 0 turns the drift alarm
    off."""

    def __post_init__(self) -> None:
        read_kv_cache_dtype(self.kv_cache_dtype)
        if not 0 <= self.drift_share < 1:
            raise UserError(f"drift_share is {self.drift_share}; it must be 0 or more and below 1")
        if self.gpu_memory_utilization is not None:
            if not 0 < self.gpu_memory_utilization <= 1:
                raise UserError(
                    f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
                )
            if self.memory is not None:
                raise UserError("memory and gpu_memory_utilization both limit the memory of blocks; give one of them")
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("drafter_sinks", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not 1 <= self.max_depth <= MOST_IN_CHAIN:
            raise UserError(f"max_depth is {self.max_depth}; it must be 1 to {MOST_IN_CHAIN}")
        if not isinstance(self.suffix, SuffixConfig | None):
            raise UserError(f"suffix is {self.suffix!r}; give SuffixConfig(...), or None for no suffix drafts")

    def batched_tokens(self, device: torch.device) -> int:
        """Token budget of one target pass, as configured or by default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return default_batched_tokens(on_gpu=device.type == "cuda", max_num_seqs=self.max_num_seqs)

    @property
    def kv_cache_type(self) -> torch.dtype | None:
        """Element type of keys and values in the blocks; None: as computed."""
        return FP8 if read_kv_cache_dtype(self.kv_cache_dtype) == "fp8" else None

    def room(self, device: torch.device, max_model_len: int) -> Room:
        """Sizes of an engine as `eyas plan` describes them."""
        return Room(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_depth=max(self.max_depth, 0 if self.tree is None else self.tree.depth),
            max_drafts=0 if self.tree is None else self.tree.budget,
            max_offers=0 if self.suffix is None else min(OFFERED, self.suffix.deepest),
            max_num_batched_tokens=self.batched_tokens(device),
            block_size=self.block_size,
        )


def choose_length(asked: int | None, target: Target) -> int:
    """The longest context to serve: the requested one if the target allows it."""
    most = target.facts.max_position_embeddings
    if asked is None:
        return min(LONGEST, most or LONGEST)
    if most is not None and asked > most:
        raise UserError(
            f"max_model_len {asked} is above the {most} tokens that {target.facts.source} was made for; lower it"
        )
    return asked


def plan_budget(target: Target, drafter: Drafter | None, options: EngineConfig, max_model_len: int) -> BlockBudget:
    """Compute the number of blocks, by the functions that `eyas plan` uses too."""
    footprint, memory = footprint_of(target, drafter, options, max_model_len), options.memory
    if options.gpu_memory_utilization is not None:
        memory = _memory_of_share(options.gpu_memory_utilization, target.device, footprint)
    return plan_blocks(
        footprint=footprint,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        free_bytes=free_bytes(target.device),
        memory=memory,
    )


def require_gpu(device: torch.device) -> None:
    """Refuse a share of GPU memory where there is no GPU."""
    if device.type != "cuda":
        raise UserError(
            f"gpu_memory_utilization is a share of a GPU's memory and this runs on {device.type}; leave it out, or say "
            "how much memory the KV cache may take (--memory-gib)"
        )


def require_kv_cache_dtype(options: EngineConfig, device: torch.device) -> None:
    """Refuse 8-bit keys and values on GPUs whose kernels cannot read them."""
    if options.kv_cache_type is None or device.type != "cuda" or not has_triton():
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise UserError(
            f"kv_cache_dtype {options.kv_cache_dtype} needs a GPU of compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY))} or more, and {torch.cuda.get_device_name(device)} has "
            f"{'.'.join(map(str, capability))}; use auto"
        )


def _memory_of_share(share: float, device: torch.device, footprint: Footprint) -> int:
    """Bytes for blocks: the share of the card, minus what this process holds and what running needs."""
    require_gpu(device)
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device) + CUDA_RUNTIME + footprint.beside_weights
    memory = int(share * total) - taken
    if memory <= 0 or memory > free - footprint.beside_weights:
        raise UserError(
            f"gpu_memory_utilization {share:g} is {size(share * total)} of the GPU's {size(total)}; weights and passes "
            f"take {size(taken)} of that, and {size(free)} are free now; {'raise' if memory <= 0 else 'lower'} it"
        )
    return memory


def footprint_of(target: Target, drafter: Drafter | None, options: EngineConfig, max_model_len: int) -> Footprint:
    """Memory footprint of a loaded pair: measured weights and KV cache entries, the rest by formula."""
    trial = KVCache(blocks=1, block_size=options.block_size, dtype=options.kv_cache_type)
    calls = TargetRunner(target, trial).calls
    config, element = target.model.config.get_text_config(), target.dtype.itemsize
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    room = options.room(target.device, max_model_len)
    hidden = len(options.hidden_state_layers or ()) * config.hidden_size
    states, drafter_token = hidden, 0
    if drafter is not None:
        states += drafter.config.num_aux_hidden_states * drafter.config.target_hidden_size
        kept = "fp8" if options.kv_cache_type is not None else str(drafter.fc.weight.dtype).removeprefix("torch.")
        drafter_token = kv_bytes_per_token(drafter.config, kept)
    on_gpu = target.device.type == "cuda"
    working = working_bytes(
        hidden=config.hidden_size,
        intermediate=intermediate if isinstance(intermediate, int) else max(intermediate),  # some give one per layer
        heads_width=max(call.heads * call.head_dim for call in calls),
        vocab_size=target.facts.vocab_size,
        states=states,
        room=room,
        element=element,
        recorded=on_gpu and options.graphs,
    )
    recorded = recorded_bytes(
        vocab_size=target.facts.vocab_size, states=states - hidden, room=room, element=element, padded=on_gpu
    )
    return Footprint(
        weights=weight_bytes(target.model),
        drafter=0 if drafter is None else weight_bytes(drafter, beside=target.model),
        token=trial.bytes_per_block // options.block_size + hidden * element,
        drafter_token=drafter_token,
        working=working,
        recorded=recorded,
    )


def require_fit(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter of another target, device or dtype."""
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


def weight_bytes(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Bytes of a model's weights and buffers, each counted once, without those shared with `beside`."""
    lent = set() if beside is None else {x.data_ptr() for x in _tensors(beside)}
    return sum({x.data_ptr(): x.nbytes for x in _tensors(model) if x.data_ptr() not in lent}.values())


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *packed_tensors(model)]
