"""``routeprof whatif batching``: what batches composed otherwise would bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.completion import one_of
from routeprof.commands.options import AsJson, Between, Recordings, Tag, selected
from routeprof.errors import UsageError


def batching(
    source: Recordings,
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Requests in a batch, such as 8,16,32; unset, those of them that fit."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Expert-parallel ranks; unset, the recording's or 8."),
    ] = None,
    phase: Annotated[
        str,
        typer.Option(help="decode or prefill.", autocompletion=one_of(("decode", "prefill"))),
    ] = "decode",
    tag: Tag = None,
    between: Between = None,
    seed: Annotated[int, typer.Option(help="Of random orders and intervals.")] = 0,
    signatures: Annotated[
        Path | None,
        typer.Option(help="File to write the routing signature of each tag to, as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What batches would bring that mix requests of different routing.

    Composes batches of the recorded requests in the order of arrival, at random, and by what a
    scheduler can know of their routing beforehand. Needs a recording of level tokens.

    Example: routeprof whatif batching runs/mixtral --batch-sizes 8,16,32 --ranks 8
    """
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.rank_loads import usual_ranks
    from routeprof.report.whatif_batching import batching_json, print_batching
    from routeprof.whatif.batching import compare_batching

    if seed < 0:
        raise UsageError(f"seed is {seed}: pass 0 or more")
    sizes = None if batch_sizes is None else [_size(one) for one in batch_sizes.split(",")]
    profile = selected(load(source), None, tag, between)
    number = usual_ranks(profile)[0] if ranks is None else ranks
    made = compare_batching(profile, sizes, ranks=number, phase=phase, seed=seed)
    asked = {"tag": profile.tag or "all"}
    if signatures is not None:
        from routeprof.report.whatif_batching import signatures_json

        text = json.dumps(signatures_json(made.signatures, asked), indent=1) + "\n"
        _write(signatures, text)
    if as_json:
        typer.echo(json.dumps(batching_json(made, {**asked, "seed": seed}), indent=1))
    else:
        print_batching(made, Console())


def _size(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"batch size {text.strip()!r} is not a whole number of 1 or more")
    return int(text)


def _write(path: Path, text: str) -> None:
    from routeprof.report.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; pass another file to --signatures"
        ) from None
