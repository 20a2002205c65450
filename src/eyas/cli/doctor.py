"""`eyas doctor`: examine a drafter: how deep it holds, where it stops, and why."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import MODEL, OUTPUT, SPECULATION, WORK
from eyas.cli.options import (
    AsJson,
    ModelOptions,
    Prompts,
    StopOptions,
    arguments_of,
    command,
    load_libraries,
    options,
    short_names,
)
from eyas.cli.terminal import (
    ProgressDisplay,
    cell,
    make_folder,
    print_result,
    report,
    text_file,
    titled_table,
    wide_console,
    write_results,
)
from eyas.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from eyas.data.conversations import Conversation
    from eyas.doctor.examination import Examination, ExaminationConfig, ExaminationPrompt
    from eyas.doctor.requirements import Requirement
    from eyas.target.model import Target

Record = Mapping[str, Any]

_STYLES = {"fault": "bold red", "warning": "yellow", "unknown": "magenta", "note": "blue", "healthy": "green"}
_DECIDED = {"ship": "bold green", "do_not_ship": "bold red", "cannot_tell": "bold magenta"}
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)


@options(MODEL)
class DoctorModelOptions(ModelOptions):
    """The target."""

    quantization: str = "none"


@options(WORK)
class ExaminationOptions(StopOptions):
    """What is examined, and how thoroughly."""

    drafter: Annotated[list[str], Option(rich_help_panel=SPECULATION)]
    """A drafter's name, folder or hub id; repeat to compare with a second one."""
    out: Annotated[Path | None, Option(rich_help_panel=OUTPUT)] = None
    """Folder for doctor.json, doctor.png and doctor.html; earlier ones are replaced."""
    require: list[str] | None = None
    """A condition such as length@3>=2.2, drift<=0.02 or retained@7000>=0.95; repeatable."""
    limit: Annotated[int, Option(min=1)] = 40
    """Prompts to examine at most."""
    max_tokens: Annotated[int, Option(min=2)] = 64
    """New tokens per answer at most."""
    depth: Annotated[int, Option(min=2, max=64)] = 16
    """Deepest draft to look at."""
    case_prompts: Annotated[int, Option(min=1)] = 6
    """Prompts of each other condition; from 5 on they are judged."""
    context_prompts: Annotated[int, Option(min=1)] = 2
    """Prompts of each length of context; from 5 on they are judged."""
    length: Annotated[list[int] | None, Option(min=1, show_default="1000 to 7000")] = None
    """Tokens of other text around a question; repeatable."""
    filler: Annotated[Path | None, Option(show_default="the other prompts of the file")] = None
    """Text for those."""
    robustness: bool = True
    """Try other conditions as well."""
    diagnosis: bool = True
    """Try repairs of known faults."""
    minutes: Annotated[float, Option(min=0.0)] = 8.0
    """No further condition is begun after this long."""
    seed: int = 0
    """Seed of noise and sampled answers."""

    def config(self) -> "ExaminationConfig":
        """These options as the library has them."""
        from eyas.doctor.examination import ExaminationConfig
        from eyas.doctor.robustness import Conditions

        conditions = Conditions(
            prompts=self.case_prompts,
            context_prompts=self.context_prompts,
            max_new_tokens=min(32, self.max_tokens),
            context_tokens=min(24, self.max_tokens),
            depths=tuple(k for k in (3, 7) if k <= self.depth) or (self.depth,),
            lengths=tuple(sorted(set(self.length or Conditions.lengths))),
            seed=self.seed,
        )
        return ExaminationConfig(
            depth=self.depth,
            max_new_tokens=self.max_tokens,
            stop_strings=self.stop_strings(),
            conditions=conditions if self.robustness else None,
            diagnosed=self.diagnosis,
            minutes=self.minutes,
        )


@command()
def doctor(prompts: Prompts, *, model: DoctorModelOptions, given: ExaminationOptions, as_json: AsJson = False) -> None:
    """Examine a drafter: drift by depth, robustness, known faults, and a verdict in words.

    Ctrl-C prints and writes what was measured until then. Exit code 1 if a --require does not hold.
    """
    arguments = arguments_of(**locals())
    load_libraries(model.target, *given.drafter)
    from eyas.data.files import read_conversations
    from eyas.doctor.candidate import load_candidate
    from eyas.doctor.examination import Examination
    from eyas.doctor.requirements import parse_requirement

    requirements = [parse_requirement(text) for text in given.require or ()]
    config = given.config()
    conversations = [conversation for file in prompts for conversation in read_conversations(file)]
    text = _filler(given.filler, conversations)
    make_folder(given.out)
    names = short_names(given.drafter)
    if len(names) < len(given.drafter):
        raise UserError(f"--drafter {given.drafter[0]} is given twice; give another one to compare with")
    loaded = _load(model)
    arguments["quantization"] = loaded.quantization
    asked = chat_prompts(conversations, loaded, config, given.limit)
    candidates = [load_candidate(source, name, loaded) for name, source in names.items()]
    examination = Examination(loaded, candidates, asked, config, filler=text)
    try:
        with ProgressDisplay() as progress:
            examination.run(lambda name, done, total: progress.update(name, done, total or None))
    except (KeyboardInterrupt, UserError):
        if any(examination.measured.values()):
            report("stopped early; this is what was measured until then")
            _deliver(examination, arguments, requirements, given.out, as_json=as_json)
        raise
    record = _deliver(examination, arguments, requirements, given.out, as_json=as_json)
    if not all(gate["passed"] for gate in record["gates"]):
        raise typer.Exit(1)


