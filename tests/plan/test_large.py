"""Targets for several cards: weights as published, division over cards and training by hand."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.engine.config import EngineConfig
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.plan.acceptance import usual_profile
from eyas.plan.cards import CARDS, find_card
from eyas.plan.decoder import Decoder, read_decoder
from eyas.plan.forecast import Deployment, Forecast, forecast_of
from eyas.plan.quantisation import parse_quantisation, stored_quantisation
from eyas.plan.request import read_tokens
from eyas.plan.resolve import usual_drafter
from eyas.plan.roofline import speed_of
from eyas.plan.training import PER_WEIGHT, TOP_K, TrainingRun, plan_training, trained_weights
from eyas.train.recipe import FeatureSettings, TrainSettings
from known_configs import LLAMA_8B

CONFIGS = Path(__file__).parent / "configs"
H200 = CARDS["h200"]
PUBLISHED = {
    "kimi-k2": (1_026_408_209_408, 32_861_477_888),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "llama-3.3-70b": (70_553_706_496, 70_553_706_496),
    "glm-4.5": (352_797_814_784, 33_632_251_904),
    "llama-4-maverick": (400_711_848_960, 17_184_691_200),
    "gpt-oss-120b": (116_829_156_672, 5_750_551_872),
}
"""Weights, and those of a token; without the extra layers that some train to foretell two tokens, or vision."""


def config_of(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return raw


def deployment(name: str, *, cards: int, users: int = 16, context: int = 8192, card: str = "h200") -> Deployment:
    config = config_of(name)
    decoder, kept = read_decoder(config, name), stored_quantisation(config, name)
    return Deployment(
        decoder=decoder,
        drafter=usual_drafter(decoder),
        quantisation=kept,
        card=CARDS[card],
        speed=speed_of(CARDS[card], kept, cards=cards),
        profile=usual_profile(),
        users=users,
        context=context,
        cards=cards,
    )


OTHERS = [("qwen3-235b-a22b", "bfloat16", 8), ("llama-3.3-70b", "bfloat16", 2)]
"""Large targets beside Kimi K2, as they are published, and cards that hold them."""


def plain_step(forecast: Forecast) -> float:
    """Seconds of the users that were asked for."""
    (found,) = (one for one in forecast.table if (one.users, one.depth) == (forecast.deployment.users, 0))
    return found.step_seconds


@each("name", PUBLISHED)
def test_weights_match_published_counts(name: str) -> None:
    decoder = read_decoder(config_of(name), name)
    assert (decoder.parameters, decoder.active_parameters) == PUBLISHED[name]


def test_kimi_k2_on_eight_cards_by_hand() -> None:
    found = forecast_of(deployment("kimi-k2", cards=8))
    # Attention: queries by way of 1536, a latent of 512 + 64, keys and values of 64 heads, and o.
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    matrices = 61 * attention + dense + 60 * (385 * expert + 384 * 7168)
    vectors = 61 * (2 * 7168 + 1536 + 512) + 7168
    weights = (matrices * (8 + 32 / 128**2) / 8 + 2 * 163840 * 7168 * 2) / 8 + vectors * 2
    assert found.footprint.weights == pytest.approx(weights, rel=1e-9)
    assert found.footprint.token == 61 * 576 * 2, "every card has the whole latent"
    assert found.footprint.drafter_token == 2 * 1 * 128 * 2, "and one of the drafter's eight heads"
    assert found.fits
    work = found.deployment.pair.verify(rows=1, tokens=1, context=4096)
    used = 61 * attention + dense + 60 * (9 * expert + 384 * 7168) + 163840 * 7168
    scores = 61 * 4096 * 64 * (2 * 576 - 64)
    assert work.flops == pytest.approx(2 * (used + scores) / 8, rel=1e-9)
    assert work.sums == 2 * 61 + 2
    assert work.summed == (2 * 61 + 1) * 7168 * 2 + 163840
    speed = found.deployment.speed
    seconds = work.bytes / (4.8e12 * 0.88) + work.flops / (1979e12 * 0.7) + 61 * 30e-6 + 2 * 200e-6
    seconds += 124 * 10e-6 + 2 * 7 / 8 * work.summed / (450e9 * 0.8)
    assert speed.seconds(work) == pytest.approx(seconds, rel=1e-9)


@each("name", ["kimi-k2", "qwen3-235b-a22b", "llama-3.3-70b"])
def test_more_cards_are_faster_but_not_proportionally(name: str) -> None:
    forecasts = [forecast_of(deployment(name, cards=cards)) for cards in (1, 2, 4, 8)]
    for fewer, more in pairwise(forecasts):
        assert fewer.footprint.weights / 2 <= more.footprint.weights < fewer.footprint.weights
        assert more.footprint.token in (fewer.footprint.token // 2, fewer.footprint.token)
        assert more.users_fit >= fewer.users_fit
        assert plain_step(fewer) / 2 < plain_step(more) < plain_step(fewer)
    assert forecasts[-1].fits
    eight = deployment(name, cards=8)
    slow = speed_of(replace(H200, link=32e9), eight.quantisation, cards=8)
    assert plain_step(forecast_of(replace(eight, speed=slow))) > plain_step(forecasts[-1])


def test_key_heads_are_divided_down_to_one() -> None:
    decoder = read_decoder(config_of("qwen3-235b-a22b"), "q")
    assert [decoder.kv_width_on(cards) // (2 * 128) for cards in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_indivisible_heads_and_unknown_links_are_refused() -> None:
    with pytest.raises(UserError, match="--tensor-parallel-size 6 does not divide the 64 heads"):
        deployment("llama-3.3-70b", cards=6)
    with pytest.raises(UserError, match="say it with --link"):
        speed_of(find_card("mine", memory=80, bandwidth=2000, tflops=300), parse_quantisation("bfloat16"), cards=2)
    assert find_card("mine", memory=80, bandwidth=2000, tflops=300, link=100).link == 100e9


def training(decoder: Decoder, kind: str, **changes: Any) -> TrainingRun:
    return TrainingRun(
        decoder=decoder,
        drafter=usual_drafter(decoder),
        quantisation=parse_quantisation(kind),
        card=H200,
        tokens=5e8,
        **changes,
    )


@each(("taught", "rate", "gib"), [(0.30, 28_724, 33), (0.53, 24_672, 39)])
def test_the_plan_for_an_8b_target_matches_measured_training_on_an_h200(taught: float, rate: float, gib: int) -> None:
    found = plan_training(training(read_decoder(LLAMA_8B, "l"), "bfloat16", taught=taught))
    assert found.source == "live"
    assert found.tokens_per_second == pytest.approx(rate, rel=0.05)
    assert found.memory / 2**30 == pytest.approx(gib, rel=0.05)


@each(("name", "kind", "cards"), [("kimi-k2", "fp8", 8), *OTHERS])
def test_training_for_large_targets_by_hand(name: str, kind: str, cards: int) -> None:
    decoder = read_decoder(config_of(name), name)
    run = training(decoder, kind, trainers=8, server_cards=cards, step_tokens=16384)
    found = plan_training(run)
    figures = {figure.name: figure for figure in found.figures}
    parts, hidden, vocabulary = trained_weights(run.drafter), decoder.hidden_size, decoder.vocab_size
    weights, inner = sum(parts.values()), run.drafter.config.intermediate_size
    assert parts["fc"] == 3 * hidden**2
    assert weights < 1.5e9, "fits one card with its moments, so copies that sum gradients will do"
    assert figures["drafter"].value == 20 * weights
    assert figures["tables"].value == 2 * vocabulary * hidden * 2
    assert figures["states"].value == 16384 * 4 * hidden * 2
    assert figures["activations"].value == 16384 * 0.5 * 5 * (3 * inner + 10 * hidden) * 2
    operations = 6 * (parts["fc"] + 0.5 * 5 * (parts["layer"] + parts["head"])) + 2 * 0.5 * vocabulary * hidden
    assert figures["a trainer"].value == pytest.approx(989e12 * 0.47 / operations)
    used = decoder.active_parameters - (2 - decoder.tied) * vocabulary * hidden - decoder.vectors
    flops = 2 * used + 2 * len(decoder.layers) * 2048 * decoder.score_width
    per_card = 1979e12 if kind == "fp8" else 989e12
    assert figures["the target"].value == pytest.approx(cards * per_card * 0.56 / flops, rel=1e-6)
    assert found.source == "served"
    assert found.servers == -(-8 * figures["a trainer"].value // figures["the target"].value)
    assert figures["states over the network"].value == pytest.approx(found.tokens_per_second * 4 * hidden * 2)
    assert figures["gradients over the network"].value == pytest.approx(2 * 7 / 8 * 4 * weights / 50e9)
    assert figures["a cache on disk"].value == 5e8 * (3 * hidden * 2 + 0.5 * (64 * 6 + 8))
    assert found.nodes == -(-(8 + cards * found.servers) // 8)
    assert found.hours == pytest.approx(5e8 / found.tokens_per_second / 3600)
    assert found.fits
    assert all(figure.formula for figure in found.figures)
    # vLLM hands out no states of targets with a latent.
    assert [("MLA" in note) for note in found.notes] == ([True] if name == "kimi-k2" else [])


def test_a_server_of_too_few_cards_does_not_fit() -> None:
    run = training(read_decoder(config_of("kimi-k2"), "k"), "fp8", trainers=8, server_cards=4)
    assert not plan_training(run).fits


def test_training_matches_the_assumptions_of_its_plan() -> None:
    import torch

    from eyas.train.state import TrainState
    from tiny import drafter_config, random_drafter

    assert FeatureSettings.model_fields["top_k"].default == TOP_K
    depths = TrainSettings.model_fields["depths"].default
    assert TrainingRun.depths == depths
    drafter = random_drafter(drafter_config()).bfloat16().requires_grad_(True)
    state = TrainState("d", drafter, TrainSettings(steps=1))
    masters = state.master_weights.values()
    for master in masters:
        master.grad = torch.zeros_like(master)
    state.optimizer.step()
    moments = sum(
        entry.numel() * entry.element_size()
        for kept in state.optimizer.state.values()
        for entry in kept.values()
        if entry.ndim
    )
    weights = sum(master.numel() for master in masters)
    assert {master.element_size() for master in masters} == {PER_WEIGHT["master weights"]}
    assert moments == weights * PER_WEIGHT["moments"]
    assert {p.element_size() for p in state.drafter.parameters() if p.requires_grad} == {PER_WEIGHT["working copy"]}


def worth(formula: str) -> float:
    """What a formula's numbers come to: its words are left out."""
    sums = re.sub(r"[a-zA-Z/]*[a-wyzA-Z][a-zA-Z/']*", "", formula.replace(",", "").replace("tokens/s", ""))
    value: float = eval(sums.replace(" x ", " * "))
    return value


