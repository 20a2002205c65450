"""An adaptation from the target's weights to the verdict: train, judge, examine, tell."""

import functools
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli.options import Ticker, report
from eyas.cli.stop import StopRequest
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.data.conversations import Conversation
    from eyas.drafter.checkpoint import Checkpoint
    from eyas.target.model import Target
    from eyas.target.parts import TargetParts
    from eyas.train.adaptation.judge import AcceptanceChange
    from eyas.train.corpus.encoding import EncodingProgress
    from eyas.train.features import OpenSource
    from eyas.train.pace import Pace
    from eyas.train.recipe import Recipe
    from eyas.train.run import TrainResult
    from eyas.train.run_data import RunData

SCHEMA = "eyas.adaptation/1"
RECORD = "record.json"
JUDGED_ON_CPU, JUDGED_ELSEWHERE = 64, 400
"""Conversations that are judged on at most."""
DOCTOR_PROMPTS, DOCTOR_TOKENS, DOCTOR_DEPTH = 16, 48, 8
DOCTOR_MINUTES = 3.0


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Everything behind the arguments: train, judge, examine, tell."""

    recipe: "Recipe"
    newest: "Sequence[Conversation]"
    """What the doctor asks."""
    out: Path
    depth: int
    max_loss: float
    doctor: bool
    device_share: float
    arguments: Mapping[str, Any]
    cache: Path | None

    def run(self, *, resume: bool, as_json: bool) -> None:
        """All of it; exit code 1 if the old drafter stays."""
        import torch

        from eyas.cli.adapt_tables import print_adaptation
        from eyas.cli.train import load_training_target
        from eyas.target.facts import read_facts
        from eyas.target.parts import TargetParts
        from eyas.train.adaptation.outcome import as_stored_like, decide_adaptation
        from eyas.train.preflight import check_run
        from eyas.train.ranks import Ranks
        from eyas.train.sources.live import LiveSource
        from eyas.train.sources.paced import PacedSources, rests_between_modules

        started = time.perf_counter()
        check_run(self.recipe, read_facts(self.recipe.target.source, cache=self.cache), resuming=resume)
        with StopRequest() as stop:
            pace = self._pace(stop)
            target = load_training_target(self.recipe, Ranks(), self.cache)
            pace.rest()
            parts = TargetParts.of(target)
            live = functools.partial(LiveSource, target, chunk=self.recipe.train.chunk)
            open_source = PacedSources(open_source=live, pace=pace)
            with rests_between_modules(pace, compiled=self.recipe.train.compile):
                outcome = self._train(parts, open_source, stop, pace, resume=resume)
        trained = time.perf_counter()
        assert self.recipe.drafter.init_from is not None
        assert outcome.data is not None
        candidate = as_stored_like(outcome.drafters["drafter"], self.recipe.drafter.init_from)
        with rests_between_modules(pace):
            changes = self._judge(parts, open_source, candidate, outcome.data)
        verdict = decide_adaptation(changes, self.max_loss)
        judged = time.perf_counter()
        examined = self._examine(target, candidate, pace) if self.doctor else {"skipped": "by --no-doctor"}
        record = self._record(parts, changes)
        record |= {"kept": verdict.kept, "verdict": verdict.text, "doctor": examined}
        record["device_share"] = {**pace.as_json(), "threads": torch.get_num_threads()}
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

    def _pace(self, stop: StopRequest) -> "Pace":
        """Begins to count; on a CPU it leaves threads to others too."""
        import torch

        from eyas.cli.train import choose_training_device
        from eyas.train.pace import Pace, threads_of

        device = torch.device(choose_training_device(self.recipe.target.device))
        if device.type == "cpu":
            if self.device_share < 1:
                torch.set_num_threads(threads_of(self.device_share, torch.get_num_threads()))
            # Importing torch and reading answers were the processor's work too.
            return Pace(self.device_share, hurry=stop.asked, before=time.process_time())
        return Pace(self.device_share, hurry=stop.asked, synchronize=lambda: torch.accelerator.synchronize(device))

    def _train(
        self, parts: "TargetParts", open_source: "OpenSource", stop: StopRequest, pace: "Pace", *, resume: bool
    ) -> "TrainResult":
        from eyas.cli.train import TrainScreen
        from eyas.train.adaptation.enough import require_held_out
        from eyas.train.run import run

        tick = Ticker()

        def encoded(progress: "EncodingProgress") -> None:
            tick(str(progress), at_once=not progress.conversations)
            pace.rest()

        with TrainScreen(shown=True) as screen:
            outcome = run(
                self.recipe,
                parts,
                open_source,
                observers=[screen],
                stop=stop.asked,
                on_first_step=stop.saves_from_now_on,
                resuming=resume,
                on_encoded=encoded,
                on_data=functools.partial(require_held_out, self.recipe),
                cache=self.cache,
                clock=pace.seconds_worked,
            )
        if not outcome.finished:
            report(f"stopped at step {outcome.step} of {outcome.length}; the same command with --resume goes on")
            raise typer.Exit(130)
        return outcome

    def _judge(
        self, parts: "TargetParts", open_source: "OpenSource", candidate: "Checkpoint", data: "RunData"
    ) -> dict[str, "AcceptanceChange"]:
        """Old and new drafter on what was held out: the traffic, and what is replayed."""
        import numpy as np
        import torch

        from eyas.drafter.checkpoint import build_drafter, read_checkpoint
        from eyas.train.adaptation.judge import compare, walk_conversations
        from eyas.train.adaptation.outcome import REPLAY, TRAFFIC
        from eyas.train.run import precision_of

        on_cpu = parts.device.type == "cpu"
        dtype = getattr(torch, precision_of(self.recipe, parts))
        assert self.recipe.drafter.init_from is not None
        drafters = {}
        for name, checkpoint in (("before", read_checkpoint(self.recipe.drafter.init_from)), ("after", candidate)):
            model = build_drafter(checkpoint).to(device=parts.device, dtype=dtype)
            drafters[name] = model.share_target(parts.embedding_VD.to(dtype), parts.head.weight_VD)
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

    def _examine(self, target: "Target", candidate: "Checkpoint", pace: "Pace") -> dict[str, Any]:
        """The doctor on the newest prompts: drift and known faults, no other conditions."""
        from eyas.cli.doctor import chat_prompts
        from eyas.cli.progress import ProgressDisplay
        from eyas.doctor.candidate import prepare_candidate
        from eyas.doctor.examination import Examination, ExaminationConfig
        from eyas.doctor.record import record_of
        from eyas.kernels.linear.packed_linear import pack_linears
        from eyas.kernels.llama.packed_experts import pack_experts
        from eyas.train.journal import write_text

        if self.recipe.target.quantization == "none":  # as `eyas doctor` does
            pack_linears(target.model, halve=False, cache=self.cache)
            pack_experts(target.model, halve=False, cache=self.cache)
        config = ExaminationConfig(
            depth=DOCTOR_DEPTH, max_new_tokens=DOCTOR_TOKENS, conditions=None, minutes=DOCTOR_MINUTES
        )
        prompts = chat_prompts(self.newest, target, config, DOCTOR_PROMPTS)
        subject = prepare_candidate(candidate, "adapted", target, source=str(self.out / "drafter"))
        examination = Examination(target, [subject], prompts, config, filler="")
        with ProgressDisplay() as progress:

            def step(name: str, done: int, total: int) -> None:
                progress.update(name, done, total or None)
                pace.rest()

            examination.run(step)
        record = record_of(examination, self.arguments, [])
        write_text(self.out / "doctor.json", json.dumps(record, indent=1))
        return dict(record["decision"])

    def _record(self, parts: "TargetParts", changes: Mapping[str, "AcceptanceChange"]) -> dict[str, Any]:
        from eyas.drafter.checkpoint import fingerprint_drafter
        from eyas.train.journal import versions

        training = self._training_record()
        start = self.recipe.drafter.init_from
        assert start is not None
        return {
            "schema": SCHEMA,
            "versions": versions(),
            "arguments": dict(self.arguments),
            "from": {"drafter": start, "fingerprint": fingerprint_drafter(start)},
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
        from eyas.drafter.checkpoint import fingerprint_drafter, write_checkpoint
        from eyas.train.adaptation.outcome import TRAFFIC
        from eyas.train.adaptation.plot import plot_adaptation
        from eyas.train.estimate import acceptance_file
        from eyas.train.journal import write_text

        place = self.out / "drafter"
        if record["kept"]:
            story = {RECORD: json.dumps(record, indent=1) + "\n", **acceptance_file(changes[TRAFFIC].after)}
            write_checkpoint(candidate, place, replace=True, beside=story)
            record["drafter"] = {"folder": str(place), "fingerprint": fingerprint_drafter(str(place))}
        elif (place / RECORD).exists():  # an earlier adaptation's, which nobody is to take for what came of this one
            _remove(place)
        write_text(self.out / RECORD, json.dumps(record, indent=1))
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


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is of an earlier adaptation and cannot be removed: {error.strerror or error}; remove it"
        ) from error
