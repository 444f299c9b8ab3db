"""One coarse window out of many windows, whose sums are theirs to the last bit.

A float64 cannot hold the exact sum of many: after the row with the nearest come remainder rows of
the same window, layer, phase and tag, whose whole numbers are 0 and whose floats are what the rows
before them rounded away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.recording.exact import MINUS, NAN, PLUS, Exact
from routeprof.recording.fold_part import exact_table, row_keys
from routeprof.recording.layers import layer_places
from routeprof.recording.reader import Part, column, read_part
from routeprof.recording.schema import WINDOW_SCHEMA, RecordingInfo
from routeprof.recording.totals import (
    FLOATS,
    LISTS,
    SUMS,
    Totals,
    Windows,
    key_order,
    merge_exact,
)

_COLUMNS = ("layer", *SUMS, *LISTS)
"""``layer`` tells which rows there are."""


@dataclass(frozen=True)
class Coarse:
    """Windows of one rank, added up.

    Attributes:
        totals: their sums, floats in ``exact`` alone, without a timeline.
        lengths: for each column int64 [keys, layers]: -1 where no row has a value, else the
            longest list, 0 of a number.
        window: the lowest number.
        start, end: the earliest and the latest, seconds since the epoch.
    """

    totals: Totals
    lengths: dict[str, NDArray[np.int64]]
    window: int
    start: float
    end: float

    @staticmethod
    def of(part: Part, info: RecordingInfo) -> Coarse | str:
        """Of all windows of a part; one line where it cannot be added up with others."""
        table = read_part(part, info)
        if isinstance(table, str):
            return table
        times = [column(table, name) for name in ("window", "start", "end")]
        if not table.num_rows or any(values.null_count for values in times):
            return f"{part.label} has windows without a time"
        totals = exact_table(table, part, info)
        if totals.unread:
            return totals.unread[0]
        window, start, end = (values.to_numpy() for values in times)
        none = Windows.empty(len(info.capacity_factors))
        return Coarse(
            replace(totals, windows=none),
            _lengths(table, info),
            int(window.min()),
            float(start.min()),
            float(end.max()),
        )

    @staticmethod
    def merged(some: Sequence[Coarse], info: RecordingInfo) -> Coarse:
        """All of them as one.

        Raises:
            OverflowingError: whole numbers add up to 2^63 or more.
        """
        return Coarse(
            merge_exact([one.totals for one in some], info),
            _longest(some, len(info.layers)),
            min(one.window for one in some),
            min(one.start for one in some),
            max(one.end for one in some),
        )

    def table(self, info: RecordingInfo, rank: int) -> pa.Table:
        """As rows of a part: first one for each key and layer, then remainders.

        Args:
            rank: its number in its own run.
        """
        there = np.nonzero(self.lengths["layer"] >= 0)
        blocks = [self._block(there, info, rank, self._first(there))]
        terms = {name: _terms(exact) for name, exact in self.totals.exact.items()}
        blocks[0] |= {name: self._float(name, own[0], there) for name, own in terms.items()}
        for number in range(1, max(map(len, terms.values()))):
            left = {name: own[number] for name, own in terms.items() if number < len(own)}
            some = np.zeros(self.lengths["layer"].shape, dtype=bool)
            for values in left.values():
                some |= (values != 0).reshape(*some.shape, -1).any(-1)
            rows = np.nonzero(some)
            rest = {name: self._remainder(name, own, rows) for name, own in left.items()}
            blocks.append(self._block(rows, info, rank, _zeros(len(rows[0]))) | rest)
        tables = [_filled(block, len(block["layer"])) for block in blocks]
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    def _block(
        self, rows: Any, info: RecordingInfo, rank: int, numbers: dict[str, pa.Array]
    ) -> dict[str, pa.Array]:
        """Columns of some rows: when, where, of what, and whole numbers.

        Args:
            rows: their keys and layers, as of ``np.nonzero``.
        """
        key, layer = rows
        indices = np.array([one.index for one in info.layers], dtype=np.int32)
        same = {"window": self.window, "start": self.start, "end": self.end, "rank": rank}
        columns = {
            name: pa.array(np.full(len(key), value), WINDOW_SCHEMA.field(name).type)
            for name, value in same.items()
        }
        columns["layer"] = pa.array(indices[layer], pa.int32())
        for place, name in enumerate(("phase", "tag")):
            texts = pa.array([own[place] for own in self.totals.keys], pa.string())
            columns[name] = texts.take(pa.array(key)).dictionary_encode()
        return columns | numbers

    def _first(self, rows: Any) -> dict[str, pa.Array]:
        """Whole numbers, their lists, and the largest imbalance."""
        columns = {}
        for name, values in self.totals.sums.items():
            known = self.lengths[name][rows] >= 0
            if name == "calls":  # of a converted file they are counted
                known |= values[rows] > 0
            columns[name] = pa.array(values[rows], mask=~known)
        for name, values in self.totals.lists.items():
            columns[name] = _list_array(values[rows], self.lengths[name][rows])
        largest = self.totals.imbalance_max[rows]
        columns["imbalance_max"] = pa.array(largest, mask=np.isnan(largest))
        return columns

    def _float(self, name: str, values: NDArray[np.float64], rows: Any) -> pa.Array:
        lengths = self.lengths[name][rows]
        if name in LISTS:
            return _list_array(values[rows], lengths)
        return pa.array(values[rows], mask=lengths < 0)

    def _remainder(self, name: str, values: NDArray[np.float64], rows: Any) -> pa.Array:
        own = values[rows]
        if name in LISTS:
            return _list_array(own, np.where((own != 0).any(-1), self.lengths[name][rows], -1))
        return pa.array(own, mask=own == 0)


def _lengths(table: pa.Table, info: RecordingInfo) -> dict[str, NDArray[np.int64]]:
    keys, key = row_keys(table)
    shape = (len(keys), len(info.layers))
    place = key * len(info.layers) + layer_places(column(table, "layer"), info)
    found = {}
    for name in _COLUMNS:
        values = column(table, name)
        known = values.is_valid().to_numpy(zero_copy_only=False)
        own = np.diff(values.offsets.to_numpy()) if name in LISTS else 0
        longest = np.full(shape[0] * shape[1], -1, dtype=np.int64)
        np.maximum.at(longest, place, np.where(known, own, -1))
        found[name] = longest.reshape(shape)
    return found


def _longest(some: Sequence[Coarse], layers: int) -> dict[str, NDArray[np.int64]]:
    keys = sorted({key for one in some for key in one.totals.keys}, key=key_order)
    numbers = {key: number for number, key in enumerate(keys)}
    found = {name: np.full((len(keys), layers), -1, dtype=np.int64) for name in _COLUMNS}
    for one in some:
        place = [numbers[key] for key in one.totals.keys]
        for name, lengths in found.items():
            lengths[place] = np.maximum(lengths[place], one.lengths[name])
    return found


def _terms(exact: Exact) -> list[NDArray[np.float64]]:
    """Arrays that add up to the sums, and to what was added that is not finite."""
    terms = list(exact.terms()) or [np.zeros(exact.seen.shape)]
    for bit, value in ((NAN, np.nan), (PLUS, np.inf), (MINUS, -np.inf)):
        hit = (exact.seen & bit) != 0
        if hit.any():
            terms.append(np.where(hit, value, 0.0))
    return terms


def _list_array(matrix: NDArray[Any], lengths: NDArray[np.int64]) -> pa.Array:
    """Rows of a matrix as lists of these lengths, null where it is -1."""
    inside = np.arange(matrix.shape[1])[None, :] < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(matrix[inside]), mask=pa.array(lengths < 0)
    )


def _zeros(rows: int) -> dict[str, pa.Array]:
    """Whole numbers of remainder rows; what they expected is as little known as lists are."""
    names = [name for name in SUMS if name not in FLOATS and name != "expected_tokens"]
    return {name: pa.array(np.zeros(rows, dtype=np.int64)) for name in names}


def _filled(columns: dict[str, pa.Array], rows: int) -> pa.Table:
    """As a table of the schema, null where nothing is said."""
    return pa.table(
        [
            columns[field.name].cast(field.type)
            if field.name in columns
            else pa.nulls(rows, field.type)
            for field in WINDOW_SCHEMA
        ],
        schema=WINDOW_SCHEMA,
    )
