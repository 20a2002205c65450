"""`eyas data`: make training data and look at it."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.answer import answer, prompts
from eyas.cli.help import OUTPUT, WORK, GroupedCommand, new_app
from eyas.cli.options import AsJson, BadRecordOptions, TextOptions, command, options
from eyas.cli.terminal import (
    ProgressDisplay,
    make_folder,
    print_counts,
    print_result,
    report,
    report_skipped,
    text_file,
    titled_table,
    wide_console,
    write_results,
)
from eyas.errors import UserError
from eyas.target.locate import require_on_hub

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.train.corpus.encoding import EncodingProgress

app = new_app("Make training data and look at it.", prompts, answer)


@options(WORK)
class CheckOptions:
    """What is checked, and against what."""

    recipe: Path | None = None
    """Take files, target and settings from a recipe."""
    evaluation: Annotated[list[str] | None, Option("--eval")] = None
    """Prompts that should not be in the corpus; repeatable."""
    max_length: Annotated[int, Option(min=3)] = 2048
    """Tokens of a row at most, as data.max_length."""
    workers: Annotated[int, Option(min=0, max=1024, show_default="as many as pay")] = 0
    """Processes that encode."""
    out: Annotated[Path | None, Option(rich_help_panel=OUTPUT)] = None
    """Folder for check.json and check.png; earlier ones are replaced."""


@app.command(cls=GroupedCommand)
@command()
def check(
    files: Annotated[
        list[str] | None, typer.Argument(help="Conversations: files, folders or globs.", show_default=False)
    ] = None,
    *,
    text: TextOptions,
    given: CheckOptions,
    records: BadRecordOptions,
    as_json: AsJson = False,
) -> None:
    """Read a whole corpus and say what training would make of it.

    Exit code 1 if training would refuse it. With --recipe, that decides everything but --eval and --workers.
    """
    from eyas.data.files import expand_files
    from eyas.train.recipe_file import load_recipe

    chosen = None if given.recipe is None else load_recipe(given.recipe)
    if bool(files) == (chosen is not None):
        raise UserError("give files of conversations or --recipe, one of the two")
    require_on_hub(text.target if chosen is None else chosen.target.source)
    from eyas.train.corpus.check import check_corpus
    from eyas.train.corpus.encoding import EncodingSettings

    max_bad_share = records.max_bad_share
    if chosen is None:
        settings = EncodingSettings(
            source=text.target, max_length=given.max_length, cache=text.cache, chat_format=text.chat_format()
        )
    else:
        settings, max_bad_share = EncodingSettings.of(chosen, cache=text.cache), chosen.data.max_bad_share
    make_folder(given.out)
    with ProgressDisplay() as display:

        def show(progress: "EncodingProgress") -> None:
            share = progress.bytes_read / max(1, progress.bytes_total)
            display.update("encoding (%)", int(100 * share), 100, note=str(progress))

        record = check_corpus(
            expand_files(files or list(chosen.data.files if chosen is not None else ())),
            settings,
            max_bad_share=max_bad_share,
            evaluation=expand_files(given.evaluation or []),
            workers=given.workers or (0 if chosen is None else chosen.data.workers),
            on_progress=show,
        )
    _deliver(record, given.out, as_json=as_json)
    if record["refused"]:
        report(f"eyas: training would refuse this: {record['refused']}")
        raise typer.Exit(1)


@app.command(cls=GroupedCommand)
@command()
def show(
    file: Annotated[Path, typer.Argument(help="Conversations: a file or folder.")],
    sample: Annotated[int, Option(help="Which conversation to print, from 1.", min=1)] = 1,
    limit: Annotated[int, Option(help="How many conversations to count at most.", min=1)] = 1000,
    *,
    text: TextOptions,
    as_json: AsJson = False,
) -> None:
    """Print one conversation as the target reads it, row by row, what is trained on in colour, and counts."""
    from eyas.data.bad_records import BadRecords
    from eyas.data.chat_encoder import ChatEncoder
    from eyas.data.files import read_conversations
    from eyas.target.text import load_tokenizer

    chat_format = text.chat_format()
    tokenizer, stop_ids = load_tokenizer(text.target, cache=text.cache, chat_format=chat_format)
    encoder = ChatEncoder(tokenizer, stop_ids, variables=chat_format.variables)
    counts = dict.fromkeys(("conversations", "unanswered", "turns", "rows", "tokens", "trained on", "longest"), 0)
    shown = None
    bad = BadRecords()
    conversations = read_conversations(file, bad)
    for number, conversation in enumerate(islice(conversations, limit), start=1):
        try:
            rows = encoder.encode(conversation)
        except UserError as error:
            if number == sample:
                raise
            bad.add(error, "refused by the chat template")
            continue
        counts["conversations"] += 1
        counts["unanswered"] += not rows
        counts["turns"] += len(conversation.messages)
        counts["rows"] += len(rows)
        counts["tokens"] += sum(len(row.ids) for row in rows)
        counts["trained on"] += sum(row.trainable for row in rows)
        counts["longest"] = max([counts["longest"], *(len(row.ids) for row in rows)])
        if number == sample:
            shown = rows
    if shown is None:
        raise UserError(f"--sample {sample} is beyond the {counts['conversations']} conversations read; choose less")
    if next(conversations, None) is not None:
        report(f"note: counted the first {limit} conversations of {file} only; --limit N counts more")
    report_skipped(bad, max_share=1.0)
    if as_json:
        typer.echo(json.dumps({**counts, "sample": [{"ids": row.ids, "mask": row.mask} for row in shown]}))
        return
    for number, row in enumerate(shown, start=1):
        if len(shown) > 1:
            typer.secho(f"--- row {number} of {len(shown)} ---", bold=True)
        # Whole runs, because one character may be several tokens.
        for trained, run in groupby(zip(row.mask, row.ids, strict=True), key=lambda pair: pair[0]):
            words = str(tokenizer.decode([token for _, token in run]))
            typer.secho(words, nl=False, fg=typer.colors.GREEN if trained else None)
        typer.echo("\n")
    if not shown:
        typer.echo(f"nobody answers in conversation {sample}: nothing to train on\n")
    print_counts(counts, as_json=False)


def _deliver(record: Mapping[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Print, then write."""
    from eyas.train.plots import plot_check

    console = wide_console(120, highlight=False)
    print_result(record, lambda: console.print(*_tables(record), sep="\n"), as_json=as_json)
    plot = partial(plot_check, record)
    write_results(out, {"check.json": text_file(json.dumps(record, indent=1)), "check.png": plot})


