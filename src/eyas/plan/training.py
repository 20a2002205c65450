"""Cost of training a drafter: memory of a card, tokens per second, network, disk and hours, each with its formula.

The target's states come either from a target on the trainer's own card (`live`), or from servers that hold it
(`served`), each on several cards. Trainers are data-parallel copies: a drafter fits one card.

Shares of arithmetic were fitted to an H200 and a target of 8B (docs/training.md); everything else is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from eyas.drafter.tensors import WEIGHT_DTYPES, expected_tensors
from eyas.errors import UserError
from eyas.plan.cards import Card
from eyas.plan.decoder import Decoder
from eyas.plan.footprint import CUDA_RUNTIME, DrafterShape, target_bytes
from eyas.plan.forecast import SPARE
from eyas.plan.memory import size
from eyas.plan.quantisation import Quantisation

TARGET_SHARE, DRAFTER_SHARE = 0.56, 0.47
"""Share of a card's arithmetic that the target's forward pass and the drafter's training reach."""
STATE = 2
"""Bytes of a number in states, activations and tables."""
PER_WEIGHT = {"master weights": 4, "working copy": 2, "moments": 8, "gradients": 4 + 2}
"""Bytes of a trained weight: float32, and bfloat16 for the copy that computes and for its gradient."""
CHUNK, PER_SCORE = 4096, 10
"""Rows whose scores over the draft vocabulary are held at once, and bytes of a score with its gradient."""
TOP_K = 64
"""Tokens of the target's distribution that a cache on disk keeps for a row, by default."""
CARDS_OF_NODE = 8


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Drafter, data and hardware of a training run."""

    decoder: Decoder
    drafter: DrafterShape
    quantisation: Quantisation
    """Of the target."""
    card: Card
    tokens: float
    """Tokens to read, over all epochs."""
    trainers: int = 1
    """Cards that train."""
    server_cards: int = 1
    """Tensor-parallel size of a server of the target."""
    length: int = 4096
    """Tokens of a document; a token looks back to half of it on average."""
    taught: float = 0.5
    """Share of tokens with a loss: the target's own answers."""
    depths: int = 5
    step_tokens: int = 32768
    """Tokens of one trainer in one step."""
    network: float = 50e9
    """Bytes per second from one node to others."""

    def __post_init__(self) -> None:
        for name in ("tokens", "trainers", "server_cards", "length", "depths", "step_tokens", "network"):
            if not 0 < getattr(self, name) < 1e18:
                raise UserError(f"{name} of a training run is {getattr(self, name):g}; it must be above 0")
        if not 0 < self.taught <= 1:
            raise UserError(f"the share of tokens that teach is {self.taught:g}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class TrainingFigure:
    """A number with its formula."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Cost of a run."""

    run: TrainingRun
    source: str
    """live or served."""
    memory: int
    """Bytes of a trainer's card."""
    tokens_per_second: float
    servers: int
    nodes: int
    fits: bool
    figures: Sequence[TrainingFigure] = field(repr=False)

    @property
    def notes(self) -> list[str]:
        """Assumptions of the figures that do not hold today."""
        if self.source == "served" and self.run.decoder.latent:
            return [
                "vLLM 0.32 hands out no states of targets that keep a latent (MLA), and eyas refuses to ask: these "
                "figures are for a server that does; until then the target must be laid over the cards of the "
                'trainer\'s machine (features.source = "live", target.spread)'
            ]
        return []

    @property
    def hours(self) -> float:
        return self.run.tokens / self.tokens_per_second / 3600


def plan_training(run: TrainingRun) -> TrainingPlan:
    """Plan with the target on the trainer's card if both fit, else with servers."""
    usable = int(run.card.memory * (1 - SPARE))
    figures = _trainer_memory(run)
    memory = int(sum(figure.value for figure in figures))
    target = target_bytes(run.decoder, run.quantisation, device=run.card.device)
    shared = memory - int(figures[1].value) + target  # the target lends its embedding and head
    live = shared <= usable
    trainer, reader = _speeds(run)
    servers = 0
    if live:
        memory = shared
        bits = f"matrices of {run.quantisation.bits:.3g} bits"
        figures[1] = TrainingFigure("target", target, "bytes", f"{run.decoder.parameters:,} weights, {bits}")
        rate = run.trainers / (1 / trainer.value + 1 / reader.value)
        both = f"1 / {trainer.value:,.0f} + 1 / {reader.value:,.0f}"
        formula = f"{run.trainers} trainers / ({both}), target and drafter in turn"
    else:
        wanted = run.trainers * trainer.value
        servers = ceil(wanted / reader.value)
        rate = min(wanted, servers * reader.value)
        formula = f"{run.trainers} trainers x {trainer.value:,.0f}"
    figures += [
        TrainingFigure("memory of a trainer", memory, "bytes", f"of {size(usable)} usable"),
        trainer,
        reader,
    ]
    if servers:
        needed = f"{formula} tokens/s wanted / {reader.value:,.0f} of a server of {run.server_cards} cards"
        figures.append(TrainingFigure("servers", servers, "", needed))
    figures.append(TrainingFigure("training", rate, "tokens/s", formula))
    figures += _traffic(run, rate, served=not live)
    cards = run.trainers + servers * run.server_cards
    nodes = ceil(cards / CARDS_OF_NODE)
    hours = run.tokens / rate / 3600
    figures += [
        TrainingFigure("cards", cards, "", f"{run.trainers} train, {cards - run.trainers} serve"),
        TrainingFigure("nodes", nodes, "", f"{cards} cards / {CARDS_OF_NODE}"),
        TrainingFigure("time", hours, "hours", f"{run.tokens:,.0f} tokens / {rate:,.0f} a second"),
    ]
    held = target_bytes(run.decoder, run.quantisation, device=run.card.device, cards=run.server_cards)
    return TrainingPlan(
        run=run,
        source="live" if live else "served",
        memory=memory,
        tokens_per_second=rate,
        servers=servers,
        nodes=nodes,
        fits=memory <= usable and (live or held + CUDA_RUNTIME <= usable),
        figures=tuple(figures),
    )


def trained_weights(drafter: DrafterShape) -> dict[str, int]:
    """Count the weights of fc, of the head, and all others; the embedding is the target's and not trained."""
    sizes = {
        name: prod(spec.shape)
        for name, spec in expected_tensors(drafter.config).items()
        if spec.dtypes == WEIGHT_DTYPES and name != "embed_tokens.weight"
    }
    fusion, head = sizes.pop("fc.weight"), sizes.pop("lm_head.weight", 0)
    return {"fc": fusion, "head": head, "layer": sum(sizes.values())}


def _trainer_memory(run: TrainingRun) -> list[TrainingFigure]:
    """Bytes of a trainer without a target beside it."""
    config, decoder, weights = run.drafter.config, run.decoder, sum(trained_weights(run.drafter).values())
    states, wide = config.num_aux_hidden_states + 1, config.target_hidden_size
    inner, hidden, per = config.intermediate_size, config.hidden_size, sum(PER_WEIGHT.values())
    parts = {
        "drafter": (
            weights * per,
            f"{weights:,} trained weights x {per} bytes "
            f"({', '.join(f'{name} {count}' for name, count in PER_WEIGHT.items())})",
        ),
        "tables": (
            2 * decoder.vocabulary * STATE,
            f"the target's embedding and head: 2 x {decoder.vocab_size:,} x {decoder.hidden_size:,} x {STATE} bytes",
        ),
        "states": (
            run.step_tokens * states * wide * STATE,
            f"{run.step_tokens:,} tokens x {states} states x {wide:,} x {STATE} bytes",
        ),
        "activations": (
            run.step_tokens * (run.taught * run.depths) * (3 * inner + 10 * hidden) * STATE,
            f"{run.step_tokens:,} tokens x {run.taught:g} taught x {run.depths} depths x (3 x {inner:,} + 10 x "
            f"{hidden:,}) x {STATE} bytes",
        ),
        "scores": (
            CHUNK * config.draft_vocab_size * PER_SCORE,
            f"{CHUNK:,} rows x {config.draft_vocab_size:,} draft tokens x {PER_SCORE} bytes",
        ),
        "runtime": (CUDA_RUNTIME, "context and libraries of the device"),
    }
    return [TrainingFigure(name, value, "bytes", formula) for name, (value, formula) in parts.items()]


def _speeds(run: TrainingRun) -> tuple[TrainingFigure, TrainingFigure]:
    """Tokens per second of a trainer, and of one target: beside it, or on the cards of a server."""
    parts, decoder = trained_weights(run.drafter), run.decoder
    repeated = run.taught * run.depths * (parts["layer"] + parts["head"])
    drafter_ops = 6 * (parts["fc"] + repeated) + 2 * run.taught * decoder.vocabulary
    flops = run.card.speed_of("bf16")
    used = sum(layer.used for layer in decoder.layers)
    seen = sum(min(run.length / 2, layer.window or run.length) for layer in decoder.layers)
    target_ops = 2 * used + 2 * seen * decoder.score_width
    arithmetic = run.card.speed_of(run.quantisation.arithmetic)
    return (
        TrainingFigure(
            "a trainer",
            flops * DRAFTER_SHARE / drafter_ops,
            "tokens/s",
            f"{flops / 1e12:,.0f} TFLOPS x {DRAFTER_SHARE:g} / {drafter_ops / 1e9:,.2f} G operations a token: "
            f"6 x (fc {parts['fc']:,} + {run.taught:g} x {run.depths} x (layer {parts['layer']:,} + head "
            f"{parts['head']:,})) + 2 x {run.taught:g} x {decoder.vocabulary:,}",
        ),
        TrainingFigure(
            "the target",
            run.server_cards * arithmetic * TARGET_SHARE / target_ops,
            "tokens/s",
            f"{run.server_cards} x {arithmetic / 1e12:,.0f} TFLOPS x {TARGET_SHARE:g} / "
            f"{target_ops / 1e9:,.2f} G operations a token: 2 x {used:,} weights + attention behind "
            f"{run.length // 2:,} tokens",
        ),
    )


def _traffic(run: TrainingRun, rate: float, *, served: bool) -> list[TrainingFigure]:
    """Network traffic, and the size of a cache on disk."""
    config, weights, trainers = run.drafter.config, sum(trained_weights(run.drafter).values()), run.trainers
    figures, network, wide = [], f"{run.network / 1e9:g} GB/s", config.target_hidden_size
    states = config.num_aux_hidden_states
    if served:
        formula = f"{rate:,.0f} tokens/s x {states + 1} states x {wide:,} x {STATE} bytes; a node has {network}"
        value = rate * ((states + 1) * wide * STATE)
        figures.append(TrainingFigure("states over the network", value, "bytes/s", formula))
    if trainers > 1:
        value = 2 * (trainers - 1) / trainers * 4 * weights / run.network
        formula = f"2 x {trainers - 1}/{trainers} x 4 bytes x {weights:,} / {network}"
        formula += f", of {run.step_tokens * trainers / rate:,.2f} s that a step takes"
        figures.append(TrainingFigure("gradients over the network", value, "s a step", formula))
    row = TOP_K * 6 + 8
    value = run.tokens * (states * wide * STATE + run.taught * row)
    formula = (
        f"{run.tokens:,.0f} tokens x ({states} states x {wide:,} x {STATE} bytes + {run.taught:g} x {row} of the "
        f"target's {TOP_K} best)"
    )
    return [*figures, TrainingFigure("a cache on disk", value, "bytes", formula)]
