"""``routeprof whatif placement``: how even the load would be with experts placed otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands import completion
from routeprof.commands.completion import one_of, some_of
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

if TYPE_CHECKING:
    from routeprof.profile import Profile


def placement(
    source: Recordings,
    gpus: Annotated[int, typer.Option(help="GPUs of the expert-parallel group.")],
    slots: Annotated[int, typer.Option(help="Slots for experts and replicas on all GPUs.")],
    nodes: Annotated[int, typer.Option(help="Nodes that the GPUs are on.")] = 1,
    groups: Annotated[
        int, typer.Option(help="Expert groups to keep on one node each; 1: anywhere.")
    ] = 1,
    speed: Annotated[
        str | None, typer.Option(help="Speed of each GPU in any unit, such as 1,1,0.5,0.5.")
    ] = None,
    effort: Annotated[
        str, typer.Option(help="low, normal or high.", autocompletion=one_of(completion.EFFORTS))
    ] = "normal",
    today: Annotated[
        Path | None,
        typer.Option(help="Where the experts are today: a file of any kind that --out writes."),
    ] = None,
    moves: Annotated[
        int | None,
        typer.Option(help="Experts of a layer that may come to a GPU which has them not today."),
    ] = None,
    repeats: Annotated[
        bool, typer.Option(help="A GPU may hold an expert twice where that is faster.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the placement there, fitted on all steps."),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="With --out: sglang, trtllm, vllm, eplb, vllm-ascend, csv; several by commas.",
            autocompletion=some_of(completion.PLACED),
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory for experts on each GPU, such as 60GiB.")
    ] = None,
    expert_bytes: Annotated[
        str | None,
        typer.Option(help="Size of one expert in one layer, such as 84MiB; else as recorded."),
    ] = None,
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

    With --out the placement is fitted once more, on all steps, and written in the files of engines.

    Example: routeprof whatif placement runs/mixtral --gpus 8 --slots 16 --phase decode --out placed
    """
    from rich.console import Console

    from routeprof.formats.placements import chosen_formats, read_placement, write_placement
    from routeprof.profile import load
    from routeprof.report.whatif_placement import (
        placement_json,
        print_placement,
        print_written,
        written_json,
    )
    from routeprof.whatif.cluster import Cluster
    from routeprof.whatif.comparison import compare
    from routeprof.whatif.decision import Wish, decide
    from routeprof.whatif.placement import EFFORTS
    from routeprof.whatif.today import deployment_of

    if effort not in EFFORTS:
        raise UsageError(f"effort {effort!r} is not one of {', '.join(EFFORTS)}")
    if 0 < slots < gpus:
        raise UsageError(f"{gpus} GPUs for {slots} slots: pass --slots {gpus} or more")
    if formats is not None and out is None:
        raise UsageError("--format says how to write: pass --out, the directory to write to")
    wanted = chosen_formats(formats)
    cluster = Cluster.even(gpus, slots, nodes)
    if speed is not None:
        cluster = replace(cluster, speed=_numbers(speed))
    profile = selected(load(source), phase, tag, between)
    _check_memory(profile, gpus, slots, gpu_memory, expert_bytes)
    deployment = None if today is None and out is None else deployment_of(profile, gpus)
    held = None if today is None or deployment is None else read_placement(today, deployment)
    how = Wish(groups=groups, effort=effort, today=held, moves=moves, repeats=repeats)
    made = compare(profile, cluster, **how)
    written = None
    if out is not None:
        decision = decide(profile, cluster, **how)
        written = decision, write_placement(decision.placement, out, wanted)
    level = profile.info.level
    if as_json:
        asked: dict[str, int | str] = {"gpus": gpus, "slots": slots, "nodes": nodes}
        asked |= {"groups": groups, "effort": effort}
        asked |= {} if speed is None else {"speed": speed}
        asked |= {"phase": profile.phase or "all", "tag": profile.tag or "all"}
        data = placement_json(made, asked, level=level, layers=layers)
        data |= {} if written is None else {"written": written_json(*written)}
        typer.echo(json.dumps(data, indent=1))
    else:
        print_placement(made, Console(), level=level, layers=layers)
        if written is not None:
            print_written(made, *written, Console())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"speed {text!r} is no numbers: pass such as 1,1,0.5") from None


def _check_memory(
    profile: Profile, gpus: int, slots: int, memory: str | None, expert: str | None
) -> None:
    from routeprof.placements import placed
    from routeprof.tables import moe_layers
    from routeprof.whatif.room import parse_bytes, require_room
    from routeprof.whatif.sizes import expert_bytes

    if memory is None and expert is None:
        return
    if memory is None:
        raise UsageError("--expert-bytes says what memory holds: pass --gpu-memory too")
    size = expert_bytes(profile) if expert is None else parse_bytes(expert, "--expert-bytes")
    room = parse_bytes(memory, "--gpu-memory")
    layers = [placed(layer) for _, layer in moe_layers(profile)]
    require_room(slots, max(layers, default=0), gpus, len(layers), room, size)
