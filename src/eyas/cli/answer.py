"""`eyas data prompts` and `eyas data answer`: the target makes prompts, and answers prompts, as training data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import MEMORY, MODEL, OUTPUT, SAMPLING, SERVERS, WORK
from eyas.cli.options import (
    AsJson,
    BadRecordOptions,
    ChatOptions,
    KVCacheOptions,
    PrecisionOptions,
    StopOptions,
    TemplateOptions,
    command,
    load_libraries,
    options,
)
from eyas.cli.terminal import ProgressDisplay, print_counts, report, report_skipped
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.answering.answers import AnswerLimits
    from eyas.answering.engine import OwnEngine
    from eyas.answering.servers import Servers
    from eyas.target.chat_template import ChatFormat
    from eyas.target.facts import TargetFacts

LONGEST = 2048
"""Tokens of a conversation, unless told, without the thinking of its last answer."""
OF_CONFIG = "the generation config's"
SEQS_ON_CPU, SEQS_ELSEWHERE, SEQS_PER_SERVER = 16, 256, 512
"""Answers at the same time, unless told."""
Out = Annotated[Path, Option(help="File of JSON lines to write; an existing one is continued.", rich_help_panel=OUTPUT)]


@options(SERVERS)
class AnswererOptions(KVCacheOptions):
    """A target that answers, on this machine or on servers."""

    target: Annotated[
        str | None, Option(show_default=f"{DEFAULT_TARGET}, or the servers' model", rich_help_panel=MODEL)
    ] = None
    """smollm2, a GGUF file, a folder or a hub id; with --server for its tokenizer and template."""
    drafter: Annotated[
        str | None, Option(show_default="on a GPU the target's own, if shipped", rich_help_panel=MODEL)
    ] = None
    """A drafter's name, folder or hub id, or none; answers are the same."""
    server: list[str] | None = None
    """URL of an OpenAI-compatible server that answers instead of this machine; repeat for several."""
    model: Annotated[str | None, Option(show_default="the only one")] = None
    """The servers' model to ask."""
    api_key: Annotated[str | None, Option(envvar="EYAS_API_KEY")] = None
    """API key of the servers."""
    timeout: Annotated[float, Option(min=1.0)] = 3600.0
    """Seconds for one answer of a server."""
    patience: Annotated[float, Option(min=0.0)] = 1800.0
    """Seconds to wait while no server is there."""
    slots: Annotated[
        int | None,
        Option(
            min=1,
            show_default=f"{SEQS_ON_CPU} on a CPU, {SEQS_ELSEWHERE} elsewhere, {SEQS_PER_SERVER} for each server",
            rich_help_panel=MEMORY,
        ),
    ] = None
    """Answers at the same time."""

    def require_unsaid(self, precision: PrecisionOptions) -> None:
        """Refuse options that a server was given when it was started."""
        for name, value in {
            **vars(precision),
            "kv-cache-dtype": self.kv_cache_dtype,
            "drafter": self.drafter or "auto",
        }.items():
            if self.server and value != "auto":
                raise UserError(
                    f"--{name} {value} is for a target on this machine, and --server answers; leave it out, the "
                    "server's own options say it"
                )

    @contextmanager
    def open(
        self, precision: PrecisionOptions, total: int, *, cache: Path | None, chat_format: "ChatFormat"
    ) -> "Iterator[tuple[OwnEngine | Servers, int]]":
        """Load the target or connect to the servers; yields also how many of the `total` answers run at once."""
        from eyas.answering.engine import OwnEngine
        from eyas.answering.servers import Servers
        from eyas.remote.server_pool import RetryPolicy

        if not self.server:
            engine = OwnEngine.load(
                self.target or DEFAULT_TARGET,
                self.drafter,
                kv_cache_dtype=self.kv_cache_dtype,
                cache=cache,
                chat_format=chat_format,
                **vars(precision),
            )
            yield engine, min(self.slots or (SEQS_ON_CPU if engine.on_cpu else SEQS_ELSEWHERE), total)
            return
        retry = RetryPolicy(timeout=self.timeout, patience=self.patience)
        seqs = min(self.slots or SEQS_PER_SERVER * len(self.server), total)
        with Servers.connect(self.server, model=self.model, api_key=self.api_key, retry=retry, slots=seqs) as servers:
            servers.load(self.target, cache=cache, chat_format=chat_format)
            yield servers, seqs


