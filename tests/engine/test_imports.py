"""Files of the engine import each other in one direction, including imports for type checkers."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import eyas.engine

PACKAGE = Path(eyas.engine.__file__).parent


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_file_of_the_engine_imports_itself_by_way_of_others() -> None:
    files = {".".join(("eyas.engine", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in PACKAGE.rglob("*.py")}
    graph = {name: imported_by(path) & files.keys() for name, path in files.items()}
    assert len(graph) > 20
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files
