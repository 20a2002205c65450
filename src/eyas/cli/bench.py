"""`eyas bench`: how fast a server answers, with and without drafting, from one user to many."""

import asyncio
import json
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import OUTPUT, SAMPLING, SERVERS, WORK, GroupedCommand, new_app
from eyas.cli.options import AsJson, build, command, options
from eyas.cli.terminal import cell, print_result, report, titled_table, wide_console
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.bench.experiment import ExperimentConfig
    from eyas.bench.load import Load
    from eyas.bench.record import RecordBuilder
    from eyas.bench.requests import RequestOptions
    from eyas.bench.workload import Workload

DEFAULT_SERVER = "eyas serve"
Record = Mapping[str, Any]
app = new_app(None)


@options(SERVERS)
class ServerOptions:
    """Servers to measure."""

    url: list[str] | None = None
    """A running server, as [name=]URL; repeatable."""
    serve: Annotated[list[str] | None, Option(show_default=DEFAULT_SERVER)] = None
    """Start this server and stop it after, as [name=]COMMAND."""
    baseline_url: list[str] | None = None
    """The same without drafting, for a server that cannot by request."""
    baseline_serve: list[str] | None = None
    """The same, to be started."""
    baseline: bool = True
    """Measure eyas without drafting too, request by request."""
    model: Annotated[str | None, Option(show_default="the one that is served")] = None
    """The model to ask."""
    api_key: Annotated[str | None, Option(envvar="EYAS_API_KEY")] = None
    """API key of the servers."""
    timeout: Annotated[float, Option(min=0.1)] = 600.0
    """Seconds for a request at most."""
    start_seconds: Annotated[float, Option(min=1.0)] = 600.0
    """Seconds for a server to start."""


@options(SAMPLING)
class BenchRequestOptions:
    """What is in every request."""

    max_tokens: Annotated[int, Option(min=1)] = 128
    """Tokens of an answer at most."""
    ignore_eos: bool = False
    """Let no answer end before that."""
    temperature: Annotated[float, Option(min=0.0)] = 0.0
    """0 is greedy, and texts are compared."""
    seed: int = 0
    """Seed of the choice of prompts, arrivals and sampling."""
    endpoint: Annotated[str, Option(rich_help_panel=SERVERS)] = "chat"
    """chat or completions."""
    extra_body: Annotated[str | None, Option(rich_help_panel=SERVERS)] = None
    """Further fields of every request, as JSON."""

    def config(self, output: int | None) -> "RequestOptions":
        """These options as the library has them; `output` is how long every answer is, if the workload says so."""
        from eyas.bench.requests import RequestOptions

        if self.endpoint not in ("chat", "completions"):
            raise UserError(f"--endpoint {self.endpoint!r} is unknown; give chat or completions")
        try:
            extra = json.loads(self.extra_body) if self.extra_body is not None else {}
        except ValueError as error:
            raise UserError(f"--extra-body {self.extra_body!r} is no JSON ({error})") from error
        if not isinstance(extra, dict):
            raise UserError(
                f"--extra-body {self.extra_body!r} is no JSON object; give one such as '{{\"top_p\": 0.9}}'"
            )
        length = {"max_tokens": output or self.max_tokens, "ignore_eos": self.ignore_eos or output is not None}
        return build(RequestOptions, self, extra=extra, **length)


@options(WORK)
class WorkloadOptions:
    """Conversations and loads."""

    workload: list[Path] | None = None
    """Spec-Bench, SPEED-Bench, EAGLE's questions, prompts, conversations; repeatable."""
    synthetic: str | None = None
    """Instead: prompts of IN random tokens, answers of OUT, as IN:OUT."""
    users: Annotated[list[str] | None, Option(show_default="1,4,16")] = None
    """Closed loop with so many users: 1,4,16."""
    rate: list[str] | None = None
    """Open loop with so many requests per second: 0.5,2."""
    limit: Annotated[int, Option(min=0)] = 48
    """Conversations, evenly over categories; 0 for all."""
    turns: Annotated[int | None, Option(min=1)] = None
    """Turns of a conversation at most."""
    repetitions: Annotated[int, Option(min=1)] = 3
    """How often everything is measured."""
    warmup: Annotated[int | None, Option(min=0, show_default="one per user")] = None
    """Requests before each mode and load."""
    prefill: bool = True
    """Ask each prompt for one token first, so that prefix caches meet all modes alike."""
    vocab: Annotated[int, Option(min=4)] = 8192
    """Synthetic prompts have ids below this."""

    def read(self, seed: int) -> "tuple[Workload, int | None]":
        """Read the workload, and how long answers must be where it says so."""
        from eyas.bench.workload import read_workload, synthetic_workload

        if bool(self.workload) == (self.synthetic is not None):
            raise UserError(
                "give --workload FILE or --synthetic IN:OUT, one of them: there is nothing to ask otherwise"
            )
        if self.workload:
            return read_workload(self.workload, limit=self.limit or None, turns=self.turns, seed=seed), None
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.synthetic or "")
        if not match:
            raise UserError(f"--synthetic {self.synthetic!r} is no pair of lengths; give one such as 512:128")
        tasks = self.limit or 48
        return synthetic_workload(int(match[1]), tasks=tasks, vocabulary=self.vocab, seed=seed), int(match[2])

    def loads(self) -> "tuple[Load, ...]":
        """Every load, closed ones first."""
        from eyas.bench.load import Load

        counts = _numbers("--users", self.users or (() if self.rate else ("1,4,16",)), int)
        rates = _numbers("--rate", self.rate or (), float)
        return (*(Load(users=int(count)) for count in counts), *(Load(rate=number) for number in rates))


