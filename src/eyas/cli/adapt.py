"""`eyas adapt`: from a drafter and a few thousand answers of its target to a drafter that foretells such better."""

import functools
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.arguments import as_json_value, make_folder, read_chat_format, require_models
from eyas.cli.help import MODEL, OPERATION, OUTPUT, TRAINING, WORK
from eyas.cli.libraries import import_libraries
from eyas.cli.options import (
    AsJson,
    Cache,
    ChatTemplate,
    ChatTemplateKwargs,
    Device,
    Dtype,
    Raw,
    Ticker,
    report,
)
from eyas.cli.stop import StopRequest

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.drafter.checkpoint import Checkpoint
    from eyas.target.model import Target
    from eyas.target.parts import TargetParts
    from eyas.train.adaptation.judge import AcceptanceChange
    from eyas.train.features import OpenSource
    from eyas.train.recipe import Recipe
    from eyas.train.run import TrainResult

SCHEMA = "eyas.adaptation/1"
RECORD = "record.json"
JUDGED_ON_CPU, JUDGED_ELSEWHERE = 64, 400
"""Conversations that are judged on at most."""
DOCTOR_PROMPTS, DOCTOR_TOKENS, DOCTOR_DEPTH = 16, 48, 8
DOCTOR_MINUTES = 3.0


