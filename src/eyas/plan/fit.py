"""Settings that fit, as near as possible to those that were asked for.

Users are given up first (others wait), then context, then precision, and the drafter last, since it is small beside its
target. Within a precision the context is halved down to `LEAST_CONTEXT`, and as many users are taken as fit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from eyas.errors import UserError
from eyas.plan.cards import CARDS
from eyas.plan.forecast import Deployment, Forecast, forecast_of
from eyas.plan.memory import size
from eyas.plan.quantisation import LADDER, Quantisation, parse_quantisation
from eyas.plan.roofline import Speed

LEAST_CONTEXT = 2048
"""The context is not cut below this, unless a shorter one was asked for."""


def fit(deployment: Deployment, speed_of: Callable[[Quantisation], Speed]) -> tuple[Forecast, list[str]]:
    """Find the first settings that fit, with a line for each change; refuse if none do."""
    for candidate in _candidates(deployment, speed_of):
        forecast = forecast_of(candidate)
        if forecast.users_fit < 1:
            continue
        users = min(candidate.users, forecast.users_fit)
        # Fewer users need less memory beside the blocks too, so the settings still fit.
        return forecast_of(replace(candidate, users=users)), _changes(deployment, replace(candidate, users=users))
    smallest = forecast_of(list(_candidates(deployment, speed_of))[-1])
    larger = [card.name for card in CARDS.values() if card.memory >= smallest.needed / deployment.users * 1.02]
    raise UserError(
        f"{deployment.decoder.source} does not fit on {deployment.card.name} ({size(deployment.card.memory)}) in any "
        f"way: even {_words(smallest.deployment)} it would take {size(smallest.footprint.beside_blocks)} before the "
        f"first token; choose a smaller target or a larger card{f' such as {larger[0]}' if larger else ''}"
    )


def _candidates(deployment: Deployment, speed_of: Callable[[Quantisation], Speed]) -> Iterator[Deployment]:
    for drafter in [deployment.drafter] if deployment.drafter is None else [deployment.drafter, None]:
        kept = deployment.quantisation
        coarser = [kept]
        if kept.expert_bits is None:  # nothing is coarser than experts of 4 bits
            coarser += [coarse for name in LADDER if (coarse := parse_quantisation(name)).bits < kept.bits]
        for kind in coarser:
            speed = deployment.speed if kind is deployment.quantisation else speed_of(kind)
            context = deployment.context
            while True:
                yield replace(deployment, quantisation=kind, speed=speed, context=context, drafter=drafter)
                if context // 2 < LEAST_CONTEXT:
                    break
                context //= 2


def _changes(asked: Deployment, found: Deployment) -> list[str]:
    changes = []
    if found.users != asked.users:
        changes.append(f"users: {found.users} at a time instead of {asked.users}; others wait in the queue")
    if found.context != asked.context:
        changes.append(f"context: {found.context:,} tokens instead of {asked.context:,}")
    if found.quantisation != asked.quantisation:
        changes.append(f"quantisation: {found.quantisation.name} instead of {asked.quantisation.name}")
    if found.drafter != asked.drafter:
        changes.append("drafter: none; there is no room for it")
    return changes or ["nothing: it fits as asked"]


def _words(deployment: Deployment) -> str:
    return f"in {deployment.quantisation.name}, for one user of {deployment.context:,} tokens, without a drafter,"
