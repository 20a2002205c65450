"""Options made from dataclasses, and the words that all commands have in common."""

import dataclasses
from typing import Annotated, Any

import pytest
import typer
from typer import Option
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.cli.help import GroupedCommand
from eyas.cli.options import arguments_of, build, command, options


@options("Model")
class Base:
    """Fields that another class inherits."""

    size: Annotated[int, Option(min=1, show_default="small")] = 3
    """How
    large."""
    quiet: bool = False
    """Say nothing."""


@options("Output")
class Derived(Base):
    """Fields of its own, and one with another default."""

    size: int = 5
    names: list[str] | None = None
    """Repeatable."""


@dataclasses.dataclass
class Config:
    size: int
    names: tuple[str, ...] = ()
    other: int = 0


def made(common: tuple[str, ...] = ()) -> tuple[Any, list[Any]]:
    """A command, and what it was called with."""
    called: list[Any] = []

    @command(common=common)
    def run(word: str, *, given: Derived) -> None:
        called.append((word, vars(given)))

    application = typer.Typer(add_completion=False)
    application.command(cls=GroupedCommand)(run)
    return application, called


def test_fields_are_options_with_their_defaults_and_texts() -> None:
    application, called = made(common=("names",))
    assert CliRunner().invoke(application, ["w", "--names", "a", "--names", "b", "--quiet"]).exit_code == 0
    assert CliRunner().invoke(application, ["v", "--size", "7"]).exit_code == 0
    assert called == [
        ("w", {"size": 5, "quiet": True, "names": ["a", "b"]}),
        ("v", {"size": 7, "quiet": False, "names": None}),
    ]
    typed: Any = typer.main.get_command(application)
    typed._read_help()
    found = {one.name: one for one in typed.params}
    assert [(found[name].help, found[name].rich_help_panel) for name in ("size", "quiet", "names")] == [
        ("How large.", "Output"),
        ("Say nothing.", "Model"),
        ("Repeatable.", "Common"),
    ]
    assert (found["quiet"].opts, found["quiet"].secondary_opts) == (["--quiet"], [])
    assert CliRunner().invoke(application, ["w", "--no-quiet"]).exit_code == 2


def test_bounds_are_those_of_the_field() -> None:
    @command()
    def run(*, given: Base) -> None:
        assert given.size >= 1

    application = typer.Typer(add_completion=False)
    application.command()(run)
    assert [CliRunner().invoke(application, ["--size", size]).exit_code for size in ("0", "1")] == [2, 0]


def test_configs_and_records_are_built_by_name() -> None:
    given = Derived(names=["a"])
    assert build(Config, given, other=2) == Config(size=5, names=["a"], other=2)  # type: ignore[arg-type]
    assert arguments_of(word="w", given=given) == {"word": "w", "size": 5, "quiet": False, "names": ["a"]}


def all_commands(group: Any, path: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, one in group.commands.items():
        found.append((f"{path}{name}", one))
        found += all_commands(one, f"{path}{name} ") if hasattr(one, "commands") else []
    return found


COMMANDS = all_commands(typer.main.get_command(app))


@pytest.mark.parametrize(("name", "one"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_option_says_what_it_does(name: str, one: Any) -> None:
    one._read_help()
    for option in one.params:
        assert option.help or option.param_type_name == "argument", (name, option.name)


def test_target_drafter_and_output_are_said_in_one_way() -> None:
    """A target is TARGET where a command is about it alone, else --target; so is a drafter. Results go to --out."""
    targets: dict[str, str] = {}
    drafters: dict[str, str] = {}
    outs: dict[str, str] = {}
    for name, one in COMMANDS:
        for option in one.params:
            said = option.opts[0] if option.param_type_name == "option" else option.name.upper()
            for kind, found in (("target", targets), ("drafter", drafters), ("out", outs)):
                if option.name == kind or (kind != "drafter" and option.name.endswith(f"_{kind}")):
                    found[name] = said
    assert set(targets.values()) == {"TARGET", "--target"}
    assert {name for name, said in targets.items() if said == "TARGET"} == {
        *("serve", "plan", "fetch", "export vllm-command", "features serve")
    }
    assert set(drafters.values()) == {"DRAFTER", "--drafter"}
    assert {name for name, said in drafters.items() if said == "DRAFTER"} == {"check", "convert", "adapt"}
    assert set(outs.values()) == {"--out"}
    assert len(outs) >= 10
