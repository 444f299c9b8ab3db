"""The HTML report: one file that needs nothing else, for light and dark screens and for paper.

It says what ``routeprof summary`` says, with the figures of ``report.figures`` as inline SVG.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from routeprof.diagnose import Finding, layer_list
from routeprof.report.figures import CAPTIONS, INK, figures, save
from routeprof.report.files import write_text
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

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --paper: #fff; --card: #f6f8fa; --error: #c0232c; --warning: #8a5a00; --info: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --card: #151b23; --error: #ff7b72; --warning: #e3b341; --info: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 50rem; }
.soft, small, figcaption, caption { color: var(--soft); }
.findings { list-style: none; margin: 1rem 0; padding: 0; }
.findings li { margin: .5rem 0; padding: .5rem .9rem; max-width: none; background: var(--card);
  border-left: 4px solid var(--tone); border-radius: 4px; }
.findings b { color: var(--tone); }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .info { --tone: var(--info); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .7rem;
  margin: 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .8rem; }
.facts dt { color: var(--soft); font-size: .85rem; }
.facts dd { margin: 0; font-weight: 600; }
.facts small { display: block; font-weight: 400; line-height: 1.3; }
figure { margin: 1.2rem 0 2rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: 'DejaVu Sans', Verdana, sans-serif; }
figcaption, caption { font-size: .9rem; text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { vertical-align: bottom; font-weight: 600; }
td.text, th.text { text-align: left; overflow-wrap: anywhere; min-width: 11rem; }
.meanings { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem;
  font-size: .9rem; }
.meanings dt { font-family: ui-monospace, monospace; } .meanings dd { margin: 0; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --paper: #fff;
  --card: #fff; --error: #a00; --warning: #740; --info: #048; }
  body { padding: 0; max-width: none; font-size: 11px; } .wide { overflow: visible; }
  table { font-size: 8px; } th, td { padding: .1rem .3rem; } tr { break-inside: avoid; } }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_html(profile: Profile, path: str | Path, *, now: float | None = None) -> Path:
    """Write the report to a file, whose directory is made; returns the file."""
    return write_text(path, html_text(profile, now=now))


def html_text(profile: Profile, *, now: float | None = None) -> str:
    """The report as one HTML document.

    Args:
        now: the time, to tell a live recording from one whose process was killed.
    """
    rows = layer_rows(profile)
    model = _text(profile.info.model.name or "a model")
    body = [
        f'<header><h1>Expert routing of {model}</h1><p class="soft">routeprof report</p></header>',
        _findings(profile.findings(now)),
        _section("Key figures", _facts(key_figures(profile, rows))),
        _section("Figures", *(_figure(*item) for item in figures(profile).items())),
        _section("Layers, the most imbalanced first", *_layers(profile, rows)),
        *(_groups(kind, group_rows(profile, kind)) for kind in ("phase", "tag")),
        _section("What the columns mean", _meanings(rows)),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Expert routing of {model}</title>\n<style>{_STYLE}</style>\n</head>\n"
    )
    return head + "<body>\n" + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"


def _text(value: object) -> str:
    return escape(plain(value))


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="soft">No findings: every layer was captured and none stands out.</p>'
    items = "\n".join(
        f'<li class="{finding.severity}"><b>{finding.severity}</b> {_text(finding.evidence)} '
        f"<small>[{_text(finding.code)}]</small><br>{_text('→ ' + finding.suggestion)}</li>"
        for finding in found
    )
    return f'<ul class="findings" aria-label="findings, the gravest first">\n{items}\n</ul>'


def _facts(facts: Iterable[tuple[str, str, str]]) -> str:
    cards = "\n".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)} <small>{_text(meaning)}</small></dd></div>"
        for name, value, meaning in facts
    )
    return f'<dl class="facts">\n{cards}\n</dl>'


def _figure(name: str, figure: Figure) -> str:
    title, caption = figure.get_suptitle().replace(r"\$", "$"), CAPTIONS[name]
    label = _text(f"{title}. {caption}")
    return (
        f'<figure id="{name}">{_svg(name, figure, label)}'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
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
    missing = [f"<p>{_text(line)}</p>" for line in not_captured(profile)]
    dropping = [layer.index for layer in profile.info.layers if layer.drops]
    if dropping:
        missing.append(f"<p>{_text(DROPS.format(layer_list(dropping)))}</p>")
    if not len(ordered):
        return missing
    headings = [" ".join(column.heading).strip().replace("- ", "") for column in columns]
    cells = [
        [column.show(value) for column, value in zip(columns, values, strict=True)]
        for values in ordered[[column.name for column in columns]].itertuples(index=False)
    ]
    names = [[plain(name)] for name in ordered["layer_name"]]
    lines = [cell + name for cell, name in zip(cells, names, strict=True)]
    return [*missing, _table([*headings, "module"], lines, texts={len(headings)})]


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
    return _section(title, _table(headings, lines, texts={0}))


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]], texts: set[int]) -> str:
    """A table; ``texts`` are the columns that hold no numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        marks = ['class="text"' if number in texts else "" for number in range(len(cells))]
        pairs = zip(cells, marks, strict=True)
        inside = (f"<{f'{tag} {mark}'.strip()}>{_text(cell)}</{tag}>" for cell, mark in pairs)
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(row(line, "td") for line in lines)
    head = row(headings, "th")
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def _meanings(rows: pd.DataFrame) -> str:
    items = "\n".join(
        f"<dt>{_text(column.name)}</dt><dd>{_text(column.meaning)}</dd>"
        for column in shown_columns(rows)
    )
    return f'<dl class="meanings">\n{items}\n</dl>'
