"""`eyas doctor`: does this drafter hold, where does it stop holding, and why."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import as_json_value, make_folder, read_chat_format, read_stop, require_models, short_names
from eyas.cli.help import MODEL, OUTPUT, SPECULATION, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    Quantization,
    Raw,
    Stop,
    report,
)

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.doctor.examination import Examination, ExaminationConfig, ExaminationPrompt
    from eyas.doctor.requirements import Requirement
    from eyas.target.model import Target


def doctor(
    context: typer.Context,
    drafter: Annotated[str, typer.Option(help="A drafter's folder or hub id.", rich_help_panel=SPECULATION)],
    prompts: Annotated[
        list[Path],
        typer.Option(help="Prompts or conversations: a file or folder; repeatable.", rich_help_panel=WORK),
    ],
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    against: Annotated[
        str | None, typer.Option(help="A second drafter to compare with.", rich_help_panel=SPECULATION)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for doctor.json, doctor.png and doctor.html; earlier ones are replaced.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="A condition such as length@3>=2.2, drift<=0.02 or retained@7000>=0.95; repeatable.",
            rich_help_panel=WORK,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts to examine at most.", min=1, rich_help_panel=WORK)] = 40,
    max_tokens: Annotated[int, typer.Option(help="New tokens per answer at most.", min=2, rich_help_panel=WORK)] = 64,
    depth: Annotated[int, typer.Option(help="Deepest draft to look at.", min=2, max=64, rich_help_panel=WORK)] = 16,
    case_prompts: Annotated[
        int,
        typer.Option(help="Prompts of each other condition; from 5 on they are judged.", min=1, rich_help_panel=WORK),
    ] = 6,
    context_prompts: Annotated[
        int,
        typer.Option(help="Prompts of each length of context; from 5 on they are judged.", min=1, rich_help_panel=WORK),
    ] = 2,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of other text around a question; repeatable.",
            min=1,
            show_default="1000 to 7000",
            rich_help_panel=WORK,
        ),
    ] = None,
    filler: Annotated[
        Path | None,
        typer.Option(help="Text for those.", show_default="the other prompts of the file", rich_help_panel=WORK),
    ] = None,
    robustness: Annotated[bool, typer.Option(help="Try other conditions as well.", rich_help_panel=WORK)] = True,
    diagnosis: Annotated[bool, typer.Option(help="Try repairs of known faults.", rich_help_panel=WORK)] = True,
    minutes: Annotated[
        float, typer.Option(help="No further condition is begun after this long.", min=0.0, rich_help_panel=WORK)
    ] = 8.0,
    seed: Annotated[int, typer.Option(help="Of noise and drawn answers.", rich_help_panel=WORK)] = 0,
    stop: Stop = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Quantization = "none",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Examine a drafter: drift by depth, robustness, known faults, and a verdict in words.

    Ctrl-C tells and writes what was measured until then. Exit code 1 if a --require does not hold.
    """
    require_models(target, drafter, against)
    import_libraries()
    from eyas.cli.progress import ProgressDisplay
    from eyas.doctor.candidate import load_candidate
    from eyas.doctor.examination import Examination
    from eyas.doctor.requirements import parse_requirement
    from eyas.errors import UserError
    from eyas.kernels.linear.packed_linear import pack_linears
    from eyas.kernels.llama.packed_experts import pack_experts
    from eyas.loading import load_target
    from eyas.target.model import Target

    arguments = {name: as_json_value(value) for name, value in context.params.items()}
    requirements = [parse_requirement(text) for text in require or ()]
    config = _config(depth, max_tokens, case_prompts, context_prompts, length, seed, robustness, diagnosis, minutes)
    conversations = _read(prompts)
    text = _filler(filler, conversations)
    if out is not None:
        make_folder(out)
    if against == drafter:
        raise UserError(f"--against {against} is the drafter itself; give another one")
    names = short_names([drafter] if against is None else [drafter, against])
    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=raw)
    config = replace(config, stop_strings=read_stop(stop))
    if quantization == "none":
        loaded = Target.load(
            target, dtype=dtype, device=device, cache=cache, chat_format=chat_format, quantization="none"
        )
        # Faster on a CPU, and no row's result depends on the others'; never halved, so that states are exact.
        pack_linears(loaded.model, halve=False, cache=cache)
        pack_experts(loaded.model, halve=False, cache=cache)
    else:
        loaded = load_target(
            target, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
        )
    arguments["quantization"] = loaded.quantization
    asked = chat_prompts(conversations, loaded, config, limit)
    candidates = [load_candidate(source, name, loaded) for name, source in names.items()]
    examination = Examination(loaded, candidates, asked, config, filler=text)
    try:
        with ProgressDisplay() as progress:
            examination.run(lambda name, done, total: progress.update(name, done, total or None))
    except (KeyboardInterrupt, UserError):
        if any(examination.measured.values()):
            report("stopped early; this is what was measured until then")
            _deliver(examination, arguments, requirements, out, as_json=as_json)
        raise
    record = _deliver(examination, arguments, requirements, out, as_json=as_json)
    if not all(gate["passed"] for gate in record["gates"]):
        raise typer.Exit(1)


