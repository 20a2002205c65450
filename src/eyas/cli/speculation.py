"""`--depth` and `--tree`, read."""

from typing import TYPE_CHECKING

from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.engine.request import Speculation
    from eyas.engine.speculation.draft import Tree


def read_depth(text: str, drafter: str | None) -> "Speculation":
    """Whether and how deep to draft: auto, 0 or a number."""
    from eyas.engine.request import Speculation
    from eyas.engine.speculation.draft import MOST_IN_CHAIN

    shortened = text if len(text) < 20 else f"{text[:20]}..."
    if text == "auto":
        return Speculation()
    if not text.isdigit():
        raise UserError(f"--depth {shortened} is neither a number from 0 nor auto")
    if len(text) > 4 or int(text) > MOST_IN_CHAIN:
        raise UserError(f"--depth {shortened} is above the {MOST_IN_CHAIN} tokens of a chain; lower it, or say auto")
    if int(text) == 0:
        return Speculation(mode="off")
    if drafter is None:
        raise UserError(f"--depth {text} needs a drafter to draft; give --drafter or leave --depth out")
    return Speculation(mode="fixed", depth=int(text))


def read_tree(text: str | None, drafter: str | None) -> "Tree | None":
    """The shape of trees: DEPTHxWIDTHxBUDGET."""
    from eyas.engine.speculation.draft import Tree

    if text is None:
        return None
    if drafter is None:
        raise UserError(f"--tree {text} needs a drafter to draft; give --drafter or leave --tree out")
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise UserError(f"--tree {text} is no DEPTHxWIDTHxBUDGET such as 5x4x24")
    depth, width, budget = map(int, parts)
    return Tree(depth=depth, width=width, budget=budget)
