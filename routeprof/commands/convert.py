"""``routeprof convert``: other tools' files in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from routeprof.commands.completion import READ, WRITTEN, one_of, phases
from routeprof.commands.options import AsJson, selected
from routeprof.errors import UsageError

if TYPE_CHECKING:
    from routeprof.formats import Told
    from routeprof.profile import Profile


def convert(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Files of one run, or recordings; then what is made of them.",
            metavar="SRC... DST",
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="Kind of SRC; unset, by its content.", autocompletion=one_of(READ)
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to", help="Kind of DST; unset, by its ending.", autocompletion=one_of(WRITTEN)
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Experts of a token, where SRC does not say it.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers of the model, dense ones too, where SRC has only some."),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts of a layer, where SRC has only chosen ones.")
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            help="Phase of what has none; of a recording, only this one.", autocompletion=phases
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Tag of what has none; of a recording, only this one.")
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="A trace of torch.profiler to write the counters into.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a recording of other tools' files, or write a recording for other tools.

    Verbs read other tools' files directly; a recording keeps the result, and what you add to it.

    Example: routeprof convert expert_distribution_recorder_1.pt runs/sglang --top-k 8

    For SGLang: routeprof convert runs/mixtral counts.json

    For Perfetto: routeprof convert runs/mixtral both.trace.json --beside torch.json
    """
    from routeprof.formats import Told
    from routeprof.formats.writers import writer_for

    *files, out = paths
    if not files:
        raise UsageError("one path is given: pass what to convert, and what to make of it")
    told = Told(top_k, phase, tag, layers, experts)
    if target or beside or writer_for(out):
        facts = _write(files, out, source, target, told, beside)
    else:
        facts = _read(files, out, source, told)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(
        f"{facts['about']}: {facts['layers']} MoE layers, {facts['assignments']:,} assignments, "
        f"level {facts['level']}"
    )
    for note in facts["notes"]:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {out}")


def _read(files: list[Path], out: Path, source: str | None, told: Told) -> dict[str, Any]:
    """Make a recording of files."""
    from routeprof.formats import FORMATS, convert
    from routeprof.profile import load

    profile = load(convert(files, out, source, told))
    return _facts(profile, out, FORMATS[profile.info.source].about)


def _write(
    files: list[Path],
    out: Path,
    source: str | None,
    target: str | None,
    told: Told,
    beside: Path | None,
) -> dict[str, Any]:
    """Write recordings, or what files are as recordings, to a file."""
    from tempfile import TemporaryDirectory

    from routeprof.formats import convert, recognised
    from routeprof.formats.trace import write_beside
    from routeprof.formats.writers import write
    from routeprof.profile import load

    with TemporaryDirectory(prefix="routeprof-") as folder:
        if source or recognised(files[0]):
            profile = load(convert(files, Path(folder) / "converted", source, told))
        else:
            profile = selected(load(files), told.phase, told.tag, None)
        if beside is None:
            write(profile, out, target)
        else:
            write_beside(profile, beside, out)
    return _facts(profile, out, profile.info.source or "recording")


def _facts(profile: Profile, out: Path, about: str) -> dict[str, Any]:
    return {
        "written": str(out),
        "about": about,
        "format": profile.info.source or None,
        "level": profile.info.level,
        "layers": len(profile.captured),
        "assignments": int(profile.counts.sum()),
        "notes": list(profile.info.notes),
    }
