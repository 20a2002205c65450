"""`eyas generate`: answer a prompt, or a file of them, with or without a drafter."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import MEMORY, OUTPUT, SAMPLING, SPECULATION
from eyas.cli.options import (
    AsJson,
    KVCacheOptions,
    PairOptions,
    StopOptions,
    ThreadOptions,
    build,
    command,
    load_libraries,
    options,
)
from eyas.cli.terminal import report
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.engine.output import OutputDelta, RequestOutput, SpecDecodeStats
    from eyas.engine.request import Request

ACCEPTED, OWN = typer.colors.GREEN, typer.colors.YELLOW


@options(SAMPLING)
class SamplingOptions(StopOptions):
    """How tokens are chosen, and how many."""

    max_tokens: Annotated[int, Option(min=1)] = 128
    """New tokens per answer at most."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability."""
    min_p: float = 0.0
    """Keep tokens this likely in proportion to the most likely."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were there less likely."""
    seed: int = 0
    """Seed of the sampling; answers differ by their number."""


@options(SPECULATION)
class GenerateOptions(ThreadOptions):
    """Further options of `eyas generate`."""

    tree: str | None = None
    """Draft trees: DEPTHxWIDTHxBUDGET, for example 5x4x24."""
    users: Annotated[int, Option(min=1, rich_help_panel=MEMORY)] = 16
    """Prompts at the same time."""
    show_drafts: Annotated[bool, Option("--show-drafts", rich_help_panel=OUTPUT)] = False
    """Colour tokens: accepted from a draft, or the target's own."""


@command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; - reads standard input.")] = None,
    file: Annotated[Path | None, Option(help="Prompts or conversations instead: a file or folder.")] = None,
    *,
    pair: PairOptions,
    more: GenerateOptions,
    sampling: SamplingOptions,
    kept: KVCacheOptions,
    as_json: AsJson = False,
) -> None:
    """Answer through the target's chat template.

    A drafter changes how fast answers come, never what they are: the same seed gives the same text without it.
    """
    load_libraries(pair.target, pair.drafter, threads=more.threads)
    from eyas.data.conversations import Conversation
    from eyas.data.encode_prompt import encode_prompt
    from eyas.drafter.shipped import choose_drafter
    from eyas.engine.config import EngineConfig
    from eyas.engine.engine import Engine
    from eyas.engine.request import Request
    from eyas.sampling import Sampling
    from eyas.serve.speculative_config import read_depth, read_tree

    if (prompt is None) == (file is None):
        raise UserError("give a prompt or --file, one of them")
    drafter = choose_drafter(pair.drafter, pair.target)
    speculation, tree = read_depth(pair.depth, drafter), read_tree(more.tree, drafter)
    chosen = build(Sampling, sampling)
    config = EngineConfig(max_num_seqs=more.users, kv_cache_dtype=kept.kv_cache_dtype)
    text = sys.stdin.read() if prompt == "-" else prompt or ""
    single = Conversation(messages=({"role": "user", "content": text},), where="the prompt")
    asked = [single] if file is None else _read(file)
    target, model = pair.load_pair(drafter)
    deepest = max(speculation.depth or 7, 1 if tree is None else tree.depth)
    engine = Engine(target, model, config=replace(config, max_depth=deepest, tree=tree))
    requests = [
        Request(
            prompt=tuple(encode_prompt(target, conversation)),
            sampling=chosen,
            max_new_tokens=sampling.max_tokens,
            stop_ids=target.stop_ids(),
            stop_strings=sampling.stop_strings(),
            seed=sampling.seed + number,
            speculation=speculation,
        )
        for number, conversation in enumerate(asked)
    ]
    started = time.perf_counter()
    alone = len(requests) == 1 and not as_json
    answers = engine.generate(requests, on_piece=_Painter(shown=more.show_drafts).write if alone else None)
    seconds = time.perf_counter() - started
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if as_json:
            typer.echo(json.dumps(_record(pair.target, drafter, request, answer, seconds)))
        elif not alone:
            typer.echo(f"{'' if number == 0 else chr(10)}[{number + 1}] {answer.text}")
    if alone:
        typer.echo()
    if not as_json:
        report(_summary(pair.target, drafter, answers, engine.stats, seconds))
    for event in engine.controller.events():
        report(event)


def _read(file: Path) -> "list[Conversation]":
    """Read the questions of a file: each conversation up to its first user turn."""
    from eyas.data.files import read_conversations

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
    """Writes the pieces of an answer as they come."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._colour = sys.stdout.isatty()

    def write(self, piece: "OutputDelta") -> None:
        """Write tokens in colours on a terminal; elsewhere accepted ones stand in brackets."""
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
