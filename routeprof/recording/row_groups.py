"""Row groups of tokens parts: a layer and a phase with many ids has one of its own, so that it is
read without the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.recording.places import parquet_file
from routeprof.recording.reader import Part, unreadable

LEAST = 1 << 17
"""Bytes of ids that are worth a row group of their own; one takes nine hundred more."""

BOUNDED = ("layer", "phase", "step")
"""Columns of which the foot of a part says the least and the largest value of each row group."""


def in_groups(table: pa.Table) -> list[pa.Table]:
    """The rows of a tokens part by layer, phase and step, as one table for each row group."""
    names = table["phase"].cast(pa.string()).combine_chunks()
    phase = pc.rank(names, tiebreaker="dense").to_numpy()
    layer, step = (table[name].to_numpy() for name in ("layer", "step"))
    order = np.lexsort([step, phase, layer])
    kinds = np.stack([layer[order], phase[order]], axis=1)
    edges = np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1
    table = table.take(pa.array(order))
    sizes = pc.binary_length(table["ids"]).to_numpy()
    cuts = _cuts([0, *edges.tolist(), len(order)], sizes)
    return [table.slice(first, last - first) for first, last in pairwise(cuts)]


def _cuts(edges: list[int], sizes: NDArray[np.integer]) -> list[int]:
    """Those of the edges between runs of rows at which a row group ends."""
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    cuts = [0]
    for start, stop in pairwise(edges[1:]):
        before, following = ends[start] - ends[cuts[-1]], ends[stop] - ends[start]
        if before and max(before, following) >= LEAST:
            cuts.append(start)
    return [*cuts, edges[-1]]


@dataclass(frozen=True)
class RowGroup:
    """What a part's foot says of one of its row groups.

    Attributes:
        bounds: least and largest value of each of ``BOUNDED``; absent where that is not known,
            or where there is a null among them.
    """

    part: Part
    number: int
    bounds: dict[str, tuple[Any, Any]]

    def may_hold(self, name: str, value: Any) -> bool:
        """Whether a row may have this value."""
        least, largest = self.bounds.get(name, (value, value))
        return bool(least <= value <= largest)

    def may_hold_step(self, steps: NDArray[np.int64]) -> bool:
        """Whether a row may be of one of these steps, which ascend."""
        if not len(steps):
            return False
        least, largest = self.bounds.get("step", (steps[0], steps[0]))
        place = int(np.searchsorted(steps, least))
        return place < len(steps) and bool(steps[place] <= largest)


def row_groups(part: Part) -> list[RowGroup] | str:
    """The row groups of a part, or one line that says why they cannot be told."""
    try:
        with parquet_file(part.path) as file:
            names, groups = (
                file.schema.names,
                map(file.metadata.row_group, range(file.num_row_groups)),
            )
            return [
                RowGroup(part, number, _bounds(own, names)) for number, own in enumerate(groups)
            ]
    except (pa.ArrowException, OSError, ValueError) as error:
        return unreadable(part, error)


def _bounds(group: Any, names: list[str]) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name in set(BOUNDED).intersection(names):
        known = group.column(names.index(name)).statistics
        if known is not None and known.has_min_max and known.null_count == 0:
            found[name] = (known.min, known.max)
    return found
