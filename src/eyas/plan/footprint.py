"""Bytes of a target with its drafter, from their shapes: what `memory.py` divides.

The formulas are those of eyas' own engine, which keeps every position of every layer, windows or not, and both caches
in the precision of what is not quantised, or in fp8.
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
"""What a process takes on a GPU before it has a tensor: context, kernels, workspaces of the libraries."""
FLOAT32 = 4
LUMP = 64
"""States of a request that are worth a pass of their own."""
PATIENCE_BYTES = 2**26
"""States that may wait for the drafter of all requests together on a CPU, or up to twice as much."""
LONGEST_CHUNK = 8192
"""Tokens of prompts above which a pass over them is not captured: there is more to compute than to launch."""


def default_batched_tokens(*, on_gpu: bool, max_num_seqs: int) -> int:
    """Tokens of one target pass unless told: a GPU reads long chunks as fast, and verifies 7 drafts of everybody."""
    return max(2048, 8 * max_num_seqs) if on_gpu else 512


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the engine is told about how much it takes on at once; the names are those of its options."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_depth: int = 7
    max_drafts: int = 0
    """Drafts of a request that may be verified, where trees have more than the deepest chain."""
    max_offers: int = 0
    """The same of those that the host looks up, for few requests: no more than trees have."""
    block_size: int = 16

    @property
    def recorded_rows(self) -> int:
        """The most rows of a captured step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def ring(self, state_bytes: int, *, padded: bool) -> int:
        """Positions of a request whose states, of so many bytes each, can wait for the drafter.

        Where passes are not padded, the drafter reads any number at once, and those of a request that ends before are
        never read.
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
    """A drafter, and which of the two matrices that a target can lend it brings itself."""

    name: str
    config: DrafterConfig
    own_embedding: bool
    own_head: bool
    halved: bool = False
    """Whether its weights are bfloat16, which a processor that computes float32 keeps as they are."""
    bits: float | None = None
    """Of a weight of its linears but the head, where they are quantised on disk."""
    assumed: bool = False
    """Whether there is no such drafter yet, only the usual shape of one."""


def target_bytes(decoder: Decoder, quantisation: Quantisation, *, device: str, cards: int = 1) -> int:
    """Weights as they lie in the memory of each card: matrices are divided, norms and biases are on all of them.

    A processor computes float32 from panels: a head that is the embedding as well lies there twice.
    """
    twice = device == "cpu" and quantisation.name == "float32"
    vocabulary = quantisation.vocabulary_bytes(decoder.vocabulary, tied=decoder.tied and not twice)
    matrices = quantisation.matrix_bytes(decoder.matrices, decoder.experts)
    return int((matrices + vocabulary) / cards) + decoder.vectors * quantisation.other_bytes


def drafter_bits(drafter: DrafterShape, quantisation: Quantisation) -> float | None:
    """Of a weight of its linears but the head beside a target; None: as those of every other weight."""
    if drafter.bits is None or quantisation.drafter_bits is not None:
        return quantisation.drafter_bits
    return EIGHT if quantisation.dtype == "float32" else drafter.bits


def drafter_bytes(drafter: DrafterShape, quantisation: Quantisation, *, device: str, cards: int = 1) -> int:
    """What a drafter holds itself on each card, tables of its vocabulary included; matrices are divided."""
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
    """What a pass holds at its widest place, and the logits that tokens are chosen from.

    Beside the stream and its norm in two copies lie queries, keys, values and what attention gives, or the feed-forward
    part three times; a pass reads the budget's tokens. Logits are chosen from in float32, a second copy. Recorded
    passes keep all this for themselves, in one pool that they share.
    """
    widest = max(4 * heads_width, 3 * intermediate)
    tokens = room.max_num_batched_tokens * (4 * hidden + widest + states) * element
    once = tokens + room.recorded_tokens * vocab_size * (element + FLOAT32)
    return once * 2 if recorded else once


def recorded_bytes(*, vocab_size: int, states: int, room: Room, element: int, padded: bool = True) -> int:
    """The memory that rounds share: logits, float32 at worst, and a ring of auxiliary states by slot.

    `padded` says that passes come in fixed shapes, as on a GPU. What else a slot holds, some numbers and a block table,
    is thousands of times less and not counted.
    """
    logits = (max(room.recorded_tokens, room.recorded_rows) + 1) * vocab_size * FLOAT32
    return logits + (room.recorded_rows + 1) * room.ring(states * element, padded=padded) * states * element


def ring_length(max_depth: int, waiting: int = 0) -> int:
    """Positions of a request whose states can wait for the drafter, when drafts are so deep at most.

    A power of 2: twice what a pass of the deepest draft writes fits, and as many as are `waiting` at most.
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
    """Everything but the KV blocks, from shapes; on each card, where tensor parallelism divides it over several."""
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
