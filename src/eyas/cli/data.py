"""`eyas data`: conversations to train on. `show` is what training would see of a file; the others have files of their
own."""

import json
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.answer import answer
from eyas.cli.arguments import read_chat_format
from eyas.cli.data_check import check
from eyas.cli.help import GroupedCommand, new_app
from eyas.cli.options import AsJson, Cache, ChatTemplate, ChatTemplateKwargs, Raw, print_counts, report, report_skipped
from eyas.cli.prompts import prompts

app = new_app(help="Make training data and look at it.", add_completion=False)
app.command(cls=GroupedCommand)(prompts)
app.command(cls=GroupedCommand)(answer)
app.command(cls=GroupedCommand)(check)


@app.callback()
def options(context: typer.Context) -> None:
    """Make training data and look at it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(cls=GroupedCommand)
def show(
    file: Annotated[Path, typer.Argument(help="Conversations: a file or folder.")],
    target: Annotated[str, typer.Option(help="Whose chat template and tokenizer to use.")] = "smollm2",
    sample: Annotated[int, typer.Option(help="Which conversation to print, from 1.", min=1)] = 1,
    limit: Annotated[int, typer.Option(help="How many conversations to count at most.", min=1)] = 1000,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Print one conversation as the target reads it, row by row, what is trained on in colour, and counts."""
    from eyas.data.bad_records import BadRecords
    from eyas.data.chat_encoder import ChatEncoder
    from eyas.data.files import read_conversations
    from eyas.errors import UserError
    from eyas.target.tokenizer import load_tokenizer

    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=raw)
    tokenizer, stop_ids = load_tokenizer(target, cache=cache, chat_format=chat_format)
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
            text = str(tokenizer.decode([token for _, token in run]))
            typer.secho(text, nl=False, fg=typer.colors.GREEN if trained else None)
        typer.echo("\n")
    if not shown:
        typer.echo(f"nobody answers in conversation {sample}: nothing to train on\n")
    print_counts(counts, as_json=False)