@options(SAMPLING)
class AnswerOptions(StopOptions):
    """How answers are sampled, and where they end."""

    generation_config: str = "auto"
    """Sampling defaults: auto, the target's generation_config.json; vllm, none; or a folder."""
    temperature: Annotated[float | None, Option(show_default=f"{OF_CONFIG}, else 0")] = None
    """0 takes the most likely token."""
    top_k: Annotated[int | None, Option(show_default=OF_CONFIG)] = None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float | None, Option(show_default=OF_CONFIG)] = None
    """Keep the most likely tokens up to this probability."""
    min_p: Annotated[float | None, Option(show_default=OF_CONFIG)] = None
    """Keep tokens this likely in proportion to the most likely."""
    repetition_penalty: Annotated[float | None, Option(show_default=OF_CONFIG)] = None
    """Above 1 makes tokens that were there less likely."""
    max_tokens: Annotated[int, Option(min=1)] = 1024
    """Tokens per answer at most, thinking apart."""
    max_thinking_tokens: Annotated[int, Option(min=1)] = 4096
    """Tokens of thinking per answer at most."""
    turns: Annotated[int | None, Option(min=1, show_default="all", rich_help_panel=WORK)] = None
    """User turns to answer per conversation at most."""
    limit: Annotated[int | None, Option(min=1, show_default="all", rich_help_panel=WORK)] = None
    """Conversations of the file to answer at most."""
    max_length: Annotated[
        int | None,
        Option(
            min=2,
            show_default=f"{LONGEST}, for targets that think --max-thinking-tokens more, or the longest context",
            rich_help_panel=MEMORY,
        ),
    ] = None
    """Tokens of a conversation at most."""
    seed: int = 0
    """Seed of the first conversation; others count from it."""

    def sampling_given(self) -> dict[str, Any]:
        """The sampling options that were given."""
        from eyas.answering.notes import SAMPLED

        return {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}

    def limits_for(self, facts: "TargetFacts", *, thinks: bool) -> "AnswerLimits":
        """Where answers of this target end."""
        from eyas.answering.answers import AnswerLimits

        length, most = self.max_length, facts.max_position_embeddings
        if length is None:
            wanted = LONGEST + (self.max_thinking_tokens if thinks else 0)
            length = min(wanted, most or wanted)
        elif most is not None and length > most:
            raise UserError(
                f"--max-length {length} is above the {most} tokens that {facts.source} was made for; "
                f"choose {most} or less"
            )
        return AnswerLimits(max_tokens=self.max_tokens, max_thinking_tokens=self.max_thinking_tokens, max_length=length)


