"""The HTML report: one file that needs nothing else, for light and dark screens and for paper.

It says what ``routeprof summary`` says, with the figures of ``report.figures`` as inline SVG.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from routeprof.diagnose import Finding, layer_list
from routeprof.report.figures import CAPTIONS, INK, figures, save
from routeprof.report.files import write_text
from routeprof.report.page import document, escaped, facts, section, table
from routeprof.report.summary import (
    DROPS,
    group_rows,
    identity,
    key_figures,
    layer_rows,
    not_captured,
    plain,
    ratio,
    shown_columns,
    whole,
    worst_first,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeprof.profile import Profile


def write_html(profile: Profile, path: str | Path, *, now: float | None = None) -> Path:
    """Write the report to a file, whose directory is made; returns the file."""
    return write_text(path, html_text(profile, now=now))


def html_text(profile: Profile, *, now: float | None = None) -> str:
    """The report as one HTML document.

    Args:
        now: the time, to tell a live recording from one whose process was killed.
    """
    rows = layer_rows(profile)
    model = escaped(profile.info.model.name or "a model")
    body = [
        f'<header><h1>Expert routing of {model}</h1><p class="soft">routeprof report</p></header>',
        _findings(profile.findings(now)),
        section("Key figures", facts(key_figures(profile, rows))),
        section("Figures", *(_figure(*item) for item in figures(profile).items())),
        section("Layers, the most imbalanced first", *_layers(profile, rows)),
        *(_groups(kind, group_rows(profile, kind)) for kind in ("phase", "tag")),
        section("What the columns mean", _meanings(rows)),
    ]
    return document(f"Expert routing of {model}", (part for part in body if part))


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="soft">No findings: every layer was captured and none stands out.</p>'
    items = "\n".join(
        f'<li class="{finding.severity}"><b>{finding.severity}</b> {escaped(finding.evidence)} '
        f"<small>[{escaped(finding.code)}]</small><br>{escaped('→ ' + finding.suggestion)}</li>"
        for finding in found
    )
    return f'<ul class="findings" aria-label="findings, the gravest first">\n{items}\n</ul>'


def _figure(name: str, figure: Figure) -> str:
    title, caption = figure.get_suptitle().replace(r"\$", "$"), CAPTIONS[name]
    label = escaped(f"{title}. {caption}")
    return (
        f'<figure id="{name}">{_svg(name, figure, label)}'
        f"<figcaption>{escaped(caption)}</figcaption></figure>"
    )


def _svg(name: str, figure: Figure, label: str) -> str:
    """The figure as an element of the page: its text colour, its own ids, no addresses."""
    buffer = StringIO()
    save(figure, buffer, "svg", text=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(f": {INK}", ": currentColor")
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r"font-family: [^;]*; ", "", svg).replace(">*{stroke", ">svg *{stroke")
    for reference in (' id="', "url(#", 'href="#'):
        svg = svg.replace(reference, f"{reference}{name}-")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _layers(profile: Profile, rows: pd.DataFrame) -> list[str]:
    ordered, columns = worst_first(rows), shown_columns(rows)
    missing = [f"<p>{escaped(line)}</p>" for line in not_captured(profile)]
    dropping = [layer.index for layer in profile.info.layers if layer.drops]
    if dropping:
        missing.append(f"<p>{escaped(DROPS.format(layer_list(dropping)))}</p>")
    if not len(ordered):
        return missing
    headings = [" ".join(column.heading).strip().replace("- ", "") for column in columns]
    cells = [
        [column.show(value) for column, value in zip(columns, values, strict=True)]
        for values in ordered[[column.name for column in columns]].itertuples(index=False)
    ]
    names = [[plain(name)] for name in ordered["layer_name"]]
    lines = [cell + name for cell, name in zip(cells, names, strict=True)]
    return [*missing, table([*headings, "module"], lines, texts={len(headings)})]


def _groups(kind: str, groups: Sequence[dict[str, Any]]) -> str:
    if not groups:
        return ""
    headings = [kind, "steps", "tokens", "median max/mean", "worst max/mean", "in layer"]
    lines = [
        [
            str(row[kind]),
            whole(row["steps"]),
            whole(row["tokens"]),
            ratio(row["imbalance_ratio_median"]),
            ratio(row["imbalance_ratio_worst"]),
            identity(row["worst_layer"]),
        ]
        for row in groups
    ]
    title = f"By {kind}: imbalance_ratio (max ÷ mean) over the layers"
    return section(title, table(headings, lines, texts={0}))


def _meanings(rows: pd.DataFrame) -> str:
    items = "\n".join(
        f"<dt>{escaped(column.name)}</dt><dd>{escaped(column.meaning)}</dd>"
        for column in shown_columns(rows)
    )
    return f'<dl class="meanings">\n{items}\n</dl>'
