"""A target and the drafter that drafts for it, loaded and made ready to decode."""

from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cli.options import report

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

NO_DRAFTER = "none"


def choose_drafter(drafter: str | None, target: str) -> str | None:
    """The drafter that was named; if none was, the one that comes with eyas for that target."""
    from eyas.drafter.shipped import DEFAULT_DRAFTER

    if drafter is None:
        return DEFAULT_DRAFTER.get(target)
    return None if drafter == NO_DRAFTER else drafter


def load_drafter_for(target: "Target", drafter: str) -> "Drafter":
    """A drafter where its target is and in its precision, with what it shares with it."""
    from eyas.drafter.checkpoint import load_drafter

    model = load_drafter(drafter).to(device=target.device, dtype=target.dtype)
    return model.share_target(target.embedding(), target.head())


def load_another(target: "Target", drafter: str, *, cache: Path | None) -> "Drafter":
    """A drafter for a target at work, whose server must not learn too late that it does not fit."""
    from eyas.drafter.check import check
    from eyas.errors import UserError
    from eyas.kernels.linear.packed_linear import pack_linears

    wrong = [finding.message for finding in check(drafter, target=target.facts).findings if finding.severity == "error"]
    if wrong:
        raise UserError(f"{drafter} does not fit {target.facts.source}: {wrong[0]}")
    model = load_drafter_for(target, drafter)
    if target.device.type == "cpu":
        pack_linears(model, halve=True, cache=cache)
    return model


def load_pair(
    target: str, drafter: str | None, *, dtype: str, device: str, cache: Path | None
) -> "tuple[Target, Drafter | None]":
    """Load both; on a CPU their matrix products are packed, and the user hears how.

    `auto` computes in the precision that is stored; on a CPU in float32, where matrices stored in bfloat16 can stay as
    they are (`pack_linears`). Embeddings, keys and values then take twice the memory.
    """
    from eyas.kernels.linear.packed_linear import pack_linears
    from eyas.target.model import Target

    loaded = Target.load(target, dtype=dtype, device=device, cache=cache)
    if loaded.device.type == "cpu":
        packing = pack_linears(loaded.model, widen=dtype == "auto", cache=cache)
        how = f"in float32, in panels, by {packing.words}" if packing.linears else f"by torch: {packing.words}"
        report(f"matrix products {how}")
    model = None if drafter is None else load_drafter_for(loaded, drafter)
    if model is not None and loaded.device.type == "cpu":
        pack_linears(model, halve=True, cache=cache)
    return loaded, model
