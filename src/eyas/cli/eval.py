"""`eyas eval`: measure acceptance length, for one or several drafters of one target."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from eyas.cli.help import MEMORY, OUTPUT, SPECULATION, WORK
from eyas.cli.options import (
    AsJson,
    ModelOptions,
    Prompts,
    StopOptions,
    arguments_of,
    build,
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

    from eyas.data.conversations import Conversation, Message
    from eyas.evaluate.prompts import Answer as GivenAnswer
    from eyas.evaluate.prompts import Prompt
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.model import Target

LONGEST = 8192

Record = Mapping[str, Any]


@options(WORK)
class EvalOptions(StopOptions):
    """What is measured."""

    drafter: Annotated[list[str], Option(rich_help_panel=SPECULATION)]
    """A drafter's name, folder or hub id; repeat to compare several."""
    depth: Annotated[list[int] | None, Option(show_default="3, 5 and 7", rich_help_panel=SPECULATION)] = None
    """Tokens to draft per round; repeat for several."""
    max_tokens: Annotated[int, Option(min=1)] = 256
    """New tokens per answer at most."""
    turns: Annotated[int, Option(min=1)] = 1
    """User turns to ask per conversation at most."""
    limit: Annotated[int | None, Option(min=1, show_default="all")] = None
    """Conversations to ask at most."""
    prefix: Path | None = None
    """A text file to put some of before every question."""
    prefix_tokens: Annotated[list[int] | None, Option(min=0, show_default="0")] = None
    """How much of it, 0 for none; repeat to compare with the first."""
    held_out: bool = False
    """Estimate on the conversations' own answers as well."""
    estimate: bool = True
    """Estimate on the target's plain answers as well."""
    out: Annotated[Path | None, Option(rich_help_panel=OUTPUT)] = None
    """Folder for eval.json and eval.png; earlier ones are replaced."""
    max_length: Annotated[
        int | None, Option(min=2, show_default=f"{LONGEST}, or the target's context", rich_help_panel=MEMORY)
    ] = None
    """Tokens of prompt and answer at most."""
    slots: Annotated[int | None, Option(min=1, show_default="by length and device", rich_help_panel=MEMORY)] = None
    """Answers at the same time."""

    def depths(self) -> list[int]:
        """All depths, in order."""
        depths = sorted(set(self.depth or (3, 5, 7)))
        if depths[0] < 1:
            raise UserError(f"--depth {depths[0]} drafts nothing, so there is nothing to measure; give 1 or more")
        return depths

    def conversations(self, files: Sequence[Path]) -> "list[Conversation]":
        """Read the files; refuse options that do not fit them."""
        from eyas.data.files import read_conversations

        found = list(islice(chain.from_iterable(read_conversations(file) for file in files), self.limit))
        if any(self.prefix_tokens or ()) != (self.prefix is not None):
            raise UserError("--prefix names a text and --prefix-tokens how much of it to use; give both or neither")
        if self.held_out and not any(conversation.answered for conversation in found):
            raise UserError(f"--held-out needs answers and {files[0]} holds prompts only; leave it out")
        return found

    def length_for(self, target: "Target") -> int:
        """Tokens of prompt and answer at most."""
        length, longest = self.max_length, target.facts.max_position_embeddings
        if length is None:
            length = min(LONGEST, longest or LONGEST)
        elif longest is not None and length > longest:
            raise UserError(
                f"--max-length {length} is above the {longest} tokens that {target.facts.source} was made for; "
                f"choose {longest} or less"
            )
        if self.max_tokens >= length:
            raise UserError(
                f"--max-tokens {self.max_tokens} leaves no room for a prompt in --max-length {length}; "
                "lower the one or raise the other"
            )
        return length


@command()
def evaluate(prompts: Prompts, *, model: ModelOptions, given: EvalOptions, as_json: AsJson = False) -> None:
    """Measure acceptance length by real greedy decoding, and estimate it on the same text.

    Ctrl-C prints what was measured until then.
    """
    arguments = arguments_of(**locals())
    load_libraries(model.target, *given.drafter)
    from eyas.evaluate.evaluate import record_groups
    from eyas.evaluate.evaluation import Evaluation
    from eyas.loading import load_drafter_for, require_fit
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.facts import read_facts
    from eyas.train.journal import versions

    depths, conversations = given.depths(), given.conversations(prompts)
    make_folder(given.out)
    names = short_names(given.drafter)
    facts = read_facts(model.target, cache=model.cache)
    for source in names.values():
        require_fit(source, facts)
    given.stop_strings()  # refused before anything is loaded
    target = model.load()
    length = given.length_for(target)
    drafters = {name: load_drafter_for(target, source, cache=model.cache) for name, source in names.items()}
    computed = {"dtype": str(target.dtype), "quantization": target.quantization, "device": str(target.device)}
    record: dict[str, Any] = {"versions": versions(), "arguments": arguments, "drafters": names, "depths": depths}
    record |= {"target": {**asdict(target.facts), **computed}, "max_length": length, "held_out": None}
    run = build(
        Evaluation,
        given,
        target=target,
        drafters=drafters,
        conversations=conversations,
        depths=depths,
        max_length=length,
        stop_strings=given.stop_strings(),
        read_answer=partial(_read_answer, AnswerReader(target)),
    )
    started = time.perf_counter()

    def finish(*, whole: bool) -> None:
        """Print and write what there is."""
        if not whole:
            if not any(group.measured for group in run.groups):
                return
            report("stopped early; this is what was measured until then")
        record.update(whole=whole, seconds=round(time.perf_counter() - started, 1), groups=record_groups(run.groups))
        _deliver(record, given.out, as_json=as_json)

    try:
        with ProgressDisplay() as progress, _explaining_memory():
            if given.held_out:
                report("estimating on the conversations as they stand")
                record["held_out"] = run.on_held_out()
            run.measure(partial(_follow, progress))
    except (KeyboardInterrupt, UserError):
        finish(whole=False)
        raise
    finish(whole=True)