def _tables(record: Mapping[str, Any]) -> "Iterator[Table]":
    read, bad = record["bad"]["read"], record["bad"]
    counts = [
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
    ]
    rows = [(name, f"{count:,}", f"{count / max(1, read):.1%}") for name, count in counts]
    yield titled_table("records", ["what becomes of them", "records", "share"], rows)
    tokens = (("in all", record["tokens"]), ("trained on", record["trained_on"]))
    rows = [(name, f"{count:,}", f"{count / max(1, record['tokens']):.1%}") for name, count in tokens]
    yield titled_table("tokens", ["", "tokens", "share"], rows)
    lengths = record["lengths"]
    yield titled_table(
        f"lengths of {record['rows']:,} rows, by quantile",
        ["", *(f"{float(q):.0%}" for q in lengths["tokens"])],
        [
            [name, *(f"{length:,}" for length in lengths[key].values())]
            for name, key in (("tokens", "tokens"), ("trained on", "trained_on"))
        ],
    )
    vocabulary = record["vocabulary"]
    yield titled_table(
        f"draft vocabulary: {vocabulary['distinct']:,} different tokens are trained on",
        ["to cover", *(f"{float(share):.1%}" for share in vocabulary["tokens_for"])],
        [["tokens needed", *(f"{count:,}" for count in vocabulary["tokens_for"].values())]],
    )
    yield titled_table(
        "",
        ["draft tokens", *(f"{int(size):,}" for size in vocabulary["coverage_of"])],
        [["cover", *(f"{share:.2%}" for share in vocabulary["coverage_of"].values())]],
    )
    overlaps = (record["overlap"] or {"files": []})["files"]
    if record["overlap"] is not None:
        yield titled_table(
            "evaluation prompts in the corpus",
            ["file", "prompts", "word for word", "nearly", "13 words shared"],
            [[own["file"], *(f"{own[key]:,}" for key in ("prompts", "exact", "near", "shared"))] for own in overlaps],
        )
    examples = [line for lines in bad["examples"].values() for line in lines]
    examples += [
        f"{one['prompt']} is in {one['conversation']} ({one['overlap']})" for own in overlaps for one in own["examples"]
    ]
    if examples:
        yield titled_table("for example", ["what to look at"], [[line] for line in examples])
