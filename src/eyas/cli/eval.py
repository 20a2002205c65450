"""`eyas eval`: how many tokens a verification really yields, for one or several drafters of one target."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import as_json_value, make_folder, read_chat_format, read_stop, require_models, short_names
from eyas.cli.help import MEMORY, MODEL, OUTPUT, SPECULATION, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    Quantization,
    Raw,
    Stop,
    report,
)
from eyas.cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation, Message
    from eyas.evaluate.evaluate import Estimates, GivenAnswer
    from eyas.evaluate.prompts import Prompt
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.model import Target

LONGEST = 8192
# Tokens and rows that the estimate scores at a time.
PACK_ON_CPU, PACK_ELSEWHERE = 2048, 16_384
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096


def evaluate(
    context: typer.Context,
    prompts: Annotated[list[Path], typer.Argument(help="Prompts or conversations: files or folders.")],
    drafter: Annotated[
        list[str],
        typer.Option(help="A drafter's folder or hub id; repeat to compare several.", rich_help_panel=SPECULATION),
    ],
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    depth: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens to draft per round; repeat for several.",
            show_default="3, 5 and 7",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per answer at most.", min=1, rich_help_panel=WORK)] = 256,
    turns: Annotated[
        int, typer.Option(help="User turns to ask per conversation at most.", min=1, rich_help_panel=WORK)
    ] = 1,
    limit: Annotated[
        int | None, typer.Option(help="Conversations to ask at most.", min=1, show_default="all", rich_help_panel=WORK)
    ] = None,
    prefix: Annotated[
        Path | None, typer.Option(help="A text file to put some of before every question.", rich_help_panel=WORK)
    ] = None,
    prefix_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="How much of it, 0 for none; repeat to compare with the first.",
            min=0,
            show_default="0",
            rich_help_panel=WORK,
        ),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Estimate on the conversations' own answers as well.", rich_help_panel=WORK),
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Estimate on the target's plain answers as well.", rich_help_panel=WORK)
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for eval.json and eval.png; earlier ones are replaced.", rich_help_panel=OUTPUT),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer at most.",
            min=2,
            show_default=f"{LONGEST}, or the target's context",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Answers at the same time.", min=1, show_default="by length and device", rich_help_panel=MEMORY
        ),
    ] = None,
    stop: Stop = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Measure acceptance length by real greedy decoding, and estimate it on the same text.

    Ctrl-C prints what was measured until then.
    """
    require_models(target, *drafter)
    import_libraries()
    from eyas.data.encode_prompt import encode_prompt
    from eyas.errors import UserError
    from eyas.evaluate.decoders import EngineDecoders
    from eyas.evaluate.evaluate import Group, estimate_corpus, record_estimates, record_groups
    from eyas.evaluate.evaluate import evaluate as run
    from eyas.evaluate.partings import find_parting
    from eyas.evaluate.prompts import PrefixText, Questions
    from eyas.loading import load_drafter_for, load_target, require_fit
    from eyas.serve.builders.answer_reader import AnswerReader
    from eyas.target.facts import read_facts
    from eyas.train.journal import versions

    arguments = {name: as_json_value(value) for name, value in context.params.items()}
    depths = sorted(set(depth or (3, 5, 7)))
    if depths[0] < 1:
        raise UserError(f"--depth {depths[0]} drafts nothing, so there is nothing to measure; give 1 or more")
    prefixes = list(dict.fromkeys(prefix_tokens or (0,)))
    conversations = _read(prompts, limit)
    if any(prefixes) != (prefix is not None):
        raise UserError("--prefix names a text and --prefix-tokens how much of it to use; give both or neither")
    if held_out and not any(conversation.answered for conversation in conversations):
        raise UserError(f"--held-out needs answers and {prompts[0]} holds prompts only; leave it out")
    if out is not None:
        make_folder(out)
    names = short_names(drafter)
    facts = read_facts(target, cache=cache)
    for source in names.values():
        require_fit(source, facts)
    chat_format = read_chat_format(chat_template, chat_template_kwargs, raw=raw)
    stop_strings = read_stop(stop)
    loaded = load_target(
        target, dtype=dtype, device=device, quantization=quantization, cache=cache, chat_format=chat_format
    )
    max_length = _choose_length(max_length, loaded)
    if max_tokens >= max_length:
        raise UserError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in --max-length {max_length}; "
            "lower the one or raise the other"
        )
    text = None if prefix is None else PrefixText(prefix, loaded)
    if text is not None:
        text.check(max(prefixes))
    encode = partial(encode_prompt, loaded)
    questions = Questions(conversations, encode, turns=turns, longest=max_length - max_tokens, prefix=text)
    groups = []
    for tokens in prefixes:
        asked, skipped = questions.first(tokens)
        groups.append(Group(prefix_tokens=tokens, prompts=asked, skipped=skipped))
    drafters = {name: load_drafter_for(loaded, source, cache=cache) for name, source in names.items()}
    on_cpu = loaded.device.type == "cpu"

    def walk(corpus: Any) -> "Estimates":
        return estimate_corpus(
            drafters,
            loaded,
            corpus,
            depths=depths,
            pack_length=PACK_ON_CPU if on_cpu else PACK_ELSEWHERE,
            chunk=CHUNK_ON_CPU if on_cpu else CHUNK_ELSEWHERE,
        )

    record: dict[str, Any] = {"versions": versions(), "arguments": arguments, "drafters": names, "depths": depths}
    record |= {
        "target": {
            **asdict(loaded.facts),
            "dtype": str(loaded.dtype),
            "quantization": loaded.quantization,
            "device": str(loaded.device),
        }
    }
    record |= {"max_length": max_length, "held_out": None}
    started = time.perf_counter()

    def finish(*, whole: bool) -> None:
        """Tell and write what there is."""
        if not whole:
            if not any(group.measured for group in groups):
                return
            report("stopped early; this is what was measured until then")
        record.update(whole=whole, seconds=round(time.perf_counter() - started, 1), groups=record_groups(groups))
        _deliver(record, out, as_json=as_json)

    try:
        with ProgressDisplay() as progress, _explaining_memory():
            if held_out:
                report("estimating on the conversations as they stand")
                kept, corpus = _encode(conversations, loaded, max_length)
                record["held_out"] = {"conversations": kept, "estimates": record_estimates(walk(corpus))}
            run(
                groups,
                questions,
                EngineDecoders(
                    loaded,
                    drafters,
                    max_new_tokens=max_tokens,
                    max_depth=depths[-1],
                    max_num_seqs=slots,
                    stop_strings=stop_strings,
                    read_answer=partial(_read_answer, AnswerReader(loaded)),
                ),
                drafters=list(drafters),
                depths=depths,
                turns=turns,
                find_parting=partial(find_parting, loaded),
                estimate=walk if estimate else None,
                follow=partial(_follow, progress),
            )
    except (KeyboardInterrupt, UserError):
        finish(whole=False)
        raise
    finish(whole=True)


