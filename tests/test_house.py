"""Laws of the code: unique class names, and code that exists only once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from structure import layer_table

import eyas
from each import each

SOURCE = Path(eyas.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def test_a_class_name_stands_for_one_thing_in_the_whole_package() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@each(
    ("pattern", "home"),
    [
        (r"AttentionInterface\.register\(", "target/attention.py"),
        (r"torch\.cuda\.CUDAGraph\(\)", "engine/runner/graph_capture.py"),
        (r"functional\.rms_norm\(", "kernels/elementwise.py"),
        (r"def race\(", "kernels/noise.py"),
        (r"LLMatcher\(", "grammar/compile.py"),
    ],
)
def test_some_code_exists_only_once(pattern: str, home: str) -> None:
    found = {str(file.relative_to(SOURCE)) for file in FILES if re.search(pattern, file.read_text())}
    assert found == {home}


def test_only_the_engine_decodes() -> None:
    """A loop that commits tokens one step after another exists in one place."""
    scheduled = {str(file.relative_to(SOURCE)) for file in FILES if re.search(r"\bScheduler\(\n?", file.read_text())}
    assert scheduled == {"engine/engine.py"}


def test_the_architecture_page_shows_the_layers_as_they_are() -> None:
    assert layer_table() in (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