@each(("name", "kind", "cards"), [("kimi-k2", "fp8", 8), *OTHERS])
def test_every_figure_equals_its_formula(name: str, kind: str, cards: int) -> None:
    invoke: Callable[..., Any] = CliRunner().invoke
    words = ["plan", str(CONFIGS / f"{name}.json"), "--gpu", "h200", "--tensor-parallel-size", str(cards)]
    words += ["--quantization", kind, "--users", "16"]
    served = invoke(app, [*words, "--json"])
    assert served.exit_code == 0, served.output
    record = json.loads(served.stdout)
    said, memory = record["formulas"], record["memory"]
    assert set(memory) - set(said) == {"beside_kv_blocks"}, "which is a sum of the others"
    for key in ("kv_per_token", "drafter_kv_per_token", "working", "recorded", "needed", "left_for_kv_blocks"):
        assert worth(said[key]) == memory[key], key
    assert worth(said["usable"]) == pytest.approx(memory["usable"], abs=1)
    assert int(worth(said["users_fit"])) == record["users_fit"]
    room, _, most = said["longest_context"].partition(", at most ")
    assert min(worth(room), worth(most)) == pytest.approx(record["longest_context"], abs=16)
    depth = record["recommended_depth"]
    at = {(one["users"], one["depth"]): one for one in record["expected"]}
    best = at[16, depth]
    assert worth(said["length"]) == pytest.approx(best["length"], rel=1e-3)
    assert worth(said["tokens_per_second"]) * 1e3 == pytest.approx(best["tokens_per_second"], rel=1e-3)
    assert worth(said["speedup"]) == pytest.approx(best["speedup"], rel=1e-3)
    for key, users_depth in (("step", 0), ("drafting_step", depth)):
        assert milliseconds(said[key]) == pytest.approx(at[16, users_depth]["step_seconds"] * 1e3, rel=0.01), key
    (command,) = record["commands"]
    assert command.startswith("vllm serve")
    assert f"--tensor-parallel-size {cards}" in command

    printed = " ".join(invoke(app, words).stdout.replace("\u2502", " ").split())
    assert "memory of each card" in printed
    for key in ("step", "drafting_step", "length", "tokens_per_second", "speedup", "users_fit"):
        assert " ".join(said[key].split()) in printed, key
    for key in ("weights", "drafter", "kv_per_token", "drafter_kv_per_token", "working", "recorded", "needed"):
        assert " ".join(said[key].split())[:40] in printed, key
    trained = invoke(app, [*words, "--train", "500M", "--trainers", "8"])
    assert trained.exit_code == 0, trained.output
    for part in ("trained weights x 20 bytes", "gradients over the", "a cache on disk", "nodes", "hours"):
        assert part in trained.stdout, part


