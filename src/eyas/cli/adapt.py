"""`eyas adapt`: from a drafter and a few thousand answers of its target to a drafter that foretells such better."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.arguments import as_json_value, make_folder, read_chat_format, require_models
from eyas.cli.help import MODEL, OPERATION, OUTPUT, TRAINING, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    Raw,
)
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.data.bad_records import BadRecords
    from eyas.data.conversations import Conversation


def adapt(
    context: typer.Context,
    drafter: Annotated[str, typer.Argument(help="The drafter to start from: its name, folder or hub id.")],
    answers: Annotated[
        list[Path], typer.Argument(help="Answers of the target, oldest first: files or folders of conversations.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for drafter, record, picture and training.", rich_help_panel=OUTPUT)
    ],
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            help="Other answers of the target, mixed in and judged on too, so that they are not forgotten; repeatable.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    replay_share: Annotated[
        float,
        typer.Option(help="Share of the tokens that is of --replay.", min=0.0, max=0.95, rich_help_panel=TRAINING),
    ] = 0.25,
    minutes: Annotated[
        float,
        typer.Option(
            help="Minutes of training at most; rests for --device-share are none.",
            min=0.01,
            max=1e6,
            rich_help_panel=TRAINING,
        ),
    ] = 3.0,
    epochs: Annotated[
        float, typer.Option(help="Passes over the answers at most.", min=0.01, max=1e6, rich_help_panel=TRAINING)
    ] = 4.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=1.0, rich_help_panel=TRAINING)] = 1e-4,
    anchor: Annotated[
        float,
        typer.Option(
            help="Share of the way back to the starting weights that every step goes; 0: none.",
            min=0.0,
            max=0.99,
            rich_help_panel=TRAINING,
        ),
    ] = 0.01,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set any value of the recipe: train.depths=5. Repeatable.", rich_help_panel=TRAINING
        ),
    ] = None,
    held_out_share: Annotated[
        float,
        typer.Option(
            help="Share of the newest answers that is judged on and not trained on; 16 conversations at least.",
            min=0.01,
            max=0.5,
            rich_help_panel=WORK,
        ),
    ] = 0.1,
    depth: Annotated[
        int,
        typer.Option(help="Tokens that are drafted per round where it is judged.", min=1, max=64, rich_help_panel=WORK),
    ] = 5,
    max_loss: Annotated[
        float,
        typer.Option(
            help="Share of the acceptance length on --replay that may be lost.", min=0.0, max=1.0, rich_help_panel=WORK
        ),
    ] = 0.02,
    doctor: Annotated[bool, typer.Option(help="Have the doctor examine the new drafter.", rich_help_panel=WORK)] = True,
    device_share: Annotated[
        float,
        typer.Option(
            help="Share of the device's time that all of it takes, with rests in between, for a device that serves "
            "meanwhile; on a CPU also this share of the threads, one at least. 1: no rests.",
            min=0.001,
            max=1.0,
            rich_help_panel=OPERATION,
        ),
    ] = 1.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was stopped in --out.", rich_help_panel=OPERATION)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the recipe and stop.", rich_help_panel=OPERATION)
    ] = False,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="What the target's matrices are while it makes states: none, auto, gguf, int8, int4, fp8.",
            rich_help_panel=MODEL,
        ),
    ] = "none",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Adapt a drafter to the traffic it meets, and keep the new one only if it is better.

    The newest answers are held out. Old and new drafter walk them, and the new one is kept if it is better beyond the
    interval: then it lies in OUT/drafter, as vLLM loads it. Exit code 1: it is not, and the old one stays. Ctrl-C
    saves; --resume goes on.
    """
    require_models(target, drafter)
    import_libraries()
    from eyas.cli.adaptation import DOCTOR_PROMPTS, Adaptation
    from eyas.data.bad_records import BadRecords
    from eyas.drafter.checkpoint import find_folder, read_config
    from eyas.loading import require_fit
    from eyas.target.facts import read_facts
    from eyas.train.adaptation.recipe import AdaptationSettings, adaptation_recipe
    from eyas.train.recipe_file import to_toml

    arguments = {name: as_json_value(value) for name, value in context.params.items()}
    facts = read_facts(target, cache=cache)
    require_fit(drafter, facts)
    if find_folder(drafter).resolve() == (out / "drafter").resolve():
        raise UserError(
            f"{out / 'drafter'} is the drafter to start from, and where the new one would lie; choose another --out"
        )
    chosen_device = _device(device)
    settings = AdaptationSettings(
        drafter=drafter,
        answers=[str(path) for path in answers],
        replay=[str(path) for path in replay or ()],
        replay_share=replay_share,
        held_out_share=held_out_share,
        lr=lr,
        anchor=anchor,
        epochs=epochs,
        minutes=minutes,
        device_share=device_share,
        target={
            "source": target,
            "dtype": dtype,
            "quantization": quantization,
            "device": device,
            "raw": raw,
            **({} if chat_template is None else {"chat_template": chat_template}),
            "chat_template_kwargs": dict(read_chat_format(None, chat_template_kwargs, raw=False).variables),
        },
        folder=str(out / "training"),
        overrides=overrides or (),
    )
    bad, bad_replay = BadRecords(), BadRecords()
    found = _conversations(settings.answers, bad)
    conversations = [one for one in found if one.answered]
    recipe = adaptation_recipe(
        settings,
        read_config(drafter),
        answered=len(conversations),
        unanswered=len(found) - len(conversations),
        longest=_longest([*conversations, *_conversations(settings.replay, bad_replay)]),
        bad=bad,
        bad_replay=bad_replay,
        context=facts.max_position_embeddings,
        on_cpu=chosen_device == "cpu",
    )
    if dry_run:
        typer.echo(to_toml(recipe))
        return
    make_folder(out)
    Adaptation(
        recipe=recipe,
        newest=conversations[-DOCTOR_PROMPTS:],
        out=out,
        depth=depth,
        max_loss=max_loss,
        doctor=doctor,
        device_share=device_share,
        arguments=arguments,
        cache=cache,
    ).run(resume=resume, as_json=as_json)


def _conversations(files: Sequence[str], bad: "BadRecords") -> "list[Conversation]":
    """All that can be read, in order; what cannot is counted in `bad`."""
    from eyas.data.files import ConversationReader, expand_files

    return list(ConversationReader(expand_files(files), bad))


def _longest(conversations: "Sequence[Conversation]") -> int | None:
    """Tokens of the longest, where all of them came with their tokens."""
    if not all(conversation.samples for conversation in conversations):
        return None
    return max(
        (len(one.prompt_ids) + len(one.answer_ids) for conversation in conversations for one in conversation.samples),
        default=None,
    )


def _device(asked: str) -> str:
    from eyas.cli.train import choose_training_device

    return choose_training_device(asked)
