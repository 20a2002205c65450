"""Reads `--config FILE.yaml`, as vLLM has it: keys are options; the command line wins."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from eyas.errors import UserError

ALIASES = {"model": "target", "model_tag": "target"}
"""vLLM's names for what eyas serves."""


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of this command's options, before any other option is read."""
    if path is not None and not context.resilient_parsing:
        context.default_map = _options(context, path)
    return path


def _options(context: typer.Context, path: Path) -> dict[str, Any]:
    known = {
        parameter.name: parameter for parameter in context.command.params if parameter.name not in (None, "config_file")
    }
    # `--no-drafter-swap` is also a key: vLLM's files name flags as the command line does.
    switches = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in known.values()
        for name in getattr(parameter, "secondary_opts", ())
    }
    names = {option.lstrip("-").replace("-", "_"): p for p in known.values() for option in p.opts} | known
    options: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).strip().lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if name in switches and isinstance(value, bool):
            name, value = switches[name].name, not value
        elif name not in names:
            near = get_close_matches(name, [*names, *switches], n=1)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else "see `eyas serve --help` for what there is"
            raise UserError(f"{path} has no option {key!r} to set; {hint}")
        parameter = names[name]
        if parameter.name in options:
            raise UserError(f"{path} sets {key!r} twice; keep one of them")
        options[str(parameter.name)] = _value(path, str(key), value, several=getattr(parameter, "multiple", False))
    return options


def _value(path: Path, key: str, value: Any, *, several: bool) -> Any:
    """Convert a value for its option: objects to JSON; for an option that repeats, one value to a list."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, list):
        if not several:
            raise UserError(f"{path} gives {key!r} {len(value)} values; it takes one")
        return [str(one) for one in value]
    if several and value is not None:
        return [str(value)]
    return value


def _read(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is no YAML ({error}); write one `option: value` a line") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"--config {path} holds a {type(content).__name__}; write one `option: value` a line")
    return content
