"""`eyas serve --learn`: whose answers are kept and where, settled before a model is loaded, and said at the start."""

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


def learn_from(
    ring: "AnswerRing | None", access: "AccessRules", served: ServedEngine, report: Callable[[str], None]
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
    return LearnFolder(ring=ring, author=author)
