"""`eyas`: the table of commands and the one place where an error becomes a line and an exit code.

Nothing heavy is imported here or at the top of a command's file: `eyas --help` answers before torch could load.
"""

import sys

import typer

from eyas.cli.adapt import adapt
from eyas.cli.bench import app as bench_app
from eyas.cli.check import check
from eyas.cli.convert import convert
from eyas.cli.data import app as data_app
from eyas.cli.demo import demo
from eyas.cli.doctor import doctor
from eyas.cli.eval import evaluate
from eyas.cli.features import app as features_app
from eyas.cli.fetch import fetch
from eyas.cli.generate import generate
from eyas.cli.help import GroupedCommand, UsageFault, new_app
from eyas.cli.plan import plan
from eyas.cli.serve import export_app, serve
from eyas.cli.terminal import shown_logs
from eyas.cli.train import train
from eyas.errors import UserError

app = new_app(
    "Train, check and serve EAGLE-3.1 drafters: speculative decoding that holds up in production.",
    *(demo, generate, serve, plan, check, convert, fetch, train, adapt),
    name="eyas",
    add_completion=True,
)
app.command("eval", cls=GroupedCommand)(evaluate)
app.command(cls=GroupedCommand)(doctor)
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(export_app, name="export")
app.add_typer(features_app, name="features")


def main() -> None:
    """Run the command line."""
    try:
        with shown_logs():
            code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except UsageFault as error:
        _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"eyas: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
