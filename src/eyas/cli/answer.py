"""`eyas data answer`: the target answers prompts itself, and its answers become training data."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import read_chat_format, read_stop, require_models, require_unsaid
from eyas.cli.help import MEMORY, MODEL, OUTPUT, SAMPLING, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AnsweringServer,
    AnswersDrafter,
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    KVCacheDtype,
    MaxBadShare,
    Patience,
    Quantization,
    Raw,
    Slots,
    Stop,
    TheirKey,
    TheirModel,
    Timeout,
    print_counts,
    report,
    report_skipped,
)
from eyas.cli.progress import ProgressDisplay
from eyas.data.bad_records import MAX_BAD_SHARE, BadRecords
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.cli.answer_limits import AnswerLimits
    from eyas.data.regenerate import Progress
    from eyas.sampling import Sampling
    from eyas.target.facts import TargetFacts

LONGEST = 2048
"""Tokens of a conversation, unless told, without the thinking of its last answer."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OF_CONFIG = "the generation config's"


def answer(
    file: Annotated[Path, typer.Argument(help="Prompts or conversations: a file or folder.")],
    out: Annotated[
        Path,
        typer.Option(help="Where answers go, as JSON lines; an existing file is gone on with.", rich_help_panel=OUTPUT),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="smollm2, a GGUF file, a folder or a hub id; beside --server for its tokenizer and template.",
            show_default="smollm2, or what the servers say",
            rich_help_panel=MODEL,
        ),
    ] = None,
    drafter: AnswersDrafter = None,
    server: AnsweringServer = None,
    model: TheirModel = None,
    api_key: TheirKey = None,
    timeout: Timeout = 3600.0,
    patience: Patience = 1800.0,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults: auto, the target's generation_config.json; vllm, none; or a folder.",
            rich_help_panel=SAMPLING,
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the most likely token.", show_default=f"{OF_CONFIG}, else 0", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep the k most likely tokens; 0 keeps all.", show_default=OF_CONFIG, rich_help_panel=SAMPLING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the most likely tokens up to this probability.", show_default=OF_CONFIG, rich_help_panel=SAMPLING
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens this likely in proportion to the most likely.",
            show_default=OF_CONFIG,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 makes tokens that were there less likely.", show_default=OF_CONFIG, rich_help_panel=SAMPLING
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens per answer at most, thinking apart.", min=1, rich_help_panel=SAMPLING)
    ] = 1024,
    max_thinking_tokens: Annotated[
        int, typer.Option(help="Tokens of thinking per answer at most.", min=1, rich_help_panel=SAMPLING)
    ] = 4096,
    turns: Annotated[
        int | None,
        typer.Option(
            help="User turns to answer per conversation at most.", min=1, show_default="all", rich_help_panel=WORK
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Conversations of the file to answer at most.", min=1, show_default="all", rich_help_panel=WORK
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a conversation at most.",
            min=2,
            show_default=f"{LONGEST}, for targets that think --max-thinking-tokens more, or the longest context",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    slots: Slots = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Of drawn answers; each conversation has its own, counted from this.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    stop: Stop = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    max_bad_share: MaxBadShare = MAX_BAD_SHARE,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Let the target answer every user turn of a file, old answers dropped.

    Stopped in any way, the same command goes on where it was.
    """
    own = {"dtype": dtype, "device": device, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    if server:
        require_unsaid(own, drafter)
    if target is not None or drafter is not None:
        require_models(target or DEFAULT_TARGET, drafter)
    import_libraries()
    from itertools import islice

    from eyas.checksum import sha256_of_all
    from eyas.cli.answer_limits import AnswerLimits
    from eyas.cli.answering_target import ServerOptions, answering_target
    from eyas.data.files import ConversationReader, expand_files
    from eyas.data.regenerate import regenerate
    from eyas.sampling import Sampling
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.generation_defaults import read_defaults

    flags = dict(zip(SAMPLED, (temperature, top_k, top_p, min_p, repetition_penalty), strict=True))
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    Sampling(**given)  # before anything is loaded
    files, bad = expand_files([file]), BadRecords()
    conversations = list(islice(ConversationReader(files, bad), limit))
    report_skipped(bad, max_bad_share)
    chat_format, stops = read_chat_format(chat_template, chat_template_kwargs, raw=raw), read_stop(stop)
    # Records say with which arguments they were answered, so that whoever asks them again does it alike.
    conversations = [
        replace(one, chat_template_kwargs={**chat_format.variables, **one.chat_template_kwargs})
        for one in conversations
    ]
    servers = ServerOptions(urls=server or (), model=model, api_key=api_key, timeout=timeout, patience=patience)
    opening = answering_target(
        target,
        drafter,
        servers,
        own=own,
        slots=slots,
        total=len(conversations),
        cache=cache,
        chat_format=chat_format,
    )
    with opening as (who, seqs), ProgressDisplay() as display:
        defaults = read_defaults(generation_config, who.target.generation_config).given
        defaults.pop("max_new_tokens", None)
        sampling = Sampling(**{**defaults, **given})
        report(_sampling_words(sampling, defaults, given))
        reader = AnswerReader(who.target)
        limits = AnswerLimits(
            max_tokens=max_tokens,
            max_thinking_tokens=max_thinking_tokens,
            max_length=_longest(max_length, who.target.facts, max_thinking_tokens if reader.thinks else 0),
        )
        answerer = who.answerer(
            reader, sampling=sampling, limits=limits, stop_strings=stops, max_num_seqs=seqs, seed=seed
        )
        arguments = {
            "input": str(file),
            "input_sha256": sha256_of_all(files),
            "target": who.target.facts.source,
            **who.arguments,
            **{name: getattr(sampling, name) for name in SAMPLED},
            **asdict(limits),
            "stop": stops,
            "chat_template": chat_format.template,
            "chat_template_kwargs": chat_format.variables,
            "raw": raw,
            "turns": turns,
            "seed": seed,
        }
        started, latest = time.perf_counter(), list["Progress"]()

        def show(progress: "Progress") -> None:
            latest[:] = [progress]
            rate = progress.tokens / (time.perf_counter() - started)
            display.update("answering", progress.done, progress.total, note=f"{rate:,.0f} tokens/s")

        try:
            done = regenerate(
                conversations, answerer, out, arguments=arguments, author=who.author, turns=turns, on_progress=show
            )
        except (KeyboardInterrupt, UserError):
            if latest:
                written = latest[0].earlier + latest[0].written
                report(f"{written} of {len(conversations)} conversations are in {out}; the same command goes on")
            raise
    for line in _advice(done, limits):
        report(line)
    counts = {**asdict(done), "seconds": round(time.perf_counter() - started, 1)}
    print_counts(counts, as_json=as_json)


def _longest(max_length: int | None, facts: "TargetFacts", thinking: int) -> int:
    """Tokens of a conversation at most."""
    most, wanted = facts.max_position_embeddings, LONGEST + thinking
    if max_length is None:
        return min(wanted, most or wanted)
    if most is not None and max_length > most:
        raise UserError(
            f"--max-length {max_length} is above the {most} tokens that {facts.source} was made for; "
            f"choose {most} or less"
        )
    return max_length


def _sampling_words(sampling: "Sampling", defaults: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What answers are drawn by, and who said so."""
    values = ", ".join(f"{name} {getattr(sampling, name):g}" for name in SAMPLED if name in {**defaults, **given})
    unsaid = "" if "temperature" in {**defaults, **given} else "the most likely token each time"
    own = [name for name in defaults if name not in given]
    by = f" ({', '.join(own)} of the generation config)" if own else ""
    return f"sampling: {', '.join(part for part in (unsaid, values) if part)}{by}"


def _advice(done: "Progress", limits: "AnswerLimits") -> Iterator[str]:
    """What to do next time, and what to tell the recipe."""
    from eyas.train.recipe import DataSettings

    if done.failed:
        yield f"note: {done.failed} conversations got no answer from any server; the same command asks them again"
    room = f"and --max-length (now {limits.max_length}) with it, if prompt and answer reach that"
    for cut, what, flag, now in (
        (done.cut_thinking, "while the target was thinking", "--max-thinking-tokens", limits.max_thinking_tokens),
        (done.cut_answer, "in the answer", "--max-tokens", limits.max_tokens),
    ):
        if cut and 2 * (done.cut_thinking + done.cut_answer) > done.written:
            yield (
                f"note: {cut} of {done.written} conversations end {what}, cut by a length. They can be trained on; "
                f"for whole answers raise {flag} (now {now}), {room}"
            )
    if done.longest > DataSettings.model_fields["max_length"].default:
        yield (
            f"note: the longest prompt with its answer has {done.longest} tokens; set data.max_length and "
            "data.pack_length of the recipe to that, or training cuts or drops what is longer"
        )
