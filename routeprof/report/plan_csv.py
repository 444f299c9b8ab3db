"""The layouts of ``routeprof plan`` as CSV."""

from __future__ import annotations

import csv
from io import StringIO
from typing import TYPE_CHECKING, Any

from routeprof.report.plan_json import split_row

if TYPE_CHECKING:
    from routeprof.plan.memory import Plan


def plan_csv(made: Plan) -> str:
    """One row for each layout; empty where a figure is not known."""
    text = StringIO()
    rows = [split_row(row) for row in made.splits]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
