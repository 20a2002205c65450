"""`eyas bench`: how fast a server answers, with and without drafting, from one user to many."""

import asyncio
import json
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.bench_servers import DEFAULT_SERVER, ChosenServers
from eyas.cli.help import OUTPUT, SAMPLING, SERVERS, WORK, GroupedCommand, new_app
from eyas.cli.options import AsJson, report

if TYPE_CHECKING:
    from eyas.bench.experiment import ExperimentConfig
    from eyas.bench.load import Load
    from eyas.bench.record import RecordBuilder
    from eyas.bench.requests import RequestOptions
    from eyas.bench.workload import Workload

app = new_app(add_completion=False)


@app.callback()
def bench(
    context: typer.Context,
    workload: Annotated[
        list[Path] | None,
        typer.Option(
            help="Spec-Bench, SPEED-Bench, EAGLE's questions, prompts, conversations; repeatable.", rich_help_panel=WORK
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Instead: prompts of IN random tokens, answers of OUT, as IN:OUT.", rich_help_panel=WORK),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="A running server, as [name=]URL; repeatable.", rich_help_panel=SERVERS)
    ] = None,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            help="Start this server and stop it after, as [name=]COMMAND.",
            show_default=DEFAULT_SERVER,
            rich_help_panel=SERVERS,
        ),
    ] = None,
    baseline_url: Annotated[
        list[str] | None,
        typer.Option(help="The same without drafting, for a server that cannot by request.", rich_help_panel=SERVERS),
    ] = None,
    baseline_serve: Annotated[
        list[str] | None, typer.Option(help="The same, to be started.", rich_help_panel=SERVERS)
    ] = None,
    baseline: Annotated[
        bool, typer.Option(help="Measure eyas without drafting too, request by request.", rich_help_panel=SERVERS)
    ] = True,
    users: Annotated[
        list[str] | None,
        typer.Option(help="Closed loop with so many users: 1,4,16.", show_default="1,4,16", rich_help_panel=WORK),
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Open loop with so many requests per second: 0.5,2.", rich_help_panel=WORK)
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Conversations, evenly over categories; 0 for all.", min=0, rich_help_panel=WORK)
    ] = 48,
    turns: Annotated[
        int | None, typer.Option(help="Turns of a conversation at most.", min=1, rich_help_panel=WORK)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer at most.", min=1, rich_help_panel=SAMPLING)
    ] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let no answer end before that.", rich_help_panel=SAMPLING)
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy, and texts are compared.", min=0.0, rich_help_panel=SAMPLING)
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the choice of prompts, arrivals and sampling.", rich_help_panel=SAMPLING)
    ] = 0,
    endpoint: Annotated[str, typer.Option(help="chat or completions.", rich_help_panel=SERVERS)] = "chat",
    extra_body: Annotated[
        str | None, typer.Option(help="Further fields of every request, as JSON.", rich_help_panel=SERVERS)
    ] = None,
    repetitions: Annotated[
        int, typer.Option(help="How often everything is measured.", min=1, rich_help_panel=WORK)
    ] = 3,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Requests before each mode and load.", min=0, show_default="one per user", rich_help_panel=WORK
        ),
    ] = None,
    prefill: Annotated[
        bool,
        typer.Option(
            help="Ask each prompt for one token first, so that prefix caches meet all modes alike.",
            rich_help_panel=WORK,
        ),
    ] = True,
    vocab: Annotated[
        int, typer.Option(help="Synthetic prompts have ids below this.", min=4, rich_help_panel=WORK)
    ] = 8192,
    model: Annotated[
        str | None, typer.Option(help="Which model.", show_default="the one that is served", rich_help_panel=SERVERS)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="EYAS_API_KEY", help="For the servers.", rich_help_panel=SERVERS)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for a request at most.", min=0.1, rich_help_panel=SERVERS)
    ] = 600.0,
    start_seconds: Annotated[
        float, typer.Option(help="Seconds for a server to start.", min=1.0, rich_help_panel=SERVERS)
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for bench.json and bench.html.",
            show_default="a new one, bench-DATE-TIME",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure OpenAI-compatible servers (eyas, vLLM, SGLang): speed, latency, acceptance, the same text or not.

    Without --url or --serve it starts `eyas serve` with the default target. bench.json grows with every measurement, so
    that Ctrl-C or a server's death leaves what was measured until then.
    """
    if context.invoked_subcommand is not None:
        return
    from eyas.bench.experiment import ExperimentConfig
    from eyas.bench.provenance import without_secrets
    from eyas.errors import UserError

    asked, output = _workload(workload, synthetic, limit=limit, turns=turns, vocab=vocab, seed=seed)
    options = _request_options(
        endpoint,
        extra_body,
        max_tokens=output or max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos or output is not None,
    )
    loads = _loads(users, rate)
    chosen = ChosenServers(url, serve, baseline_url, baseline_serve, baseline=baseline, model=model, api_key=api_key)
    folder = out or Path(f"bench-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    bench_run = _Bench(folder, without_secrets(shlex.join(sys.argv)))

    async def measure() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # servers must be stopped too
        async with AsyncExitStack() as stack:
            variants = await chosen.identify(stack, timeout=timeout, start_seconds=start_seconds)
            await bench_run.run(
                ExperimentConfig(
                    variants=variants,
                    loads=loads,
                    workload=asked,
                    options=options,
                    repetitions=repetitions,
                    warmup=warmup,
                    prefill=prefill,
                    timeout=timeout,
                )
            )

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
    from eyas.cli.bench_tables import print_comparison

    found = compare_records(read_record(before), read_record(after))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_comparison(found, str(before), str(after))


class _Bench:
    """An experiment with its files and its progress."""

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
        """Print and write what was measured, if anything was."""
        from eyas.atomic import new_file
        from eyas.bench.record import write_record
        from eyas.bench.report import render_report
        from eyas.cli.bench_tables import print_bench

        if self._builder is None:
            return None
        record = self._builder.build(stopped)
        if record["rows"]:
            if stopped is not None:
                report(f"{stopped}; this is what was measured until then")
            if as_json:
                typer.echo(json.dumps(record))
            else:
                print_bench(record)
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


def _workload(
    files: Sequence[Path] | None, synthetic: str | None, *, limit: int, turns: int | None, vocab: int, seed: int
) -> "tuple[Workload, int | None]":
    """What is asked, and how long answers must be where the workload says so."""
    from eyas.bench.workload import read_workload, synthetic_workload
    from eyas.errors import UserError

    if bool(files) == (synthetic is not None):
        raise UserError("give --workload FILE or --synthetic IN:OUT, one of them: there is nothing to ask otherwise")
    if files:
        return read_workload(files, limit=limit or None, turns=turns, seed=seed), None
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", synthetic or "")
    if not match:
        raise UserError(f"--synthetic {synthetic!r} is no pair of lengths; give one such as 512:128")
    return synthetic_workload(int(match[1]), tasks=limit or 48, vocabulary=vocab, seed=seed), int(match[2])


def _request_options(endpoint: str, extra_body: str | None, **options: Any) -> "RequestOptions":
    from eyas.bench.requests import RequestOptions
    from eyas.errors import UserError

    if endpoint not in ("chat", "completions"):
        raise UserError(f"--endpoint {endpoint!r} is unknown; give chat or completions")
    try:
        extra = json.loads(extra_body) if extra_body is not None else {}
    except ValueError as error:
        raise UserError(f"--extra-body {extra_body!r} is no JSON ({error})") from error
    if not isinstance(extra, dict):
        raise UserError(f"--extra-body {extra_body!r} is no JSON object; give one such as '{{\"top_p\": 0.9}}'")
    return RequestOptions(endpoint=endpoint, extra=extra, **options)  # type: ignore[arg-type]


def _loads(users: Sequence[str] | None, rate: Sequence[str] | None) -> "tuple[Load, ...]":
    from eyas.bench.load import Load

    counts = _numbers("--users", users or (() if rate else ("1,4,16",)), int)
    rates = _numbers("--rate", rate or (), float)
    return (*(Load(users=int(count)) for count in counts), *(Load(rate=number) for number in rates))


def _numbers(option: str, texts: Sequence[str], kind: type[int] | type[float]) -> list[float]:
    from eyas.errors import UserError

    numbers: dict[float, None] = {}
    for text in texts:
        for part in text.split(","):
            try:
                numbers[kind(part)] = None
            except ValueError as error:
                raise UserError(f"{option} {text!r} holds {part!r}; give numbers such as 1,4,16") from error
    return list(numbers)
