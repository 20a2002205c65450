"""`eyas adapt`: adapt a drafter to a few thousand answers of its target."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import MODEL, OPERATION, OUTPUT, TRAINING, WORK
from eyas.cli.options import (
    AsJson,
    Drafter,
    ModelOptions,
    arguments_of,
    build,
    command,
    load_libraries,
    options,
)
from eyas.cli.stop import StopRequest
from eyas.cli.terminal import ProgressDisplay, Ticker, make_folder, print_result, report, titled_table, wide_console
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.drafter.checkpoint import Checkpoint
    from eyas.target.model import Target as LoadedTarget
    from eyas.train.adaptation.recipe import AdaptationSettings
    from eyas.train.adaptation.run import Adaptation
    from eyas.train.pace import Pace
    from eyas.train.recipe import Recipe

DOCTOR_PROMPTS, DOCTOR_TOKENS, DOCTOR_DEPTH = 16, 48, 8
DOCTOR_MINUTES = 3.0
NAMES = {"traffic": "the traffic", "replay": "what is replayed"}


@options(MODEL)
class AdaptModelOptions(ModelOptions):
    """The target, which makes the states that are trained on."""

    quantization: str = "none"
    """Format of the target's matrices while it makes states: none, auto, gguf, int8, int4, fp8."""


@options(TRAINING)
class TrainingOptions:
    """What is trained, and for how long."""

    replay: list[Path] | None = None
    """Other answers of the target, mixed in and judged on too, so that they are not forgotten; repeatable."""
    replay_share: Annotated[float, Option(min=0.0, max=0.95)] = 0.25
    """Share of the tokens that is of --replay."""
    minutes: Annotated[float, Option(min=0.01, max=1e6)] = 3.0
    """Minutes of training at most; rests for --device-share do not count."""
    epochs: Annotated[float, Option(min=0.01, max=1e6)] = 4.0
    """Passes over the answers at most."""
    lr: Annotated[float, Option(min=1e-9, max=1.0)] = 1e-4
    """Peak learning rate."""
    anchor: Annotated[float, Option(min=0.0, max=0.99)] = 0.01
    """Share of the way back to the starting weights that every step goes; 0: none."""
    overrides: Annotated[list[str] | None, Option("--set")] = None
    """Set any value of the recipe: train.depths=5. Repeatable."""
    held_out_share: Annotated[float, Option(min=0.01, max=0.5, rich_help_panel=WORK)] = 0.1
    """Share of the newest answers that is judged on and not trained on; 16 conversations at least."""
    device_share: Annotated[float, Option(min=0.001, max=1.0, rich_help_panel=OPERATION)] = 1.0
    """Share of the device's time that all of it takes, with rests in between, for a device that serves meanwhile; on a
    CPU also this share of the threads, one at least. 1: no rests."""
    resume: Annotated[bool, Option("--resume", rich_help_panel=OPERATION)] = False
    """Go on with what was stopped in --out."""
    dry_run: Annotated[bool, Option("--dry-run", rich_help_panel=OPERATION)] = False
    """Print the recipe and stop."""


@options(WORK)
class JudgingOptions:
    """How old and new drafter are compared."""

    depth: Annotated[int, Option(min=1, max=64)] = 5
    """Tokens to draft per round where the drafters are judged."""
    max_loss: Annotated[float, Option(min=0.0, max=1.0)] = 0.02
    """Share of the acceptance length on --replay that may be lost."""
    doctor: bool = True
    """Have the doctor examine the new drafter."""


