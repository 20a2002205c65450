"""`eyas serve --learn`: the folder of kept answers, and how the server adapts its drafter to them.

All of it is checked before a model is loaded, and reported at the start.
"""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eyas.cli.serve_options import ServeArguments
from eyas.cli.terminal import report
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.serve.access.policy import AccessRules
    from eyas.serve.learning.answer_ring import AnswerRing
    from eyas.serve.learning.collector import LearnFolder
    from eyas.serve.learning.learner import LearnerSettings
    from eyas.serve.served_engine import ServedEngine


def open_ring(access: "AccessRules", given: ServeArguments) -> "tuple[AccessRules, AnswerRing | None]":
    """Open the folder for answers; return it with the rules that hold the keys that opted in. Without --learn: None."""
    from eyas.serve.access.policy import with_learning
    from eyas.serve.learning.answer_ring import AnswerRing

    if given.learn is None:
        if given.learn_key:
            raise UserError(
                "--learn-key (EYAS_LEARN_KEY) names who opted in, but nothing is kept; add --learn or leave it out"
            )
        return access, None
    keys = given.learn_key or ()
    return with_learning(access, given.host, keys), AnswerRing(given.learn, given.learn_bytes)


def learner_settings(given: ServeArguments, target: str, drafter: str | None) -> "LearnerSettings | None":
    """How the server adapts its drafter; None if it only keeps answers."""
    from eyas.serve.learning.learner import LearnerSettings

    options = _adapt_options(given, target)
    if not given.learn_share:
        return None
    share = f"--learn-share is {given.learn_share:g}"
    if given.learn is None:
        raise UserError(f"{share}, but nothing is kept to learn from; add --learn or leave it out")
    if given.engine == "vllm":
        raise UserError(
            "--learn-share swaps drafters while it serves, and vLLM keeps the one that it was started with; leave it "
            "out: answers are kept (--learn), `eyas adapt` learns from them, and a restart takes the new drafter"
        )
    if drafter is None:
        raise UserError("--learn-share adapts a drafter, and there is none; name one by --speculative-config")
    if given.revision is not None:
        raise UserError(
            f"--learn-share learns from a target by its name alone, not of revision {given.revision}; serve a folder "
            "of it"
        )
    return LearnerSettings(
        share=given.learn_share,
        options=options,
        answers=given.learn_answers,
        interval=given.learn_interval,
        resume=given.learn_resume,
    )


def _adapt_options(given: ServeArguments, target: str) -> list[str]:
    """The options of `eyas adapt` under which it sees the target as it is served."""
    from eyas.target.device import choose_device

    device = given.learn_device or given.device
    # Another kind of device may not multiply these matrices.
    other = given.learn_device is not None and choose_device(device).type != choose_device(given.device).type
    words = ["--target", target, "--dtype", given.dtype, "--quantization", "auto" if other else given.quantization]
    words += ["--device", device]
    words += [] if given.chat_template is None else ["--chat-template", given.chat_template]
    words += ["--raw"] if given.raw else []
    words += [] if given.cache is None else ["--cache", str(given.cache)]
    try:
        words += shlex.split(given.learn_options)
    except ValueError as error:
        raise UserError(
            f"--learn-options is {given.learn_options!r} ({error}); write it as on a command line"
        ) from error
    _require_known(words, given.learn_options)
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


def learn_from(
    ring: "AnswerRing | None",
    access: "AccessRules",
    served: "ServedEngine",
    learner: "LearnerSettings | None",
) -> "LearnFolder | None":
    """Make the folder of kept answers, once the target is known, and report it."""
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
