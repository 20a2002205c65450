"""Healthy drafters of the tiny target, another target of the same shape, and prompts in the tiny language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from eyas.doctor.transcripts import Asked
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target


@pytest.fixture(scope="session")
def other_target() -> Target:
    """As the tiny target in everything but its weights."""
    from eyas.target.facts import facts_of
    from eyas.target.model import Target
    from tiny import Letters, trained_target

    model = trained_target(steps=120, seed=99)
    return Target(facts=facts_of(model.config, "other"), model=model, tokenizer=Letters())


@pytest.fixture(scope="session")
def pruned_drafter(tiny_target: Target) -> Drafter:
    """EAGLE-3.1 with a pruned vocabulary: it has everything that can break."""
    from doctor.planted import KEPT
    from tiny import drafter_config, trained_drafter

    config = drafter_config(fc_norm=True, norm_output=True, draft_vocab_size=len(KEPT))
    return trained_drafter(tiny_target.model, config, steps=150, kept=KEPT)


@pytest.fixture(scope="session")
def plain_drafter(tiny_target: Target) -> Drafter:
    """EAGLE-3, neither of the norms."""
    from tiny import drafter_config, trained_drafter

    return trained_drafter(tiny_target.model, drafter_config(), steps=120)


@pytest.fixture(scope="session")
def asked() -> list[Asked]:
    """Prompts of different lengths."""
    import torch

    from eyas.doctor.transcripts import Asked
    from tiny import language

    ids = language(6, 40, torch.Generator().manual_seed(11)).tolist()
    return [Asked(key=key, ids=tuple(row[: 20 + 3 * key])) for key, row in enumerate(ids)]
