"""``routeprof whatif placement``: how even the load would be with experts placed otherwise."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from routeprof.commands.options import (
    AsJson,
    Between,
    Layers,
    Phase,
    Recordings,
    Tag,
    selected,
)
from routeprof.errors import UsageError


def placement(
    source: Recordings,
    gpus: Annotated[int, typer.Option(help="GPUs of the expert-parallel group.")],
    slots: Annotated[int, typer.Option(help="Slots for experts and replicas on all GPUs.")],
    nodes: Annotated[int, typer.Option(help="Nodes that the GPUs are on.")] = 1,
    groups: Annotated[
        int, typer.Option(help="Expert groups to keep on one node each; 1: anywhere.")
    ] = 1,
    effort: Annotated[str, typer.Option(help="low, normal or high.")] = "normal",
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    layers: Layers = False,
    as_json: AsJson = False,
) -> None:
    """How even another placement of experts would make the load of the GPUs.

    Compares the placement of today (in order, unless the recording has another), EPLB's and
    routeprof's with what no placement can be below. They are fitted on the first half of the steps
    and judged on the second; that needs a recording of level steps.

    Example: routeprof whatif placement runs/mixtral --gpus 8 --slots 16 --phase decode
    """
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.whatif_placement import placement_json, print_placement
    from routeprof.whatif.cluster import Cluster
    from routeprof.whatif.comparison import compare
    from routeprof.whatif.placement import EFFORTS

    if effort not in EFFORTS:
        raise UsageError(f"effort {effort!r} is not one of {', '.join(EFFORTS)}")
    if 0 < slots < gpus:
        raise UsageError(f"{gpus} GPUs for {slots} slots: pass --slots {gpus} or more")
    cluster = Cluster.even(gpus, slots, nodes)
    profile = selected(load(source), phase, tag, between)
    made = compare(profile, cluster, groups=groups, effort=effort)
    if as_json:
        asked: dict[str, int | str] = {"gpus": gpus, "slots": slots, "nodes": nodes}
        asked |= {"groups": groups, "effort": effort}
        asked |= {"phase": profile.phase or "all", "tag": profile.tag or "all"}
        data = placement_json(made, asked, level=profile.info.level, layers=layers)
        typer.echo(json.dumps(data, indent=1))
    else:
        print_placement(made, Console(), level=profile.info.level, layers=layers)