def _read_answer(reader: "AnswerReader", prompt: "Prompt", text: str) -> "Message":
    """An answer as a client of the server gets it and sends it back: reasoning apart, where there is any."""
    answer = reader.read(prompt.ids, prompt.conversation.tools)
    answer.feed(text)
    return answer.message()


def _follow(
    progress: ProgressDisplay, name: str, answers: "Iterable[GivenAnswer]", total: int
) -> "Iterator[GivenAnswer]":
    """Hand on answers as they come, and tell in the end what they came to."""
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


def _read(files: Sequence[Path], limit: int | None) -> "list[Conversation]":
    from eyas.data.files import read_conversations

    return list(islice(chain.from_iterable(read_conversations(file) for file in files), limit))


def _choose_length(asked: int | None, target: "Target") -> int:
    from eyas.errors import UserError

    longest = target.facts.max_position_embeddings
    if asked is None:
        return min(LONGEST, longest or LONGEST)
    if longest is not None and asked > longest:
        raise UserError(
            f"--max-length {asked} is above the {longest} tokens that {target.facts.source} was made for; "
            f"choose {longest} or less"
        )
    return asked


def _encode(conversations: "Sequence[Conversation]", target: "Target", max_length: int) -> tuple[int, Any]:
    from eyas.train.corpus.encoding import encode_conversations

    corpus, counts = encode_conversations(
        conversations,
        target.tokenizer,
        target.stop_ids(),
        max_length=max_length,
        variables=target.template_variables,
    )
    return counts.kept, corpus


def _deliver(record: Mapping[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Print, then write."""
    from eyas.cli.eval_tables import print_tables
    from eyas.errors import UserError

    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_tables(record)
    if out is not None:
        from eyas.evaluate.plot import plot_evaluation

        try:
            (out / "eval.json").write_text(json.dumps(record), encoding="utf-8")
            plot_evaluation(record, out / "eval.png")
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror}; free space or choose another --out") from error
        report(f"written: {out / 'eval.json'}, {out / 'eval.png'}")


@contextmanager
def _explaining_memory() -> Iterator[None]:
    import torch

    from eyas.errors import UserError

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError("the device is out of memory; pass fewer --slots, or shorten --max-length") from error
