"""``routeprof demo``: the bundled model, recorded live, then the dashboard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where recording and report go; a new folder if unset."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the dashboard.", min=0, max=65535)] = 8050,
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

        dashboard(folder / "recording", port=port)


def _record(directory: Path, new_tokens: int) -> None:
    """Generate from prompts of each kind, one batch a kind, each under its tag."""
    import torch

    from routeprof.hooks.transformers import record
    from routeprof.sample_data import PROMPT_KINDS, encode, load_model, load_prompts

    typer.echo(f"Recording the sample model into {directory} …")
    model = load_model()
    kinds = [*PROMPT_KINDS, "mixed"]
    with torch.inference_mode(), record(model, directory, level="steps", window=0.5) as recording:
        for kind in kinds:
            prompts = load_prompts(kind)[:16]
            with recording.tag(kind):
                batch = encode(prompts)
                # Greedy text of so small a model runs in circles.
                torch.manual_seed(0)
                model.generate(**batch, max_new_tokens=new_tokens, do_sample=True, temperature=0.7)
            typer.echo(f"  {kind}: {len(prompts)} prompts, {new_tokens} new tokens each")


def _show(folder: Path) -> None:
    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.figures import write_figures
    from routeprof.report.html import write_html
    from routeprof.report.text import print_summary

    profile = load(folder / "recording")
    print_summary(profile, Console())
    report = folder / "report"
    files = profile.write_csv(report)
    files.append(write_html(profile, report / "report.html"))
    files += write_figures(profile, report / "figures", ["png"])
    typer.echo(f"\nWrote {len(files)} files to {report}:")
    for path in files:
        typer.echo(f"  {path.relative_to(folder)}")
