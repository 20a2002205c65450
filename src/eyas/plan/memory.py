"""Division of memory before anything is allocated, for the engine and for `eyas plan`.

    weights, drafter      loaded models
    runtime               the device's libraries, before anything is loaded
    working               activations of a pass
    recorded              permanent buffers of steps: logits, and states that wait for the drafter
    blocks                keys and values of requests; they get what is left, or what is granted

A block holds `block_size` positions of one request in every layer of the target and of the drafter.
"""

from dataclasses import dataclass

from eyas.errors import UserError

SHARE_OF_FREE = 0.5
"""Default share of the memory that is left after loading which blocks may take."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a target with its drafter: of everything beside the blocks, and of a token in a block."""

    weights: int
    drafter: int
    token: int
    """Keys and values of one token in every layer of the target."""
    drafter_token: int
    """Keys and values of one token in the drafter."""
    working: int
    recorded: int
    runtime: int = 0

    @property
    def per_token(self) -> int:
        """Bytes of one token in both caches."""
        return self.token + self.drafter_token

    @property
    def beside_blocks(self) -> int:
        """Bytes of everything except the blocks."""
        return self.runtime + self.weights + self.drafter + self.beside_weights

    @property
    def beside_weights(self) -> int:
        """Bytes that running takes after loading, without blocks."""
        return self.working + self.recorded


@dataclass(frozen=True, kw_only=True)
class BlockBudget:
    """Blocks of the KV caches."""

    blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, and of one more that takes the writes of padding."""
        return (self.blocks + 1) * self.bytes_per_block

    @property
    def positions(self) -> int:
        """Tokens that fit at the same time, over all requests."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        return (
            f"{self.blocks:,} blocks of {self.block_size} tokens, {size(self.bytes)}: "
            f"{self.positions:,} tokens at once, {self.positions // self.max_model_len} requests "
            f"of {self.max_model_len:,}"
        )


def blocks_of(length: int, block_size: int) -> int:
    """Blocks of a request of this length, and one more for when it crosses a block boundary."""
    return -(-length // block_size) + 1


def plan_blocks(
    *,
    footprint: Footprint,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    memory: int | None = None,
    share: float = SHARE_OF_FREE,
) -> BlockBudget:
    """Plan blocks for `max_num_seqs` requests of `max_model_len`, or as many as fit; refuse if not even one does.

    `free_bytes` are free after loading; running takes its part of them first. `memory` is what the user grants to
    blocks; without it, they get a `share` of what is left.
    """
    if block_size < 1:
        raise UserError(f"block_size is {block_size}; it must be 1 or more")
    left = max(0, free_bytes - footprint.beside_weights)
    if memory is not None and memory > left:
        raise UserError(
            f"memory for blocks is {size(memory)}, above the {size(left)} that are free beside "
            f"{size(footprint.beside_weights)} for running; lower it"
        )
    granted = int(left * share) if memory is None else memory
    bytes_per_block = footprint.per_token * block_size
    per_request = blocks_of(max_model_len, block_size)
    blocks = min(granted // bytes_per_block, per_request * max_num_seqs)
    if blocks < per_request:
        raise UserError(
            f"one request of {max_model_len:,} tokens needs {size(per_request * bytes_per_block)} of blocks, above the "
            f"{size(granted)} granted ({size(free_bytes)} are free); lower max_model_len to "
            f"{longest(granted, footprint.per_token, block_size):,} or grant more"
        )
    return BlockBudget(
        blocks=blocks, block_size=block_size, bytes_per_block=bytes_per_block, max_model_len=max_model_len
    )


def longest(granted: int, per_token: int, block_size: int) -> int:
    """Length of the longest request whose blocks fit."""
    return max(0, (granted // (per_token * block_size) - 1) * block_size)


def size(count: float) -> str:
    """Format a number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"
