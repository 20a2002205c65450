"""Options that several commands share, and how every command reports progress."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.help import API, MEMORY, MODEL, OPERATION, OUTPUT, SAMPLING, SERVERS, SPECULATION, WORK
from eyas.data.bad_records import BadRecords

Cache = Annotated[
    Path | None,
    typer.Option(
        envvar="EYAS_CACHE",
        help="Where converted models are kept.",
        show_default="the user's cache directory",
        rich_help_panel=OPERATION,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: as stored; on a CPU float32 where that is faster.",
        rich_help_panel=MODEL,
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="On a CPU: int8 or int4 quantises the target's matrices, gguf takes a file's as they are, none makes "
        "bfloat16 of them; auto: gguf for a GGUF file, unless --dtype is given, else none. On a GPU: fp8 or int4 "
        "quantises them; auto takes those of a quantised checkpoint as they are, none makes 16 bits of them.",
        rich_help_panel=MODEL,
    ),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="What target and drafter keep keys and values in: auto, as they compute them; fp8 or fp8_e4m3, 8-bit "
        "floats, so that twice the tokens of bfloat16 fit.",
        rich_help_panel=MEMORY,
    ),
]
Device = Annotated[
    str,
    typer.Option(help="Where to run: cpu, cuda, cuda:1, ..., or auto: a GPU if there is one.", rich_help_panel=MODEL),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads that compute on a CPU.",
        show_default="OMP_NUM_THREADS, or the processors that this process may use",
        rich_help_panel=MEMORY,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="A Jinja file, or the template itself.", show_default="the target's own", rich_help_panel=MODEL),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help='Variables of the chat template, as JSON: {"enable_thinking": false}; a record\'s own go over them.',
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Of a hub id: a branch, a tag or a commit.", show_default="main", rich_help_panel=MODEL),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="The model name in the API.", show_default="the target as given", rich_help_panel=API),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and answer together.",
        show_default="the target's, at most 8192",
        min=2,
        rich_help_panel=MEMORY,
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most answers that run at once.", min=1, rich_help_panel=MEMORY)]
Depths = Annotated[
    Path | None,
    typer.Option(
        help="For vLLM: depths by batch size, from the JSON of `eyas plan --out`.",
        show_default="3 at every size, unless num_speculative_tokens is given",
        rich_help_panel=SPECULATION,
    ),
]
VLLMArguments = Annotated[
    list[str] | None,
    typer.Argument(help="With vLLM: options of its own, such as --tensor-parallel-size 2.", metavar="[-- OPTION ...]"),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw", help="Plain text in, its continuation out: for base models without a template.", rich_help_panel=MODEL
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; repeat for several.", rich_help_panel=SAMPLING)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs instead of text.", rich_help_panel=OUTPUT)
]
MaxBadShare = Annotated[
    float,
    typer.Option(
        help="Share of bad records to skip at most; beyond it the files are refused.",
        min=0.0,
        max=1.0,
        rich_help_panel=WORK,
    ),
]

SEQS_ON_CPU, SEQS_ELSEWHERE, SEQS_PER_SERVER = 16, 256, 512
"""Answers at the same time for `eyas data`, unless told."""
Slots = Annotated[
    int | None,
    typer.Option(
        help="Answers at the same time.",
        min=1,
        show_default=f"{SEQS_ON_CPU} on a CPU, {SEQS_ELSEWHERE} elsewhere, {SEQS_PER_SERVER} for each server",
        rich_help_panel=MEMORY,
    ),
]
AnswersDrafter = Annotated[
    str | None,
    typer.Option(
        help="A drafter's name, folder or hub id, or none; answers are the same.",
        show_default="on a GPU the target's own, if shipped",
        rich_help_panel=MODEL,
    ),
]
AnsweringServer = Annotated[
    list[str] | None,
    typer.Option(
        help="URL of an OpenAI-compatible server that answers instead of this machine; repeat for several.",
        rich_help_panel=SERVERS,
    ),
]
TheirModel = Annotated[
    str | None, typer.Option(help="Which model of theirs.", show_default="the only one", rich_help_panel=SERVERS)
]
TheirKey = Annotated[str | None, typer.Option(envvar="EYAS_API_KEY", help="For the servers.", rich_help_panel=SERVERS)]
Timeout = Annotated[float, typer.Option(help="Seconds for one answer of a server.", min=1.0, rich_help_panel=SERVERS)]
Patience = Annotated[
    float, typer.Option(help="Seconds to wait while no server is there.", min=0.0, rich_help_panel=SERVERS)
]


class LogLevel(StrEnum):
    """How severe, in Python's words."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"

    @property
    def number(self) -> int:
        """The level as `logging` counts."""
        return logging.getLevelNamesMapping()[self.upper()]


def report(message: str) -> None:
    """Progress goes to stderr, so that stdout holds results only."""
    print(message, file=sys.stderr, flush=True)


def print_counts(counts: Mapping[str, float], *, as_json: bool) -> None:
    """What came of a run, a line for each count."""
    if as_json:
        typer.echo(json.dumps(counts))
        return
    for name, count in counts.items():
        typer.echo(f"{name:14} {count:>12,}")


def report_skipped(bad: BadRecords, max_share: float) -> None:
    """Name records that were skipped; too many of them are refused."""
    bad.require_few(max_share, "--max-bad-share")
    if bad:
        report(f"note: {len(bad):,} of {bad.read:,} records are bad and skipped")
        for line in bad.lines():
            report(f"  {line}")


class Ticker:
    """Reports at most every few seconds: for long work, where there may be no terminal to draw on."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def __call__(self, message: str, *, at_once: bool = False) -> None:
        """Report, if it is time, or `at_once`."""
        now = time.monotonic()
        if at_once or now - self._last >= self._seconds:
            self._last = now
            report(message)