def adapt(
    context: typer.Context,
    drafter: Annotated[str, typer.Argument(help="The drafter to start from: its name, folder or hub id.")],
    answers: Annotated[
        list[Path], typer.Argument(help="Answers of the target, oldest first: files or folders of conversations.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for drafter, record, picture and training.", rich_help_panel=OUTPUT)
    ],
    target: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder or a hub id.", rich_help_panel=MODEL)
    ] = "smollm2",
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            help="Other answers of the target, mixed in and judged on too, so that they are not forgotten; repeatable.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    replay_share: Annotated[
        float,
        typer.Option(help="Share of the tokens that is of --replay.", min=0.0, max=0.95, rich_help_panel=TRAINING),
    ] = 0.25,
    minutes: Annotated[
        float, typer.Option(help="Minutes of training at most.", min=0.01, max=1e6, rich_help_panel=TRAINING)
    ] = 3.0,
    epochs: Annotated[
        float, typer.Option(help="Passes over the answers at most.", min=0.01, max=1e6, rich_help_panel=TRAINING)
    ] = 4.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=1.0, rich_help_panel=TRAINING)] = 1e-4,
    anchor: Annotated[
        float,
        typer.Option(
            help="Share of the way back to the starting weights that every step goes; 0: none.",
            min=0.0,
            max=0.99,
            rich_help_panel=TRAINING,
        ),
    ] = 0.01,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set any value of the recipe: train.depths=5. Repeatable.", rich_help_panel=TRAINING
        ),
    ] = None,
    held_out_share: Annotated[
        float,
        typer.Option(
            help="Share of the newest answers that is judged on and not trained on; 16 conversations at least.",
            min=0.01,
            max=0.5,
            rich_help_panel=WORK,
        ),
    ] = 0.1,
    depth: Annotated[
        int,
        typer.Option(help="Tokens that are drafted per round where it is judged.", min=1, max=64, rich_help_panel=WORK),
    ] = 5,
    max_loss: Annotated[
        float,
        typer.Option(
            help="Share of the acceptance length on --replay that may be lost.", min=0.0, max=1.0, rich_help_panel=WORK
        ),
    ] = 0.02,
    doctor: Annotated[bool, typer.Option(help="Have the doctor examine the new drafter.", rich_help_panel=WORK)] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was stopped in --out.", rich_help_panel=OPERATION)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the recipe and stop.", rich_help_panel=OPERATION)
    ] = False,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    raw: Raw = False,
    dtype: Dtype = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="What the target's matrices are while it makes states: none, auto, gguf, int8, int4, fp8.",
            rich_help_panel=MODEL,
        ),
    ] = "none",
    device: Device = "auto",
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Adapt a drafter to the traffic it meets, and keep the new one only if it is better.

    The newest answers are held out. Old and new drafter walk them, and the new one is kept if it is better beyond the
    interval: then it lies in OUT/drafter, as vLLM loads it. Exit code 1: it is not, and the old one stays. Ctrl-C
    saves; --resume goes on.
    """
    require_models(target, drafter)
    import_libraries()
    from eyas.drafter.checkpoint import read_config
    from eyas.loading import require_fit
    from eyas.target.facts import read_facts
    from eyas.train.adaptation.recipe import AdaptationSettings, adaptation_recipe
    from eyas.train.recipe import to_toml

    arguments = {name: as_json_value(value) for name, value in context.params.items()}
    facts = read_facts(target, cache=cache)
    require_fit(drafter, facts)
    chosen_device = _device(device)
    settings = AdaptationSettings(
        drafter=drafter,
        answers=[str(path) for path in answers],
        replay=[str(path) for path in replay or ()],
        replay_share=replay_share,
        held_out_share=held_out_share,
        lr=lr,
        anchor=anchor,
        epochs=epochs,
        minutes=minutes,
        target={
            "source": target,
            "dtype": dtype,
            "quantization": quantization,
            "device": device,
            "raw": raw,
            **({} if chat_template is None else {"chat_template": chat_template}),
            "chat_template_kwargs": dict(read_chat_format(None, chat_template_kwargs, raw=False).variables),
        },
        folder=str(out / "training"),
        overrides=overrides or (),
    )
    conversations = [one for one in _conversations(settings.answers) if one.answered]
    recipe = adaptation_recipe(
        settings,
        read_config(drafter),
        answered=len(conversations),
        longest=_longest([*conversations, *_conversations(settings.replay)]),
        context=facts.max_position_embeddings,
        on_cpu=chosen_device == "cpu",
    )
    if dry_run:
        typer.echo(to_toml(recipe))
        return
    make_folder(out)
    _Adaptation(
        recipe=recipe, out=out, depth=depth, max_loss=max_loss, doctor=doctor, arguments=arguments, cache=cache
    ).run(resume=resume, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class _Adaptation:
    """Everything behind the arguments: train, judge, examine, tell."""

    recipe: "Recipe"
    out: Path
    depth: int
    max_loss: float
    doctor: bool
    arguments: Mapping[str, Any]
    cache: Path | None

    def run(self, *, resume: bool, as_json: bool) -> None:
        from eyas.cli.adapt_tables import print_adaptation
        from eyas.cli.train import load_training_target
        from eyas.target.facts import read_facts
        from eyas.target.parts import TargetParts
        from eyas.train.adaptation.outcome import as_stored_like, decide_adaptation
        from eyas.train.preflight import check_run
        from eyas.train.ranks import Ranks
        from eyas.train.sources.live import LiveSource

        started = time.perf_counter()
        check_run(self.recipe, read_facts(self.recipe.target.source, cache=self.cache), resuming=resume)
        with StopRequest() as stop:
            target = load_training_target(self.recipe, Ranks(), self.cache)
            parts = TargetParts.of(target)
            open_source = functools.partial(LiveSource, target, chunk=self.recipe.train.chunk)
            outcome = self._train(parts, open_source, stop, resume=resume)
        trained = time.perf_counter()
        assert self.recipe.drafter.init_from is not None
        candidate = as_stored_like(outcome.drafters["drafter"], self.recipe.drafter.init_from)
        changes = self._judge(parts, open_source, candidate)
        verdict = decide_adaptation(changes, self.max_loss)
        judged = time.perf_counter()
        examined = self._examine(target, candidate) if self.doctor else {"skipped": "by --no-doctor"}
        record = self._record(parts, changes)
        record |= {"kept": verdict.kept, "verdict": verdict.text, "doctor": examined}
        record["seconds"] = {
            "until_trained": round(trained - started, 1),
            "training": round(self._training_record()["training_seconds"], 1),
            "judging": round(judged - trained, 1),
            "doctor": round(time.perf_counter() - judged, 1),
            "total": round(time.perf_counter() - started, 1),
        }
        self._write(record, candidate, changes)
        if as_json:
            typer.echo(json.dumps(record))
        else:
            print_adaptation(record)
            self._say_what_next(kept=verdict.kept)
        if not verdict.kept:
            raise typer.Exit(1)

    def _train(
        self, parts: "TargetParts", open_source: "OpenSource", stop: StopRequest, *, resume: bool
    ) -> "TrainResult":
        from eyas.cli.train import TrainScreen
        from eyas.train.run import run

        tick = Ticker()
        with TrainScreen(shown=True) as screen:
            outcome = run(
                self.recipe,
                parts,
                open_source,
                observers=[screen],
                stop=stop.asked,
                on_first_step=stop.saves_from_now_on,
                resuming=resume,
                on_encoded=lambda progress: tick(str(progress), at_once=not progress.conversations),
                cache=self.cache,
            )
        if not outcome.finished:
            report(f"stopped at step {outcome.step} of {outcome.length}; the same command with --resume goes on")
            raise typer.Exit(130)
        return outcome

    def _judge(
        self, parts: "TargetParts", open_source: "OpenSource", candidate: "Checkpoint"
    ) -> dict[str, "AcceptanceChange"]:
        """Old and new drafter on what was held out: the traffic, and what is replayed."""
        import numpy as np
        import torch

        from eyas.drafter.checkpoint import build_drafter, read_checkpoint
        from eyas.train.adaptation.judge import compare, walk_conversations
        from eyas.train.adaptation.outcome import REPLAY, TRAFFIC
        from eyas.train.run import precision_of
        from eyas.train.run_data import read_data

        on_cpu = parts.device.type == "cpu"
        dtype = getattr(torch, precision_of(self.recipe, parts))
        assert self.recipe.drafter.init_from is not None
        drafters = {}
        for name, checkpoint in (("before", read_checkpoint(self.recipe.drafter.init_from)), ("after", candidate)):
            model = build_drafter(checkpoint).to(device=parts.device, dtype=dtype)
            drafters[name] = model.share_target(parts.embedding_VD.to(dtype), parts.head.weight_VD)
        data = read_data(self.recipe, parts, cache=self.cache)
        changes = {}
        for name, corpus in ((TRAFFIC, data.held_out), (REPLAY, data.replay_held_out)):
            if corpus is None:
                continue
            last = np.unique(corpus.owners)[-(JUDGED_ON_CPU if on_cpu else JUDGED_ELSEWHERE) :]
            corpus = corpus.take(np.flatnonzero(np.isin(corpus.owners, last)))
            report(f"judging old and new drafter on {corpus.conversations} held-out conversations ({name})")
            walked = walk_conversations(
                drafters,
                parts.facts,
                open_source,
                corpus,
                depth=self.depth,
                pack_length=self.recipe.data.pack_length,
                chunk=self.recipe.train.chunk,
                device=parts.device,
            )
            changes[name] = compare(walked["before"], walked["after"])
        return changes

    def _examine(self, target: "Target", candidate: "Checkpoint") -> dict[str, Any]:
        """The doctor on the newest prompts: drift and known faults, no other conditions."""
        from eyas.cli.doctor import chat_prompts
        from eyas.cli.progress import ProgressDisplay
        from eyas.doctor.candidate import prepare_candidate
        from eyas.doctor.examination import Examination, ExaminationConfig
        from eyas.doctor.record import record_of
        from eyas.kernels.linear.packed_linear import pack_linears
        from eyas.kernels.llama.packed_experts import pack_experts

        if self.recipe.target.quantization == "none":  # as `eyas doctor` does
            pack_linears(target.model, halve=False, cache=self.cache)
            pack_experts(target.model, halve=False, cache=self.cache)
        config = ExaminationConfig(
            depth=DOCTOR_DEPTH, max_new_tokens=DOCTOR_TOKENS, conditions=None, minutes=DOCTOR_MINUTES
        )
        newest = _conversations(self.recipe.data.files)[-DOCTOR_PROMPTS:]
        prompts = chat_prompts(newest, target, config, DOCTOR_PROMPTS)
        subject = prepare_candidate(candidate, "adapted", target, source=str(self.out / "drafter"))
        examination = Examination(target, [subject], prompts, config, filler="")
        with ProgressDisplay() as progress:
            examination.run(lambda name, done, total: progress.update(name, done, total or None))
        record = record_of(examination, self.arguments, [])
        _write_text(self.out / "doctor.json", json.dumps(record, indent=1))
        return dict(record["decision"])

    def _record(self, parts: "TargetParts", changes: Mapping[str, "AcceptanceChange"]) -> dict[str, Any]:
        from eyas.train.adaptation.outcome import fingerprint_weights
        from eyas.train.journal import versions

        training = self._training_record()
        start = self.recipe.drafter.init_from
        assert start is not None
        return {
            "schema": SCHEMA,
            "versions": versions(),
            "arguments": dict(self.arguments),
            "from": {"drafter": start, "fingerprint": fingerprint_weights(start)},
            "target": {**asdict(parts.facts), "fingerprint": parts.fingerprint},
            "data": training["data"],
            "recipe": training["recipe"],
            "steps": training["step"],
            "depth": self.depth,
            "changes": {name: change.as_json() for name, change in changes.items()},
        }

    def _training_record(self) -> dict[str, Any]:
        text = (Path(self.recipe.output.folder) / RECORD).read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
        return record

    def _write(
        self, record: dict[str, Any], candidate: "Checkpoint", changes: Mapping[str, "AcceptanceChange"]
    ) -> None:
        from eyas.drafter.checkpoint import write_checkpoint
        from eyas.train.adaptation.outcome import TRAFFIC, fingerprint_weights
        from eyas.train.adaptation.plot import plot_adaptation
        from eyas.train.estimate import acceptance_file

        if record["kept"]:
            place = self.out / "drafter"
            story = {RECORD: json.dumps(record, indent=1) + "\n", **acceptance_file(changes[TRAFFIC].after)}
            write_checkpoint(candidate, place, replace=True, beside=story)
            record["drafter"] = {"folder": str(place), "fingerprint": fingerprint_weights(str(place))}
        _write_text(self.out / RECORD, json.dumps(record, indent=1))
        plot_adaptation(record["changes"], self.out / "adaptation.png")

    def _say_what_next(self, *, kept: bool) -> None:
        from eyas.target.locate import DEFAULT_TARGET

        trained = Path(self.recipe.output.folder)
        typer.echo(f"record and picture: {self.out}; recipe, log and picture of the training: {trained}")
        if not kept:
            typer.echo(f"what was trained is {trained / 'drafter'}; more answers, or other --lr and --epochs, may help")
            return
        target, drafter = self.recipe.target.source, str(self.out / "drafter")
        words = ["eyas", "eval", "PROMPTS.jsonl", "--target", target, "--drafter", drafter]
        typer.echo(f"measure it: {shlex.join(words)}")
        config = json.dumps({"model": drafter, "method": "eagle3"})
        typer.echo(f"serve it: {shlex.join(['eyas', 'serve', target, '--speculative-config', config])}")
        if target != DEFAULT_TARGET:  # a name that only eyas knows
            typer.echo(f"with vLLM: {shlex.join(['vllm', 'serve', target, '--speculative-config', config])}")


def _conversations(files: Sequence[str]) -> "list[Conversation]":
    """All that can be read, in order."""
    from eyas.data.bad_records import BadRecords
    from eyas.data.files import ConversationReader, expand_files

    return list(ConversationReader(expand_files(files), BadRecords()))


def _longest(conversations: "Sequence[Conversation]") -> int | None:
    """Tokens of the longest, where all of them came with their tokens."""
    if not all(conversation.samples for conversation in conversations):
        return None
    return max(
        (len(one.prompt_ids) + len(one.answer_ids) for conversation in conversations for one in conversation.samples),
        default=None,
    )


def _device(asked: str) -> str:
    from eyas.cli.train import choose_training_device

    return choose_training_device(asked)


def _write_text(path: Path, text: str) -> None:
    from eyas.train.journal import write_text

    write_text(path, text)
