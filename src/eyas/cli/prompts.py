"""`eyas data prompts`: the target says what its users would ask, for those who have no prompts."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.arguments import read_chat_format, require_models, require_unsaid
from eyas.cli.help import MODEL, OUTPUT, SAMPLING
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
    Patience,
    Quantization,
    Slots,
    TheirKey,
    TheirModel,
    Timeout,
    print_counts,
    report,
)
from eyas.cli.progress import ProgressDisplay
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.data.user_turn import PromptCounts


def prompts(
    count: Annotated[
        int, typer.Argument(help="How often the target is asked; what is cut, empty or there already is left out.")
    ],
    out: Annotated[
        Path,
        typer.Option(help="Where prompts go, as JSON lines; an existing file is gone on with.", rich_help_panel=OUTPUT),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="smollm2, a GGUF file, a folder or a hub id; needed beside --server, for its tokenizer and template.",
            show_default=DEFAULT_TARGET,
            rich_help_panel=MODEL,
        ),
    ] = None,
    drafter: AnswersDrafter = None,
    server: AnsweringServer = None,
    model: TheirModel = None,
    api_key: TheirKey = None,
    timeout: Timeout = 3600.0,
    patience: Patience = 1800.0,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="Prompts that should not be among them; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System prompt behind which users speak; the prompts are without it.",
            show_default="the template's own",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Above 0; more gives more kinds.", rich_help_panel=SAMPLING)] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the most likely tokens up to this probability.", rich_help_panel=SAMPLING),
    ] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a prompt at most.", min=1, rich_help_panel=SAMPLING)] = 512,
    seed: Annotated[
        int, typer.Option(help="Each prompt has its own, counted from this.", rich_help_panel=SAMPLING)
    ] = 0,
    slots: Slots = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Let the target say what users ask: prompts of the kind that it was taught to answer.

    Stopped in any way, the same command goes on where it was. A larger COUNT adds to the file.
    """
    own = {"dtype": dtype, "device": device, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    if count < 1:
        raise UserError(f"COUNT is {count}; ask for 1 prompt at least")
    if temperature <= 0:
        raise UserError(
            f"--temperature {temperature:g} gives one prompt again and again; choose more than 0, such as 1"
        )
    if server:
        require_unsaid(own, drafter)
        if target is None:
            raise UserError("--server does not tell its chat template; name the target with --target")
    source = target or DEFAULT_TARGET
    require_models(source, drafter)
    import_libraries()
    from eyas.checksum import sha256_of_all
    from eyas.cli.answer_limits import AnswerLimits
    from eyas.cli.answering_target import ServerOptions, answering_target
    from eyas.data.files import ConversationReader, expand_files
    from eyas.data.overlap import PromptIndex
    from eyas.data.user_turn import VERBATIM, UserTurn, ask_for_prompts
    from eyas.sampling import Sampling
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.tokenizer import load_tokenizer

    sampling = Sampling(temperature=temperature, top_p=top_p)
    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=False)
    evaluated = expand_files(evaluation or [])
    index = PromptIndex(list(ConversationReader(evaluated)))
    tokenizer, _ = load_tokenizer(source, cache=cache, chat_format=chat_format)
    turn = UserTurn.of(tokenizer, source, chat_format, system)
    servers = ServerOptions(urls=server or (), model=model, api_key=api_key, timeout=timeout, patience=patience)
    opening = answering_target(
        source, drafter, servers, own=own, slots=slots, total=count, cache=cache, chat_format=VERBATIM
    )
    with opening as (who, seqs), ProgressDisplay() as display:
        said = len(who.target.encode_chat([{"role": "user", "content": turn.opening}]))
        most = who.target.facts.max_position_embeddings or said + max_tokens
        if said >= most:
            raise UserError(
                f"what stands before a user's words has {said} tokens and {source} reads {most}; shorten it"
            )
        answerer = who.answerer(
            AnswerReader(who.target),
            sampling=sampling,
            limits=AnswerLimits(max_tokens=max_tokens, max_thinking_tokens=1, max_length=min(most, said + max_tokens)),
            stop_strings=(turn.end,) if turn.end else (),
            max_num_seqs=seqs,
            seed=seed,
        )
        arguments = {
            "target": source,
            **who.arguments,
            # Not the opening itself: some templates write the day into it.
            "system": system,
            "chat_template": chat_format.template,
            "chat_template_kwargs": chat_format.variables,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "eval_sha256": sha256_of_all(evaluated) if evaluated else None,
            "seed": seed,
        }
        started, latest = time.perf_counter(), list["PromptCounts"]()

        def show(counts: "PromptCounts") -> None:
            latest[:] = [counts]
            rate = counts.tokens / (time.perf_counter() - started)
            display.update("asking", counts.done, counts.asked, note=f"{rate:,.0f} tokens/s")

        try:
            done = ask_for_prompts(
                turn,
                count,
                answerer,
                out,
                tokenizer=tokenizer,
                evaluation=index,
                arguments=arguments,
                on_progress=show,
            )
        except (KeyboardInterrupt, UserError):
            if latest:
                report(f"{latest[0].earlier + latest[0].written} prompts are in {out}; the same command goes on")
            raise
    if 2 * done.duplicate > count:
        report(f"note: {done.duplicate} of {count} were there already; raise --temperature or --top-p, or ask for less")
    counts = {**asdict(done), "seconds": round(time.perf_counter() - started, 1)}
    print_counts(counts, as_json=as_json)
