"""``routeprof demo``: the bundled model, recorded live, then the dashboard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

_LESSON = """
Look at the table by tag: on prompts of one kind a few experts do most of the work, on mixed
prompts the same model is balanced. Skew that differs by tag comes from the data: mix requests.
"""


def demo(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where recording and report go; a new folder if unset."),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            help="Port of the dashboard; 0 takes a free one.", metavar="PORT", min=0, max=65535
        ),
    ] = 8050,
    serve: Annotated[bool, typer.Option(help="Serve the dashboard at the end.")] = True,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=1)] = 64,
) -> None:
    """Record the bundled trained MoE while it generates, then show what came out.

    Example: routeprof demo --no-serve -o demo-out
    """
    from routeprof.commands.extras import need

    need("transformers", "demo")
    folder = out or Path(tempfile.mkdtemp(prefix="routeprof-demo-"))
    _record(folder / "recording", new_tokens)
    _show(folder)
    if serve:
        from routeprof.commands.dashboard import dashboard

        dashboard([folder / "recording"], port=port)


def _record(directory: Path, new_tokens: int) -> None:
    """Generate from prompts of each kind, one batch a kind, each under its tag."""
    from routeprof.sample_data import load_model
    from routeprof.sample_data.record import PROMPTS, record_prompts

    typer.echo(f"Recording the sample model into {directory} …")

    def done(kind: str) -> None:
        typer.echo(f"  {kind}: {PROMPTS} prompts, {new_tokens} new tokens each")

    record_prompts(
        load_model(), directory, level="tokens", window=0.25, new_tokens=new_tokens, done=done
    )


def _show(folder: Path) -> None:
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.figures import write_figures
    from routeprof.report.html import write_html
    from routeprof.report.text import print_summary

    profile = load(folder / "recording")
    print_summary(profile, Console())
    typer.echo(_LESSON)
    report = folder / "report"
    files = profile.write_csv(report)
    files.append(write_html(profile, report / "report.html"))
    files += write_figures(profile, report / "figures", ["png"])
    typer.echo(f"\nWrote {len(files)} files to {report}: " + _names(report, files))


def _names(report: Path, files: list[Path]) -> str:
    return ", ".join(str(path.relative_to(report)) for path in files)
