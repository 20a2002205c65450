"""Seconds of a pass, from the bytes that it moves and the operations that it computes.

    seconds = (moving^p + computing^p)^(1/p) + layers * launch + passes * host + reducing
    moving = bytes / bandwidth, computing = operations / arithmetic
    reducing = sums * latency + 2 (n - 1) / n * summed bytes / link

p says how well moving and computing overlap: 1 adds them, a large p takes the longer one. It matters near the ridge,
where drafts stop being free. A GPU's steps are best described by p = 1, eyas' kernels on a processor by 3
(docs/plan.md). Launch is the least time of a layer; host is the time of a pass around its layers. The time of a step
around all of its passes (scheduling, choosing tokens, output) counts as one more pass.

Tensor parallelism over n cards divides bytes and operations by n. Every layer then has two all-reduces, behind
attention and behind the feed-forward part, by a ring over the links.

Where a pair was measured, factors by size correct these times. Kernels of a processor work in tiles and have variants
for few rows, so the time of a pass is a stair that no constants follow. It depends on the tokens of the pass and on
little else: the target's factor is kept by verified tokens, the drafter's by users, and its first pass, which reads
what the last round accepted, apart from the others.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from eyas.drafter.cost import BYTES_PER_ELEMENT, attention_flops, matrix_sizes, remembering_weights
from eyas.errors import UserError
from eyas.plan.cards import Card
from eyas.plan.decoder import Decoder
from eyas.plan.footprint import DrafterShape, drafter_bits, drafter_token
from eyas.plan.kv_cache_dtype import KVCacheKind, kv_element
from eyas.plan.quantisation import Quantisation

BANDWIDTH_SHARE = 0.88
"""Share of a card's bandwidth that programs see: 4.25 of 4.8 TB/s were measured on an H200."""
FLOPS_SHARE = 0.7
"""Share of a card's arithmetic that matrix products of decoding reach."""
GPU_LAYER, GPU_PASS = 30e-6, 200e-6
"""Launch and host with CUDA graphs, as vLLM's steps show on an H200."""
CPU_LAYER, CPU_PASS = 100e-6, 1e-3
GPU_OVERLAP, CPU_OVERLAP = 1.0, 3.0
FAST_SUM, SLOW_SUM, FAST_LINK = 10e-6, 40e-6, 200e9
"""Least seconds of an all-reduce over fast links (NVLink and the like) and over PCIe, and the bandwidth that separates
them. Assumed, from published latencies for 8 cards; not measured here."""
LINK_SHARE = 0.8
"""Share of a link that large all-reduces reach. Assumed."""
CPU_INTEGERS = 2.0
"""Speed of integer products on a processor over float32: one N1 core decodes for 16 users from Q8_0 in the time that
two cores need in float32."""
ACTIVATION = 2
"""Bytes of a number that cards send each other."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes, operations and launches of one or more passes."""

    bytes: float
    flops: float
    layers: float
    passes: float
    sums: float = 0
    """All-reduces over the cards."""
    summed: float = 0
    """Bytes of all of them together."""


NO_WORK = Work(bytes=0, flops=0, layers=0, passes=0)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Measured over fitted time by a count; linear in the count's logarithm between points, constant outside."""

    points: tuple[tuple[int, float], ...] = ()
    """Sorted by count; without points the factor is 1."""

    def at(self, count: float) -> float:
        place = bisect_left(self.points, count, key=lambda point: point[0])
        if not self.points:
            return 1.0
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (low, below), (high, above) = self.points[place - 1 : place + 1]
        share = log(count / low) / log(high / low)
        return below + share * (above - below)


@dataclass(frozen=True, kw_only=True)
class PassFactors:
    """Factors of the passes of a step."""

    verify: Factors = Factors()
    """Of the target's pass and the host's work, by verified tokens."""
    first_draft: Factors = Factors()
    """By users."""
    further_drafts: Factors = Factors()
    """By users."""


