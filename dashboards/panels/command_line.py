"""The command line that answers what a page shows, or what would take a page too long."""

from __future__ import annotations

from shlex import quote

from routeprof.dashboards.view import Context
from routeprof.errors import RouteprofError
from routeprof.timerange import range_text

SOURCE = "RECORDING"
"""Stands for the recording's directory, which a page does not tell."""


def sentence(error: RouteprofError) -> str:
    """Why something cannot be shown."""
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def command_line(context: Context, verb: str, **options: object) -> str:
    """``routeprof whatif VERB`` with options, for what is selected.

    Args:
        options: by their names without dashes; None leaves one out. A phase among them is meant
            instead of the one that is selected.
    """
    return _of_selection(context, f"whatif {verb}", options)


def diagnose_line(context: Context) -> str:
    """``routeprof diagnose`` for what is selected."""
    return _of_selection(context, "diagnose", {"gpus": context.state.ranks})


def _of_selection(context: Context, verb: str, options: dict[str, object]) -> str:
    state = context.state
    selected = {
        "phase": state.phase,
        "tag": state.tag,
        "between": range_text(state.between) if state.between else None,
    }
    chosen = {**options, **{name: options.get(name, own) for name, own in selected.items()}}
    return written(f"routeprof {verb} {SOURCE}", chosen)


def written(start: str, options: dict[str, object]) -> str:
    """A command with options by their names without dashes; None leaves one out."""
    given = [
        f"--{name} {quote(str(value))}" for name, value in options.items() if value is not None
    ]
    return " ".join([start, *given])