def _read_answer(reader: "AnswerReader", prompt: "Prompt", text: str) -> "Message":
    """Parse an answer into the message that a client of the server would get, with its reasoning apart."""
    answer = reader.read(prompt.ids, prompt.conversation.tools)
    answer.feed(text)
    return answer.message()


def _follow(
    progress: ProgressDisplay, name: str, answers: "Iterable[GivenAnswer]", total: int
) -> "Iterator[GivenAnswer]":
    """Hand on answers as they come, then print their acceptance length."""
    tokens = rounds = accepted = 0

    def counted() -> "Iterator[GivenAnswer]":
        nonlocal tokens, rounds, accepted
        for answer in answers:
            tokens, rounds = tokens + len(answer.tokens), rounds + len(answer.accepted)
            accepted += sum(answer.accepted)
            yield answer

    def summary(seconds: float) -> str:
        length = f": {1 + accepted / rounds:.3f}" if rounds else ""
        return f"{name}{length} ({total} prompts, {tokens} tokens, {seconds:.1f} s)"

    return progress.follow(name, counted(), total, summary=summary)


def _deliver(record: Record, out: Path | None, *, as_json: bool) -> None:
    """Print, then write."""
    from eyas.evaluate.plot import plot_evaluation

    print_result(record, lambda: _print_tables(record), as_json=as_json)
    plot = partial(plot_evaluation, record)
    write_results(out, {"eval.json": text_file(json.dumps(record)), "eval.png": plot})


@contextmanager
def _explaining_memory() -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError("the device is out of memory; pass fewer --slots, or shorten --max-length") from error


def _print_tables(record: Record) -> None:
    console = wide_console(160)
    for table in _tables(record):
        console.print(table)
        console.print()


def _tables(record: Record) -> Iterator["Table"]:
    """Yield lengths for every prefix, then, for the first one at the deepest depth, categories and depths."""
    groups = [group for group in record["groups"] if group["measured"]]
    for group in groups:
        yield _lengths(group, compared=len(groups) > 1)
    if groups:
        cells = groups[0]["measured"]
        deepest = max(one["depth"] for one in cells)
        yield _categories([one for one in cells if one["depth"] == deepest], deepest)
        yield _depths([one for one in cells if one["depth"] == deepest], deepest)
    if record.get("held_out"):
        yield _held_out(record["held_out"])


def _lengths(group: Record, *, compared: bool) -> "Table":
    plain = group["plain"]
    title = f"acceptance length, {group['prompts']} prompts"
    if group["prefix_tokens"]:
        title += f" behind {group['prefix_tokens']} tokens of other text"
    if group["skipped"]:
        title += f", {group['skipped']} too long and left out"
    title += f"; {_share(plain['looping'], plain['answers'])} of the plain answers loop"
    headings = ["drafter", "depth", "pooled", "by prompt", "no loops", "looping", "estimate", "error"]
    headings += ["same as plain", "margin"]
    table = titled_table(title, [*headings, "to first prefix"] if compared else headings)
    for one in group["measured"]:
        estimate = one["estimate"] or {}
        row = [
            one["drafter"],
            str(one["depth"]),
            _number(one["acceptance_length"]),
            _number(one["mean_by_answer"]),
            _number(one["without_loops"]["acceptance_length"]),
            _share(one["looping"], one["answers"]),
            _number(estimate.get("acceptance_length")),
            cell(one["estimate_difference"], "{:+.1%}"),
            f"{one['identical']} of {one['answers']}",
            _number(one["largest_margin"]),
        ]
        table.add_row(*row, *([_percent(one["ratio_to_first_prefix"])] if compared else []))
    return table


def _categories(cells: Sequence[Record], depth: int) -> "Table":
    table = titled_table(f"by category, depth {depth}", ["category", "answers", *(one["drafter"] for one in cells)])
    for label in sorted({label for one in cells for label in one["by_category"]}):
        own = [one["by_category"].get(label, {}) for one in cells]
        answers = max(part.get("answers", 0) for part in own)
        table.add_row(label, str(answers), *(_number(part.get("acceptance_length")) for part in own))
    return table


def _depths(cells: Sequence[Record], depth: int) -> "Table":
    title = f"accepted with all before it at depth {depth}, in brackets where all before it were"
    table = titled_table(title, ["drafter", *(str(k + 1) for k in range(depth))])
    for one in cells:
        pairs = zip(one["acceptance_by_depth"], one["acceptance_by_depth_given_all_before"], strict=True)
        table.add_row(one["drafter"], *(f"{_percent(share)} ({_percent(given)})" for share, given in pairs))
    return table


def _held_out(held_out: Record) -> "Table":
    found = held_out["estimates"]
    depths = list(dict.fromkeys(one["depth"] for one in found))
    title = f"estimated on the {held_out['conversations']} conversations as they stand"
    table = titled_table(title, ["drafter", *(f"depth {depth}" for depth in depths)])
    for name in dict.fromkeys(one["drafter"] for one in found):
        own = {one["depth"]: one["acceptance_length"] for one in found if one["drafter"] == name}
        table.add_row(name, *(_number(own[depth]) for depth in depths))
    return table


def _number(value: float | None) -> str:
    return cell(value, "{:.3f}")


def _percent(value: float | None) -> str:
    return cell(value, "{:.1%}")


def _share(part: int, whole: int) -> str:
    return _percent(part / whole if whole else None)
