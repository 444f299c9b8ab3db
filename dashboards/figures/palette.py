"""Colours and plotly templates, light and dark, readable with every kind of colour vision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

Scheme = Literal["light", "dark"]

SEQUENTIAL = "Cividis"


@dataclass(frozen=True)
class Palette:
    """Colours of one scheme; the first three tell series apart, by brightness as well as hue."""

    ink: str
    faint: str
    grid: str
    absent: str
    blue: str
    orange: str
    grey: str
    diverging: tuple[str, ...]


PALETTES: dict[Scheme, Palette] = {
    "light": Palette(
        ink="#2b3138",
        faint="#69727d",
        grid="#e6e9ed",
        absent="rgba(120,130,140,0.16)",
        blue="#0f6db3",
        orange="#d5700a",
        grey="#8c96a0",
        diverging=("#0b3c6f", "#3f8cc5", "#a9cfe8", "#f6f6f4", "#f7c58d", "#dd7a1c", "#7a3403"),
    ),
    "dark": Palette(
        ink="#dfe3e8",
        faint="#98a2ad",
        grid="#353b42",
        absent="rgba(160,170,180,0.14)",
        blue="#5bb1ec",
        orange="#f5a13d",
        grey="#8a949e",
        diverging=("#bfe3fb", "#5bb1ec", "#255b86", "#2a2f35", "#8a5314", "#f0962c", "#ffe0b3"),
    ),
}

FONT = "-apple-system, BlinkMacSystemFont, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


def template(scheme: Scheme) -> go.layout.Template:
    """Plotly's looks in one scheme."""
    colours = PALETTES[scheme]
    axis = {
        "gridcolor": colours.grid,
        "linecolor": colours.grid,
        "zerolinecolor": colours.grid,
        "ticks": "",
        "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13, "color": colours.faint}},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": colours.ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": [colours.blue, colours.orange, colours.grey],
            "xaxis": axis,
            "yaxis": axis,
            "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
            "hoverlabel": {"font": {"family": FONT}},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "bargap": 0.25,
        }
    )


def diverging(scheme: Scheme) -> list[list[object]]:
    """A colour scale whose middle is the page: what is as it should be does not stand out."""
    colours = PALETTES[scheme].diverging
    return [[place / (len(colours) - 1), colour] for place, colour in enumerate(colours)]
