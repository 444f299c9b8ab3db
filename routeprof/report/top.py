"""``routeprof top``: one frame of the live view, as wide and as high as the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routeprof.profile import Profile
from routeprof.report.summary import (
    NONE,
    coverage,
    duration,
    identity,
    layer_rows,
    not_captured,
    plain,
    ratio,
    whole,
    worst_first,
)
from routeprof.report.text import layers_that_fit

BARS = 24
"""Cells of a bar at most."""

HEADER, TABLE = 6, 4
"""Lines above the tables, and of a table besides its rows."""

_STYLES = {"live": "bold green", "stopped": "dim", "quiet": "bold red", "paused": "yellow"}


@dataclass(frozen=True)
class Moment:
    """What one frame is of.

    Attributes:
        whole: the recording; recent: its newest stretch, of ``seconds``; all of it, and None,
            where nobody knows the time.
        kind, said: what the engine does, in a word and in a sentence.
        message: what the reader must know of the figures; empty when all is well.
    """

    whole: Profile
    recent: Profile
    seconds: float | None
    kind: str
    said: str
    message: str = ""

    @property
    def stretch(self) -> str:
        """What the tables are of."""
        return "all" if self.seconds is None else f"the last {self.seconds:.0f} s"


def frame(moment: Moment, width: int, height: int, ranks: int | None = None) -> RenderableType:
    """The view.

    Args:
        ranks: expert-parallel ranks to show the load of; unset, those that the recording tells of.
    """
    return Group(*_parts(moment, width, height, ranks))


def _parts(moment: Moment, width: int, height: int, ranks: int | None) -> Iterator[RenderableType]:
    yield from _header(moment)
    rows = worst_first(layer_rows(moment.recent))
    if not len(rows):
        yield Text(f"\nno tokens in {moment.stretch}", "dim")
        return
    loads = _rank_loads(moment.recent, ranks)
    room = max(height - HEADER, 8)
    bars = min(len(loads), max(room // 2 - TABLE, 1)) if len(loads) else 0
    listed = max(room - TABLE - (bars + TABLE if bars else 0), 1)
    yield Text(f"\nlayers, the most imbalanced of {moment.stretch} first", "bold")
    yield layers_that_fit(rows.head(listed), width)[0]
    if bars:
        yield Text(f"\nload of {len(loads)} ranks ÷ mean, layers added up ({loads.name})", "bold")
        yield _bars(loads, bars, width)


def _header(moment: Moment) -> Iterator[RenderableType]:
    info, whole_profile = moment.whole.info, moment.whole
    name = plain(info.model.name or info.model.model_type or "model")
    head = Text.assemble((name, "bold"), "  ", (moment.kind, _STYLES.get(moment.kind, "yellow")))
    yield Text.assemble(head, f"  {plain(moment.said)}")
    rate = _rate(moment.recent)
    facts = {
        "tokens/s": NONE if np.isnan(rate) else whole(rate),
        "tokens": whole(_tokens(whole_profile)),
        "recorded": duration(whole_profile.seconds),
        "coverage": coverage(whole_profile.coverage),
        "phases": ", ".join(moment.recent.phases) or NONE,
    }
    yield Text("   ").join(Text.assemble((f"{key} ", "dim"), text) for key, text in facts.items())
    for line in (*not_captured(whole_profile), *([moment.message] if moment.message else [])):
        yield Text(plain(line), "bold red")


def _tokens(profile: Profile) -> float:
    tokens = profile.layers()["tokens"].dropna()
    return float(tokens.max()) if len(tokens) else np.nan


def _rate(recent: Profile) -> float:
    """Tokens of the layer with the most, by second of the windows that are shown."""
    return _tokens(recent) / recent.seconds if recent.seconds > 0 else np.nan


def _rank_loads(recent: Profile, ranks: int | None) -> pd.Series[float]:
    """Load of each rank ÷ mean, as recorded or else contiguous; empty where experts are fewer."""
    table = recent.rank_loads(ranks)
    for name in ("recorded", "contiguous"):
        own = table[table["placement"] == name]
        if len(own):
            loads = own.groupby("rank")["assignments"].sum().astype(float)
            return (loads / loads.mean()).rename(f"{name} placement")
    return pd.Series(dtype=float)


def _bars(loads: pd.Series[float], most: int, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    cells = max(min(BARS, width - 20), 1)
    for rank, load in loads.sort_values(ascending=False, kind="stable").head(most).items():
        filled = round(cells * load / loads.max()) if loads.max() else 0
        style = "red" if load > 1.2 else "green"
        table.add_row(f"rank {identity(rank)}", ratio(load), Text("█" * filled, style))
    return table
