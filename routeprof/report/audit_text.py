"""``routeprof audit`` as text: what breaks first, then the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from routeprof.plan.audit.mixed import Mixed
from routeprof.plan.audit.verdicts import Verdict
from routeprof.plan.weights import SCHEMES, Audit
from routeprof.report.audit import layers_table
from routeprof.report.summary import NONE, plain, share, size
from routeprof.report.text import plain_table

SHOWN = tuple(scheme for scheme in SCHEMES if scheme not in ("fp8-unscaled", "fp8-median"))
"""Schemes with a column; what would be done by mistake is in CSV and JSON."""

LAYERS_SHOWN = 12
EXPERTS_SHOWN = 8
_STYLES = {
    "not-finite": "bold red",
    "outlier": "yellow",
    "vanishing": "yellow",
    "near-zero": "yellow",
}
ERRORS = "error: root mean square of the rounding error ÷ that of the weights, worst expert"


def print_audit(
    audit: Audit,
    found: Sequence[Verdict],
    plan: Mixed | None,
    console: Console,
    *,
    all_layers: bool,
) -> None:
    """Print the audit."""
    for part in [*_parts(audit, found, all_layers), *_plan(plan, all_layers)]:
        console.print(part, highlight=False)


def _parts(audit: Audit, found: Sequence[Verdict], every: bool) -> Iterator[RenderableType]:
    table = layers_table(audit)
    experts = sum(one.experts for one in audit.matrices)
    layers = table["name"].nunique()
    yield f"{layers} MoE layers, {experts:,} expert matrices, {size(audit.read)}"
    if audit.sample > 1:
        yield f"errors and shares are of one in {audit.sample} groups; maxima of all elements"
    for reason, names in audit.skipped.items():
        yield Text(f"not audited: {len(names)} tensors, {plain(reason)}", "yellow")
    yield ""
    for one in found:
        yield _verdict(one)
    if not found:
        yield "no expert's range breaks a shared scale"
    yield Text("\nlayers, the widest range of experts first", "bold")
    ordered = table.sort_values("max_ratio", ascending=False, kind="stable", na_position="first")
    shown = ordered if every else ordered.head(LAYERS_SHOWN)
    yield _layers(shown)
    if len(shown) < len(ordered):
        yield f"… and {len(ordered) - len(shown)} more; --all shows them"
    yield Text(ERRORS, "dim")


def _verdict(one: Verdict) -> RenderableType:
    names = ", ".join(map(str, one.experts[:EXPERTS_SHOWN]))
    more = len(one.experts) - EXPERTS_SHOWN
    which = f"{names} and {more} more" if more > 0 else names
    noun = "expert" if len(one.experts) == 1 else "experts"
    where = f"{plain(one.layer)} {plain(one.matrix)} {noun} {which}"
    grid = Table.grid()
    head = Text(f"{one.kind}: ", _STYLES[one.kind], end="")
    grid.add_row(Text.assemble(head, f"{where}: {one.evidence}"))
    grid.add_row(Text(f"  → {one.suggestion}", "dim"))
    return grid


def _layers(rows: pd.DataFrame) -> Table:
    table = plain_table()
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("matrix", no_wrap=True)
    for heading in ("max ÷\nmedian", "max ÷\nrms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for scheme in SHOWN:
        table.add_column(
            scheme.replace("-", "\n").removesuffix("\ngroup"), justify="right", no_wrap=True
        )
    for row in rows.to_dict("records"):
        table.add_row(
            _layer(row),
            plain(row["matrix"]),
            _number(row["max_ratio"]),
            _number(row["outlier_ratio"]),
            *(_error(row[f"error_{scheme.replace('-', '_')}"]) for scheme in SHOWN),
        )
    return table


def _plan(plan: Mixed | None, every: bool) -> Iterator[RenderableType]:
    if plan is None:
        return
    saved = plan.source_bytes - plan.bytes
    yield Text(f"\nprecision by hotness: hot experts {plan.hot}, others {plan.cold}", "bold")
    yield (
        f"{size(plan.bytes)} instead of {size(plan.source_bytes)}: {size(saved)} saved; "
        f"{share(plan.low_share)} of the assignments go to experts in {plan.cold}"
    )
    for name in plan.not_recorded:
        yield Text(f"{plain(name)} was not recorded: kept as it is", "yellow")
    table = plain_table()
    for heading in ("layer", "hot experts", "assignments to others", "tokens that meet one"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = plan.layers.sort_values("low_share", ascending=False, kind="stable")
    shown = rows if every else rows.head(LAYERS_SHOWN)
    for row in shown.to_dict("records"):
        hot = f"{row['hot_experts']} of {row['experts']}"
        table.add_row(_layer(row), hot, share(row["low_share"]), _touched(row))
    yield table
    if len(shown) < len(rows):
        yield f"… and {len(rows) - len(shown)} more; --all shows them"


def _touched(row: dict[Any, Any]) -> str:
    low, high = row["tokens_touched_lower"], row["tokens_touched_upper"]
    return share(low) if low == high or pd.isna(low) else f"{share(low)} to {share(high)}"


def _number(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.3g}"


def _layer(row: dict[Any, Any]) -> str:
    return str(row["layer"]) if row["layer"] >= 0 else NONE


def _error(value: float) -> str:
    return NONE if pd.isna(value) else f"{value * 100:.2g}%"