@command()
def answer(
    file: Annotated[Path, typer.Argument(help="Prompts or conversations: a file or folder.")],
    out: Out,
    *,
    who: AnswererOptions,
    given: AnswerOptions,
    precision: PrecisionOptions,
    chat: ChatOptions,
    records: BadRecordOptions,
    as_json: AsJson = False,
) -> None:
    """Let the target answer every user turn of a file, old answers dropped.

    Stopped in any way, the same command goes on where it was.
    """
    who.require_unsaid(precision)
    load_libraries(who.target, who.drafter)
    from eyas.answering.answers import AnswerSettings
    from eyas.answering.notes import SAMPLED, advice, describe_sampling
    from eyas.checksum import sha256_of_all
    from eyas.data.bad_records import BadRecords
    from eyas.data.files import ConversationReader, expand_files
    from eyas.data.regenerate import regenerate
    from eyas.sampling import Sampling
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.text import read_defaults

    said = given.sampling_given()
    Sampling(**said)  # before anything is loaded
    files, bad = expand_files([file]), BadRecords()
    conversations = list(islice(ConversationReader(files, bad), given.limit))
    report_skipped(bad, records.max_bad_share)
    chat_format, stops = chat.chat_format(), given.stop_strings()
    # Records keep the template's arguments, so that asking them again renders the same prompt.
    conversations = [
        replace(one, chat_template_kwargs={**chat_format.variables, **one.chat_template_kwargs})
        for one in conversations
    ]
    with (
        who.open(precision, len(conversations), cache=chat.cache, chat_format=chat_format) as (opened, seqs),
        _Rate("answering") as rate,
    ):
        defaults = read_defaults(given.generation_config, opened.target.generation_config).given
        defaults.pop("max_new_tokens", None)
        sampling = Sampling(**{**defaults, **said})
        report(describe_sampling(sampling, defaults, said))
        reader = AnswerReader(opened.target)
        limits = given.limits_for(opened.target.facts, thinks=reader.thinks)
        settings = AnswerSettings(
            reader=reader, sampling=sampling, limits=limits, stop_strings=stops, max_num_seqs=seqs, seed=given.seed
        )
        arguments = {
            "input": str(file),
            "input_sha256": sha256_of_all(files),
            "target": opened.target.facts.source,
            **opened.arguments,
            **{name: getattr(sampling, name) for name in SAMPLED},
            **asdict(limits),
            "stop": stops,
            **_template(chat_format),
            "raw": chat.raw,
            "turns": given.turns,
            "seed": given.seed,
        }
        with rate.told_if_stopped(f"of {len(conversations)} conversations are in {out}; the same command goes on"):
            done = regenerate(
                conversations,
                opened.answerer(settings),
                out,
                arguments=arguments,
                author=opened.author,
                turns=given.turns,
                on_progress=lambda progress: rate.show(progress, progress.tokens, progress.done, progress.total),
            )
    for line in advice(done, limits):
        report(line)
    print_counts({**asdict(done), "seconds": rate.seconds}, as_json=as_json)


@options(SAMPLING)
class PromptOptions:
    """How prompts are sampled."""

    evaluation: Annotated[list[Path] | None, Option("--eval")] = None
    """Prompts that should not be among them; repeatable."""
    system: Annotated[str | None, Option(show_default="the template's own")] = None
    """System prompt behind which users speak; the prompts are without it."""
    temperature: float = 1.0
    """Above 0; more gives more kinds."""
    top_p: float = 0.95
    """Keep the most likely tokens up to this probability."""
    max_tokens: Annotated[int, Option(min=1)] = 512
    """Tokens of a prompt at most."""
    seed: int = 0
    """Seed of the first prompt; others count from it."""

    def limits_for(self, facts: "TargetFacts", opening: int) -> "AnswerLimits":
        """Where prompts behind an opening of so many tokens end."""
        from eyas.answering.answers import AnswerLimits

        most = facts.max_position_embeddings or opening + self.max_tokens
        if opening >= most:
            raise UserError(
                f"the template writes {opening} tokens before a user's words, and {facts.source} reads {most}; "
                "shorten it"
            )
        length = min(most, opening + self.max_tokens)
        return AnswerLimits(max_tokens=self.max_tokens, max_thinking_tokens=1, max_length=length)


