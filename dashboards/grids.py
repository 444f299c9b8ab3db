"""Tables to browse: DataFrame to the columns and rows of an ag-grid (community features only)."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
import numpy as np
import pandas as pd

from routeprof.dashboards.definitions import Kind, definition
from routeprof.dashboards.formats import NOTHING

_FORMATS: dict[Kind, str] = {
    "count": "d3.format(',d')(params.value)",
    "ratio": "d3.format(',.2f')(params.value)",
    "number": "d3.format(',.4~g')(params.value)",
    "seconds": "d3.format(',.4~g')(params.value)",
    "share": "d3.format('.2%')(params.value)",
    "text": "params.value",
}

MOST_ROWS = 50_000
"""Rows that a browser is sent; the CSV file has them all."""


def grid(name: str, frame: pd.DataFrame) -> dag.AgGrid:
    """A grid; ``columns`` and ``rows`` fill it anew."""
    return dag.AgGrid(
        id={"grid": name},
        columnDefs=columns(frame),
        rowData=rows(frame),
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 110, "flex": 1},
        dashGridOptions={
            "animateRows": False,
            "enableCellTextSelection": True,
            "suppressFieldDotNotation": True,
            "rowHeight": 32,
            "headerHeight": 36,
        },
        style={"height": "340px"},
        className="numbers",
    )


def columns(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Column definitions: labels with units, number formats, a tooltip that defines each."""
    return [_column(str(name)) for name in frame.columns]


def _column(name: str) -> dict[str, Any]:
    meaning = definition(name)
    known = f"params.value == null ? '{NOTHING}' : {_FORMATS[meaning.kind]}"
    column: dict[str, Any] = {
        "field": name,
        "headerName": meaning.label,
        "headerTooltip": meaning.text,
        "valueFormatter": {"function": known},
    }
    if meaning.kind == "text":
        column["minWidth"] = 140
    else:
        column["type"] = "rightAligned"
    return column


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows with None for no value."""
    plain = frame.head(MOST_ROWS).astype(object)
    plain = plain.where(frame.head(MOST_ROWS).notna(), None)
    return [
        {str(name): _plain(value) for name, value in row.items()}
        for row in plain.to_dict("records")
    ]


def _plain(value: Any) -> Any:
    """JSON has no infinity, and numpy is not JSON."""
    value = value.item() if isinstance(value, np.generic) else value
    return "∞" if value == float("inf") else value
