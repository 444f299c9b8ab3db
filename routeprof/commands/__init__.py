"""The command line: one module per verb, one error boundary."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from routeprof import __version__
from routeprof.commands.attach import attach
from routeprof.commands.audit import audit
from routeprof.commands.check import check
from routeprof.commands.compact import compact
from routeprof.commands.control import pause, start, stop
from routeprof.commands.convert import convert
from routeprof.commands.dashboard import dashboard
from routeprof.commands.demo import demo
from routeprof.commands.detach import detach
from routeprof.commands.diagnose import diagnose
from routeprof.commands.diff import diff
from routeprof.commands.fold import fold
from routeprof.commands.plan import plan
from routeprof.commands.report import report
from routeprof.commands.run import run
from routeprof.commands.serve_metrics import serve_metrics
from routeprof.commands.status import status
from routeprof.commands.summary import summary
from routeprof.commands.top import top
from routeprof.commands.verbs import CONTEXT, add
from routeprof.commands.watch import watch
from routeprof.commands.whatif import app as whatif
from routeprof.errors import RouteprofError

app = typer.Typer(
    name="routeprof",
    help="Routing and load-balance profiler for Mixture-of-Experts inference.",
    epilog=(
        "routeprof VERB --help shows options and examples. Exit status: 0 done; 1 something was "
        "found, or somebody did not answer; 2 wrong use or a file that cannot be read, said in "
        "one line. routeprof --install-completion makes Tab complete verbs, options and values."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=CONTEXT,
)

RECORD = "Record"
LOOK = "Look at a recording"
JUDGE = "Judge it"
CHANGE = "Before you change something, or deploy"
FILES = "Other tools' files"
KEEP = "Keep it small"

PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

add(app, RECORD, demo)
add(app, RECORD, run, settings=PASSED_ON)
add(app, RECORD, attach, detach, start, pause, stop, status)
add(app, LOOK, summary, top, dashboard, report, fold, serve_metrics)
add(app, KEEP, compact)
add(app, JUDGE, diagnose, check, diff, watch)
app.add_typer(whatif, name="whatif", rich_help_panel=CHANGE)
add(app, CHANGE, plan, audit)
add(app, FILES, convert)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"routeprof {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Routing and load-balance profiler for Mixture-of-Experts inference."""


def main() -> None:
    """Run the command line; what the user did wrong gets one line, never a traceback."""
    try:
        sys.exit(app(prog_name="routeprof", standalone_mode=False))
    except RouteprofError as error:
        print(f"routeprof: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        where, why = error.filename or "a file", error.strerror or error
        line = _one_line(f"{where}: {why}; check the place and its room")
        print(f"routeprof: {line}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ == "Abort":  # the user broke off
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        _say_usage(error)
        sys.exit(2)


def _one_line(text: str) -> str:
    """Tags and names in a message may be anything, and must not steer the terminal."""
    if text.isprintable():
        return text
    from routeprof.report.summary import plain

    return plain(" ".join(text.split()))


def _say_usage(error: Any) -> None:
    """What click found wrong with the words on the command line.

    Typer brings a copy of click, or needs click itself, by its version: the class may be of either.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "routeprof"
    print(f"routeprof: {message[:1].lower()}{message[1:]}; see {path} --help", file=sys.stderr)
