"""Checks of a run before anything slow: they load no weights and read no text.

Encoding a corpus and loading a large target take minutes to hours; a recipe that cannot succeed should fail in the
first second. What depends on the text itself is checked when the text is read (run.py).
"""

import json
import os
from pathlib import Path

from eyas.data.files import expand_files
from eyas.errors import UserError
from eyas.target.capture import check_aux_layer_ids
from eyas.target.facts import TargetFacts
from eyas.train import resume
from eyas.train.journal import read_log
from eyas.train.recipe import DrafterRecipe, Recipe
from eyas.train.sources.cache import INDEX, require_key
from eyas.train.upgrade import read_start


def check_run(recipe: Recipe, facts: TargetFacts, *, processes: int = 1, resuming: bool = False) -> None:
    """Refuse a run that cannot begin, for the first reason found."""
    if recipe.train.packs_per_step % processes:
        raise UserError(
            f"train.packs_per_step {recipe.train.packs_per_step} cannot be shared by {processes} processes; "
            "make it a multiple of their number"
        )
    _check_folder(recipe, resuming=resuming)
    _check_lengths(recipe, facts)
    layer_ids = layers_read(recipe, facts)
    data = recipe.data
    for file in expand_files([*data.files, *data.replay, *filter(None, [data.held_out])]):
        if not file.exists():
            raise UserError(
                f"cannot read {file}: No such file or directory; check data.files, data.held_out and data.replay"
            )
    if recipe.features.source == "cache":
        _check_cache(recipe, facts, layer_ids)
    if recipe.features.servers:
        _require_writable(Path(recipe.features.states_folder), "features.states_folder")


def layers_read(recipe: Recipe, facts: TargetFacts) -> list[int]:
    """Layers whose states some drafter of the recipe reads."""
    return sorted({k for drafter in recipe.drafter_recipes() for k in _check_drafter(drafter, recipe, facts)})


def _check_folder(recipe: Recipe, *, resuming: bool) -> None:
    folder = Path(recipe.output.folder)
    newest = resume.newest(folder / "checkpoints")
    if resuming and newest is None:
        raise UserError(f"there is no checkpoint in {folder / 'checkpoints'} to go on from; leave out --resume")
    _require_writable(folder, "output.folder")
    if resuming:
        return
    if newest is not None:
        raise UserError(f"{folder} already holds a run; pass --resume to go on with it, or set another output.folder")
    if read_log(folder / "log.jsonl"):
        raise UserError(
            f"{folder} holds the log of a run that saved no checkpoint; remove {folder / 'log.jsonl'} to start over, "
            "or set another output.folder"
        )
    for drafter in recipe.drafter_recipes():
        if (place := folder / drafter.name).exists():
            raise UserError(f"{place} exists and would be overwritten; remove it or set another output.folder")


def _check_lengths(recipe: Recipe, facts: TargetFacts) -> None:
    """Refuse documents longer than the target's context, beyond which it writes nonsense."""
    context, data = facts.max_position_embeddings, recipe.data
    lengths = {"max_length": data.max_length, "join_length": data.join_length if data.join_share else 0}
    for key, length in lengths.items():
        if context is not None and length > context:
            raise UserError(
                f"data.{key} {length} exceeds the context of {facts.source}, {context} tokens; set data.{key} to "
                f"{context} or less"
            )


def _check_drafter(drafter: DrafterRecipe, recipe: Recipe, facts: TargetFacts) -> tuple[int, ...]:
    """Refuse a drafter that the target cannot have; return the layers that it reads."""
    settings = drafter.drafter
    own = recipe.drafters[drafter.name].model_fields_set if recipe.drafters else set()

    def key(name: str) -> str:
        return f"drafters.{drafter.name}.{name}" if name in own else f"drafter.{name}"

    if isinstance(size := settings.draft_vocab_size, int) and size > facts.vocab_size:
        raise UserError(
            f"{key('draft_vocab_size')} {size} is not between 1 and the target's {facts.vocab_size}; "
            "choose less, or leave it out"
        )
    if settings.init_from is not None:
        return read_start(settings, facts).layer_ids
    try:
        return check_aux_layer_ids(settings.aux_layer_ids or facts.default_aux_layer_ids(), facts.num_hidden_layers)
    except UserError as error:
        raise UserError(f"{key('aux_layer_ids')}: {error}") from error


def _check_cache(recipe: Recipe, facts: TargetFacts, layer_ids: list[int]) -> None:
    """Refuse the cache of another run, as far as that is known before the text is read."""
    assert recipe.features.folder is not None
    folder = Path(recipe.features.folder)
    _require_writable(folder, "features.folder")
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # the writer will write it
    if isinstance(found, dict):
        require_key({"target": facts.source, "aux_layer_ids": layer_ids, "dtype": recipe.features.dtype}, found, folder)


def _require_writable(folder: Path, key: str) -> None:
    existing = next(place for place in [folder, *folder.absolute().parents] if place.exists())
    if not existing.is_dir():
        raise UserError(f"cannot write {folder}: {existing} is a file; set another {key}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: no permission in {existing}; set another {key}")
