"""Ranks drafter variants by tokens per second for one user, from acceptance and measured step times.

    python benchmarks/variants.py runs/variants --greedy held-out-0.jsonl --sampled held-out-1.jsonl
    python benchmarks/variants.py runs/variants --device cpu

Acceptance is estimated by walking rounds through the target's own answers to prompts that no drafter learnt from
(`train/estimate.py`): answers of temperature 0 and of temperature 1, each depth walked for itself. Answers that end in
a loop flatter every drafter and are left out. At temperature 1 the rule is the engine's (`race` in
`train/chances.py`); those of other servers are in the JSON.

What a step takes is measured by the engine, one user, at each depth, with random weights of each shape: weights say
nothing about time. Tokens per second are tokens of a round over seconds of a step, at the depth where that is most.
Steps of temperature 0 are timed and stand for those of temperature 1.

Everything is in RUN/variants.json. Without --greedy the acceptance that is there is kept and only steps are timed: so
the ranking of another machine needs that file and no drafter. Ratios are to the first variant, with 95 % intervals by
the bootstrap over answers (of acceptance: a step's time is taken as it is).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import torch
from draft_chances import GREEDY, SAMPLED, ExpectedRounds, draft_chances, expect_rounds
from numpy.typing import NDArray
from pairs import turns

from eyas.atomic import new_file
from eyas.bench.step_times import TimedSteps, measure
from eyas.data.author_check import AuthorCheck
from eyas.drafter.checkpoint import (
    checkpoint_of,
    find_folder,
    load_drafter,
    read_config,
    read_raw_config,
    write_checkpoint,
)
from eyas.drafter.model import Drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.errors import UserError
from eyas.evaluate.evaluate import looping
from eyas.loading import load_drafter_for, load_target
from eyas.target.device import choose_device
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train.batch import CorpusPacks, TrainingBatch
from eyas.train.corpus.encoding import EncodingSettings, encode_corpus
from eyas.train.estimate import answer_borders
from eyas.train.init import set_vocabulary
from eyas.train.journal import versions
from eyas.train.recipe import Recipe
from eyas.train.recipe_file import load_recipe
from eyas.train.sources.live import LiveSource

Json = dict[str, Any]
DEPTHS = (1, 2, 3, 4, 5, 7)
TEMPERATURES = {"0": GREEDY, "1": "race"}
"""Acceptance rule for the ranking, by temperature."""
DRAWS = 1000


def main() -> None:
    """Estimate acceptance, time steps, print the ranking."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run, or of a variants.json")
    parser.add_argument("--greedy", type=Path, help="answers of temperature 0 that were not trained on")
    parser.add_argument("--sampled", type=Path, help="answers of temperature 1 that were not trained on")
    parser.add_argument("--also", action="append", default=[], help="another drafter to judge, such as the shipped one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.3, help="of steps, for each shape, depth and round")
    parser.add_argument("--rounds", type=int, default=3, help="in which all shapes and depths are timed in turn")
    arguments = parser.parse_args()
    place, began = arguments.run / "variants.json", time.perf_counter()
    device = str(choose_device(arguments.device))
    if (arguments.greedy is None) != (arguments.sampled is None):
        raise UserError("--greedy and --sampled go together: answers of temperature 0 and of temperature 1; give both")
    if arguments.greedy is not None:
        recipe = load_recipe(arguments.run / "recipe.toml")
        folders = {drafter.name: str(arguments.run / drafter.name) for drafter in recipe.drafter_recipes()}
        folders |= {name: name for name in arguments.also}
        record: Json = {
            "versions": versions(),
            "recipe": recipe.resolved(),
            "configs": {name: config_of(folder) for name, folder in folders.items()},
            "variants": judge(recipe, folders, {"0": arguments.greedy, "1": arguments.sampled}, device),
            "machines": {},
        }
        print(f"judged in {time.perf_counter() - began:.0f} s", flush=True)
        save(place, record)
    elif place.exists():
        record = json.loads(place.read_text(encoding="utf-8"))
    else:
        raise UserError(f"there is no {place} yet; give --greedy and --sampled to judge the run first")
    machine = f"{versions()['device']}, {device}"
    record["machines"][machine] = {
        "versions": versions(),
        **step_seconds(record, device, seconds=arguments.seconds, rounds=arguments.rounds),
    }
    rank(record, machine)
    save(place, record)
    print(table(record, machine))
    print(f"{time.perf_counter() - began:.0f} s, written to {place}")


def save(place: Path, record: Json) -> None:
    """Write the record."""
    with new_file(place) as file:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def config_of(folder: str) -> Json:
    """The drafter's config.json, which has its shape."""
    return dict(read_raw_config(find_folder(folder)))


def judge(recipe: Recipe, folders: Mapping[str, str], files: Mapping[str, Path], device: str) -> Json:
    """Expected rounds of every variant: by temperature, rule, depth and answer."""
    on_cpu = device == "cpu"
    dtype = "float32" if on_cpu else "auto"
    target = Target.load(recipe.target.source, dtype=dtype, device=device, quantization="none")
    drafters = {name: _beside(target, folder) for name, folder in folders.items()}
    kept = {name: drafter.vocab().target_ids_W for name, drafter in drafters.items()}
    layer_ids = {name: drafter.config.layers_read(target.facts) for name, drafter in drafters.items()}
    source = LiveSource(target, sorted({k for ids in layer_ids.values() for k in ids}), chunk=recipe.train.chunk)
    found: dict[str, dict[str, dict[str, dict[int, ExpectedRounds]]]] = {name: {} for name in drafters}
    for temperature, file in files.items():
        check = AuthorCheck.of(TargetParts.of(target))
        corpus, _ = encode_corpus([file], EncodingSettings.of(recipe), workers=recipe.data.workers, check=check)
        length = max(2048 if on_cpu else recipe.data.pack_length, corpus.longest)
        packs = CorpusPacks(corpus=corpus, length=length, seed=0, device=target.device, padded=False).epoch(0)
        for number, planned in enumerate(packs, start=1):
            batch = planned.build()
            features, counted_A = source(batch), ~loops(batch)
            for name, drafter in drafters.items():
                chances = draft_chances(
                    drafter,
                    batch,
                    features,
                    target_ids_W=kept[name],
                    layer_ids=layer_ids[name],
                    depths=max(DEPTHS),
                    chunk=recipe.train.chunk,
                )
                for rule in (GREEDY,) if temperature == "0" else SAMPLED:
                    by_depth = found[name].setdefault(temperature, {}).setdefault(rule, {})
                    for depth in DEPTHS:
                        rounds = expect_rounds(batch, chances[rule][:depth])
                        own = ExpectedRounds(
                            rounds_A=rounds.rounds_A[counted_A], accepted_AS=rounds.accepted_AS[counted_A]
                        )
                        by_depth[depth] = by_depth[depth] + own if depth in by_depth else own
            print(f"temperature {temperature}: {number} of {len(packs)} packs", flush=True)
    return {
        name: {
            temperature: {rule: {str(k): _as_json(own) for k, own in depths.items()} for rule, depths in rules.items()}
            for temperature, rules in temperatures.items()
        }
        for name, temperatures in found.items()
    }


def _beside(target: Target, folder: str) -> Drafter:
    """Load a drafter in the target's precision, neither packed nor quantised."""
    drafter = load_drafter(folder).to(device=target.device, dtype=target.dtype)
    return drafter.share_target(target.embedding(), target.head(), target.last_norm())


def loops(batch: TrainingBatch) -> NDArray[np.bool_]:
    """Which answers of a batch end in a loop."""
    said = batch.ids_T[batch.row_M + 1].tolist()
    # The last token is a stop token, or as good as any other.
    return np.array([looping(said[first : end - 1]) for first, end in pairwise(answer_borders(batch))], dtype=bool)


def _as_json(own: ExpectedRounds) -> Json:
    return {
        "acceptance_length": own.acceptance_length,
        "accepted_at": (own.accepted_AS.sum(axis=0) / max(1e-9, own.rounds_A.sum())).tolist(),
        "rounds": own.rounds_A.round(4).tolist(),
        "accepted": own.accepted_AS.sum(axis=1).round(4).tolist(),
    }


def step_seconds(record: Json, device: str, *, seconds: float, rounds: int) -> Json:
    """Seconds of a step for one user, plain and for each shape and depth, measured in turn."""
    source = record["recipe"]["target"]["source"]
    target = load_target(source, dtype="auto", device=device)
    options = EngineConfig(max_num_seqs=1, max_model_len=1024)
    with tempfile.TemporaryDirectory() as folder:
        engines = {"plain": Engine(target, None, config=options)}
        for config in record["configs"].values():
            if (shape := shape_of(config)) not in engines:
                engines[shape] = Engine(target, _random_drafter(target, config, Path(folder)), config=options)
    cells = {("plain", 0): TimedSteps(users=1, depth=0)}
    cells |= {(shape, k): TimedSteps(users=1, depth=k) for shape in engines if shape != "plain" for k in DEPTHS}
    names = {f"{shape}, depth {k}": (shape, k) for shape, k in cells}
    for cell in cells:  # captures, compiles and warms up
        measure(engines[cell[0]], TimedSteps(users=1, depth=cell[1]), seconds=0.0)
    for number in range(rounds):
        for name in turns(list(names), number):
            shape, depth = names[name]
            measure(engines[shape], cells[shape, depth], seconds=seconds)
        print(f"steps timed, round {number + 1} of {rounds}", flush=True)
    medians = {cell: median(times.seconds) for cell, times in cells.items()}
    return {
        "target": f"{target.dtype}, {target.quantization}".removeprefix("torch."),
        "plain": medians["plain", 0],
        "shapes": {shape: {str(k): medians[shape, k] for k in DEPTHS} for shape in engines if shape != "plain"},
    }


def shape_of(config: Json) -> str:
    """The part of a drafter's config that decides its speed."""
    sizes = f"{config['num_hidden_layers']} x {config['intermediate_size']}, {config['draft_vocab_size']:,}"
    states = config.get("num_aux_hidden_states", 3)
    return sizes if states == 3 else f"{sizes}, {states} states"


def _random_drafter(target: Target, config: Json, folder: Path) -> Drafter:
    """A random drafter of this shape, loaded as eyas serves it."""
    place = folder / str(len(list(folder.iterdir())))
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    drafter = Drafter(read_config(str(place)))
    set_vocabulary(drafter, torch.arange(drafter.config.draft_vocab_size))
    write_checkpoint(checkpoint_of(drafter), place, replace=True)
    return load_drafter_for(target, str(place))


def rank(record: Json, machine: str) -> None:
    """Tokens per second of every variant on that machine, and ratios to the first one."""
    times = record["machines"][machine]
    times["speeds"] = {}
    first = next(iter(record["variants"]))
    for name, judged in record["variants"].items():
        seconds = times["shapes"][shape_of(record["configs"][name])]
        speeds = times["speeds"][name] = {}
        for temperature, rule in TEMPERATURES.items():
            by_depth = judged[temperature][rule]
            rates = {k: own["acceptance_length"] / seconds[k] for k, own in by_depth.items()}
            best = max(rates, key=rates.__getitem__)
            speeds[temperature] = {"depth": int(best), "tokens_per_second": rates[best], "all": rates}
            other = times["speeds"][first][temperature]
            base = record["variants"][first][temperature][rule][str(other["depth"])]
            ratio = rates[best] / other["tokens_per_second"]
            within = bootstrap(by_depth[best], base) / (by_depth[best]["acceptance_length"] / base["acceptance_length"])
            speeds[temperature]["ratio"] = [ratio, *(ratio * np.percentile(within, (2.5, 97.5))).tolist()]
        speeds["mean"] = geometric_mean(speeds[t]["tokens_per_second"] for t in TEMPERATURES)


def bootstrap(own: Json, base: Json, *, seed: int = 0) -> NDArray[np.float64]:
    """Bootstrap ratios of two acceptance lengths over the same answers."""
    drawn = np.random.default_rng(seed).integers(len(own["rounds"]), size=(DRAWS, len(own["rounds"])))
    lengths = [
        1 + np.array(one["accepted"])[drawn].sum(axis=1) / np.array(one["rounds"])[drawn].sum(axis=1)
        for one in (own, base)
    ]
    ratios: NDArray[np.float64] = lengths[0] / lengths[1]
    return ratios


def table(record: Json, machine: str) -> str:
    """The ranking, as Markdown."""
    times = record["machines"][machine]
    plain = times["plain"]
    lines = [
        f"{machine}, target {times['target']}: plain {1 / plain:.1f} tokens/s",
        "",
        "| variant | layers x MLP, vocabulary | ms of a step, depth 3 / 7 "
        "| T 0: first draft, length at 3 / 5 / 7 | tokens/s (depth) | over the first "
        "| T 1: first draft, length at 3 / 5 / 7 | tokens/s (depth) | over the first |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(times["speeds"], key=lambda name: -times["speeds"][name]["mean"]):
        shape = shape_of(record["configs"][name])
        cells = [name, shape, " / ".join(f"{1e3 * times['shapes'][shape][k]:.2f}" for k in ("3", "7"))]
        for temperature, rule in TEMPERATURES.items():
            by_depth, speed = record["variants"][name][temperature][rule], times["speeds"][name][temperature]
            lengths = " / ".join(f"{by_depth[k]['acceptance_length']:.3f}" for k in ("3", "5", "7"))
            ratio, low, high = speed["ratio"]
            cells.append(f"{by_depth['7']['accepted_at'][0]:.3f}, {lengths}")
            cells.append(f"{speed['tokens_per_second']:.1f} ({speed['depth']})")
            cells.append(f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