AS_FITTED = PassFactors()


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds for one unit of each part of work."""

    byte: float
    flop: float
    layer: float
    pass_: float
    overlap: float = 1.0
    sum_: float = 0.0
    """Seconds of the smallest all-reduce."""
    summed_byte: float = 0.0
    factors: PassFactors = AS_FITTED
    """Measured over fitted time, where this very pair was measured."""

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The four constants that are fitted."""
        return self.byte, self.flop, self.layer, self.pass_

    def seconds(self, *works: Work) -> float:
        """Add up works that follow each other, by the constants alone."""
        power, total = self.overlap, 0.0
        for work in works:
            both: float = ((self.byte * work.bytes) ** power + (self.flop * work.flops) ** power) ** (1 / power)
            total += both + self.layer * work.layers + self.pass_ * work.passes
            total += self.sum_ * work.sums + self.summed_byte * work.summed
        return total

    def verify_seconds(self, work: Work, *, tokens: int) -> float:
        """Seconds of a target pass over this many tokens."""
        return self.factors.verify.at(tokens) * self.seconds(work)

    def draft_seconds(self, first: Work, drafts: Work, *, rows: int) -> tuple[float, float]:
        """Seconds of the drafter's first pass and of all others, given the work of the first and of all together."""
        begun = self.seconds(first)
        further = self.seconds(drafts) - begun
        return self.factors.first_draft.at(rows) * begun, self.factors.further_drafts.at(rows) * further

    def scaled(self, factors: Sequence[float]) -> "Speed":
        byte, flop, layer, pass_ = (one * factor for one, factor in zip(self.parts, factors, strict=True))
        return replace(self, byte=byte, flop=flop, layer=layer, pass_=pass_)


