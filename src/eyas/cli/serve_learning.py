"""`eyas serve --learn`: whose answers are kept and where, and whether the server adapts its drafter to them.

Settled before a model is loaded, and said at the start.
"""

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cli.served_engine import ServedEngine
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.serve.access.policy import AccessRules
    from eyas.serve.learning.answer_ring import AnswerRing
    from eyas.serve.learning.collector import LearnFolder
    from eyas.serve.learning.learner import LearnerSettings


def open_ring(
    access: "AccessRules", host: str, folder: Path | None, keys: Sequence[str], max_bytes: int
) -> "tuple[AccessRules, AnswerRing | None]":
    """The folder for answers, made or taken over, and the rules with the keys that opted in; without --learn none."""
    from eyas.serve.access.policy import with_learning
    from eyas.serve.learning.answer_ring import AnswerRing

    if folder is None:
        if keys:
            raise UserError(
                "--learn-key (EYAS_LEARN_KEY) names who opted in, but nothing is kept; add --learn or leave it out"
            )
        return access, None
    return with_learning(access, host, keys), AnswerRing(folder, max_bytes)


def closing_ring(ring: "AnswerRing | None") -> "AbstractContextManager[object]":
    """Lets go of the folder at the end."""
    return nullcontext() if ring is None else closing(ring)


def adapt_options(
    target: str,
    *,
    dtype: str,
    quantization: str,
    device: str,
    learn_device: str | None,
    chat_template: str | None,
    raw: bool,
    cache: Path | None,
    more: str,
) -> list[str]:
    """The options of `eyas adapt` under which it sees the target as it is served."""
    from eyas.target.device import choose_device

    # What another kind of device cannot multiply is left to what it can.
    other = learn_device is not None and choose_device(learn_device).type != choose_device(device).type
    words = ["--target", target, "--dtype", dtype, "--quantization", "auto" if other else quantization]
    words += ["--device", learn_device or device]
    words += [] if chat_template is None else ["--chat-template", chat_template]
    words += ["--raw"] if raw else []
    words += [] if cache is None else ["--cache", str(cache)]
    try:
        words += shlex.split(more)
    except ValueError as error:
        raise UserError(f"--learn-options is {more!r} ({error}); write it as on a command line") from error
    _require_known(words, more)
    return words


def _require_known(words: Sequence[str], more: str) -> None:
    """Refuse now what `eyas adapt` would refuse once there are answers."""
    import typer

    from eyas.cli.adapt import adapt
    from eyas.cli.help import UsageFault

    app = typer.Typer(add_completion=False)
    app.command()(adapt)
    try:
        typer.main.get_command(app).make_context("adapt", ["DRAFTER", "ANSWERS", "--out", "OUT", *words])
    except UsageFault as error:
        message = error.format_message().rstrip(".")
        raise UserError(f"--learn-options is {more!r}: {message}; see `eyas adapt --help`") from error


def learner_settings(
    share: float,
    *,
    folder: Path | None,
    engine: str,
    drafter: str | None,
    revision: str | None,
    answers: int,
    interval: float,
    resume: bool,
    options: Sequence[str],
) -> "LearnerSettings | None":
    """How the server adapts its drafter; None if it only keeps answers."""
    from eyas.serve.learning.learner import LearnerSettings

    if not share:
        return None
    if folder is None:
        raise UserError(f"--learn-share is {share:g}, but nothing is kept to learn from; add --learn or leave it out")
    if engine == "vllm":
        raise UserError(
            "--learn-share swaps drafters while it serves, and vLLM keeps the one that it was started with; leave it "
            "out: answers are kept (--learn), `eyas adapt` learns from them, and a restart takes the new drafter"
        )
    if drafter is None:
        raise UserError("--learn-share adapts a drafter, and there is none; name one by --speculative-config")
    if revision is not None:
        raise UserError(
            f"--learn-share learns from a target by its name alone, not of revision {revision}; serve a folder of it"
        )
    return LearnerSettings(share=share, options=options, answers=answers, interval=interval, resume=resume)


def learn_from(
    ring: "AnswerRing | None",
    access: "AccessRules",
    served: ServedEngine,
    learner: "LearnerSettings | None",
    report: Callable[[str], None],
) -> "LearnFolder | None":
    """What the server keeps answers with, once its target is known; people are told of it."""
    from eyas.data.author_check import AuthorCheck
    from eyas.serve.access.policy import ANY
    from eyas.serve.learning.collector import LearnFolder

    if ring is None:
        return None
    facts, author = served.client.target.facts, served.author()
    fingerprint = author.get("target_fingerprint")
    ring.require_author(AuthorCheck(source=facts.source, fingerprint=fingerprint, vocab_size=facts.vocab_size))
    whose = "everybody" if ANY in access.learn_keys else f"keys that opted in: {len(access.learn_keys)}"
    report(f"learning  finished answers are kept in {ring.folder}, {ring.max_bytes:,} bytes at most, of {whose}")
    if learner is not None:
        report(
            f"learner   adapts the drafter within {learner.share:.0%} of the device's time, once {learner.answers:,} "
            f"answers are new, every {learner.interval:g} s at most"
        )
    return LearnFolder(ring=ring, author=author, learner=learner)