def _load(model: DoctorModelOptions) -> "Target":
    from eyas.kernels.linear.packed_linear import pack_linears
    from eyas.kernels.llama.packed_experts import pack_experts
    from eyas.target.model import Target

    if model.quantization != "none":
        return model.load()
    loaded = Target.load(model.target, **model.placement())
    # Faster on a CPU, and no row's result depends on the others'; never halved, so that states are exact.
    pack_linears(loaded.model, halve=False, cache=model.cache)
    pack_experts(loaded.model, halve=False, cache=model.cache)
    return loaded


def _filler(file: Path | None, conversations: "Sequence[Conversation]") -> str:
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
    """Encode the first questions of the conversations, at most `limit`, that leave room for an answer."""
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
    from eyas.doctor.plot import plot_record
    from eyas.doctor.record import record_of
    from eyas.doctor.report import render_report

    record = record_of(examination, arguments, requirements)
    print_result(record, lambda: _print_record(record), as_json=as_json)
    write_results(
        out,
        {
            "doctor.html": lambda path: path.write_text(render_report(record), encoding="utf-8"),
            "doctor.json": text_file(json.dumps(record, indent=1)),
            "doctor.png": lambda path: plot_record(record, path),
        },
    )
    return record


def _print_record(record: Record) -> None:
    """Print the decision, tables, then the verdict."""
    console = wide_console(160)
    for name, own in record["drafters"].items():
        console.print(_decision(name, own["decision"], several=len(record["drafters"]) > 1), soft_wrap=True)
    measured = {name: own for name, own in record["drafters"].items() if own["drift"]}
    for name, own in measured.items():
        console.print(_drift(name, own))
    if record["cases"]:
        console.print(_matrix(record))
    for name, own in record["drafters"].items():
        for line in _verdict(name, own):
            console.print(line, soft_wrap=True)
    for gate in record["gates"]:
        style = "green" if gate["passed"] else "bold red"
        console.print(f"{'holds' if gate['passed'] else 'FAILS'}  {gate['gate']}: {gate['reason']}", style=style)


def _decision(name: str, decision: Record, *, several: bool) -> "Text":
    from rich.text import Text

    return Text(f"{name}: {decision['text']}" if several else decision["text"], style=_DECIDED[decision["outcome"]])


def _drift(name: str, own: Record) -> "Table":
    drift = own["drift"]
    depths = [depth for depth in _SHOWN if depth <= drift["depth"]]
    title = f"{name} ({own['family']}): {drift['prompts']} prompts, {drift['rounds']} rounds to depth {drift['depth']}"
    table = titled_table(title, ["by depth", *map(str, depths), "slope per depth"])
    rows = {
        "acceptance length": ([one["value"] for one in drift["length"]], None, "{:.2f}"),
        "conditional acceptance": (drift["conditional"]["value"], drift["conditional"]["slope"], "{:.0%}"),
        "joint acceptance": (drift["joint"]["value"], drift["joint"]["slope"], "{:.0%}"),
        "RMS fed back": (drift["rms"]["value"], drift["growth"], "{:.3g}"),
        **{
            f"attention on {region}": (curve["value"], curve["slope"], "{:.3f}")
            for region, curve in drift["mass"].items()
        },
        "attention spread": (drift["spread"]["value"], drift["spread"]["slope"], "{:.3f}"),
    }
    for label, (values, slope, form) in rows.items():
        cells = [cell(values[k - 1], form) for k in depths]
        table.add_row(label, *cells, _slope(slope, relative=label == "RMS fed back"))
    return table


def _matrix(record: Record) -> "Table":
    names = list(record["drafters"])
    table = titled_table(
        "acceptance length under other conditions, and what is kept of the unperturbed one", ["condition"]
    )
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("kept", justify="right")
    table.add_column("prompts", justify="right")
    for case in record["cases"]:
        if case["left_out"]:
            table.add_row(case["name"], f"left out: {case['left_out']}")
            continue
        cells = []
        for name in names:
            found = list(case["cells"][name].values())[-1]
            cells += [cell(found["length"], "{:.2f}"), cell(found["kept"]["value"], "{:.0%}")]
        table.add_row(case["name"], *cells, str(case["prompts"]))
    return table


def _verdict(name: str, own: Record) -> Iterator["Text"]:
    from rich.text import Text

    verdict = own["verdict"]
    yield Text(f"\n{name}: recommended depth {verdict['recommended_depth']}", style="bold")
    for statement in verdict["statements"]:
        text = Text(f"  {statement['level']:8} ", style=_STYLES[statement["level"]])
        text.append(statement["text"], style="default")
        if statement["cause"] and statement["cause"] != statement["text"]:
            text.append(f"; likely cause: {statement['cause']}", style="default")
        if statement["evidence"]:
            text.append(f"\n           {'; '.join(statement['evidence'])}", style="dim")
        if statement["advice"]:
            text.append(f"\n           do: {statement['advice']}", style="default")
        yield text


def _slope(slope: Record | None, *, relative: bool) -> str:
    if slope is None or slope["value"] is None:
        return "-"
    form = "{:+.1%}" if relative else "{:+.4f}"
    return f"{form.format(slope['value'])} ({form.format(slope['low'])} .. {form.format(slope['high'])})"
