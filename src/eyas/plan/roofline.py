"""Seconds of a pass from what it moves and computes: the times that `shapes.py` weighs drafts against.

    seconds = (moving^p + computing^p)^(1/p) + layers * launch + passes * host + reducing
    moving = bytes / bandwidth, computing = operations / arithmetic
    reducing = sums * latency + 2 (n - 1) / n * summed bytes / link

p says how well the two overlap: 1 adds them, a large one takes the longer. Near the ridge, where drafts stop to be
free, it decides. A GPU's steps are best described by a sum, eyas' kernels on a processor by 3 (docs/plan.md). Launch is
what a layer takes however little it computes; host is what a pass takes around its layers. The time that a step spends
around all of its passes (scheduling, choosing tokens, telling them) counts as one more pass.

Tensor parallelism over n cards divides bytes and operations by n. Every layer then sums what the cards found twice,
behind attention and behind the feed-forward part, by a ring over their links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eyas.drafter.cost import BYTES_PER_ELEMENT, attention_flops, matrix_sizes, remembering_weights
from eyas.errors import UserError
from eyas.plan.cards import Card
from eyas.plan.decoder import Decoder
from eyas.plan.footprint import DrafterShape, drafter_bits, drafter_token
from eyas.plan.kv_cache_dtype import KVCacheKind, kv_element
from eyas.plan.pass_factors import AS_FITTED, PassFactors
from eyas.plan.quantisation import Quantisation
from eyas.plan.shapes import Prices

BANDWIDTH_SHARE = 0.88
"""Of a card's bandwidth that programs see: 4.25 of 4.8 TB/s were measured on an H200."""
FLOPS_SHARE = 0.7
"""Of a card's arithmetic that matrix products of decoding reach."""
GPU_LAYER, GPU_PASS = 30e-6, 200e-6
"""Launch and host with CUDA graphs, as vLLM's steps show on an H200."""
CPU_LAYER, CPU_PASS = 100e-6, 1e-3
GPU_OVERLAP, CPU_OVERLAP = 1.0, 3.0
FAST_SUM, SLOW_SUM, FAST_LINK = 10e-6, 40e-6, 200e9
"""Seconds of a sum over cards however small, over links that reach memory (NVLink and the like) and over PCIe. Assumed:
published all-reduce latencies of 8 cards; not measured here."""
LINK_SHARE = 0.8
"""Of a link that large sums reach. Assumed."""
CPU_INTEGERS = 2.0
"""Times as fast as float32 are integer products on a processor: one N1 core decodes for 16 users from Q8_0 what two do
in float32."""


ACTIVATION = 2
"""Bytes of a number that cards send each other."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What passes do."""

    bytes: float
    flops: float
    layers: float
    passes: float
    sums: float = 0
    """Over all cards."""
    summed: float = 0
    """Bytes of all sums together."""


NO_WORK = Work(bytes=0, flops=0, layers=0, passes=0)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of one unit of each part of work."""

    byte: float
    flop: float
    layer: float
    pass_: float
    overlap: float = 1.0
    sum_: float = 0.0
    """Of a sum over all cards, however small."""
    summed_byte: float = 0.0
    factors: PassFactors = AS_FITTED
    """What decoding takes in parts of what the constants say, where this very pair was measured."""

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The four constants."""
        return self.byte, self.flop, self.layer, self.pass_

    def seconds(self, *works: Work) -> float:
        """Of works that follow each other, by the constants alone."""
        power, total = self.overlap, 0.0
        for work in works:
            both: float = ((self.byte * work.bytes) ** power + (self.flop * work.flops) ** power) ** (1 / power)
            total += both + self.layer * work.layers + self.pass_ * work.passes
            total += self.sum_ * work.sums + self.summed_byte * work.summed
        return total

    def verify_seconds(self, work: Work, *, tokens: int) -> float:
        """Of a target's pass over so many tokens, as far as it was measured."""
        return self.factors.verify.at(tokens) * self.seconds(work)

    def draft_seconds(self, first: Work, drafts: Work, *, rows: int) -> tuple[float, float]:
        """Of the drafter's first pass for so many rows and of those behind it, given its work and that of them all."""
        begun = self.seconds(first)
        further = self.seconds(drafts) - begun
        return self.factors.first_draft.at(rows) * begun, self.factors.further_drafts.at(rows) * further

    def scaled(self, factors: Sequence[float]) -> "Speed":
        """Each constant larger by a factor."""
        byte, flop, layer, pass_ = (one * factor for one, factor in zip(self.parts, factors, strict=True))
        return replace(self, byte=byte, flop=flop, layer=layer, pass_=pass_)


