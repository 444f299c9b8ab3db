"""``routeprof whatif capacity``: what a capacity factor would drop, waste and need."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from routeprof.commands.completion import RULES, one_of
from routeprof.commands.options import (
    AsJson,
    Between,
    Layers,
    Phase,
    Recordings,
    Tag,
    selected,
)


def capacity(
    source: Recordings,
    factors: Annotated[
        str | None,
        typer.Option(help="Capacity factors, such as 1.0,1.25,1.5; the recorded ones if unset."),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="How slots are rounded: ceil, floor, deepspeed or per-rank.",
            autocompletion=one_of(RULES),
        ),
    ] = "ceil",
    min_capacity: Annotated[
        int | None, typer.Option(help="The least capacity; 4 with rule deepspeed.")
    ] = None,
    target: Annotated[
        float, typer.Option(help="Overflow rate to find the smallest factor for.")
    ] = 0.001,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    layers: Layers = False,
    as_json: AsJson = False,
) -> None:
    """What capacity factors would drop, waste and need in memory.

    From a recording of level steps it is exact for any factor and rule, from level windows for the
    recorded factors; others are bounded, and say so.

    Example: routeprof whatif capacity runs/mixtral --factors 1.0,1.25,1.5 --phase prefill
    """
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.whatif_capacity import capacity_json, print_capacity
    from routeprof.whatif.capacity_rules import capacity_rule

    wanted = None if factors is None else [one.strip() for one in factors.split(",")]
    chosen = capacity_rule(rule, min_capacity)
    profile = selected(load(source), phase, tag, between)
    if as_json:
        data = capacity_json(profile, wanted, chosen, target, layers=layers)
        typer.echo(json.dumps(data, indent=1))
    else:
        print_capacity(profile, wanted, chosen, target, Console(), layers=layers)
