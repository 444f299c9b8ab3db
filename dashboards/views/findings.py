"""Findings: what is wrong with the routing, and what to do?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd
from dash import html

from routeprof.dashboards import formats
from routeprof.dashboards.components import told
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.findings import findings_by_layer
from routeprof.dashboards.panels.command_line import diagnose_line
from routeprof.dashboards.panels.diagnosis import NO_TOKENS, Judged, judged
from routeprof.dashboards.panels.finding_list import finding_list, more_at
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View
from routeprof.diagnose import Severity, layer_list

COLUMNS = "severity finding finding_layers finding_phase evidence suggestion gain".split()
_CARDS: dict[Severity, str] = {
    "error": "errors_found",
    "warning": "warnings_found",
    "info": "notes_found",
}

NOTHING = "Nothing stands out in what is selected."
NOTHING_QUICK = "The quick rules find nothing in what is selected."
NO_LAYERS = "No finding names a layer."


def fill(context: Context) -> Content:
    """The page's content."""
    found = judged(context)
    state = context.state
    number = formats.plural(len(found.trust), "finding")
    trust = more_at(f"{number} on what was captured, on Health", "health", state)
    more = trust if found.trust else None
    return Content(
        panels={"where": where(context, found)},
        cards=cards(found),
        lead=[finding_list("What stands out", found.findings, state, _nothing(found), more)],
        body=[unjudged(found), command(context)],
    )


def _nothing(found: Judged) -> str:
    if found.why == NO_TOKENS:
        return NO_TOKENS
    return NOTHING_QUICK if found.why else NOTHING


def cards(found: Judged) -> list[Card]:
    """How many there are; a dash where nothing could be judged."""
    numbers = Counter(one.severity for one in found.findings)
    empty = found.why == NO_TOKENS
    note = "nothing was counted" if empty else "by the quick rules" if found.why else "by all rules"
    made = [
        Card(
            name,
            formats.NOTHING if empty else str(numbers[severity]),
            note,
            "bad" if severity != "info" and numbers[severity] else "",
        )
        for severity, name in _CARDS.items()
    ]
    rules = formats.NOTHING if found.unjudged is None else str(len(found.unjudged))
    return [*made, Card("rules_unjudged", rules, "not computed" if found.why else "rules, below")]


def where(context: Context, found: Judged) -> Filled:
    """Which layers which finding names, and all of it as a table."""
    table = pd.DataFrame(
        [
            (
                one.severity,
                one.code,
                layer_list(one.layers) or None,
                one.phase,
                one.evidence,
                one.suggestion,
                one.gain or None,
            )
            for one in found.findings
        ],
        columns=COLUMNS,
    )
    named = [(one.code, one.severity, one.layers) for one in found.findings if one.layers]
    if not named:
        text = NO_TOKENS if found.why == NO_TOKENS else NO_LAYERS
        return Filled(blank(text, context.scheme), "", table)
    caption = (
        f"Layers that the findings name, {context.selection}. Those of the whole recording are in "
        "the list only. Click a mark for its layer."
    )
    return Filled(findings_by_layer(named, context.absent, context.scheme), caption, table)


def unjudged(found: Judged) -> Any:
    """Rules that could not be judged, and what it would take."""
    if found.unjudged is None:
        return told("Not judged", found.why)
    rows = [html.Li([html.Code(code), f" {text}"]) for code, text in found.unjudged.items()]
    if not rows:
        return told("Not judged", "Every rule was judged.")
    intro = html.P("What would be needed; no finding there means nothing.", className="caption")
    return html.Section(
        [html.H2("Not judged"), intro, html.Ul(rows, className="unjudged")],
        className="panel wide",
        **{"aria-label": "Not judged"},
    )


def command(context: Context) -> Any:
    """The command that says the same."""
    text = (
        "The command has more options: an earlier recording to look for drift (--since), the "
        "engine's capacity factor, other thresholds, other GPUs. Time is modelled at an H100's "
        "peak rates. routeprof check makes an exit status of it."
    )
    return told("The same from the command line", text, diagnose_line(context))


VIEW = View(
    path="findings",
    title="Findings",
    question="What is wrong with the routing, and what to do?",
    reports=("findings",),
    panels=(
        Panel(
            "where",
            "Findings by layer",
            "Chart of marks: layers that each finding names, by severity",
            height=300,
            leads="layer",
        ),
    ),
    fill=fill,
    controls=("between", "ranks", "gains"),
)
