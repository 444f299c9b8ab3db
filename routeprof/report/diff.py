"""``routeprof diff`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.text import Text

from routeprof.compare.comparable import key_text
from routeprof.report.summary import NONE, identity, json_data, plain, ratio
from routeprof.report.text import plain_table
from routeprof.tables import tag_name

if TYPE_CHECKING:
    from routeprof.compare.difference import Difference, Group

SHOWN = 12


def difference_json(difference: Difference) -> dict[str, Any]:
    """All figures with all digits, for JSON; null where noise is not known."""
    data: dict[str, Any] = json_data(
        {
            "alpha": difference.alpha,
            "judged": difference.judged,
            "significant": difference.significant if difference.judged else None,
            "caveats": list(difference.caveats),
            "groups": [_group_data(group) for group in difference.groups],
            "layers": difference.layers.astype(object).to_dict("records"),
            "experts": difference.experts.astype(object).to_dict("records"),
        }
    )
    return data


def _group_data(group: Group) -> dict[str, Any]:
    a, b = group.assignments
    judged = group.judged
    return {
        "phase": group.key[0],
        "tag": group.key[1],
        "assignments_a": a,
        "assignments_b": b,
        "stretches_a": judged.stretches[0] if judged else None,
        "stretches_b": judged.stretches[1] if judged else None,
        "neighbours_alike": judged.alike if judged else None,
        "reason": group.reason,
    }


def print_difference(difference: Difference, console: Console, *, all_rows: bool = False) -> None:
    """The same as text: the verdict, the layers and then the experts that changed most.

    Args:
        all_rows: every layer and expert rather than those that changed, the first of them.
    """
    for part in _parts(difference, all_rows):
        console.print(part, highlight=False)


def _parts(difference: Difference, all_rows: bool) -> Iterator[RenderableType]:
    yield _verdict(difference)
    for line in difference.caveats:
        yield Text(f"note: {plain(line)}", "yellow")
    yield from _basis(difference)
    yield from _layers(difference, all_rows)
    yield from _experts(difference, all_rows)


def _verdict(difference: Difference) -> Text:
    layers, experts = difference.layers, difference.experts
    if not difference.judged:
        return Text("noise is not known: differences, and none of them called significant", "bold")
    seen = f"of {_judged(layers):,} layers and {_judged(experts):,} experts compared"
    if not difference.significant:
        return Text(f"no significant change {seen}, level {difference.alpha:g}", "bold")
    return Text(
        f"{_changed(layers):,} layers and {_changed(experts):,} experts changed by more than noise "
        f"{seen}, level {difference.alpha:g} for all together",
        "bold",
    )


def _judged(table: pd.DataFrame) -> int:
    return int(table["significant"].notna().sum())


def _changed(table: pd.DataFrame) -> int:
    return int(table["significant"].eq(True).sum())


def _basis(difference: Difference) -> Iterator[RenderableType]:
    table = plain_table()
    tagged = any(group.key[1] is not None for group in difference.groups)
    for heading in ("phase", *(["tag"] if tagged else [])):
        table.add_column(heading, overflow="fold")
    for heading in ("assignments\nA", "assignments\nB", "stretches\nA, B"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in difference.groups:
        judged = group.judged
        table.add_row(
            group.key[0],
            *([Text(plain(tag_name(group.key[1])))] if tagged else []),
            *(f"{number:,}" for number in group.assignments),
            "{}, {}".format(*judged.stretches) if judged else NONE,
        )
    yield table
    for reason, places in _reasons(difference).items():
        where = "everywhere" if len(places) == len(difference.groups) else "; ".join(places)
        yield Text(f"{where}: {reason}", "dim")


def _reasons(difference: Difference) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group in difference.groups:
        if group.reason:
            found.setdefault(group.reason, []).append(plain(key_text(group.key)))
    return found


def _layers(difference: Difference, all_rows: bool) -> Iterator[RenderableType]:
    rows = difference.layers
    listed = rows if all_rows else rows.head(SHOWN)
    headings = ("imbalance\nA", "imbalance\nB", "divergence\nbits", "noise\nbound", "p")
    table = plain_table()
    for heading in _where(rows, "layer"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "phase")
    for heading in (*headings, "experts\nchanged"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in listed.to_dict("records"):
        table.add_row(
            *_place(rows, row, "layer"),
            ratio(row["imbalance_a"]),
            ratio(row["imbalance_b"]),
            *(_digits(row[name]) for name in ("divergence", "noise_bound")),
            _p(row["p"]),
            identity(row["experts_changed"]),
            _flag(row["significant"]),
        )
    yield Text("\nlayers, the largest significant change first", "bold")
    yield table
    yield from _more(rows, listed)


def _experts(difference: Difference, all_rows: bool) -> Iterator[RenderableType]:
    rows = difference.experts
    if difference.judged and not all_rows:
        rows = rows[rows["significant"].eq(True)]
    if not len(rows):
        return
    listed = rows if all_rows else rows.head(SHOWN)
    table = plain_table()
    for heading in (*_where(difference.experts, "layer"), "expert"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "phase")
    for heading in ("share\nA, %", "share\nB, %", "change\npoints", "± noise", "change\n%", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in listed.to_dict("records"):
        table.add_row(
            *_place(difference.experts, row, "layer"),
            identity(row["expert"]),
            *(_digits(100 * row[name]) for name in ("share_a", "share_b")),
            _signed(100 * row["share_change"]),
            _digits(100 * row["noise_bound"]),
            "new" if not row["assignments_a"] else _signed(100 * row["relative_change"]),
            _p(row["p"]),
        )
    kind = "experts that changed" if difference.judged and not all_rows else "experts"
    yield Text(f"\n{kind}, the largest change first", "bold")
    yield table
    yield from _more(rows, listed)


def _where(rows: pd.DataFrame, last: str) -> Sequence[str]:
    return [*(["phase"] if _several(rows, "phase") else []), *_tagged(rows), last]


def _place(rows: pd.DataFrame, row: dict[Any, Any], last: str) -> list[RenderableType]:
    names = _where(rows, last)
    return [Text(plain(row[name]) if name != last else identity(row[name])) for name in names]


def _tagged(rows: pd.DataFrame) -> list[str]:
    return ["tag"] if _several(rows, "tag") else []


def _several(rows: pd.DataFrame, name: str) -> bool:
    return rows[name].nunique() > 1


def _more(rows: pd.DataFrame, listed: pd.DataFrame) -> Iterator[RenderableType]:
    if len(listed) < len(rows):
        yield f"… and {len(rows) - len(listed):,} more; --all shows them"


def _digits(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.3g}"


def _signed(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:+.3g}"


def _p(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.3f}"


def _flag(value: Any) -> Text:
    if pd.isna(value):
        return Text("not judged", "dim")
    return Text("changed", "bold yellow") if value else Text("")
