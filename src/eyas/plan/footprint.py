"""Bytes of a target with its drafter, from their shapes; `memory.py` divides memory by them.

The formulas are those of eyas' own engine, which caches every position of every layer, windows or not, in the dtype of
what is not quantised, or in fp8.
"""

from dataclasses import dataclass
from math import prod

from eyas.drafter.config import DrafterConfig
from eyas.drafter.cost import BYTES_PER_ELEMENT, kv_bytes_per_token
from eyas.drafter.tensors import WEIGHT_DTYPES, TensorSpec, expected_tensors
from eyas.plan.decoder import Decoder
from eyas.plan.kv_cache_dtype import KVCacheKind, kv_element
from eyas.plan.memory import Footprint
from eyas.plan.quantisation import EIGHT, Quantisation
from eyas.plan.shapes import CAPTURED_TREE_ROWS, CAPTURED_TREES

CUDA_RUNTIME = 640 * 2**20
"""Memory of a process on a GPU before it has a tensor: context, kernels, workspaces of the libraries."""
FLOAT32 = 4
LUMP = 64
"""Waiting states of a request that are worth a pass of the drafter of their own."""
PATIENCE_BYTES = 2**26
"""Bytes of states that may wait for the drafter on a CPU, over all requests; rounding may double it."""
LONGEST_CHUNK = 8192
"""Longest chunk of prompts whose pass is captured: longer ones take more time to compute than to launch."""


def default_batched_tokens(*, on_gpu: bool, max_num_seqs: int) -> int:
    """Default tokens of one target pass: a GPU reads long chunks as fast, and verifies 7 drafts of every request."""
    return max(2048, 8 * max_num_seqs) if on_gpu else 512


