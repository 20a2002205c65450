"""`eyas data check`: what training would make of a whole corpus."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import make_folder, read_chat_format, require_models
from eyas.cli.help import MODEL, OUTPUT, WORK
from eyas.cli.options import AsJson, Cache, ChatTemplate, ChatTemplateKwargs, MaxBadShare, Raw, report
from eyas.cli.progress import ProgressDisplay
from eyas.data.bad_records import MAX_BAD_SHARE

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.train.corpus.encoding import EncodingProgress

MAX_LENGTH = 2048


def check(
    files: Annotated[
        list[str] | None, typer.Argument(help="Conversations: files, folders or globs.", show_default=False)
    ] = None,
    target: Annotated[
        str, typer.Option(help="Whose chat template and tokenizer to use.", rich_help_panel=MODEL)
    ] = "smollm2",
    recipe: Annotated[
        Path | None,
        typer.Option(help="Take files, target and settings from a recipe.", rich_help_panel=WORK),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option("--eval", help="Prompts that should not be in the corpus; repeatable.", rich_help_panel=WORK),
    ] = None,
    max_length: Annotated[
        int, typer.Option(help="Tokens of a row at most, as data.max_length.", min=3, rich_help_panel=WORK)
    ] = MAX_LENGTH,
    max_bad_share: MaxBadShare = MAX_BAD_SHARE,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that encode.", min=0, max=1024, show_default="as many as pay", rich_help_panel=WORK
        ),
    ] = 0,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for check.json and check.png; earlier ones are replaced.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Read a whole corpus and say what training would make of it.

    Exit code 1 if training would refuse it. With --recipe, that decides everything but --eval and --workers.
    """
    from eyas.data.files import expand_files
    from eyas.errors import UserError
    from eyas.train.recipe_file import load_recipe

    chosen = None if recipe is None else load_recipe(recipe)
    if bool(files) == (chosen is not None):
        raise UserError("give files of conversations or --recipe, one of the two")
    require_models(target if chosen is None else chosen.target.source)
    from eyas.train.corpus.check import check_corpus
    from eyas.train.corpus.encoding import EncodingSettings

    if chosen is None:
        settings = EncodingSettings(
            source=target,
            max_length=max_length,
            cache=cache,
            chat_format=read_chat_format(chat_template, chat_template_kwargs, raw=raw),
        )
    else:
        settings, max_bad_share = EncodingSettings.of(chosen, cache=cache), chosen.data.max_bad_share
    if out is not None:
        make_folder(out)
    with ProgressDisplay() as display:

        def show(progress: "EncodingProgress") -> None:
            share = progress.bytes_read / max(1, progress.bytes_total)
            display.update("encoding (%)", int(100 * share), 100, note=str(progress))

        record = check_corpus(
            expand_files(files or list(chosen.data.files if chosen is not None else ())),
            settings,
            max_bad_share=max_bad_share,
            evaluation=expand_files(evaluation or []),
            workers=workers or (0 if chosen is None else chosen.data.workers),
            on_progress=show,
        )
    _deliver(record, out, as_json=as_json)
    if record["refused"]:
        report(f"eyas: training would refuse this: {record['refused']}")
        raise typer.Exit(1)


def _deliver(record: Mapping[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Print, then write."""
    from eyas.cli.tables import wide_console
    from eyas.errors import UserError

    if as_json:
        typer.echo(json.dumps(record))
    else:
        console = wide_console(120, highlight=False)
        for table in _tables(record):
            console.print(table)
    if out is not None:
        from eyas.train.corpus.plot import plot_check

        try:
            (out / "check.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
            plot_check(record, out / "check.png")
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror}; free space or choose another --out") from error
        report(f"written: {out / 'check.json'}, {out / 'check.png'}")


def _tables(record: Mapping[str, Any]) -> "Iterator[Table]":
    from eyas.cli.tables import titled_table

    read, bad = record["bad"]["read"], record["bad"]
    table = titled_table("records", ["what becomes of them", "records", "share"])
    for name, count in (
        ("read", read),
        ("kept", record["kept"]),
        ("  of these cut", record["cut"]),
        ("too long", record["too_long"]),
        ("unanswered", record["unanswered"]),
        *((("answers with calls that the template leaves out", n),) if (n := record["unwritten"]) else ()),
        ("bad", bad["records"]),
        *((f"  {reason}", count) for reason, count in bad["by_reason"].items()),
        ("said before, word for word", record["duplicates"]["conversations"]),
        ("first question asked before", record["duplicates"]["first_prompts"]),
        *((f"answered by {author or 'an unknown author'}", count) for author, count in record["authors"].items()),
    ):
        table.add_row(name, f"{count:,}", f"{count / max(1, read):.1%}")
    yield table

    table = titled_table("tokens", ["", "tokens", "share"])
    for name, count in (("in all", record["tokens"]), ("trained on", record["trained_on"])):
        table.add_row(name, f"{count:,}", f"{count / max(1, record['tokens']):.1%}")
    yield table

    lengths = record["lengths"]
    quantiles = [f"{float(q):.0%}" for q in lengths["tokens"]]
    table = titled_table(f"lengths of {record['rows']:,} rows, by quantile", ["", *quantiles])
    for name, key in (("tokens", "tokens"), ("trained on", "trained_on")):
        table.add_row(name, *(f"{length:,}" for length in lengths[key].values()))
    yield table

    vocabulary = record["vocabulary"]
    table = titled_table(
        f"draft vocabulary: {vocabulary['distinct']:,} different tokens are trained on",
        ["to cover", *(f"{float(share):.1%}" for share in vocabulary["tokens_for"])],
    )
    table.add_row("tokens needed", *(f"{count:,}" for count in vocabulary["tokens_for"].values()))
    yield table
    table = titled_table("", ["draft tokens", *(f"{int(size):,}" for size in vocabulary["coverage_of"])])
    table.add_row("cover", *(f"{share:.2%}" for share in vocabulary["coverage_of"].values()))
    yield table

    if record["overlap"] is not None:
        table = titled_table(
            "evaluation prompts in the corpus", ["file", "prompts", "word for word", "nearly", "13 words shared"]
        )
        for own in record["overlap"]["files"]:
            table.add_row(own["file"], *(f"{own[key]:,}" for key in ("prompts", "exact", "near", "shared")))
        yield table
    examples = [line for lines in bad["examples"].values() for line in lines]
    examples += [
        f"{one['prompt']} is in {one['conversation']} ({one['overlap']})"
        for own in (record["overlap"] or {"files": []})["files"]
        for one in own["examples"]
    ]
    if examples:
        table = titled_table("for example", ["what to look at"])
        for line in examples:
            table.add_row(line)
        yield table