def _config(
    depth: int,
    max_tokens: int,
    case_prompts: int,
    context_prompts: int,
    lengths: Sequence[int] | None,
    seed: int,
    robustness: bool,
    diagnosis: bool,
    minutes: float,
) -> "ExaminationConfig":
    from eyas.doctor.examination import ExaminationConfig
    from eyas.doctor.robustness import Conditions

    conditions = Conditions(
        prompts=case_prompts,
        context_prompts=context_prompts,
        max_new_tokens=min(32, max_tokens),
        context_tokens=min(24, max_tokens),
        depths=tuple(k for k in (3, 7) if k <= depth) or (depth,),
        lengths=tuple(sorted(set(lengths or Conditions.lengths))),
        seed=seed,
    )
    return ExaminationConfig(
        depth=depth,
        max_new_tokens=max_tokens,
        conditions=conditions if robustness else None,
        diagnosed=diagnosis,
        minutes=minutes,
    )


def _read(files: Sequence[Path]) -> "list[Conversation]":
    from eyas.data.files import read_conversations

    return [conversation for file in files for conversation in read_conversations(file)]


def _filler(file: Path | None, conversations: "Sequence[Conversation]") -> str:
    from eyas.errors import UserError

    if file is None:
        return "\n\n".join(str(message["content"]) for one in conversations for message in one.messages)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}); give a text file") from error
    if not text.strip():
        raise UserError(f"{file} holds no text; give some for --filler or leave it out")
    return text


def chat_prompts(
    conversations: "Sequence[Conversation]", target: "Target", config: "ExaminationConfig", limit: int
) -> "list[ExaminationPrompt]":
    """The first questions of the conversations, as many as `limit`, that leave room for an answer."""
    from eyas.data.encode_prompt import encode_prompt
    from eyas.doctor.examination import ExaminationPrompt
    from eyas.doctor.transcripts import Asked
    from eyas.evaluate.prompts import Questions

    longest = (target.facts.max_position_embeddings or 8192) - config.max_new_tokens - config.depth
    encode = partial(encode_prompt, target)
    asked, skipped = Questions(conversations[:limit], encode, turns=1, longest=longest).first()
    if skipped:
        report(f"{skipped} prompts are too long for the target's context and left out")
    return [
        ExaminationPrompt(asked=Asked(key=prompt.key, ids=prompt.ids), conversation=prompt.conversation)
        for prompt in asked
    ]


def _deliver(
    examination: "Examination",
    arguments: Mapping[str, Any],
    requirements: "Sequence[Requirement]",
    out: Path | None,
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Print, then write."""
    from eyas.cli.doctor_tables import print_record
    from eyas.doctor.record import record_of
    from eyas.errors import UserError

    record = record_of(examination, arguments, requirements)
    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_record(record)
    if out is not None:
        from eyas.doctor.plot import plot_record
        from eyas.doctor.report import render_report

        try:
            (out / "doctor.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
            (out / "doctor.html").write_text(render_report(record), encoding="utf-8")
            plot_record(record, out / "doctor.png")
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror}; free space or choose another --out") from error
        report(f"written: {', '.join(str(out / f'doctor.{kind}') for kind in ('html', 'json', 'png'))}")
    return record