def speed_of(card: Card, quantisation: Quantisation, *, cards: int = 1) -> Speed:
    """What programs get of a card, or of each of several that work together."""
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
    """A target, perhaps with a drafter, in one precision: what their passes work."""

    decoder: Decoder
    drafter: DrafterShape | None
    quantisation: Quantisation
    kv_cache_dtype: KVCacheKind = "auto"
    cards: int = 1
    """That tensor parallelism divides both over; works are of each."""

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
        """One pass of the target: rows that look back so far, so many tokens together, logits behind some of them."""
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
            sums=sums + 2 if self.cards > 1 else 0,  # and of embeddings, and logits are gathered
            summed=(sums + 1) * tokens * width + logits * decoder.vocab_size * ACTIVATION / 2 if self.cards > 1 else 0,
        )

    def draft(self, *, rows: int, passes: float, tokens: float, context: float) -> Work:
        """The drafter's passes of a step over so many tokens together; the first of them reads what is new."""
        if not passes or self.drafter is None:
            return NO_WORK
        config, element = self.drafter.config, self.drafter_element
        sizes = matrix_sizes(config)
        fusion, layers, head = sizes.fusion, sizes.every_depth, sizes.head
        first = max(rows, tokens - (passes - 1) * rows)
        kept = "fp8" if self.kv_cache_dtype == "fp8" else self.quantisation.dtype
        kv_bytes, cards = drafter_token(self.drafter, kept, self.cards), self.cards
        sums = passes * (2 * config.num_hidden_layers + 2)
        attention = context * attention_flops(config)
        return Work(
            bytes=((fusion + passes * layers) * element + passes * head * self.drafter_head_element) / cards
            + passes * rows * context * kv_bytes,
            flops=(2 * (first * fusion + tokens * layers + passes * rows * head) + tokens * attention) / cards,
            layers=passes * config.num_hidden_layers,
            passes=passes,
            sums=sums if cards > 1 else 0,
            summed=sums / passes * tokens * config.hidden_size * ACTIVATION if cards > 1 else 0,
        )

    def prefill(self, tokens: int, chunk: int) -> list[Work]:
        """The passes over a prompt, in chunks, by both."""
        passes = []
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            seen = start + count / 2
            passes.append(self.verify(rows=1, tokens=count, context=seen, logits=1))
            passes.append(self.drafter_prefill(tokens=count, context=seen))
        return passes

    def drafter_prefill(self, *, tokens: int, context: float) -> Work:
        """The drafter over a part of a prompt: later tokens see keys and values of the last layer alone."""
        if self.drafter is None or self.drafter.config.num_hidden_layers > 1:
            return self.draft(rows=1, passes=1, tokens=tokens, context=context)
        config, element = self.drafter.config, self.drafter_element
        fusion = matrix_sizes(config).fusion
        projected = remembering_weights(config)
        return Work(
            bytes=(fusion + projected) * element / self.cards,
            flops=2 * tokens * (fusion + projected) / self.cards,
            layers=config.num_hidden_layers,
            passes=1,
        )

    def prices(self, speed: Speed, *, rows: int, context: float, reads: float) -> Prices:
        """Seconds of the parts of a step, for a batch of rows that look back so far each."""

        def draft(passes: int, first: float, further: float) -> float:
            begun = self.draft(rows=rows, passes=min(1, passes), tokens=first, context=context)
            drafts = self.draft(rows=rows, passes=passes, tokens=first + further, context=context)
            return sum(speed.draft_seconds(begun, drafts, rows=rows))

        def verify(drafts: int) -> float:
            tokens = rows + drafts
            return speed.verify_seconds(self.verify(rows=rows, tokens=tokens, context=context), tokens=tokens)

        return Prices(verify=verify, draft=draft, reads=reads)
