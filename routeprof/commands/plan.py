"""``routeprof plan``: what a model needs of the GPUs' memory, before it is deployed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.completion import CACHE_DTYPES, DTYPES, models, one_of
from routeprof.commands.options import AsJson, Phase, Place, Tag, selected
from routeprof.errors import UsageError
from routeprof.recording.places import place

if TYPE_CHECKING:
    from routeprof.plan.hotness import Measured
    from routeprof.plan.memory import Plan
    from routeprof.plan.model import Model
    from routeprof.profile import Profile

dtypes = one_of(DTYPES)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a model's directory, or a known model such as deepseek-v3; unset, "
            "that of the recording.",
            metavar="CONFIG_JSON|MODEL_DIR|NAME",
            show_default=False,
            autocompletion=models,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs, on all nodes together.")] = 8,
    gpu_memory: Annotated[str, typer.Option(help="Of each GPU, such as 80GiB or 141GB.")] = "80GiB",
    nodes: Annotated[int, typer.Option(help="Nodes that the GPUs stand in.")] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"Of weights: {', '.join(DTYPES)}.", autocompletion=dtypes)
    ] = "bf16",
    attention_dtype: Annotated[
        str | None, typer.Option(help="Of attention's weights.", autocompletion=dtypes)
    ] = None,
    expert_dtype: Annotated[
        str | None, typer.Option(help="Of routed experts.", autocompletion=dtypes)
    ] = None,
    hot_dtype: Annotated[
        str | None, typer.Option(help="Of the hottest routed experts.", autocompletion=dtypes)
    ] = None,
    hot_experts: Annotated[float, typer.Option(help="Share of experts that are hot.")] = 0.25,
    embedding_dtype: Annotated[
        str | None, typer.Option(help="Of embeddings; 16 bits if not told.", autocompletion=dtypes)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of keys and values: fp32, bf16, fp16, fp8, int8 or int4.",
            autocompletion=one_of(CACHE_DTYPES),
        ),
    ] = None,
    state_dtype: Annotated[
        str, typer.Option(help="Of recurrent states.", autocompletion=dtypes)
    ] = "fp32",
    dispatch_dtype: Annotated[
        str, typer.Option(help="On the way to the experts.", autocompletion=dtypes)
    ] = "bf16",
    length: Annotated[int, typer.Option(help="Tokens of a sequence, prompt and answer.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences at once, on all GPUs together.")] = 1,
    step_tokens: Annotated[
        int, typer.Option(help="Tokens of a forward pass on one replica at most.")
    ] = 8192,
    reserve: Annotated[
        float, typer.Option(help="Share of the memory to hold back; 0.2 to 0.3 is usual.")
    ] = 0.25,
    runtime: Annotated[str, typer.Option(help="CUDA context, NCCL and the engine.")] = "1GiB",
    graphs: Annotated[str, typer.Option(help="CUDA graphs; 0 for none.")] = "1GiB",
    recording: Annotated[
        list[Place] | None,
        typer.Option(
            parser=place,
            help="Loads of experts as recorded, instead of even ones.",
            metavar="DIR",
        ),
    ] = None,
    phase: Phase = None,
    tag: Tag = None,
    top: Annotated[int, typer.Option(help="Layouts to print.")] = 16,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the layouts to this file.")] = None,
) -> None:
    """Write the memory plan of a model on one page: weights, cache, buffers, and what fits.

    For every TP x EP x DP split of the GPUs: bytes on the fullest GPU by part, what is left for the
    cache, and how many sequences of the length fit at once.

    Example: routeprof plan deepseek-v3 --gpus 16 --nodes 2 --gpu-memory 141GB --dtype fp8
    """
    from routeprof.plan.memory import Setting
    from routeprof.plan.memory import plan as planned
    from routeprof.plan.precision import FORMATS, named, precision
    from routeprof.whatif.room import parse_bytes

    if top < 1:
        raise UsageError(f"top is {top}: pass 1 or more")
    if (phase or tag) and not recording:
        raise UsageError("a phase or a tag is of a recording: pass --recording DIR, too")
    setting = Setting(
        memory=parse_bytes(gpu_memory, "GPU memory"),
        length=length,
        batch=batch,
        step_tokens=step_tokens,
        precision=precision(
            dtype,
            attention=attention_dtype,
            experts=expert_dtype,
            embeddings=embedding_dtype,
            cache=kv_dtype,
            state=state_dtype,
            hot=hot_dtype,
            hot_experts=hot_experts,
        ),
        reserve=reserve,
        runtime=_reserve(runtime, "runtime"),
        graphs=_reserve(graphs, "graphs"),
        dispatch=named(dispatch_dtype, "dispatch-dtype", FORMATS),
    )
    profile = _profile(recording, phase, tag) if recording else None
    found = _model(model, profile)
    loads = None if profile is None else _loads(profile, found)
    made = planned(found, setting, gpus=gpus, nodes=nodes, measured=loads)
    _write(made, html, csv)
    if as_json:
        from routeprof.report.plan_json import plan_json

        typer.echo(json.dumps(plan_json(made), indent=1))
    else:
        from rich.console import Console

        from routeprof.report.plan_text import print_plan

        print_plan(made, Console(), most=top)


def _reserve(text: str, name: str) -> int:
    from routeprof.whatif.room import parse_bytes

    return 0 if text.strip() == "0" else parse_bytes(text, name)


def _profile(directories: list[Path], phase: str | None, tag: str | None) -> Profile:
    from routeprof.profile import load

    return selected(load(directories), phase, tag, None)


def _model(source: str | None, profile: Profile | None) -> Model:
    """The model that is named, else that of the recording's own configuration."""
    if source is not None:
        from routeprof.plan.model import load_model

        return load_model(source)
    if profile is None:
        raise UsageError(
            "no model to plan: pass a config.json, a model's directory or a known name, or "
            "--recording DIR whose recording has its model's configuration"
        )
    from routeprof.plan.recorded import own_model

    own = own_model(profile)
    if own is None:
        raise UsageError(
            "the recording does not have its model's configuration: pass a config.json, a model's "
            "directory or a known name, too, or record anew"
        )
    return own


def _loads(profile: Profile, model: Model) -> Measured:
    from routeprof.plan.hotness import measured

    return measured(profile, model)


def _write(made: Plan, html: Path | None, csv: Path | None) -> None:
    from routeprof.report.files import write_text

    try:
        if html:
            from routeprof.report.plan_html import plan_html

            write_text(html, plan_html(made))
        if csv:
            from routeprof.report.plan_csv import plan_csv

            write_text(csv, plan_csv(made))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}: pass another file") from None
