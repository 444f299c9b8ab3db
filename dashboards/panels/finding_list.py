"""What was found, as a list: what, where, why, what to do, and the view that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from routeprof.dashboards.components import layer_link
from routeprof.dashboards.state import ViewState
from routeprof.diagnose import Finding, layer_list

_SEVERITY = {"error": "red", "warning": "orange", "info": "blue"}

SEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "hot-experts": ("layer", {}),
    "collapse": ("layer", {}),
    "model-skew": ("ranks", {"redundant": 0}),
    "narrow-input": ("prompts", {}),
    "step-skew": ("layer", {}),
    "hot-cold": ("heatmap", {}),
    "dead-experts": ("heatmap", {}),
    "small-gemms": ("layer", {"phase": "decode"}),
    "overflow": ("overflow", {}),
    "rank-imbalance": ("ranks", {"redundant": 0}),
    "cross-node": ("layouts", {}),
    "drift-within": ("timeline", {}),
    "low-margin": ("layer", {}),
    "slower-than-dense": ("layouts", {}),
    "hybrid": ("plan", {}),
}
"""The view that shows it, and what has to be chosen there; others are on Health."""


def finding_list(
    title: str, findings: Sequence[Finding], state: ViewState, nothing: str, more: Any = None
) -> Any:
    """Findings in their order.

    Args:
        nothing: what to say where there are none.
        more: where others are, see ``more_at``.
    """
    if not findings:
        body: Any = html.P(nothing, className="caption")
    else:
        body = html.Ul([_finding(item, state) for item in findings], className="findings")
    return html.Section(
        [html.H2(title), body, more], className="panel wide", **{"aria-label": title}
    )


def _finding(item: Finding, state: ViewState) -> Any:
    gain = [html.Div(["= ", item.gain], className="finding-gain")] if item.gain else []
    return html.Li(
        [
            dmc.Badge(item.severity, color=_SEVERITY[item.severity], variant="light"),
            html.Div(
                [
                    html.Div(_head(item, state), className="finding-head"),
                    html.Div(f"{item.evidence[:1].upper()}{item.evidence[1:]}."),
                    html.Div(["→ ", item.suggestion], className="finding-remedy"),
                    *gain,
                ]
            ),
        ]
    )


def _head(item: Finding, state: ViewState) -> list[Any]:
    parts: list[Any] = [html.Code(item.code)]
    if len(item.layers) == 1:
        parts += [" Layer ", layer_link(item.layers[0], state)]
    elif item.layers:
        parts.append(f" Layers {layer_list(item.layers)}")
    if item.phase != "all":
        parts.append(f"{',' if item.layers else ''} {item.phase}")
    if item.code in SEEN:
        parts += [" · ", seen_at(item, state)]
    return parts


def seen_at(item: Finding, state: ViewState) -> Any:
    """A link to the view that shows it, with the same selection."""
    path, chosen = SEEN[item.code]
    changes = chosen | ({"layer": _layer(item)} if path == "layer" else {})
    return dcc.Link(f"see {path.capitalize()}", href=f"/{path}{state.query(**changes)}")


def _layer(item: Finding) -> int | None:
    """The layer to look at; None for the worst."""
    if len(item.layers) == 1:
        return item.layers[0]
    return int(item.figures["layer"]) if "layer" in item.figures else None


def more_at(text: str, path: str, state: ViewState) -> Any:
    """A link to where the others are listed."""
    link = dcc.Link(text, href=f"/{path}{state.selection.query()}")
    return html.P(link, className="caption")
