"""`eyas generate`: answer a prompt, or a file of them, with or without a drafter."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import read_chat_format, read_stop, require_models
from eyas.cli.help import MEMORY, MODEL, OUTPUT, SAMPLING, SPECULATION
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    KVCacheDtype,
    Quantization,
    Raw,
    Stop,
    Threads,
    report,
)

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.engine.output import OutputDelta, RequestOutput, SpecDecodeStats
    from eyas.engine.request import Request

ACCEPTED, OWN = typer.colors.GREEN, typer.colors.YELLOW


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts or conversations instead: a file or folder.")] = None,
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter's name, folder or hub id, or none.",
            show_default="the target's own, if shipped",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    depth: Annotated[
        str,
        typer.Option(
            help="Tokens to draft: a number, 0 for none, or auto: as deep as pays.", rich_help_panel=SPECULATION
        ),
    ] = "auto",
    tree: Annotated[
        str | None,
        typer.Option(help="Draft trees: DEPTHxWIDTHxBUDGET, for example 5x4x24.", rich_help_panel=SPECULATION),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="New tokens per answer at most.", min=1, rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens up to this probability.", rich_help_panel=SAMPLING)
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens this likely in proportion to the most likely.", rich_help_panel=SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens that were there less likely.", rich_help_panel=SAMPLING)
    ] = 1.0,
    stop: Stop = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the sampling; answers differ by their number.", rich_help_panel=SAMPLING)
    ] = 0,
    users: Annotated[int, typer.Option(help="Prompts at the same time.", min=1, rich_help_panel=MEMORY)] = 16,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts", help="Colour tokens: accepted from a draft, or the target's own.", rich_help_panel=OUTPUT
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Answer through the target's chat template.

    A drafter changes how fast answers come, never what they are: the same seed gives the same text without it.
    """
    require_models(target, drafter)
    import_libraries(threads=threads)
    from eyas.cli.speculation import read_depth, read_tree
    from eyas.data.encode_prompt import encode_prompt
    from eyas.drafter.shipped import choose_drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.engine.request import Request
    from eyas.errors import UserError
    from eyas.loading import load_pair
    from eyas.sampling import Sampling

    if (prompt is None) == (file is None):
        raise UserError("give a prompt or --file, one of them")
    drafter = choose_drafter(drafter, target)
    speculation, shape = read_depth(depth, drafter), read_tree(tree, drafter)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    options = EngineConfig(max_num_seqs=users, kv_cache_dtype=kv_cache_dtype)
    asked = _read(file) if file is not None else [_ask(sys.stdin.read() if prompt == "-" else prompt or "")]
    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=raw)
    loaded, model = load_pair(
        target, drafter, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
    )
    deepest = max(speculation.depth or 7, 1 if shape is None else shape.depth)
    engine = Engine(loaded, model, config=replace(options, max_depth=deepest, tree=shape))
    requests = [
        Request(
            prompt=tuple(encode_prompt(loaded, conversation)),
            sampling=sampling,
            max_new_tokens=max_tokens,
            stop_ids=loaded.stop_ids(),
            stop_strings=read_stop(stop),
            seed=seed + number,
            speculation=speculation,
        )
        for number, conversation in enumerate(asked)
    ]
    started = time.perf_counter()
    alone = len(requests) == 1 and not as_json
    answers = engine.generate(requests, on_piece=_Painter(shown=show_drafts).write if alone else None)
    seconds = time.perf_counter() - started
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if as_json:
            typer.echo(json.dumps(_record(target, drafter, request, answer, seconds)))
        elif not alone:
            typer.echo(f"{'' if number == 0 else chr(10)}[{number + 1}] {answer.text}")
    if alone:
        typer.echo()
    if not as_json:
        report(_summary(target, drafter, answers, engine.stats, seconds))
    for event in engine.controller.events():
        report(event)


def _ask(text: str) -> "Conversation":
    from eyas.data.conversations import Conversation

    return Conversation(messages=({"role": "user", "content": text},), where="the prompt")


def _read(file: Path) -> "list[Conversation]":
    """The questions of a file: each conversation up to its first user turn."""
    from eyas.data.files import read_conversations
    from eyas.errors import UserError

    asked = []
    for conversation in read_conversations(file):
        messages = conversation.messages
        last = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if last is not None:
            asked.append(replace(conversation, messages=messages[: last + 1]))
    if not asked:
        raise UserError(f"{file} holds no user turn to answer; give a file of prompts or conversations")
    return asked


class _Painter:
    """Writes pieces as they come."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._colour = sys.stdout.isatty()

    def write(self, piece: "OutputDelta") -> None:
        """Colours on a terminal; elsewhere accepted tokens stand in brackets."""
        for text, depth in zip(piece.texts, piece.depths, strict=True):
            if self._shown and text and self._colour:
                text = typer.style(text, fg=ACCEPTED if depth else OWN)
            elif self._shown and text and depth:
                text = f"[{text}]"
            sys.stdout.write(text)
        sys.stdout.flush()


def _record(
    target: str, drafter: str | None, request: "Request", answer: "RequestOutput", seconds: float
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "prompt_tokens": len(request.prompt),
        "tokens": len(answer.tokens),
        "seconds": seconds,
        "answer": answer.text,
        "finished": answer.finished.value,
    }
    if drafter is not None:
        stats = answer.stats
        record |= {
            "acceptance_length": stats.acceptance_length,
            "drafts": stats.drafts,
            "accepted": stats.accepted,
            "accepted_at": stats.accepted_at,
            "depths": list(answer.depths),
        }
    return record


def _summary(
    target: str, drafter: str | None, answers: "Sequence[RequestOutput]", stats: "SpecDecodeStats", seconds: float
) -> str:
    tokens = sum(len(answer.tokens) for answer in answers)
    line = f"[{target}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
    if drafter is not None:
        line += f"; {Path(drafter).name}: acceptance length {stats.acceptance_length:.2f} over {stats.drafts} drafts"
        line += f", {stats.tokens_per_pass:.2f} tokens per pass"
    return line + "]"
