"""The structure of the source tree: its layers of packages, and its size beside the limits that it keeps.

    python benchmarks/structure.py            lines, files, docstrings and words beside their limits
    python benchmarks/structure.py --layers   the table of packages in docs/architecture.md

Layers come from the import contract in pyproject.toml, which `make lint` checks; a package imports from layers below
its own only. Descriptions are the first lines of the packages' docstrings.
"""

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "eyas"
VAGUE = re.compile(r"(The same|Same|What|Who|Those|So|As|That)\b")
"""Openings that do not say what a thing is or does."""


def layers() -> list[list[str]]:
    """Names of packages and modules, the highest layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip(" ()").removeprefix("eyas.") for name in layer.split("|")] for layer in listed]


def description(name: str) -> str:
    """First line of a package's or module's docstring."""
    folder = SOURCE / name
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.partition("\n")[0]


def layer_table() -> str:
    """Markdown table of layers."""
    rows = ["| layer | package | |", "|---|---|---|"]
    for number, names in enumerate(layers()):
        rows += [f"| {len(layers()) - number} | `{name}` | {description(name)} |" for name in names]
    return "\n".join(rows)


def python_files(folder: Path) -> list[Path]:
    """All Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def lines_of(files: list[Path]) -> int:
    """Lines of files together."""
    return sum(len(file.read_text().splitlines()) for file in files)


def docstrings(files: list[Path]) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the string literals below fields."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.value.value.strip()


def budgets() -> list[tuple[str, float, float]]:
    """Name, value and limit of everything that is bounded."""
    source, tests = python_files(SOURCE), python_files(ROOT / "tests")
    said = list(docstrings(source))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    vague = 100 * sum(bool(VAGUE.match(one)) for one in said) / len(said)
    return [
        ("lines of src/eyas", lines_of(source), 57_000),
        ("files of src/eyas", len(source), 430),
        ("lines of its longest file", max(lines_of([file]) for file in source), 500),
        ("lines of src/eyas/cli", lines_of(python_files(SOURCE / "cli")), 4_800),
        ("lines of tests", lines_of(tests), 45_000),
        ("vague openings of docstrings, per cent", round(vague, 1), 2),
        ("words of README.md and docs", sum(len(page.read_text().split()) for page in pages), 30_000),
    ]


def main() -> None:
    """Print one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", action="store_true")
    if parser.parse_args().layers:
        print(layer_table())
        return
    for name, value, limit in budgets():
        print(f"{name:40s} {value:10,} {'of' if value <= limit else 'ABOVE':>6s} {limit:,}")


if __name__ == "__main__":
    main()
