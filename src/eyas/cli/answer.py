"""`eyas data answer`: the target answers prompts itself, and its answers become training data."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.arguments import require_models
from eyas.cli.help import MEMORY, MODEL, OUTPUT, SAMPLING, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import AsJson, Cache, Device, Dtype, MaxBadShare, report, report_skipped
from eyas.cli.progress import ProgressDisplay
from eyas.data.bad_records import MAX_BAD_SHARE, BadRecords

if TYPE_CHECKING:
    from eyas.data.regenerate import Answerer, ChatPrompt, Progress, Reply
    from eyas.sampling import Sampling
    from eyas.target.model import Target

LONGEST = 2048
SEQS_ON_CPU, SEQS_ELSEWHERE = 16, 256
# Tokens of one pass for each answer at the same time: what decoding leaves of it, prompts fill.
TOKENS_PER_SEQ = 8
LEAST_TOKENS = 512


def answer(
    file: Annotated[Path, typer.Argument(help="Prompts or conversations: a file or folder.")],
    out: Annotated[
        Path,
        typer.Option(help="Where answers go, as JSON lines; an existing file is gone on with.", rich_help_panel=OUTPUT),
    ],
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens up to this probability.", rich_help_panel=SAMPLING)
    ] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(help="New tokens per answer at most.", min=1, rich_help_panel=SAMPLING)
    ] = 400,
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
            show_default=f"{LONGEST}, or the target's longest context",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Answers at the same time.",
            min=1,
            show_default=f"{SEQS_ON_CPU} on a CPU, {SEQS_ELSEWHERE} elsewhere",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Of drawn answers; each conversation has its own, counted from this.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    max_bad_share: MaxBadShare = MAX_BAD_SHARE,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Let the target answer every user turn of a file, old answers dropped.

    Stopped in any way, the same command goes on where it was.
    """
    require_models(target)
    import_libraries()
    from itertools import islice

    from eyas.checksum import sha256_of_all
    from eyas.data.files import ConversationReader, expand_files
    from eyas.data.regenerate import regenerate
    from eyas.errors import UserError
    from eyas.loading import load_target
    from eyas.sampling import Sampling
    from eyas.target.fingerprint import fingerprint

    sampling = Sampling(temperature=temperature, top_p=top_p)
    files, bad = expand_files([file]), BadRecords()
    conversations = list(islice(ConversationReader(files, bad), limit))
    report_skipped(bad, max_bad_share)
    loaded = load_target(target, dtype=dtype, device=device, cache=cache)
    longest = loaded.facts.max_position_embeddings
    if max_length is None:
        max_length = min(LONGEST, longest or LONGEST)
    elif longest is not None and max_length > longest:
        raise UserError(
            f"--max-length {max_length} is above the {longest} tokens that {target} was made for; "
            f"choose {longest} or less"
        )
    if slots is None:
        slots = SEQS_ON_CPU if loaded.device.type == "cpu" else SEQS_ELSEWHERE
    answerer = _answerer(
        loaded,
        sampling,
        max_num_seqs=min(slots, len(conversations)),
        max_length=max_length,
        max_tokens=max_tokens,
        seed=seed,
    )
    arguments = {
        "input": str(file),
        "input_sha256": sha256_of_all(files),
        "target": target,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "max_length": max_length,
        "turns": turns,
        "seed": seed,
    }
    author = {"target": target, "target_fingerprint": fingerprint(loaded.model)}
    started, latest = time.perf_counter(), list["Progress"]()
    with ProgressDisplay() as display:

        def show(progress: "Progress") -> None:
            latest[:] = [progress]
            rate = progress.tokens / (time.perf_counter() - started)
            display.update("answering", progress.done, progress.total, note=f"{rate:,.0f} tokens/s")

        try:
            done = regenerate(
                conversations, answerer, out, arguments=arguments, author=author, turns=turns, on_progress=show
            )
        except KeyboardInterrupt:
            if latest:
                written = latest[0].earlier + latest[0].written
                report(f"{written} of {len(conversations)} conversations are in {out}; the same command goes on")
            raise
    counts = {**asdict(done), "seconds": round(time.perf_counter() - started, 1)}
    if as_json:
        typer.echo(json.dumps(counts))
        return
    for name, count in counts.items():
        typer.echo(f"{name:14} {count:>12,}")


def _answerer(
    target: "Target", sampling: "Sampling", *, max_num_seqs: int, max_length: int, max_tokens: int, seed: int
) -> "Answerer":
    """The engine as training knows it: messages in, text out."""
    from eyas.data.conversations import Sample
    from eyas.data.regenerate import Reply
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.engine.output import RequestOutput
    from eyas.engine.request import FinishReason, Request
    from eyas.errors import UserError
    from eyas.target.chat_template import ChatTemplateOptions

    target.encode_chat([{"role": "user", "content": "?"}])  # a target without a chat template is refused at once
    stop_ids = target.stop_ids()
    options = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_length,
        max_num_batched_tokens=max(LEAST_TOKENS, TOKENS_PER_SEQ * max_num_seqs),
    )

    prompts: dict[int, tuple[int, ...]] = {}

    def reply_to(number: int, given: RequestOutput) -> Reply:
        return Reply(
            id=number,
            sample=Sample(prompt_ids=prompts.pop(number), answer_ids=given.tokens),
            message={"role": "assistant", "content": given.text},
            finished=given.finished is FinishReason.STOP,
        )

    def answer_all(pull: "Callable[[], ChatPrompt | None]") -> "Iterator[Reply]":
        unfit: list[int] = []
        refusals: list[UserError] = []

        def request() -> tuple[int, Request] | None:
            while (question := pull()) is not None:
                ids = encode(question)
                if ids is not None and len(ids) < max_length:
                    prompts[question.id] = tuple(ids)
                    return question.id, Request(
                        prompt=tuple(ids),
                        sampling=sampling,
                        max_new_tokens=max_tokens,
                        stop_ids=stop_ids,
                        skip_special_tokens=False,  # a later turn needs them as much as the words
                        seed=seed + question.id,
                    )
                unfit.append(question.id)
            return None

        def encode(question: "ChatPrompt") -> list[int] | None:
            try:
                options = ChatTemplateOptions(variables=question.chat_template_kwargs)
                return target.encode_chat(question.messages, question.tools or None, options)
            except UserError as error:
                if not refusals:
                    report(f"note: conversation {question.id}, perhaps not the only one: {error}")
                refusals.append(error)
                return None

        def report_unfit() -> "Iterator[Reply]":
            while unfit:
                yield Reply(id=unfit.pop(), sample=None)

        for number, given in Engine(target, config=options).serve(request):
            yield from report_unfit()
            yield reply_to(number, given)
        yield from report_unfit()

    return answer_all
