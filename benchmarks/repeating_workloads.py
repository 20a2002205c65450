"""Makes a JSONL file of questions whose answers repeat their context: rewriting, extraction, quotation.

    python benchmarks/repeating_workloads.py repeating.jsonl
    eyas bench http://localhost:8000 --workload repeating.jsonl

The texts are this project's own source and documentation, and records that are made up by a seed; all of it may be
passed on. Categories:

    rewrite     a function, to be given back whole with one name changed
    extract     records in prose, to be given back as JSON
    cite        numbered passages, a question, and an answer that quotes them
    quote       several turns: a text, then questions that are to be answered with its sentences
"""

import argparse
import ast
import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FEWEST_LINES, MOST_LINES = 8, 24
"""Lines of a function to rewrite."""
FIRST = ("Ada", "Boris", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kaya", "Lena")
LAST = ("Abel", "Brook", "Costa", "Dahl", "Ekman", "Fontaine", "Gupta", "Haas", "Ito", "Jensen", "Kovac", "Lund")
CITIES = ("Lisbon", "Oslo", "Turin", "Graz", "Leeds", "Porto", "Ghent", "Basel", "Malmo", "Bilbao")
JOBS = ("carpenter", "nurse", "teacher", "pilot", "baker", "surveyor", "translator", "electrician")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=20, help="questions of each category")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = make_records(arguments.each, arguments.seed)
    arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} questions in {arguments.out}")


def make_records(each: int, seed: int) -> list[dict[str, Any]]:
    """`count` questions of each category."""
    draw = Random(seed)
    made: list[dict[str, Any]] = []
    functions, sections = list(_functions()), _sections()
    draw.shuffle(functions)
    for source, name in functions[:each]:
        made.append(_record("rewrite", [_rewrite(source, name)]))
    for _ in range(each):
        made.append(_record("extract", [_extract(draw)]))
    draw.shuffle(sections)
    for number in range(each):
        made.append(_record("cite", [_cite(sections[3 * number % len(sections) :][:3])]))
    for section in sections[:each]:
        made.append(_record("quote", _quote(section)))
    for number, record in enumerate(made):
        record["question_id"] = number
    return made


def _record(category: str, turns: list[str]) -> dict[str, Any]:
    return {"question_id": 0, "category": category, "turns": turns}


@cache
def _functions() -> list[tuple[str, str]]:
    """Functions of the package, with their names."""
    found = []
    for file in sorted((ROOT / "src" / "eyas").rglob("*.py")):
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(text, node) or ""
                if FEWEST_LINES <= len(source.splitlines()) <= MOST_LINES:
                    found.append((source, node.name))
    return found


def _sections() -> list[str]:
    """Paragraphs of the documentation: prose alone."""
    found = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        for paragraph in file.read_text().split("\n\n"):
            text = " ".join(paragraph.split())
            if 200 <= len(text) <= 600 and not re.search(r"[|`#]|^\s*[-*]", text):
                found.append(text)
    return found


def _rewrite(source: str, name: str) -> str:
    return (
        f"Here is a Python function:\n\n```python\n{source}\n```\n\nRename the function `{name}` to `new_{name}` and "
        "give back the whole function. Change nothing else. Answer with the code only."
    )


def _extract(draw: Random) -> str:
    lines = []
    for _ in range(6):
        first, last, city, job = (draw.choice(some) for some in (FIRST, LAST, CITIES, JOBS))
        year = draw.randrange(1950, 2005)
        lines.append(f"{first} {last} is a {job} from {city}, born in {year}.")
    return (
        "\n".join(lines) + "\n\nGive back all people as a JSON list. Each entry has the keys name, job, city and born, "
        'like {"name": "Ada Abel", "job": "nurse", "city": "Oslo", "born": 1980}. Answer with the JSON only.'
    )


def _cite(passages: list[str]) -> str:
    numbered = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
    return (
        f"{numbered}\n\nSummarise the passages above in a list. For each passage give its number, then quote its first "
        "sentence word by word in quotation marks."
    )


def _quote(section: str) -> list[str]:
    return [
        f"Read this text and repeat it word by word:\n\n{section}",
        "Which sentence of the text is the most important? Quote it word by word.",
        "Now give the whole text again, and change nothing.",
    ]


if __name__ == "__main__":
    main()
