"""Reads the JSON that a plan is told to go by."""

import json
from pathlib import Path
from typing import Any

from eyas.errors import UserError


def read_json(path: Path, where: str, give: str) -> Any:
    """What a file holds; `where` is how the user named it, `give` what it should be."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}); give {give}") from error
