"""``routeprof check``: findings as an exit status, for CI."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from routeprof.commands.diagnose import Capacity, Config, Gpus, Model, Since, asked, limits_of
from routeprof.commands.options import AsJson, Between, Phase, Recordings, Tag
from routeprof.errors import UsageError

USUAL_FACTOR = 1.25
"""Capacity that ``--max-overflow`` supposes where none is configured."""


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
        str, typer.Option(help="Least severity that fails: info, warning or error.")
    ] = "warning",
    since: Since = None,
    config: Config = None,
    gpus: Gpus = None,
    model: Model = None,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    as_json: AsJson = False,
) -> None:
    """Exit with 1 if routeprof diagnose finds a warning or an error, and say what in one line each.

    0: nothing found; 1: something found; 2: it could not be judged at all.

    Example: routeprof check runs/mixtral --max-imbalance 3 --max-overflow 0.01
    """
    from routeprof.diagnose.examine import SKEW, examine
    from routeprof.diagnose.finding import SEVERITIES
    from routeprof.report.diagnose import check_json, check_lines, failures
    from routeprof.whatif.evidence import require_tokens

    severities = [*SEVERITIES]
    if fail_on not in SEVERITIES:
        raise UsageError(f"severity {fail_on!r} is not one of {', '.join(SEVERITIES)}")
    limits = limits_of(
        config,
        hot_imbalance=max_imbalance,
        max_overflow=max_overflow,
        rank_imbalance=max_rank_imbalance,
        capacity_factor=capacity_factor,
    )
    if max_overflow is not None and not limits.capacity_factor:
        limits = limits.changed(capacity_factor=USUAL_FACTOR)
    question = asked(directories, limits, since, gpus, (phase, tag, between), "h100", model)
    answer = examine(question, gains=False)
    _require_judged(
        answer.unjudged,
        {
            "overflow": _given(
                {"--max-overflow": max_overflow, "--capacity-factor": capacity_factor}
            ),
            "rank-imbalance": _given({"--max-rank-imbalance": max_rank_imbalance, "--gpus": gpus}),
            SKEW: max_imbalance is not None and "--max-imbalance",
            "drift-since": since is not None and "--since",
            "hybrid": model is not None and "--model",
        },
    )
    failed = failures(answer, severities[: severities.index(fail_on) + 1])
    if not failed:
        require_tokens(question.profile)
        _require_judged(answer.unjudged, {SKEW: "skew"})
    if as_json:
        typer.echo(json.dumps(check_json(answer, question, failed), indent=1))
    else:
        for line in check_lines(answer, failed):
            typer.echo(line)
    if failed:
        raise typer.Exit(1)


def _given(options: dict[str, float | None]) -> str | Literal[False]:
    """The first option that was given."""
    return next((name for name, value in options.items() if value is not None), False)


def _require_judged(unjudged: dict[str, str], options: dict[str, str | Literal[False]]) -> None:
    """What was asked for by an option must not pass because nothing is known.

    Raises:
        UsageError: the rule of a given option could not be judged.
    """
    for code, option in options.items():
        if option and code in unjudged:
            raise UsageError(f"{option} cannot be judged: {unjudged[code]}")
