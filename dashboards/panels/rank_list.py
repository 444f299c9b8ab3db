"""The ranks that were recorded, with what each counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards.live.activity import is_quiet
from routeprof.dashboards.view import Context
from routeprof.recording.fold import Windows
from routeprof.recording.reader import RankFiles

DIMENSIONS = ("tp", "dp", "ep", "pp")
COLUMNS = "run rank role host rank_state steps tokens assignments".split()


def nodes(context: Context) -> int:
    """Machines that the ranks ran on; at least one."""
    ranks = context.whole.files.ranks if context.whole.files else ()
    return max(len({rank.state.host for rank in ranks if rank.state}), 1)


def rank_list(context: Context) -> pd.DataFrame:
    """One row a rank: its part, machine and state, and what it counted of the selection.

    ``steps`` and ``tokens`` are of the layer with the most. Twins are in no sum, and have none.
    """
    files = context.whole.files
    ranks = files.ranks if files else ()
    counted = _counted(context.profile.totals.windows, len(context.profile.info.layers))
    roles = [rank.state.role for rank in ranks if rank.state]
    parallel = [name for name in DIMENSIONS if any(getattr(role, name) for role in roles)]
    rows = [_row(rank, context.now, parallel) | counted.get(rank.number, {}) for rank in ranks]
    columns = COLUMNS if files and files.runs > 1 else COLUMNS[1:]
    table = pd.DataFrame(rows, columns=columns)
    whole = ["steps", "tokens", "assignments"]
    table[whole] = table[whole].astype("Int64")
    return table


def _row(rank: RankFiles, now: float, parallel: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": rank.run, "rank": rank.rank, "rank_state": "unknown"}
    state = rank.state
    if state is None:
        return row
    parts = [f"{name} {getattr(state.role, name)}" for name in parallel]
    parts += [] if state.role.owns_tokens else ["twin"]
    return row | {
        "role": " · ".join(parts) or "alone",
        "host": state.host or None,
        "rank_state": "quiet" if is_quiet(state, now) else state.state,
    }


def _counted(windows: Windows, layers: int) -> dict[int, dict[str, int]]:
    """What each rank counted, by its number among all that were opened."""
    numbers, place = np.unique(windows.rank, return_inverse=True)

    def sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
        total = np.zeros((len(numbers), layers), dtype=np.int64)
        np.add.at(total, (place.reshape(-1), windows.layer), values)
        return total

    steps, tokens = sums(windows.steps).max(1, initial=0), sums(windows.tokens).max(1, initial=0)
    assignments = sums(windows.assignments).sum(1)
    return {
        int(number): {
            "steps": int(steps[n]),
            "tokens": int(tokens[n]),
            "assignments": int(assignments[n]),
        }
        for n, number in enumerate(numbers)
    }
