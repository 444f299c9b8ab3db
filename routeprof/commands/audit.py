"""``routeprof audit``: what low precision would do to a model's expert weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.completion import one_of
from routeprof.commands.options import AsJson, Phase, Tag
from routeprof.plan.audit.options import (
    MAX_RATIO,
    PRECISIONS,
    check_numbers,
    check_plan,
    check_ratio,
)


def audit(
    model: Annotated[
        Path,
        typer.Argument(
            help="A model's directory with *.safetensors, or one such file.",
            metavar="MODEL_DIR",
            show_default=False,
        ),
    ],
    recording: Annotated[
        Path | None,
        typer.Option(help="Plan a precision for each expert by this recording's assignments."),
    ] = None,
    hot: Annotated[
        str,
        typer.Option(
            help="Precision of hot experts: source, fp8, int8 or int4.",
            autocompletion=one_of(PRECISIONS),
        ),
    ] = "source",
    cold: Annotated[
        str, typer.Option(help="Precision of the other experts.", autocompletion=one_of(PRECISIONS))
    ] = "int4",
    hot_share: Annotated[
        float | None,
        typer.Option(
            help="The fewest experts of a layer that take this share of it are hot; 0.5 if unset."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Or as many hot experts as fit, such as 40GiB in all.")
    ] = None,
    max_ratio: Annotated[
        float, typer.Option(help="An outlier's absolute maximum ÷ the median expert's.")
    ] = MAX_RATIO,
    sample: Annotated[
        int | None,
        typer.Option(
            help="Round one in so many groups of 128: 1 for all, slow; unset, so that 65536 "
            "elements of each matrix are. Maxima are always of all elements."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads; one a processor, up to 8, if unset.")
    ] = None,
    phase: Phase = None,
    tag: Tag = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write experts.csv and precision.csv there."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every layer.")] = False,
    as_json: AsJson = False,
) -> None:
    """Range of each expert's weights, and their error in FP8, INT8 and INT4.

    Names the experts that break a scale they share with others, and the granularity that cures
    it. With a recording also a precision for each expert, hot experts the higher.

    Example: routeprof audit models/mixtral --recording runs/mixtral --cold fp8 -o audit/
    """
    from routeprof.errors import UsageError
    from routeprof.plan.audit.experts import experts_of
    from routeprof.profile import load
    from routeprof.whatif.room import parse_bytes

    # What is wrong is said before torch is imported and all weights are read.
    check_numbers(sample, threads)
    check_ratio(max_ratio)
    most = None if budget is None else parse_bytes(budget, "budget")
    check_plan(hot, cold, hot_share, most)
    if recording is None and any(one is not None for one in (hot_share, budget, phase, tag)):
        raise UsageError("hot-share, budget, phase and tag are of a recording; pass --recording")
    found = experts_of(model)
    profile = None if recording is None else load(recording).select(phase=phase, tag=tag)

    from rich.console import Console

    from routeprof.plan.audit.mixed import mixed
    from routeprof.plan.audit.verdicts import verdicts
    from routeprof.plan.weights import audit as audited
    from routeprof.plan.weights import sample_for, size_of
    from routeprof.report.audit import audit_json, write_audit
    from routeprof.report.audit_text import print_audit
    from routeprof.report.progress import counted

    sample = sample_for(found) if sample is None else sample
    with counted(size_of(found), "weights") as advance:
        done = audited(model, sample=sample, threads=threads, advance=advance, found=found)
    broken = verdicts(done, max_ratio)
    planned = None
    if profile is not None:
        planned = mixed(done, profile, hot=hot, cold=cold, hot_share=hot_share, budget=most)
    if as_json:
        typer.echo(json.dumps(audit_json(done, broken, planned), indent=1))
    else:
        print_audit(done, broken, planned, Console(), all_layers=every)
    for file in write_audit(done, planned, out) if out else ():
        typer.echo(f"wrote {file}", err=as_json)