def milliseconds(step: str) -> float:
    """Of a step, or of several behind each other: its times are in brackets, what is launched and summed is not."""
    text = step.replace(",", "")
    total = sum(float(each) for each in re.findall(r"\(([\d.]+) ms\)", text))
    launched = re.findall(r"([\d.]+) (?:layers |sums )?x ([\d.]+) us", text)
    total += sum(float(count) * float(us) for count, us in launched) / 1e3
    summed = re.findall(r"([\d.]+) MB summed at ([\d.]+) GB/s", text)
    return total + sum(float(megabytes) / float(speed) for megabytes, speed in summed)


def test_sufficient_cards_are_named_and_bad_numbers_refused() -> None:
    invoke: Callable[..., Any] = CliRunner().invoke
    result = invoke(app, ["plan", str(CONFIGS / "llama-3.3-70b.json"), "--gpu", "h200", "--users", "16", "--json"])
    assert result.exit_code == 1
    assert "2 cards hold it: --tensor-parallel-size 2" in json.loads(result.stdout)["notes"]
    assert [read_tokens(text) for text in ("500M", "2.5b", "1000")] == [5e8, 2.5e9, 1000]
    for text in ("0", "-1", "many", "5 M x"):
        with pytest.raises(UserError, match="is no number of tokens such as 500M"):
            read_tokens(text)
    with pytest.raises(UserError, match="share of tokens that teach"):
        training(read_decoder(LLAMA_8B, "l"), "bfloat16", taught=1.5)


def test_the_plan_for_a_gpu_has_the_limits_of_serving() -> None:
    """With the room that suffix drafts need, which `eyas serve` makes unless told otherwise."""
    served = EngineConfig(max_num_seqs=16, max_model_len=8192, suffix=SuffixConfig())
    planned = deployment("llama-3.3-70b", cards=2).room
    assert planned == served.room(torch.device("cuda"), 8192)
    assert planned.ring(1, padded=True) > replace(served, suffix=None).room(torch.device("cuda"), 8192).ring(
        1, padded=True
    )