@command()
def adapt(
    drafter: Drafter,
    answers: Annotated[
        list[Path], typer.Argument(help="Answers of the target, oldest first: files or folders of conversations.")
    ],
    out: Annotated[Path, Option(help="Folder for drafter, record, picture and training.", rich_help_panel=OUTPUT)],
    *,
    model: AdaptModelOptions,
    training: TrainingOptions,
    judging: JudgingOptions,
    as_json: AsJson = False,
) -> None:
    """Adapt a drafter to the traffic it meets, and keep the new one only if it is better.

    The newest answers are held out. Old and new drafter walk them, and the new one is kept if it is better beyond the
    interval: then it lies in OUT/drafter, as vLLM loads it. Exit code 1: it is not, and the old one stays. Ctrl-C
    saves; --resume goes on.
    """
    arguments = arguments_of(**locals())
    load_libraries(model.target, drafter)
    from eyas.data.bad_records import BadRecords
    from eyas.drafter.checkpoint import find_folder, read_config
    from eyas.loading import require_fit
    from eyas.target.facts import read_facts
    from eyas.train.adaptation.recipe import adaptation_recipe
    from eyas.train.adaptation.run import Adaptation, longest_of, read_all
    from eyas.train.load_target import choose_training_device
    from eyas.train.preflight import check_run
    from eyas.train.recipe_file import to_toml

    facts = read_facts(model.target, cache=model.cache)
    require_fit(drafter, facts)
    if find_folder(drafter).resolve() == (out / "drafter").resolve():
        raise UserError(
            f"{out / 'drafter'} is the drafter to start from, and where the new one would lie; choose another --out"
        )
    settings = _settings(drafter, answers, out, model, training)
    bad, bad_replay = BadRecords(), BadRecords()
    found = read_all(settings.answers, bad)
    conversations = [one for one in found if one.answered]
    recipe = adaptation_recipe(
        settings,
        read_config(drafter),
        answered=len(conversations),
        unanswered=len(found) - len(conversations),
        longest=longest_of([*conversations, *read_all(settings.replay, bad_replay)]),
        bad=bad,
        bad_replay=bad_replay,
        context=facts.max_position_embeddings,
        on_cpu=choose_training_device(model.device) == "cpu",
    )
    if training.dry_run:
        typer.echo(to_toml(recipe))
        return
    make_folder(out)
    adaptation = Adaptation(
        recipe=recipe,
        out=out,
        depth=judging.depth,
        max_loss=judging.max_loss,
        device_share=training.device_share,
        arguments=arguments,
        cache=model.cache,
    )
    check_run(recipe, facts, resuming=training.resume)
    _train(adaptation, resume=training.resume)
    newest = conversations[-DOCTOR_PROMPTS:]
    record = adaptation.judge(partial(_examine, adaptation, newest) if judging.doctor else None)
    print_result(record, lambda: _print_adaptation(record, recipe, out), as_json=as_json)
    if not record["kept"]:
        raise typer.Exit(1)


def _settings(
    drafter: str, answers: Sequence[Path], out: Path, model: AdaptModelOptions, training: TrainingOptions
) -> "AdaptationSettings":
    from eyas.train.adaptation.recipe import AdaptationSettings

    variables = replace(model, chat_template=None, raw=False).chat_format().variables
    target = {"source": model.target, "chat_template_kwargs": dict(variables)}
    target |= {name: getattr(model, name) for name in ("dtype", "quantization", "device", "raw")}
    return build(
        AdaptationSettings,
        training,
        drafter=drafter,
        answers=[str(path) for path in answers],
        replay=[str(path) for path in training.replay or ()],
        target=target if model.chat_template is None else {**target, "chat_template": model.chat_template},
        folder=str(out / "training"),
        overrides=training.overrides or (),
    )


def _train(adaptation: "Adaptation", *, resume: bool) -> None:
    """Train until the end, or until a signal."""
    from eyas.cli.train import TrainScreen
    from eyas.train.adaptation.run import AdaptationStoppedError

    tick = Ticker()
    try:
        with StopRequest() as stop:
            adaptation.train(
                resume=resume,
                stop=stop.asked,
                on_first_step=stop.saves_from_now_on,
                on_encoded=lambda progress: tick(str(progress), at_once=not progress.conversations),
                screen=TrainScreen(shown=True),
            )
    except AdaptationStoppedError as stopped:
        report(f"{stopped}; the same command with --resume goes on")
        raise typer.Exit(130) from stopped


