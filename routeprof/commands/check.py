"""``routeprof check``: findings as an exit status, for CI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.completion import SEVERITIES, one_of
from routeprof.commands.diagnose import Capacity, Config, Gpus, Model, Since, asked, limits_of
from routeprof.commands.options import AsJson, Between, Phase, Recordings, Tag
from routeprof.errors import RouteprofError, UsageError

if TYPE_CHECKING:
    from routeprof.diagnose.check import Verdict


def check(
    directories: Recordings,
    max_imbalance: Annotated[
        float | None, typer.Option(help="Hottest expert ÷ mean, of a layer and of a tag.")
    ] = None,
    max_overflow: Annotated[
        float | None, typer.Option(help="Share of assignments above capacity, such as 0.01.")
    ] = None,
    max_rank_imbalance: Annotated[
        float | None, typer.Option(help="Fullest rank ÷ mean rank; needs --gpus or its record.")
    ] = None,
    capacity_factor: Capacity = None,
    fail_on: Annotated[
        str,
        typer.Option(
            help="Least severity that fails: info, warning or error.",
            autocompletion=one_of(SEVERITIES),
        ),
    ] = "warning",
    since: Since = None,
    config: Config = None,
    gpus: Gpus = None,
    model: Model = None,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            help="Also write the verdict as JUnit XML.", metavar="FILE", rich_help_panel="Reports"
        ),
    ] = None,
    github: Annotated[
        bool | None,
        typer.Option(
            "--github/--no-github",
            help="Print annotations of a GitHub workflow; unset, where one runs it without --json.",
            show_default=False,
            rich_help_panel="Reports",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Exit with 1 if routeprof diagnose finds a warning or an error, and say what in one line each.

    0: nothing found; 1: something found; 2: it could not be judged at all.

    Example: routeprof check runs/mixtral --max-imbalance 3 --max-overflow 0.01
    """
    from routeprof.diagnose.check import judge, limited, rules_asked
    from routeprof.report.diagnose import check_json, check_lines

    if github and as_json:
        raise UsageError("--github and --json both print; leave one out")
    limits = {
        "max_imbalance": max_imbalance,
        "max_overflow": max_overflow,
        "capacity_factor": capacity_factor,
        "max_rank_imbalance": max_rank_imbalance,
    }
    others = {"gpus": gpus, "since": since, "model": model}
    if github is None:
        github = os.environ.get("GITHUB_ACTIONS") == "true" and not as_json
    try:
        question = asked(
            directories,
            limited(limits_of(config), limits),
            since,
            gpus,
            (phase, tag, between),
            "h100",
            model,
        )
        verdict = judge(question, rules_asked({**limits, **others}, _option), fail_on)
    except RouteprofError as error:
        _report_error(str(error), junit, github, directories)
        raise
    _report(verdict, junit, github, directories)
    for message in verdict.unknown.values():
        raise UsageError(message)
    if as_json:
        typer.echo(json.dumps(check_json(verdict), indent=1))
    else:
        for line in check_lines(verdict):
            typer.echo(line)
    if verdict.failed:
        raise typer.Exit(1)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _report(verdict: Verdict, junit: Path | None, github: bool, directories: list[Path]) -> None:
    """For machines that read neither the lines nor the status."""
    from time import time

    from routeprof.report.github import annotation, workflow_commands
    from routeprof.report.junit import junit as document

    if junit is not None:
        _write(junit, document(verdict, [*map(str, directories)], time()))
    if github:
        for message in verdict.unknown.values():
            typer.echo(annotation("error", "routeprof: not judged", message))
        for line in workflow_commands(verdict.failed):
            typer.echo(line)


def _report_error(message: str, junit: Path | None, github: bool, directories: list[Path]) -> None:
    """The same of a check that could not be made: an older report must not stand for it."""
    from time import time

    from routeprof.report.github import annotation
    from routeprof.report.junit import junit_error

    if junit is not None:
        _write(junit, junit_error(message, [*map(str, directories)], time()))
    if github:
        typer.echo(annotation("error", "routeprof: cannot check", message))


def _write(path: Path, text: str) -> None:
    from routeprof.report.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror or error}); name another file for --junit"
        ) from error