@dataclass(frozen=True, kw_only=True)
class Room:
    """Limits of the engine, by the names of its options."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_depth: int = 7
    max_drafts: int = 0
    """Draft tokens of a request that may be verified, where trees have more than the deepest chain."""
    max_offers: int = 0
    """Draft tokens of a request that the host may look up, for few requests; no more than trees have."""
    block_size: int = 16

    @property
    def recorded_rows(self) -> int:
        """The most rows of a captured step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def ring(self, state_bytes: int, *, padded: bool) -> int:
        """Positions of a request whose states, of `state_bytes` each, can wait for the drafter.

        Where passes are not padded, the drafter can read any number at once, so more may wait; states of a request that
        ends before are never read.
        """
        waiting = 0
        if state_bytes and not padded:
            waiting = max(LUMP, PATIENCE_BYTES // ((self.recorded_rows + 1) * state_bytes))
        return ring_length(max(self.max_depth, self.max_offers), waiting)

    @property
    def recorded_tokens(self) -> int:
        """The most tokens of a captured step."""
        rows = self.recorded_rows
        in_trees = min(rows, CAPTURED_TREE_ROWS) * (1 + max(shape.budget for shape in CAPTURED_TREES))
        return min(self.max_num_batched_tokens, max(in_trees, rows * (1 + max(self.max_depth, self.max_drafts))))


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Shape of a drafter, and whether it has its own embedding and head or borrows the target's."""

    name: str
    config: DrafterConfig
    own_embedding: bool
    own_head: bool
    halved: bool = False
    """Whether its weights are bfloat16; a processor that computes in float32 keeps them so."""
    bits: float | None = None
    """Bits of a weight of its linears, except the head, where they are quantised on disk."""
    assumed: bool = False
    """Whether this is the usual shape for a drafter that is yet to be trained."""


def target_bytes(decoder: Decoder, quantisation: Quantisation, *, device: str, cards: int = 1) -> int:
    """Bytes of a target's weights on each card: matrices are divided, norms and biases are on all cards.

    A processor computes float32 from panels, so a head that is tied to the embedding takes memory twice.
    """
    twice = device == "cpu" and quantisation.name == "float32"
    vocabulary = quantisation.vocabulary_bytes(decoder.vocabulary, tied=decoder.tied and not twice)
    matrices = quantisation.matrix_bytes(decoder.matrices, decoder.experts)
    return int((matrices + vocabulary) / cards) + decoder.vectors * quantisation.other_bytes


def drafter_bits(drafter: DrafterShape, quantisation: Quantisation) -> float | None:
    """Bits of a weight of the drafter's linears, except the head, beside a target; None: those of all other weights."""
    if drafter.bits is None or quantisation.drafter_bits is not None:
        return quantisation.drafter_bits
    return EIGHT if quantisation.dtype == "float32" else drafter.bits


def drafter_bytes(drafter: DrafterShape, quantisation: Quantisation, *, device: str, cards: int = 1) -> int:
    """Bytes of a drafter's own tensors on each card, tables of its vocabulary included; matrices are divided."""
    dtype = quantisation.dtype
    lent = {"embed_tokens.weight"} if not drafter.own_embedding else set()
    lent |= {"lm_head.weight"} if not drafter.own_head else set()
    halved = device == "cpu" and dtype == "float32" and drafter.halved

    def width(name: str, spec: TensorSpec) -> float:
        if spec.dtypes != WEIGHT_DTYPES:
            return {"I64": 8, "BOOL": 1}[min(spec.dtypes)]
        multiplies = len(spec.shape) == 2 and name != "embed_tokens.weight"
        if multiplies and name != "lm_head.weight" and (bits := drafter_bits(drafter, quantisation)) is not None:
            return bits / 8
        if multiplies and quantisation.drafter_bits is not None:
            return quantisation.drafter_bits / 8
        return BYTES_PER_ELEMENT["bfloat16" if halved and multiplies else dtype]

    tensors = expected_tensors(drafter.config).items()
    held = [
        prod(spec.shape) * width(name, spec) / (cards if len(spec.shape) == 2 else 1)
        for name, spec in tensors
        if name not in lent
    ]
    return int(sum(held))


def working_bytes(
    *,
    hidden: int,
    intermediate: int,
    heads_width: int,
    vocab_size: int,
    states: int,
    room: Room,
    element: int,
    recorded: bool,
) -> int:
    """Bytes of a pass at its widest place, and of the logits.

    Besides two copies each of the residual stream and its norm, there are queries, keys, values and the attention
    output, or three tensors of the feed-forward part. Logits have a second copy in float32 for sampling. Captured
    passes (`recorded`) hold all this once more, in one pool that they share.
    """
    widest = max(4 * heads_width, 3 * intermediate)
    tokens = room.max_num_batched_tokens * (4 * hidden + widest + states) * element
    once = tokens + room.recorded_tokens * vocab_size * (element + FLOAT32)
    return once * 2 if recorded else once


def recorded_bytes(*, vocab_size: int, states: int, room: Room, element: int, padded: bool = True) -> int:
    """Bytes of the buffers that rounds share: logits, float32 at worst, and a ring of auxiliary states by slot.

    `padded` says that passes have fixed shapes, as on a GPU. The other contents of a slot, some numbers and a block
    table, are thousands of times smaller and not counted.
    """
    logits = (max(room.recorded_tokens, room.recorded_rows) + 1) * vocab_size * FLOAT32
    return logits + (room.recorded_rows + 1) * room.ring(states * element, padded=padded) * states * element


def ring_length(max_depth: int, waiting: int = 0) -> int:
    """Positions of a request whose states can wait for the drafter, a power of 2.

    There is room for twice what a pass with drafts of `max_depth` writes, and for `waiting` states.
    """
    return max(1 << (2 * max_depth + 2).bit_length(), 1 << (waiting - 1).bit_length() if waiting else 0)


def drafter_token(drafter: DrafterShape, dtype: str, cards: int = 1) -> int:
    """Bytes of a token's keys and values in the drafter, on each card: heads are divided, a latent is on all."""
    heads = 1 if drafter.config.mla is not None else drafter.config.num_key_value_heads
    return kv_bytes_per_token(drafter.config, dtype) * -(-heads // cards) // heads


def footprint(
    decoder: Decoder,
    drafter: DrafterShape | None,
    quantisation: Quantisation,
    *,
    room: Room,
    device: str,
    kv_cache_dtype: KVCacheKind = "auto",
    cards: int = 1,
) -> Footprint:
    """Compute the bytes of everything on each card, and of a token in the KV cache."""
    element, states = quantisation.other_bytes, 0
    kept = "fp8" if kv_cache_dtype == "fp8" else quantisation.dtype
    if drafter is not None:
        states = drafter.config.num_aux_hidden_states * drafter.config.target_hidden_size
    on_gpu = device != "cpu"
    working = working_bytes(
        hidden=decoder.hidden_size,
        intermediate=decoder.intermediate_size // cards,
        heads_width=decoder.heads * decoder.head_dim // cards,
        vocab_size=decoder.vocab_size,
        states=states,
        room=room,
        element=element,
        recorded=on_gpu,
    )
    recorded = recorded_bytes(vocab_size=decoder.vocab_size, states=states, room=room, element=element, padded=on_gpu)
    return Footprint(
        weights=target_bytes(decoder, quantisation, device=device, cards=cards),
        drafter=0 if drafter is None else drafter_bytes(drafter, quantisation, device=device, cards=cards),
        token=len(decoder.layers) * decoder.kv_width_on(cards) * kv_element(kv_cache_dtype, element),
        drafter_token=0 if drafter is None else drafter_token(drafter, kept, cards),
        working=working,
        recorded=recorded,
        runtime=CUDA_RUNTIME if on_gpu else 0,
    )
