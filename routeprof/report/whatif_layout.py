"""``routeprof whatif layout`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from routeprof.report.summary import (
    NONE,
    Column,
    json_data,
    ratio,
    selection_text,
    share,
    size,
)
from routeprof.report.text import fitting, plain_table

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.whatif.layout_sums import Setting
    from routeprof.whatif.layouts import Prediction, Predictions

NO_TOKENS = "what GPUs send each other needs level tokens: record with level='tokens'"
LIMITS = (
    "times are of the MoE layers and attention's all-reduce at peak rates, one after another\n"
    "rates: {}"
)


def layout_json(made: Predictions, profile: Profile, setting: Setting) -> dict[str, Any]:
    """Every layout, the quickest first, and what was supposed, for JSON."""
    hardware = asdict(setting.gpu)
    data: dict[str, Any] = json_data(
        {
            "phase": profile.phase or "all",
            "tag": profile.tag or "all",
            "steps": made.steps,
            "every": made.every,
            "fitted_steps": made.fitted or None,
            "placement": setting.placing,
            "redundant": setting.redundant,
            "relay": setting.relay,
            "hardware": hardware,
            "sizes": asdict(setting.sizes),
            "layouts": [_row(one) for one in made.rows],
            **({} if made.traffic else {"note": NO_TOKENS}),
        }
    )
    return data


def _row(one: Prediction) -> dict[str, Any]:
    figures = asdict(one)
    return {**figures.pop("layout"), **figures, "total_ms": one.total_ms}


def print_layouts(
    made: Predictions, profile: Profile, setting: Setting, console: Console, *, most: int
) -> None:
    """The same as text.

    Args:
        most: layouts to show.
    """
    for part in _parts(made, profile, setting, most, console.width):
        console.print(part, highlight=False)


def _parts(
    made: Predictions, profile: Profile, setting: Setting, most: int, width: int
) -> Iterator[RenderableType]:
    steps = f"{made.steps:,} steps" + (f", one in {made.every:,}" if made.every > 1 else "")
    yield f"{selection_text(profile)}; {steps}; {PLACED[setting.placing]}"
    rows = [_shown(one) for one in made.rows]
    yield from _gemms(rows)
    yield ""
    columns = COLUMNS if rows[0]["nodes"] > 1 else ONE_NODE
    yield from _table(rows[:most], columns, width)
    if len(rows) > most:
        yield f"… and {len(rows) - most} more; --top {len(rows)} shows them"
    yield ""
    if made.fitted:
        yield f"placements were fitted on the {made.fitted:,} steps before these"
    yield LIMITS.format(setting.gpu.source)
    if not made.traffic:
        yield NO_TOKENS


def _shown(one: Prediction) -> dict[str, Any]:
    """A row with what the table joins."""
    attention, experts = str(one.layout).split(", ")
    joined = {
        "layout_attention": attention,
        "layout_experts": experts,
        "sent_inside": one.dispatch_inside + one.combine_inside,
        "sent_between": one.dispatch_between + one.combine_between,
    }
    return _row(one) | joined


def _gemms(rows: list[dict[str, Any]]) -> Iterator[str]:
    """They are the same in each layout, unless replicas share an expert's tokens."""
    sizes = [row["tokens_per_gemm"] for row in rows]
    small = [row["small_gemm_share"] for row in rows]
    least, most = (f"{pick(sizes):,.1f}" for pick in (min, max))
    fewest, greatest = (share(pick(small)) for pick in (min, max))
    yield (
        f"expert GEMMs: {least if least == most else f'{least} to {most}'} tokens on average, "
        f"{fewest if fewest == greatest else f'{fewest} to {greatest}'} of them below 16"
    )


def _table(
    rows: list[dict[str, Any]], columns: tuple[Column, ...], width: int
) -> Iterator[RenderableType]:
    unit, scale = ("ms", 1.0) if max(_known(rows), default=1.0) >= 0.1 else ("µs", 1e3)
    cells = [[_cell(column, row[column.name], scale) for row in rows] for column in columns]
    kept = fitting(columns, cells, width)
    table = plain_table()
    for number in kept:
        heading = "\n".join(columns[number].heading).replace("time", unit)
        text = columns[number].name.startswith("layout")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for row in zip(*(cells[number] for number in kept), strict=True):
        table.add_row(*row)
    yield table
    left = [columns[number].name for number in range(len(columns)) if number not in kept]
    if left:
        yield f"not shown at this width: {', '.join(left)}"


def _known(rows: list[dict[str, Any]]) -> list[float]:
    return [row["total_ms"] for row in rows if not isnan(row["total_ms"])]


def _cell(column: Column, value: Any, scale: float) -> str:
    return column.show(value * scale if column.name.endswith("_ms") else value)


def _time(value: float) -> str:
    return NONE if isnan(value) else f"{value:,.{2 if value < 100 else 0}f}"


def _factor(value: float) -> str:
    return NONE if isnan(value) else f"{value:.3f}"


COLUMNS = (
    Column("layout_attention", ("", "attention"), str, 0, ""),
    Column("layout_experts", ("", "experts"), str, 0, ""),
    Column("total_ms", ("step", "time"), _time, 0, ""),
    Column("attention_ms", ("attention", "time"), _time, 2, ""),
    Column("dispatch_ms", ("dispatch", "time"), _time, 2, ""),
    Column("experts_ms", ("experts", "time"), _time, 2, ""),
    Column("combine_ms", ("combine", "time"), _time, 2, ""),
    Column("straggler_factor", ("slowest", "rank"), _factor, 1, ""),
    Column("ranks_per_token", ("ranks", "per token"), ratio, 5, ""),
    Column("nodes_per_token", ("nodes", "per token"), ratio, 5, ""),
    Column("sent_inside", ("sent", "inside"), size, 3, ""),
    Column("sent_between", ("sent", "between"), size, 3, ""),
    Column("expert_bytes", ("weights", "per GPU"), size, 4, ""),
)
ONE_NODE = tuple(
    column for column in COLUMNS if column.name not in ("nodes_per_token", "sent_between")
)
PLACED = {
    "contiguous": "experts in order",
    "eplb": "experts placed by EPLB",
    "routeprof": "experts placed by routeprof",
}
