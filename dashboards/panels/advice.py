"""Which capacity factor to take, and overflow at every factor; where that is quickly computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards.components import plain_table, told
from routeprof.dashboards.panels.command_line import command_line
from routeprof.dashboards.view import Context
from routeprof.errors import RouteprofError
from routeprof.whatif.advice import Recommendation, recommend
from routeprof.whatif.capacity import curve

MOST_SUMS = 20_000
"""(window, layer) sums from which recommendations are still made."""

STEPS = (0.05, 0.1, 0.25, 0.5, 1.0)
POINTS = 100
MOST_POINTS_CELLS = 20_000_000
"""(step, expert) pairs times factors that a curve still goes through."""

COLUMNS = "goal advice_phase factor_advised certainty overflow_most padding_most".split()
_GOALS = {"latency": "latency-bound serving", "quality": "quality-bound scoring"}
_TITLE = "Capacity factor to take"


def advice(context: Context) -> Any:
    """A factor for serving and one for scoring, or the command that finds them."""
    profile = context.profile
    if not context.steps and len(profile.totals.windows.end) > MOST_SUMS:
        text = "To recommend one from so many sums takes longer than a page may take."
        return told(_TITLE, text, command_line(context, "capacity"))
    try:
        return plain_table(_TITLE, context.once("advice", lambda: _table(recommend(profile))))
    except RouteprofError:  # nothing was routed, or no factors were recorded
        return None


def _table(advised: list[Recommendation]) -> pd.DataFrame:
    rows = [
        (
            _GOALS[one.goal],
            one.phase,
            f"{one.factor:g}",
            one.needed.certainty,
            one.overflow_rate,
            one.padding_rate,
        )
        for one in advised
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def every_factor(context: Context, every: pd.DataFrame) -> pd.DataFrame | None:
    """Rates at factors between the recorded ones too, exact from steps; None without these.

    Args:
        every: rates at the recorded factors, in ascending order.
    """
    steps = context.steps
    cells = sum(own.counts.size for own in steps.values())
    points = min(POINTS, MOST_POINTS_CELLS // max(cells, 1))
    factors = _between(every["capacity_factor"].tolist(), points)
    if not steps or not factors:
        return None
    return context.once("every factor", lambda: _curve(context, every, factors))


def _between(recorded: list[float], most: int) -> list[float]:
    """The recorded factors and round ones between them, at most so many; none if too many."""
    if len(recorded) < 2:
        return []
    low, high = recorded[0], recorded[-1]
    for step in STEPS:
        numbers = np.arange(np.ceil(low / step), high / step) * step
        if len(numbers) + len(recorded) <= most:
            return sorted({*recorded, *np.round(numbers, 2).tolist()})
    return []


def _curve(context: Context, every: pd.DataFrame, factors: list[float]) -> pd.DataFrame | None:
    table = curve(context.profile, factors)
    if (table["certainty"] != "exact").any():  # the model itself drops
        return None
    together = table[table["layer"] == "all"].set_index("capacity_factor")
    apart = table[table["layer"] != "all"].groupby("capacity_factor")["overflow_rate"].max()
    fine = pd.DataFrame(
        {
            "capacity_factor": together.index,
            "overflow_rate": together["overflow_rate"].to_numpy(),
            "overflow_worst": apart.reindex(together.index).to_numpy(),
            "padding_rate": together["padding_rate"].to_numpy(),
        }
    ).sort_values("capacity_factor", ignore_index=True)
    return fine if _agrees(fine, every) else None


def _agrees(fine: pd.DataFrame, every: pd.DataFrame) -> bool:
    """Whether both say the same of the recorded factors: not where steps or ids are missing."""
    same = fine[fine["capacity_factor"].isin(every["capacity_factor"])]
    return bool(np.allclose(same.to_numpy(), every[same.columns].to_numpy()))