def _examine(
    adaptation: "Adaptation",
    newest: "Sequence[Conversation]",
    target: "LoadedTarget",
    candidate: "Checkpoint",
    pace: "Pace",
) -> dict[str, Any]:
    """Have the doctor examine the candidate on the newest prompts: drift and known faults alone."""
    from eyas.cli.doctor import chat_prompts
    from eyas.doctor.candidate import prepare_candidate
    from eyas.doctor.examination import Examination, ExaminationConfig
    from eyas.doctor.record import record_of
    from eyas.kernels.linear.packed_linear import pack_linears
    from eyas.kernels.llama.packed_experts import pack_experts
    from eyas.train.journal import write_text

    if adaptation.recipe.target.quantization == "none":  # as `eyas doctor` does
        pack_linears(target.model, halve=False, cache=adaptation.cache)
        pack_experts(target.model, halve=False, cache=adaptation.cache)
    config = ExaminationConfig(
        depth=DOCTOR_DEPTH, max_new_tokens=DOCTOR_TOKENS, conditions=None, minutes=DOCTOR_MINUTES
    )
    prompts = chat_prompts(newest, target, config, DOCTOR_PROMPTS)
    subject = prepare_candidate(candidate, "adapted", target, source=str(adaptation.out / "drafter"))
    examination = Examination(target, [subject], prompts, config, filler="")
    with ProgressDisplay() as progress:

        def step(name: str, done: int, total: int) -> None:
            progress.update(name, done, total or None)
            pace.rest()

        examination.run(step)
    record = record_of(examination, adaptation.arguments, [])
    write_text(adaptation.out / "doctor.json", json.dumps(record, indent=1))
    return dict(record["decision"])


def _print_adaptation(record: Mapping[str, Any], recipe: "Recipe", out: Path) -> None:
    """Print lengths before and after, acceptance by depth, the verdicts, and what can be done next."""
    from eyas.cli.train import say_what_next

    console = wide_console(120, highlight=False)
    depth, changes = record["depth"], record["changes"]
    title = f"acceptance length at depth {depth}, estimated on what was held out"
    lengths = titled_table(title, ["on", "conversations", "before", "after", "change", "95 % interval"])
    for name, change in changes.items():
        gain = change["gain"]
        lengths.add_row(
            NAMES[name],
            str(change["conversations"]),
            f"{change['before']['acceptance_length']:.3f}",
            f"{change['after']['acceptance_length']:.3f}",
            f"{gain['value']:+.1%}",
            f"{gain['low']:+.1%} to {gain['high']:+.1%}",
        )
    console.print(lengths)
    shares = titled_table("accepted, given all before it were", ["on", "", *(str(k + 1) for k in range(depth))])
    for name, change in changes.items():
        for when in ("before", "after"):
            row = ["-" if share is None else f"{share:.3f}" for share in change[when]["conditional"]]
            shares.add_row(NAMES[name], when, *row)
    console.print(shares)
    doctor = record["doctor"]
    console.print(f"doctor: {doctor['text']}" if "text" in doctor else f"doctor: skipped {doctor['skipped']}")
    seconds, answered = record["seconds"], record["data"]["conversations"]
    console.print(
        f"{answered:,} conversations, {record['steps']:,} steps in {seconds['training'] / 60:.1f} "
        f"minutes of training; {seconds['total'] / 60:.1f} minutes in all"
    )
    if (share := record["device_share"])["asked"] < 1:
        console.print(f"{share['taken']:.1%} of the device's time, of {share['asked']:.1%} that it was allowed")
    console.print(record["verdict"], style="bold")
    trained = Path(recipe.output.folder)
    typer.echo(f"record and picture: {out}; recipe, log and picture of the training: {trained}")
    if not record["kept"]:
        typer.echo(f"what was trained is {trained / 'drafter'}; more answers, or other --lr and --epochs, may help")
        return
    served = say_what_next(recipe.target.source, str(out / "drafter"))
    if recipe.target.source != DEFAULT_TARGET:  # a name that only eyas knows
        typer.echo(f"with vLLM: {shlex.join(['vllm', *served])}")
