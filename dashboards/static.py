"""The dashboard as one file that needs neither a server nor a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from time import time

import pandas as pd
import plotly.io as pio
from plotly.offline import get_plotlyjs

from routeprof.dashboards.components import card, plain_table
from routeprof.dashboards.figures.common import GRAPH_CONFIG
from routeprof.dashboards.markup import to_html
from routeprof.dashboards.preview import context_for
from routeprof.dashboards.view import Content, Filled, Panel, View
from routeprof.dashboards.views import VIEWS
from routeprof.profile import Profile
from routeprof.report.files import write_text

MOST_ROWS = 300
"""Rows of a figure's table; the CSV files have them all."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_INVITATION = re.compile(r" ?\b(Click|Drag) [^.]*\.")
"""Sentences of captions that only a page with a server keeps its word on."""

_STYLE = """
body { max-width: 1280px; margin: 0 auto; padding: 24px; background: var(--ground);
  font: 15px/1.5 system-ui, sans-serif; color: #2b3138; }
header p, .view > p { color: var(--soft); margin: 4px 0 16px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 24px; }
.view { margin-bottom: 48px; }
.view > h2 { font-size: 22px; }
h3 { font-size: 16px; margin: 0 0 8px; }
summary { cursor: pointer; color: var(--soft); font-size: 13px; margin-top: 8px; }
.badge { border: 1px solid var(--line); border-radius: 10px; padding: 0 8px; font-size: 12px;
  justify-self: start; align-self: start; }
@media print { .panel { break-inside: avoid; } summary { display: none; } }
"""

_SCRIPT = """
const config = JSON.parse(document.getElementById("config").textContent);
const draw = (place) => {
  const figure = JSON.parse(place.nextElementSibling.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, config);
};
// Figures are drawn when they come near the screen: twenty at once would take seconds.
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { watch.unobserve(entry.target); draw(entry.target); }
  }
}, { rootMargin: "600px" });
document.querySelectorAll(".plot").forEach((place) => watch.observe(place));
window.addEventListener("beforeprint", () =>
  document.querySelectorAll(".plot:not(.js-plotly-plot)").forEach(draw));
"""


def write_page(profile: Profile, path: str | Path, *, now: float | None = None) -> Path:
    """Write every view of the dashboard to a file, whose directory is made; returns the file."""
    return write_text(path, page(profile, now=now))


def page(profile: Profile, *, now: float | None = None) -> str:
    """Every view that needs one recording only, as one HTML document of about 5 MB.

    Args:
        now: the time, to tell a live recording from one whose process was killed.
    """
    context = context_for(profile, now=time() if now is None else now)
    views = [view for view in VIEWS if "against" not in view.controls]
    style = (Path(__file__).parent / "assets" / "routeprof.css").read_text("utf-8") + _STYLE
    model = escape(profile.info.model.name or "a model")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en" data-mantine-color-scheme="light">\n<head>',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Expert routing of {model}</title>",
            f"<style>{style}</style>\n</head>\n<body>",
            f"<header><h1>Expert routing of {model}</h1>",
            f"<p>routeprof dashboard, {escape(context.selection)}</p></header>",
            "<nav>",
            *(f'<a href="#{view.path}">{view.title}</a>' for view in views),
            "</nav>\n<main>",
            *(_view(view, view.fill(context)) for view in views),
            "</main>",
            f'<script type="application/json" id="config">{_json(json.dumps(GRAPH_CONFIG))}',
            f"</script>\n<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>",
            "</body>\n</html>\n",
        ]
    )


def _view(view: View, content: Content) -> str:
    return "\n".join(
        [
            f'<section class="view" id="{view.path}"><h2>{view.title}</h2>',
            f"<p>{view.question}</p>",
            f'<div class="cards">{to_html([card(item) for item in content.cards])}</div>',
            f'<div class="panels">{to_html(list(content.lead))}</div>',
            '<div class="panels">',
            *(_panel(panel, content.panels[panel.name]) for panel in view.panels),
            f'</div>\n<div class="panels">{to_html(list(content.body))}</div></section>',
        ]
    )


def _panel(panel: Panel, filled: Filled) -> str:
    return "\n".join(
        [
            f'<section class="{"panel wide" if panel.wide else "panel"}">',
            f"<h3>{panel.title}</h3>",
            f'<div class="plot" role="img" aria-label="{escape(panel.label)}" '
            f'style="height: {panel.height}px"></div>',
            f'<script type="application/json">{_json(pio.to_json(filled.figure))}</script>',
            f'<p class="caption">{escape(_INVITATION.sub("", filled.caption), quote=False)}</p>',
            *_numbers(filled.table),
            "</section>",
        ]
    )


def _numbers(table: pd.DataFrame) -> Iterator[str]:
    rows = to_html(plain_table("Numbers", table.head(MOST_ROWS)))
    if rows:
        more = f", the first {MOST_ROWS:,} of {len(table):,} rows" if len(table) > MOST_ROWS else ""
        yield f"<details><summary>Numbers{more}</summary>{rows}</details>"


def _json(text: str | None) -> str:
    """JSON that cannot end the script element it stands in."""
    return (text or "").replace("<", "\\u003c")
