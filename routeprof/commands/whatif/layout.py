"""``routeprof whatif layout``: what each way to share the GPUs would cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from routeprof.commands import completion
from routeprof.commands.completion import one_of
from routeprof.commands.options import AsJson, Between, Phase, Recordings, Tag, selected
from routeprof.errors import UsageError


def layout(
    source: Recordings,
    gpus: Annotated[int, typer.Option(help="GPUs to lay the model out on.")],
    nodes: Annotated[int, typer.Option(help="Nodes that they stand in.")] = 1,
    gpu: Annotated[
        str,
        typer.Option(
            help="a100, h100, h200, h20, h800, b200 or mi300x.", autocompletion=completion.gpus
        ),
    ] = "h100",
    tflops: Annotated[float | None, typer.Option(help="Instead of the GPU's own, dense.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s of the GPU's memory.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s each way inside a node.")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s each way between nodes.")] = None,
    latency: Annotated[float, typer.Option(help="Microseconds that each exchange adds.")] = 0.0,
    expert_width: Annotated[
        int | None, typer.Option(help="Inner width of an expert, if the recording lacks it.")
    ] = None,
    weight_bytes: Annotated[
        float | None, typer.Option(help="Bytes of a weight, such as 1 for FP8.")
    ] = None,
    dispatch_bytes: Annotated[
        float | None, typer.Option(help="Bytes of a number on the way to the experts.")
    ] = None,
    combine_bytes: Annotated[
        float | None, typer.Option(help="Bytes of a number on the way back.")
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="contiguous, eplb or routeprof.", autocompletion=one_of(completion.PLACINGS)
        ),
    ] = "contiguous",
    redundant: Annotated[int, typer.Option(help="Slots for replicas of experts.")] = 0,
    relay: Annotated[
        bool, typer.Option("--relay", help="Send once to each node, and pass on inside it.")
    ] = False,
    top: Annotated[int, typer.Option(help="Layouts to print.")] = 16,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    as_json: AsJson = False,
) -> None:
    """Rank every TP x EP (x DP attention) split of the GPUs.

    Loads of ranks and sizes of GEMMs come from a recording of level steps; what GPUs send to each
    other from one of level tokens. The times are a simple model at the hardware's peak rates: good
    to compare layouts with, not to predict a latency.

    Example: routeprof whatif layout runs/mixtral --gpus 16 --nodes 2 --phase decode --gpu h200
    """
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.progress import shown
    from routeprof.report.whatif_layout import layout_json, print_layouts
    from routeprof.whatif.hardware import hardware
    from routeprof.whatif.layout import layouts
    from routeprof.whatif.layout_sums import PLACINGS, Setting
    from routeprof.whatif.layouts import predict
    from routeprof.whatif.sizes import least_experts, sizes_of

    placing = next((name for name in PLACINGS if name == placement), None)
    if placing is None:
        raise UsageError(f"placement {placement!r} is not one of {', '.join(PLACINGS)}")
    if top < 1:
        raise UsageError(f"top is {top}: pass 1 or more")
    profile = selected(load(source), phase, tag, between)
    rates = hardware(gpu).with_rates(
        flops=_times(tflops, 1e12),
        memory=_times(memory, 1e9),
        inside=_times(link, 1e9),
        between=_times(network, 1e9),
        latency=latency * 1e-6 or None,
    )
    sizes = sizes_of(
        profile,
        width=expert_width,
        weight=weight_bytes,
        dispatch=dispatch_bytes,
        combine=combine_bytes,
    )
    setting = Setting(sizes, rates, placing, redundant, relay)
    wanted = layouts(gpus, least_experts(profile), nodes)
    made = predict(profile, wanted, setting, progress=shown)
    if as_json:
        typer.echo(json.dumps(layout_json(made, profile, setting), indent=1))
    else:
        print_layouts(made, profile, setting, Console(), most=top)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