def speed_of(card: Card, quantisation: Quantisation, *, cards: int = 1) -> Speed:
    """Speed that programs reach on a card, or on each of several that share a model."""
    on_gpu = card.device != "cpu"
    if cards > 1 and not card.link:
        raise UserError(f"how fast {card.name} sends to another card is not known; say it with --link, in GB/s")
    faster = CPU_INTEGERS if not on_gpu and not quantisation.plain else 1.0
    return Speed(
        byte=1 / (card.bandwidth * BANDWIDTH_SHARE),
        flop=1 / (card.speed_of(quantisation.arithmetic) * FLOPS_SHARE * faster),
        layer=GPU_LAYER if on_gpu else CPU_LAYER,
        pass_=GPU_PASS if on_gpu else CPU_PASS,
        overlap=GPU_OVERLAP if on_gpu else CPU_OVERLAP,
        sum_=(FAST_SUM if card.link >= FAST_LINK else SLOW_SUM) if cards > 1 else 0.0,
        summed_byte=2 * (cards - 1) / cards / (card.link * LINK_SHARE) if cards > 1 else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, perhaps with a drafter, in one precision; its methods count the work of passes."""

    decoder: Decoder
    drafter: DrafterShape | None
    quantisation: Quantisation
    kv_cache_dtype: KVCacheKind = "auto"
    cards: int = 1
    """Tensor-parallel size; work is that of one card."""

    @property
    def drafter_head_element(self) -> float:
        """Bytes of a weight in the drafter's head; a processor reads bfloat16 as it is stored and computes float32."""
        bits, dtype = self.quantisation.drafter_bits, self.quantisation.dtype
        if bits is not None:
            return bits / 8
        halved = dtype == "float32" and self.drafter is not None and self.drafter.halved
        return BYTES_PER_ELEMENT["bfloat16" if halved else dtype]

    @property
    def drafter_element(self) -> float:
        """Bytes of a weight in the drafter's other matrices."""
        bits = None if self.drafter is None else drafter_bits(self.drafter, self.quantisation)
        return self.drafter_head_element if bits is None else bits / 8

    def verify(self, *, rows: int, tokens: int, context: float, logits: int | None = None) -> Work:
        """Count one target pass over `tokens` of `rows` requests, each of which looks back over `context` tokens.

        Logits are computed for all tokens, unless `logits` says for how many.
        """
        decoder, element = self.decoder, self.quantisation.other_bytes
        logits = tokens if logits is None else logits
        seen = sum(min(context, layer.window or context) for layer in decoder.layers)
        weights = sum(
            self.quantisation.matrix_bytes(layer.read(tokens), layer.read_experts(tokens)) + layer.vectors * element
            for layer in decoder.layers
        )
        used = sum(layer.used for layer in decoder.layers)
        weights += self.quantisation.head_bytes(decoder.vocabulary, tied=decoder.tied)
        flops = 2 * tokens * used + 2 * logits * decoder.vocabulary + 2 * tokens * seen * decoder.score_width
        sums, width = 2 * len(decoder.layers), decoder.hidden_size * ACTIVATION
        return Work(
            bytes=weights / self.cards
            + rows * seen * decoder.kv_width_on(self.cards) * kv_element(self.kv_cache_dtype, element),
            flops=flops / self.cards,
            layers=len(decoder.layers),
            passes=2,
            sums=sums + 2 if self.cards > 1 else 0,  # with those of the embeddings and of the gathered logits
            summed=(sums + 1) * tokens * width + logits * decoder.vocab_size * ACTIVATION / 2 if self.cards > 1 else 0,
        )

    def draft(self, *, rows: int, passes: float, tokens: float, context: float) -> Work:
        """Count the drafter's passes of a step over `tokens` in total; the first pass reads the new ones."""
        if not passes or self.drafter is None:
            return NO_WORK
        config, element, cards = self.drafter.config, self.drafter_element, self.cards
        sizes = matrix_sizes(config)
        fusion, layers, head = sizes.fusion, sizes.every_depth, sizes.head
        first = max(rows, tokens - (passes - 1) * rows)
        kept = "fp8" if self.kv_cache_dtype == "fp8" else self.quantisation.dtype
        sums = passes * (2 * config.num_hidden_layers + 2)
        attention = context * attention_flops(config)
        return Work(
            bytes=((fusion + passes * layers) * element + passes * head * self.drafter_head_element) / cards
            + passes * rows * context * drafter_token(self.drafter, kept, cards),
            flops=(2 * (first * fusion + tokens * layers + passes * rows * head) + tokens * attention) / cards,
            layers=passes * config.num_hidden_layers,
            passes=passes,
            sums=sums if cards > 1 else 0,
            summed=sums / passes * tokens * config.hidden_size * ACTIVATION if cards > 1 else 0,
        )

    def prefill(self, tokens: int, chunk: int) -> list[Work]:
        """Count the passes of both models over a prompt, in chunks."""
        passes = []
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            seen = start + count / 2
            passes.append(self.verify(rows=1, tokens=count, context=seen, logits=1))
            passes.append(self._drafter_prefill(tokens=count, context=seen))
        return passes

    def _drafter_prefill(self, *, tokens: int, context: float) -> Work:
        """Count the drafter's pass over a chunk: of its last layer only keys and values are computed."""
        if self.drafter is None or self.drafter.config.num_hidden_layers > 1:
            return self.draft(rows=1, passes=1, tokens=tokens, context=context)
        config = self.drafter.config
        weights = matrix_sizes(config).fusion + remembering_weights(config)
        return Work(
            bytes=weights * self.drafter_element / self.cards,
            flops=2 * tokens * weights / self.cards,
            layers=config.num_hidden_layers,
            passes=1,
        )

    def step_seconds(self, speed: Speed, *, rows: int, drafts: int, reads: float, context: float) -> float:
        """Seconds of a step of `rows` requests that verifies `drafts` draft tokens, spread evenly over the rows.

        `reads` is the number of tokens that the drafter's first pass reads for each row that drafts.
        """
        passes, drafting = -(-drafts // rows), min(drafts, rows)
        read = drafting * reads
        first = self.draft(rows=rows, passes=min(1, passes), tokens=read, context=context)
        passes_work = self.draft(rows=rows, passes=passes, tokens=read + (drafts - drafting), context=context)
        verify = speed.verify_seconds(
            self.verify(rows=rows, tokens=rows + drafts, context=context), tokens=rows + drafts
        )
        return verify + sum(speed.draft_seconds(first, passes_work, rows=rows))
