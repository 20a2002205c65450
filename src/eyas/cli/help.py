"""What `--help` prints: options in groups, one column of names and one of words, readable in 80 columns.

Typer's own tables share 80 columns among six columns and leave 20 to the words. An option names its group as
`rich_help_panel`, one of `PANELS`, which appear in that order; what every command has comes last.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from eyas import __version__

UsageFault: Any = typer.BadParameter.__mro__[2]
"""The base of every usage error, through typer's public BadParameter: newer typer carries its own copy of click."""
COMMON = "Common"
"""The options of a long command that most people use."""
SERVERS, MODEL, SPECULATION, CARD = "Servers", "Model", "Speculation", "Card"
MEMORY, TRAINING, WORK, SAMPLING = "Memory and batching", "Training", "What to measure", "Sampling"
API, NETWORK, ACCESS, LEARNING, LIMITS = "API", "Network", "Access", "Learning", "Limits"
OPERATION, OUTPUT = "Operation", "Output"
PANELS = (
    COMMON,
    *(SERVERS, MODEL, SPECULATION, CARD, MEMORY, TRAINING, WORK, SAMPLING),
    *(API, NETWORK, ACCESS, LEARNING, LIMITS, OPERATION, OUTPUT),
)
_OTHERS = "Options"

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The context settings of the whole command line: every command inherits them."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _version_option() -> Any:
    """Build `--version` as typer does: each version of typer has its own class for options."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                "-V",
                help="Print the version and exit.",
                callback=_print_version,
                is_eager=True,
                expose_value=False,
            ),
        ] = False,
    ) -> None:
        del version

    return typer.main.get_command(app).params[0]


_VERSION = _version_option()


@contextmanager
def _aborts() -> Iterator[None]:
    """Turn Ctrl-C into an abort, for which `main` prints a line; typer would only exit."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise typer.Abort from interrupt


class _Grouped:
    """Help in groups, and `--version`, for commands and groups of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """List the command's own parameters, then those of every command."""
        *own, asked_help = super().get_params(ctx)  # type: ignore[misc]
        return [*own, _VERSION, asked_help]

    def make_context(self, *given: Any, **more: Any) -> Any:
        """Read the command line."""
        with _aborts():
            return super().make_context(*given, **more)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        with _aborts():
            return super().invoke(ctx)  # type: ignore[misc]

    def _read_help(self) -> None:
        """Set the help of options that come from classes, which is read from their source only where it is shown."""
        texts = getattr(self.callback, "option_help", {})  # type: ignore[attr-defined]
        for parameter in self.params:  # type: ignore[attr-defined]
            if parameter.name in texts:
                parameter.help = texts[parameter.name]()

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a word; some shells show the help of options."""
        self._read_help()
        return super().shell_complete(ctx, incomplete)  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group of options, then subcommands."""
        self._read_help()
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *PANELS)}
        last = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            row = (_short_type(record[0]), record[1])
            panel = getattr(parameter, "rich_help_panel", None)
            if parameter.param_type_name == "argument":
                panels["Arguments"].append(row)
            elif panel is None:
                last.append(row)
            else:
                panels[panel].append(row)
        for name, rows in [*panels.items(), (_OTHERS, last)]:
            if rows:
                with formatter.section(typer.style(name, bold=True)):
                    formatter.write_dl(rows, col_max=28)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class GroupedCommand(_Grouped, TyperCommand):
    """A command whose options are shown in groups."""


class CommandGroup(_Grouped, TyperGroup):
    """Several commands under one name."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line or more for each command: its docstring's first sentence, whole."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section(typer.style("Commands", bold=True)):
            formatter.write_dl([(name, _first_paragraph(command)) for name, command in commands if command is not None])


def _first_paragraph(command: Any) -> str:
    return " ".join((command.short_help or command.help or "").split("\n\n")[0].split())


def _short_type(names: str) -> str:
    """`--port <int range>` as `--port <int>` and `--stop <list[str]>` as `--stop <str>`: the words say the rest."""
    return re.sub(r"<list\[(.+?)\]>", lambda found: f"<{found[1].lower()}>", names).replace(" range>", ">")


def new_app(help_text: str | None, *commands: Callable[..., Any], **settings: Any) -> typer.Typer:
    """Make a group of commands. With a help text it prints its help when it is called without a command."""
    app = typer.Typer(
        cls=CommandGroup,
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=SETTINGS,
        **{"add_completion": False, **settings},
    )
    if help_text is not None:
        app.callback(help=help_text)(_print_help)
    for function in commands:
        app.command(cls=GroupedCommand)(function)
    return app


def _print_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
