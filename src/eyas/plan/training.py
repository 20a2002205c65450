"""What training a drafter takes: memory of a card, tokens per second, network, disk and hours, each with its formula.

The target's states come either from a target on the trainer's own card (`live`), or from servers that hold it
(`served`): several cards that read the text and send states. Trainers are copies that sum gradients: a drafter fits one
card.

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
"""Of a card's arithmetic that the target's forward pass and the drafter's training reach."""
STATE = 2
"""Bytes of a number in states, activations and tables."""
PER_WEIGHT = {"master weights": 4, "working copy": 2, "moments": 8, "gradients": 4 + 2}
"""Bytes of a trained weight: float32 but for the copy that computes, and its gradient."""
CHUNK, PER_SCORE = 4096, 10
"""Rows whose scores over the draft vocabulary are held at once, and bytes of a score with its gradient."""
TOP_K = 64
"""Tokens of the target's distribution that a cache on disk keeps for a row, by default."""
CARDS_OF_NODE = 8


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What is to be trained, on what."""

    decoder: Decoder
    drafter: DrafterShape
    quantisation: Quantisation
    """Of the target."""
    card: Card
    tokens: float
    """Of the text, all epochs together."""
    trainers: int = 1
    """Cards that train."""
    server_cards: int = 1
    """Cards of one server, over which tensor parallelism divides the target."""
    length: int = 4096
    """Tokens of a document; a token looks back to half of it on average."""
    taught: float = 0.5
    """Share of the tokens that teach: the target's own answers."""
    depths: int = 5
    step_tokens: int = 32768
    """Of one trainer in one step."""
    network: float = 50e9
    """Bytes per second of a node to others."""

    def __post_init__(self) -> None:
        for name in ("tokens", "trainers", "server_cards", "length", "depths", "step_tokens", "network"):
            if not 0 < getattr(self, name) < 1e18:
                raise UserError(f"{name} of a training run is {getattr(self, name):g}; it must be above 0")
        if not 0 < self.taught <= 1:
            raise UserError(f"the share of tokens that teach is {self.taught:g}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class TrainingFigure:
    """A number, and how it came about."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a run comes to."""

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
        """What the figures take for granted and is not so."""
        if self.source == "served" and self.run.decoder.latent:
            return [
                "vLLM 0.32 hands out no states of targets that keep a latent (MLA), and eyas refuses to ask: these "
                "figures are for a server that does; until then the target must be laid over the cards of the "
                'trainer\'s machine (features.source = "live", target.spread)'
            ]
        return []

    @property
    def hours(self) -> float:
        """Until all tokens were read."""
        return self.run.tokens / self.tokens_per_second / 3600


def plan_training(run: TrainingRun) -> TrainingPlan:
    """Work it out: with the target beside the trainer if both fit one card, else with servers."""
    usable = int(run.card.memory * (1 - SPARE))
    alone, own = _trainer_memory(run)
    target = target_bytes(run.decoder, run.quantisation, device=run.card.device)
    tables = next(figure.value for figure in own if figure.name == "tables")
    live = alone - int(tables) + target <= usable  # the target lends its embedding and head
    drafter, target_speed = _speeds(run)
    figures = [*own]
    if live:
        memory = alone - int(tables) + target
        figures[1] = TrainingFigure(
            name="target", value=target, unit="bytes", formula=f"{run.decoder.parameters:,} weights, {_bits(run)}"
        )
        rate = run.trainers / (1 / drafter.value + 1 / target_speed.value)
        servers = 0
        both = f"1 / {drafter.value:,.0f} + 1 / {target_speed.value:,.0f}"
        formula = f"{run.trainers} trainers / ({both}), target and drafter in turn"
    else:
        memory = alone
        wanted = run.trainers * drafter.value
        servers = ceil(wanted / target_speed.value)
        rate = min(wanted, servers * target_speed.value)
        formula = f"{run.trainers} trainers x {drafter.value:,.0f}"
    figures += [
        TrainingFigure(name="memory of a trainer", value=memory, unit="bytes", formula=f"of {size(usable)} usable"),
        drafter,
        target_speed,
    ]
    if servers:
        per = run.server_cards
        figures.append(
            TrainingFigure(
                name="servers",
                value=servers,
                unit="",
                formula=f"{formula} tokens/s wanted / {target_speed.value:,.0f} of a server of {per} cards",
            )
        )
    figures.append(TrainingFigure(name="training", value=rate, unit="tokens/s", formula=formula))
    figures += _traffic(run, rate, served=not live)
    cards = run.trainers + servers * run.server_cards
    nodes = ceil(cards / CARDS_OF_NODE)
    figures += [
        TrainingFigure(
            name="cards", value=cards, unit="", formula=f"{run.trainers} train, {cards - run.trainers} serve"
        ),
        TrainingFigure(name="nodes", value=nodes, unit="", formula=f"{cards} cards / {CARDS_OF_NODE}"),
        TrainingFigure(
            name="time",
            value=run.tokens / rate / 3600,
            unit="hours",
            formula=f"{run.tokens:,.0f} tokens / {rate:,.0f} a second",
        ),
    ]
    return TrainingPlan(
        run=run,
        source="live" if live else "served",
        memory=memory,
        tokens_per_second=rate,
        servers=servers,
        nodes=nodes,
        fits=memory <= usable and (live or _server_fits(run, usable)),
        figures=tuple(figures),
    )


def trained_weights(drafter: DrafterShape) -> dict[str, int]:
    """Weights of fc, of the head if it can have one of its own, and all else; the embedding is the target's."""
    sizes = {
        name: prod(spec.shape)
        for name, spec in expected_tensors(drafter.config).items()
        if spec.dtypes == WEIGHT_DTYPES and name != "embed_tokens.weight"
    }
    fusion, head = sizes.pop("fc.weight"), sizes.pop("lm_head.weight", 0)
    return {"fc": fusion, "head": head, "layer": sum(sizes.values())}


def _trainer_memory(run: TrainingRun) -> tuple[int, list[TrainingFigure]]:
    """Bytes of a trainer without a target beside it."""
    config, weights = run.drafter.config, sum(trained_weights(run.drafter).values())
    states = config.num_aux_hidden_states + 1
    per = sum(PER_WEIGHT.values())
    taught = run.taught * run.depths
    width = 3 * config.intermediate_size + 10 * config.hidden_size
    figures = [
        TrainingFigure(
            name="drafter",
            value=weights * per,
            unit="bytes",
            formula=f"{weights:,} trained weights x {per} bytes "
            f"({', '.join(f'{name} {count}' for name, count in PER_WEIGHT.items())})",
        ),
        TrainingFigure(
            name="tables",
            value=2 * run.decoder.vocabulary * STATE,
            unit="bytes",
            formula=f"the target's embedding and head: 2 x {run.decoder.vocab_size:,} x {run.decoder.hidden_size:,} x "
            f"{STATE} bytes",
        ),
        TrainingFigure(
            name="states",
            value=run.step_tokens * states * config.target_hidden_size * STATE,
            unit="bytes",
            formula=f"{run.step_tokens:,} tokens x {states} states x {config.target_hidden_size:,} x {STATE} bytes",
        ),
        TrainingFigure(
            name="activations",
            value=run.step_tokens * taught * width * STATE,
            unit="bytes",
            formula=f"{run.step_tokens:,} tokens x {run.taught:g} taught x {run.depths} depths x (3 x "
            f"{config.intermediate_size:,} + 10 x {config.hidden_size:,}) x {STATE} bytes",
        ),
        TrainingFigure(
            name="scores",
            value=CHUNK * config.draft_vocab_size * PER_SCORE,
            unit="bytes",
            formula=f"{CHUNK:,} rows x {config.draft_vocab_size:,} draft tokens x {PER_SCORE} bytes",
        ),
        TrainingFigure(name="runtime", value=CUDA_RUNTIME, unit="bytes", formula="context and libraries of the device"),
    ]
    return int(sum(figure.value for figure in figures)), figures


def _speeds(run: TrainingRun) -> tuple[TrainingFigure, TrainingFigure]:
    """Tokens per second of a trainer, and of one target: beside it, or on the cards of a server."""
    parts, decoder = trained_weights(run.drafter), run.decoder
    repeated = run.taught * run.depths * (parts["layer"] + parts["head"])
    drafter_ops = 6 * (parts["fc"] + repeated) + 2 * run.taught * decoder.vocabulary
    flops = run.card.speed_of("bf16")
    trains = flops * DRAFTER_SHARE / drafter_ops
    used = sum(layer.used for layer in decoder.layers)
    seen = sum(min(run.length / 2, layer.window or run.length) for layer in decoder.layers)
    target_ops = 2 * used + 2 * seen * decoder.score_width
    arithmetic = run.card.speed_of(run.quantisation.arithmetic)
    reads = run.server_cards * arithmetic * TARGET_SHARE / target_ops
    return (
        TrainingFigure(
            name="a trainer",
            value=trains,
            unit="tokens/s",
            formula=f"{flops / 1e12:,.0f} TFLOPS x {DRAFTER_SHARE:g} / {drafter_ops / 1e9:,.2f} G operations a token: "
            f"6 x (fc {parts['fc']:,} + {run.taught:g} x {run.depths} x (layer {parts['layer']:,} + head "
            f"{parts['head']:,})) + 2 x {run.taught:g} x {decoder.vocabulary:,}",
        ),
        TrainingFigure(
            name="the target",
            value=reads,
            unit="tokens/s",
            formula=f"{run.server_cards} x {arithmetic / 1e12:,.0f} TFLOPS x {TARGET_SHARE:g} / "
            f"{target_ops / 1e9:,.2f} G operations a token: 2 x {used:,} weights + attention behind "
            f"{run.length // 2:,} tokens",
        ),
    )


def _traffic(run: TrainingRun, rate: float, *, served: bool) -> list[TrainingFigure]:
    """What goes over the network, and what a cache on disk would hold."""
    config, weights = run.drafter.config, sum(trained_weights(run.drafter).values())
    figures, step = [], run.step_tokens * run.trainers / rate
    if served:
        state = (config.num_aux_hidden_states + 1) * config.target_hidden_size * STATE
        figures.append(
            TrainingFigure(
                name="states over the network",
                value=rate * state,
                unit="bytes/s",
                formula=f"{rate:,.0f} tokens/s x {config.num_aux_hidden_states + 1} states x "
                f"{config.target_hidden_size:,} x {STATE} bytes; a node has {run.network / 1e9:g} GB/s",
            )
        )
    if run.trainers > 1:
        moved = 2 * (run.trainers - 1) / run.trainers * 4 * weights
        figures.append(
            TrainingFigure(
                name="gradients over the network",
                value=moved / run.network,
                unit="s a step",
                formula=f"2 x {run.trainers - 1}/{run.trainers} x 4 bytes x {weights:,} / {run.network / 1e9:g} GB/s, "
                f"of {step:,.2f} s that a step takes",
            )
        )
    row = TOP_K * 6 + 8
    figures.append(
        TrainingFigure(
            name="a cache on disk",
            value=run.tokens * (config.num_aux_hidden_states * config.target_hidden_size * STATE + run.taught * row),
            unit="bytes",
            formula=f"{run.tokens:,.0f} tokens x ({config.num_aux_hidden_states} states x "
            f"{config.target_hidden_size:,} x {STATE} bytes + {run.taught:g} x {row} of the target's {TOP_K} best)",
        )
    )
    return figures


def _server_fits(run: TrainingRun, usable: int) -> bool:
    held = target_bytes(run.decoder, run.quantisation, device=run.card.device, cards=run.server_cards)
    return held + CUDA_RUNTIME <= usable


def _bits(run: TrainingRun) -> str:
    return f"matrices of {run.quantisation.bits:.3g} bits"
