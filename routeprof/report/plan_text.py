"""``routeprof plan`` on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from routeprof.report.plan_page import (
    HELD,
    HOW,
    columns,
    facts,
    formats_text,
    hottest_rows,
    obstacles,
    parts_rows,
    spanning,
    verdict,
)
from routeprof.report.text import fitting, plain_table

if TYPE_CHECKING:
    from routeprof.plan.memory import Plan


def print_plan(made: Plan, console: Console, *, most: int) -> None:
    """Print the plan.

    Args:
        most: layouts to show.
    """
    for part in _parts(made, console.width, most):
        console.print(part, highlight=False)


def _parts(made: Plan, width: int, most: int) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts(made):
        grid.add_row(Text(name), Text(value))
    yield grid
    yield ""
    yield _table(("weights", "parameters", "bytes", "share"), parts_rows(made))
    yield ""
    yield Text(verdict(made), "bold")
    yield from _layouts(made, width, most)
    if made.measured is not None:
        yield ""
        yield _table(("hottest in layer", "expert", "share", "÷ mean"), hottest_rows(made))
    yield ""
    lines = [HOW, HELD, *formats_text(made), spanning(made), *obstacles(made), *made.model.notes]
    yield from (Text(line, "dim") for line in lines if line)


def _layouts(made: Plan, width: int, most: int) -> Iterator[RenderableType]:
    shown = columns(made)
    rows = made.splits[:most]
    cells = [[show(row) for row in rows] for _, show in shown]
    kept = fitting([column for column, _ in shown], cells, width)
    table = plain_table()
    for number in kept:
        column = shown[number][0]
        text = column.name == "experts" or number == 0
        heading = "\n".join(column.heading)
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for row in zip(*(cells[number] for number in kept), strict=True):
        table.add_row(*row)
    yield table
    if len(made.splits) > most:
        more = len(made.splits) - most
        yield f"… and {more} more; --top {len(made.splits)} shows them"
    left = [" ".join(c.heading).strip() for n, (c, _) in enumerate(shown) if n not in kept]
    if left:
        yield Text(f"not shown at this width: {', '.join(left)}", "dim")


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = plain_table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
