"""Settings that fit, as near to what was asked for as there are.

What hurts least is given up first: users (others wait), then context, then precision; the drafter last, since it is
small beside its target. Within a precision the context is halved, not below the least that is of use, and as many
users are taken as fit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from eyas.errors import UserError
from eyas.plan.cards import CARDS
from eyas.plan.memory import size
from eyas.plan.outlook import Outlook, Question, look
from eyas.plan.quantisation import LADDER, Quantisation, quantisation
from eyas.plan.roofline import Speed

LEAST_CONTEXT = 2048
"""A context is not cut below this, or below what was asked for if that is less."""


def fit(question: Question, speed_of: Callable[[Quantisation], Speed]) -> tuple[Outlook, list[str]]:
    """The first settings that fit, with a line for everything that was changed; refused if none do."""
    for candidate in _candidates(question, speed_of):
        outlook = look(candidate)
        if outlook.users_fit < 1:
            continue
        users = min(candidate.users, outlook.users_fit)
        # Fewer users need less beside the pages too, so what fitted still fits.
        return look(replace(candidate, users=users)), _changes(question, replace(candidate, users=users))
    smallest = look(list(_candidates(question, speed_of))[-1])
    larger = [card.name for card in CARDS.values() if card.memory >= smallest.needed / question.users * 1.02]
    raise UserError(
        f"{question.decoder.source} does not fit on {question.card.name} ({size(question.card.memory)}) in any way: "
        f"even {_words(smallest.question)} it would take {size(smallest.footprint.beside_blocks)} before the first "
        f"token; choose a smaller target or a larger card{f' such as {larger[0]}' if larger else ''}"
    )


def _candidates(question: Question, speed_of: Callable[[Quantisation], Speed]) -> Iterator[Question]:
    for drafter in [question.drafter] if question.drafter is None else [question.drafter, None]:
        coarser = [question.kept]
        coarser += [kind for name in LADDER if (kind := quantisation(name)).bits < question.kept.bits]
        for kept in coarser:
            speed = question.speed if kept is question.kept else speed_of(kept)
            context = question.context
            while True:
                yield replace(question, kept=kept, speed=speed, context=context, drafter=drafter)
                if context // 2 < LEAST_CONTEXT:
                    break
                context //= 2


def _changes(asked: Question, found: Question) -> list[str]:
    changes = []
    if found.users != asked.users:
        changes.append(f"users: {found.users} at a time instead of {asked.users}; others wait in the queue")
    if found.context != asked.context:
        changes.append(f"context: {found.context:,} tokens instead of {asked.context:,}")
    if found.kept != asked.kept:
        changes.append(f"quantisation: {found.kept.name} instead of {asked.kept.name}")
    if found.drafter != asked.drafter:
        changes.append("drafter: none; there is no room for it")
    return changes or ["nothing: it fits as asked"]


def _words(question: Question) -> str:
    return f"in {question.kept.name}, for one user of {question.context:,} tokens, without a drafter,"