@command()
def prompts(
    count: Annotated[
        int, typer.Argument(help="How often the target is asked; what is cut, empty or there already is left out.")
    ],
    out: Out,
    *,
    who: AnswererOptions,
    given: PromptOptions,
    precision: PrecisionOptions,
    chat: TemplateOptions,
    as_json: AsJson = False,
) -> None:
    """Let the target say what users ask: prompts of the kind that it was taught to answer.

    Stopped in any way, the same command goes on where it was. A larger COUNT adds to the file.
    """
    if count < 1:
        raise UserError(f"COUNT is {count}; ask for 1 prompt at least")
    if given.temperature <= 0:
        raise UserError(
            f"--temperature {given.temperature:g} gives one prompt again and again; choose more than 0, such as 1"
        )
    who.require_unsaid(precision)
    if who.server and who.target is None:
        raise UserError("--server does not tell its chat template; name the target with --target")
    source = who.target or DEFAULT_TARGET
    load_libraries(source, who.drafter)
    from eyas.answering.answers import AnswerSettings
    from eyas.checksum import sha256_of_all
    from eyas.data.files import ConversationReader, expand_files
    from eyas.data.overlap import PromptIndex
    from eyas.data.user_turn import VERBATIM, UserTurn, ask_for_prompts
    from eyas.sampling import Sampling
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.text import load_tokenizer

    sampling = Sampling(temperature=given.temperature, top_p=given.top_p)
    chat_format = chat.chat_format()
    evaluated = expand_files(given.evaluation or [])
    index = PromptIndex(list(ConversationReader(evaluated)))
    tokenizer, _ = load_tokenizer(source, cache=chat.cache, chat_format=chat_format)
    turn = UserTurn.of(tokenizer, source, chat_format, given.system)
    with who.open(precision, count, cache=chat.cache, chat_format=VERBATIM) as (opened, seqs), _Rate("asking") as rate:
        opening = len(opened.target.encode_chat([{"role": "user", "content": turn.opening}]))
        limits = given.limits_for(opened.target.facts, opening)
        settings = AnswerSettings(
            reader=AnswerReader(opened.target),
            sampling=sampling,
            limits=limits,
            stop_strings=(turn.end,) if turn.end else (),
            max_num_seqs=seqs,
            seed=given.seed,
        )
        arguments = {
            "target": source,
            **opened.arguments,
            # Not the opening itself: some templates write the day into it.
            **{name: getattr(given, name) for name in ("system", "temperature", "top_p", "max_tokens", "seed")},
            **_template(chat_format),
            "eval_sha256": sha256_of_all(evaluated) if evaluated else None,
        }
        with rate.told_if_stopped(f"prompts are in {out}; the same command goes on"):
            done = ask_for_prompts(
                turn,
                count,
                opened.answerer(settings),
                out,
                tokenizer=tokenizer,
                evaluation=index,
                arguments=arguments,
                on_progress=lambda counts: rate.show(counts, counts.tokens, counts.done, counts.asked),
            )
    if 2 * done.duplicate > count:
        report(f"note: {done.duplicate} of {count} were there already; raise --temperature or --top-p, or ask for less")
    print_counts({**asdict(done), "seconds": rate.seconds}, as_json=as_json)


class _Rate:
    """Shows how many tokens come per second, and what was written when a run is stopped."""

    def __init__(self, name: str) -> None:
        self._name, self._latest = name, list[Any]()

    def __enter__(self) -> "_Rate":
        self._display = ProgressDisplay().__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self._display.__exit__(*raised)

    @property
    def seconds(self) -> float:
        """Seconds since the first request."""
        return round(time.perf_counter() - self._started, 1)

    def show(self, counts: Any, tokens: int, done: int, total: int) -> None:
        """Show how far the run is."""
        self._latest[:] = [counts]
        rate = tokens / (time.perf_counter() - self._started)
        self._display.update(self._name, done, total, note=f"{rate:,.0f} tokens/s")

    @contextmanager
    def told_if_stopped(self, words: str) -> Iterator[None]:
        """Report how much was written, followed by `words`, if the run is stopped; begins to measure time."""
        self._started = time.perf_counter()
        try:
            yield
        except (KeyboardInterrupt, UserError):
            for counts in self._latest:
                report(f"{counts.earlier + counts.written} {words}")
            raise


def _template(chat_format: "ChatFormat") -> dict[str, Any]:
    return {"chat_template": chat_format.template, "chat_template_kwargs": chat_format.variables}
