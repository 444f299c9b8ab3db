"""The terminal summary: what was not captured first, then the layers, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from routeprof.diagnose import Finding, layer_list
from routeprof.report.summary import (
    DROPS,
    Column,
    coverage,
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
    from routeprof.profile import Profile

LAYERS_SHOWN = 12
RANKS_SHOWN = 16
GAP = 2
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def print_summary(
    profile: Profile,
    console: Console | None = None,
    *,
    all_layers: bool = False,
    now: float | None = None,
) -> None:
    """Print the summary.

    Args:
        console: where to; its width decides which columns are left out.
        all_layers: every layer rather than the most imbalanced.
        now: the time, to tell a live recording from one whose process was killed.
    """
    console = console or Console(highlight=False)
    for part in _parts(profile, console.width, all_layers, now):
        console.print(part, highlight=False)


def summary_text(
    profile: Profile, *, width: int = 100, all_layers: bool = False, now: float | None = None
) -> str:
    """The summary as text without colours; arguments as ``print_summary``."""
    console = Console(file=StringIO(), width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        print_summary(profile, console, all_layers=all_layers, now=now)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _parts(
    profile: Profile, width: int, all_layers: bool, now: float | None
) -> Iterator[RenderableType]:
    found, rows = profile.findings(now), layer_rows(profile)
    errors = [finding for finding in found if finding.severity == "error"]
    yield from (_finding(finding) for finding in errors)
    if errors:
        yield ""
    yield _header(key_figures(profile, rows))
    if profile.captured:
        yield from _layers(profile, rows, width, all_layers)
    yield from (Text(line, "bold red") for line in not_captured(profile))
    if profile.files is not None and len(profile.files.ranks) > 1:
        yield from _ranks(profile.ranks())
    for kind in ("phase", "tag"):
        groups = group_rows(profile, kind)
        if groups:
            yield Text(f"\nby {kind}: imbalance_ratio (max/mean) over the layers", "bold")
            yield _groups(kind, groups)
    yield ""
    yield from (_finding(finding) for finding in found if finding not in errors)


def _finding(finding: Finding) -> RenderableType:
    head = Text(f"{finding.severity}: ", _STYLES[finding.severity], end="")
    text = Text.assemble(head, plain(finding.evidence), f" [{finding.code}]")
    advice = Padding(Text(f"→ {plain(finding.suggestion)}", "dim"), (0, 0, 0, 2))
    grid = Table.grid()
    grid.add_row(text)
    grid.add_row(advice)
    return grid


def _header(figures: Sequence[tuple[str, str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value, _ in figures:
        grid.add_row(Text(name), Text(value))
    return grid


def _layers(
    profile: Profile, rows: pd.DataFrame, width: int, all_layers: bool
) -> Iterator[RenderableType]:
    ordered = worst_first(rows)
    listed = ordered if all_layers else ordered.head(LAYERS_SHOWN)
    table, left = layers_that_fit(listed, width)
    yield Text("\nlayers, the most imbalanced first", "bold")
    yield table
    if len(listed) < len(ordered):
        yield f"… and {len(ordered) - len(listed)} more; --all shows them"
    if left:
        yield Text(f"not shown at this width: {', '.join(left)}", "dim")
    dropping = [layer.index for layer in profile.info.layers if layer.drops]
    if dropping:
        yield DROPS.format(layer_list(dropping))


def layers_that_fit(rows: pd.DataFrame, width: int) -> tuple[Table, list[str]]:
    """The table of layers as wide as the terminal, and the columns that it leaves out."""
    columns = shown_columns(rows)
    cells = [[column.show(value) for value in rows[column.name]] for column in columns]
    kept = fitting(columns, cells, width)
    table = plain_table()
    for number in kept:
        table.add_column("\n".join(columns[number].heading), justify="right", no_wrap=True)
    for row in zip(*(cells[number] for number in kept), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table, [column.name for number, column in enumerate(columns) if number not in kept]


def fitting(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Positions of the columns that fit side by side, the most wanted first chosen."""
    kept: list[int] = []
    for number in sorted(range(len(columns)), key=lambda number: columns[number].rank):
        texts = (*columns[number].heading, *cells[number])
        width -= max(cell_len(text) for text in texts) + GAP
        if width < 0:
            break
        kept.append(number)
    return sorted(kept)


def _ranks(ranks: pd.DataFrame) -> Iterator[RenderableType]:
    table = plain_table()
    directories = ranks["directory"].nunique() > 1
    roles = [name for name in ("tp", "dp", "ep", "pp") if (ranks[name].fillna(0) > 0).any()]
    for heading in ("rank", *roles, "tokens", "steps", "assignments", "coverage", "problems"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("state", *(["directory"] if directories else [])):
        table.add_column(heading, overflow="fold")
    for row in ranks.head(RANKS_SHOWN).to_dict("records"):
        table.add_row(
            identity(row["rank"]),
            *(identity(row[name]) for name in roles),
            whole(row["tokens"]) if row["owns_tokens"] else f"({whole(row['tokens'])})",
            *(whole(row[name]) for name in ("steps", "assignments")),
            coverage(row["coverage"]),
            whole(row["problems"]),
            Text(plain(row["state"] if row["owns_tokens"] else f"{row['state']}, twin")),
            *([Text(plain(row["directory"]))] if directories else []),
        )
    yield Text("\nranks", "bold")
    yield table
    if len(ranks) > RANKS_SHOWN:
        yield f"… and {len(ranks) - RANKS_SHOWN} more; --json has them all"
    if not ranks["owns_tokens"].all():
        yield "a twin sees the tokens of another rank: (in brackets) and not in the sums"


def _groups(kind: str, groups: Sequence[dict[str, Any]]) -> Table:
    table = plain_table()
    table.add_column(kind, overflow="fold")
    for heading in ("steps", "tokens", "median", "worst", "in layer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in groups:
        table.add_row(
            Text(plain(row[kind])),
            whole(row["steps"]),
            whole(row["tokens"]),
            ratio(row["imbalance_ratio_median"]),
            ratio(row["imbalance_ratio_worst"]),
            identity(row["worst_layer"]),
        )
    return table


def plain_table() -> Table:
    """A table without a frame, its heading underlined."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