@app.callback()
@command()
def bench(
    context: typer.Context,
    out: Annotated[
        Path | None,
        Option(
            help="Folder for bench.json and bench.html.",
            show_default="a new one, bench-DATE-TIME",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    *,
    servers: ServerOptions,
    work: WorkloadOptions,
    requests: BenchRequestOptions,
    as_json: AsJson = False,
) -> None:
    """Measure OpenAI-compatible servers (eyas, vLLM, SGLang): speed, latency, acceptance, the same text or not.

    Without --url or --serve it starts `eyas serve` with the default target. bench.json grows with every measurement, so
    that Ctrl-C or a server's death leaves what was measured until then.
    """
    if context.invoked_subcommand is not None:
        return
    from eyas.bench.chosen_servers import ChosenServers
    from eyas.bench.experiment import ExperimentConfig
    from eyas.bench.provenance import without_secrets

    asked, output = work.read(requests.seed)
    configured = partial(
        build, ExperimentConfig, work, workload=asked, options=requests.config(output), timeout=servers.timeout
    )
    loads = work.loads()
    chosen = ChosenServers(
        servers.url or (),
        servers.serve or ([] if servers.url else [DEFAULT_SERVER]),
        servers.baseline_url or (),
        servers.baseline_serve or (),
        **{name: getattr(servers, name) for name in ("baseline", "model", "api_key")},
    )
    folder = out or Path(f"bench-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    bench_run = _Bench(folder, without_secrets(shlex.join(sys.argv)))

    async def measure() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # servers must be stopped too
        async with AsyncExitStack() as stack:
            variants = await chosen.identify(stack, timeout=servers.timeout, start_seconds=servers.start_seconds)
            await bench_run.run(configured(variants=variants, loads=loads))

    try:
        asyncio.run(measure())
    except (KeyboardInterrupt, asyncio.CancelledError):
        bench_run.deliver("interrupted", as_json=as_json)
        raise KeyboardInterrupt from None
    record = bench_run.deliver(None, as_json=as_json)
    if record is not None and not record["whole"]:
        kept = f"what was measured until then is in {folder}" if record["rows"] else "nothing was measured"
        raise UserError(f"{record['stopped']}; {kept}")


@app.command(cls=GroupedCommand)
def compare(
    before: Annotated[Path, typer.Argument(help="The bench.json of a run.")],
    after: Annotated[Path, typer.Argument(help="And of a later one.")],
    as_json: AsJson = False,
) -> None:
    """Two runs side by side: ratios, and which of them are more than the spread of repetitions."""
    from eyas.bench.compare import compare as compare_records
    from eyas.bench.record import read_record

    found = compare_records(read_record(before), read_record(after))
    print_result(found, lambda: print_comparison(found, str(before), str(after)), as_json=as_json)


class _Bench:
    """An experiment, its files and its progress."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        self._builder: RecordBuilder | None = None
        self._said = ""

    async def run(self, config: "ExperimentConfig") -> None:
        """Measure; the record on disk grows with every run."""
        from eyas.bench.experiment import Experiment
        from eyas.bench.record import RecordBuilder, write_record

        def measured() -> None:
            write_record(builder.build(), self._folder / "bench.json")

        experiment = Experiment(config, step=self._step, measured=measured)
        self._builder = builder = RecordBuilder(experiment, self._command)
        await experiment.run()

    def deliver(self, stopped: str | None, *, as_json: bool) -> dict[str, Any] | None:
        """Print and write what was measured, if anything."""
        from eyas.atomic import new_file
        from eyas.bench.record import write_record
        from eyas.bench.report import render_report

        if self._builder is None:
            return None
        record = self._builder.build(stopped)
        if record["rows"]:
            if stopped is not None:
                report(f"{stopped}; this is what was measured until then")
            print_result(record, lambda: print_bench(record), as_json=as_json)
            write_record(record, self._folder / "bench.json")
            with new_file(self._folder / "bench.html") as staging:
                staging.write_text(render_report(record), encoding="utf-8")
            report(f"written: {self._folder / 'bench.html'}, {self._folder / 'bench.json'}")
        return record

    def _step(self, name: str, done: int, total: int) -> None:
        line = f"{done + 1:>3} of {total}  {name}" if total and done < total else name
        if line != self._said:
            self._said = line
            report(line)


def _numbers(option: str, texts: Sequence[str], kind: type[int] | type[float]) -> list[float]:
    numbers: dict[float, None] = {}
    for text in texts:
        for part in text.split(","):
            try:
                numbers[kind(part)] = None
            except ValueError as error:
                raise UserError(f"{option} {text!r} holds {part!r}; give numbers such as 1,4,16") from error
    return list(numbers)


def print_bench(record: Record) -> None:
    """Print the table of measurements, then warnings."""
    from eyas.bench.measures import row_label

    console = wide_console(200)
    workload, plan = record["workload"], record["plan"]
    title = (
        f"{workload['conversations']} conversations, {plan['max_tokens']} tokens at temperature "
        f"{plan['temperature']:g}, medians of {plan['repetitions']}"
    )
    heads = ["server, mode, load", "tokens/s", "of a user", "x plain", "first token ms", "per token ms", "chunk gap ms"]
    table = titled_table(title, [*heads, "length", "by depth", "same text", "failed"])
    for row in record["rows"]:
        against, same, found = row["against_plain"], row["same_as_plain"], row["acceptance"]
        ratio = against and against["user_tokens_per_second"]
        table.add_row(
            row_label(row) + ("" if row["whole"] else " (partial)"),
            _spread(row["tokens_per_second"]),
            _spread(row["user_tokens_per_second"]),
            f"{ratio['median']:.2f}" if ratio else "-",
            *(_tail(row[key]) for key in ("time_to_first_token_ms", "time_per_output_token_ms", "chunk_gap_ms")),
            cell(found["length"], "{:.2f}"),
            " ".join(f"{share:.2f}" for share in found["by_depth"]) or "-",
            f"{same['same']} of {same['of']}" if same else "-",
            str(row["failed"]),
        )
    console.print(table)
    console.print("tokens/s with the lowest and highest repetition; times are p50 / p95; docs/bench.md has formulas")
    for row in record["rows"]:
        found = row["acceptance"]
        if suffix := found.get("suffix_accepted_tokens"):
            told = f"{row_label(row)}: {suffix:,} of {found['accepted_tokens']:,} accepted tokens were suffix drafts"
            console.print(told, markup=False, highlight=False)
    share = max((row["client"]["cpu_share"] for row in record["rows"]), default=0.0)
    console.print(f"the client used {share:.0%} of a core at most")
    for warning in record["warnings"]:
        console.print(f"mind  {warning}", style="yellow", soft_wrap=True, markup=False, highlight=False)


def print_comparison(found: Record, before: str, after: str) -> None:
    """Print the table of ratios, then what makes the two hard to compare."""
    from eyas.bench.measures import row_label

    console = wide_console(200)
    heads = [
        "server, mode, load",
        "tokens/s",
        "ratio",
        "of a user",
        "ratio",
        "first token ms",
        "per token ms",
        "length",
    ]
    table = titled_table(f"{before} → {after}", heads)
    for row in found["rows"]:
        table.add_row(
            row_label(row),
            *_change(row["tokens_per_second"]),
            *_change(row["user_tokens_per_second"]),
            *(_pair(row[key]) for key in ("time_to_first_token_ms", "time_per_output_token_ms", "acceptance_length")),
        )
    console.print(table)
    console.print("* beyond the spread of the repetitions of either; times are medians")
    same = found["same_texts"]
    if same["of"]:
        console.print(f"{same['same']} of {same['of']} answers have the same text in both")
    for words in found["differences"]:
        console.print(f"mind  {words}", style="yellow", soft_wrap=True, markup=False, highlight=False)


def _spread(found: Record | None) -> str:
    return f"{found['median']:.1f} ({found['low']:.1f}..{found['high']:.1f})" if found else "-"


def _tail(found: Record) -> str:
    return "-" if found["p50"] is None else f"{found['p50']:.0f} / {found['p95']:.0f}"


def _change(found: Record | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return (
        f"{found['before']:.1f} → {found['after']:.1f}",
        f"{found['ratio']:.2f}{'*' if found['beyond_spread'] else ''}",
    )


def _pair(found: Record) -> str:
    if found["before"] is None and found["after"] is None:
        return "-"
    return " → ".join(cell(value, "{:.4g}") for value in (found["before"], found["after"]))
