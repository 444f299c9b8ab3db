"""``routeprof diagnose``: what is wrong, why, and what a remedy would bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands import completion
from routeprof.commands.options import AsJson, Between, Phase, Recordings, Tag, selected

if TYPE_CHECKING:
    from routeprof.diagnose.question import Question
    from routeprof.diagnose.thresholds import Thresholds

Since = Annotated[
    Path | None,
    typer.Option(help="An earlier recording of the model, to look for drift.", metavar="DIR"),
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file whose table thresholds changes limits.", metavar="FILE"),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="Expert-parallel GPUs to judge; unset, those recorded."),
]
Capacity = Annotated[
    float | None,
    typer.Option(help="The engine's capacity factor, if it has a capacity."),
]

Model = Annotated[
    str | None,
    typer.Option(
        help="The model's config.json, directory or name, if the recording does not have it.",
        metavar="MODEL",
        autocompletion=completion.models,
    ),
]


def diagnose(
    directories: Recordings,
    since: Since = None,
    config: Config = None,
    gpus: Gpus = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Whose peak rates time is modelled at, such as h100.",
            autocompletion=completion.gpus,
        ),
    ] = "h100",
    capacity_factor: Capacity = None,
    model: Model = None,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with a recorded model's routing, why, and what to do.

    Looks at capture, skew and its cause, steps, ranks, nodes, drift, GEMM sizes and hybrid models.

    Example: routeprof diagnose runs/mixtral --gpus 8 --since runs/last-week
    """
    from rich.console import Console

    from routeprof.diagnose.examine import examine
    from routeprof.report.diagnose import answer_json, print_answer
    from routeprof.whatif.hardware import hardware

    hardware(gpu)
    limits = limits_of(config, capacity_factor=capacity_factor)
    question = asked(directories, limits, since, gpus, (phase, tag, between), gpu, model)
    answer = examine(question)
    if as_json:
        typer.echo(json.dumps(answer_json(answer, question), indent=1))
    else:
        print_answer(answer, question, Console())


def limits_of(config: Path | None, **limits: float | None) -> Thresholds:
    """The defaults, changed by a file, changed by options.

    Raises:
        UsageError: a file or a limit that cannot be.
    """
    from routeprof.diagnose.thresholds import DEFAULTS, read_thresholds

    return (DEFAULTS if config is None else read_thresholds(config)).changed(**limits)


def asked(
    directories: list[Path],
    limits: Thresholds,
    since: Path | None,
    gpus: int | None,
    selection: tuple[str | None, str | None, str | None],
    gpu: str,
    model: str | None = None,
) -> Question:
    """What to examine.

    Args:
        selection: phase, tag and range of time; the other recording is selected by the first two.

    Raises:
        UsageError: the phase or the tag does not occur, the range is none, or there is no such
            model.
    """
    from time import time

    from routeprof.diagnose.question import Question
    from routeprof.plan.config import read_config
    from routeprof.profile import load

    phase, tag, between = selection
    return Question(
        selected(load(directories), phase, tag, between),
        limits,
        since=None if since is None else load(since).narrowed(phase, tag),
        gpus=gpus,
        hardware=gpu,
        now=time(),
        model=None if model is None else read_config(model),
    )
