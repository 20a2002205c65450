"""A target and its drafter, loaded and made ready to decode: one way for the Python API, the commands and the server.

What makes decoding fast happens here and in the engine, so that no caller can forget it: on a CPU the matrix products
of both models are packed for this processor. Engines capture CUDA graphs themselves.
"""

import logging
from pathlib import Path

from eyas.drafter.check import check
from eyas.drafter.checkpoint import find_folder, load_drafter
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.llama.packed_experts import pack_experts
from eyas.target.chat_template import ChatFormat
from eyas.target.facts import TargetFacts
from eyas.target.model import Target

logger = logging.getLogger(__name__)


def require_fit(drafter: str, target: TargetFacts) -> None:
    """Refuse a drafter that cannot draft for this target, before anything large is loaded."""
    faults = [found.message for found in check(drafter, target=target).findings if found.severity == "error"]
    if faults:
        more = f" (and {len(faults) - 1} more, see `eyas check`)" if len(faults) > 1 else ""
        raise UserError(f"{drafter} does not fit {target.source}: {faults[0]}{more}")


def load_target(
    target: str,
    *,
    dtype: str,
    device: str,
    cache: Path | None = None,
    revision: str | None = None,
    chat_format: ChatFormat | None = None,
) -> Target:
    """Load a target that decodes; on a CPU its matrix products are packed, and the log says how.

    `auto` computes in the precision that is stored; on a CPU in float32, where matrices stored in bfloat16 can stay as
    they are (`pack_linears`). Embeddings, keys and values then take twice the memory.
    """
    loaded = Target.load(target, dtype=dtype, device=device, cache=cache, revision=revision, chat_format=chat_format)
    if loaded.device.type == "cpu":
        packing = pack_linears(loaded.model, widen=dtype == "auto", cache=cache)
        pack_experts(loaded.model, cache=cache)
        how = f"in float32, in panels, by {packing.words}" if packing.linears else f"by torch: {packing.words}"
        logger.info(f"matrix products {how}")
    return loaded


def load_drafter_for(target: Target, drafter: str, *, cache: Path | None = None) -> Drafter:
    """Load a drafter to where its target is, in its precision, packed like it, with the weights that they share."""
    model = load_drafter(drafter).to(device=target.device, dtype=target.dtype)
    model.share_target(target.embedding(), target.head())
    if target.device.type == "cpu":
        pack_linears(model, halve=True, cache=cache)
    return model


def load_pair(
    target: str,
    drafter: str | None,
    *,
    dtype: str,
    device: str,
    cache: Path | None = None,
    revision: str | None = None,
    chat_format: ChatFormat | None = None,
) -> tuple[Target, Drafter | None]:
    """Load both; no drafter for None."""
    if drafter is not None:
        find_folder(drafter)  # a name that is wrong should fail before the target is loaded
    loaded = load_target(target, dtype=dtype, device=device, cache=cache, revision=revision, chat_format=chat_format)
    return loaded, None if drafter is None else load_drafter_for(loaded, drafter, cache=cache)


def load_another(target: Target, drafter: str, *, cache: Path | None = None) -> Drafter:
    """A drafter for a target at work, whose users must not learn too late that it does not fit."""
    require_fit(drafter, target.facts)
    return load_drafter_for(target, drafter, cache=cache)
