"""The sums of one part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.recording.exact import Exact, sum_rows
from routeprof.recording.grouping import Grouping, sum_whole
from routeprof.recording.layers import layer_places
from routeprof.recording.reader import Part, column, read_part
from routeprof.recording.schema import RecordingInfo
from routeprof.recording.totals import (
    FLOATS,
    LISTS,
    SUMS,
    Key,
    Totals,
    Windows,
    key_order,
    merge_exact,
    rounded,
)

MOST = 2**53
"""More of anything in one row is no count; so little of it adds up without an overflow."""


def fold_part(
    part: Part,
    info: RecordingInfo,
    between: tuple[float, float] | None,
    columns: Collection[str] | None = None,
) -> Totals:
    """Totals of one part; a part that cannot be read adds nothing but its message.

    Nor does one with numbers that are no counts: below 0, or above 2^53.
    """
    return rounded(exact_part(part, info, between, columns))


def exact_part(
    part: Part,
    info: RecordingInfo,
    between: tuple[float, float] | None,
    columns: Collection[str] | None = None,
) -> Totals:
    """The same without the floats in ``sums`` and ``lists``, for what is merged anyway."""
    table = read_part(part, info, columns)
    if isinstance(table, str):
        return merge_exact([], info, (table,))
    if between is not None:
        end = column(table, "end").to_numpy(zero_copy_only=False)  # NaN where it is not known
        table = table.filter(pa.array((end > between[0]) & (end <= between[1])))
    return exact_table(table, part, info)


def exact_table(table: pa.Table, part: Part, info: RecordingInfo) -> Totals:
    """The sums of what was read of a part, as ``exact_part`` gives them."""
    if not table.num_rows:
        return merge_exact([], info)
    if column(table, "phase").null_count:
        return merge_exact([], info, (f"{part.label} has rows without a phase",))
    rows = _Rows.of(table, info)
    wrong = rows.wrong()
    if wrong:
        return merge_exact([], info, (f"{part.label} has numbers that are no counts: {wrong}",))
    return rows.totals()


@dataclass(frozen=True)
class Lists:
    """A list column: those lists that are there, filled up with zeros.

    Attributes:
        rows: int64, the rows that have a list.
        matrix: [len(rows), longest].
    """

    rows: NDArray[np.int64]
    matrix: NDArray[Any]

    @staticmethod
    def of(values: pa.ListArray, least: int = 0) -> Lists:
        """Of a list column; nulls in the lists are NaN, or -1, which is no count.

        Args:
            least: columns to have at least.
        """
        rows = _known(values)
        lengths = np.diff(values.offsets.to_numpy())[rows]
        flat = values.flatten()
        numbers = _numbers(flat, np.nan if pa.types.is_floating(flat.type) else -1)
        longest = int(lengths.max(initial=least))
        if len(rows) and int(lengths.min()) == longest:
            return Lists(rows, numbers.reshape(len(rows), longest))
        matrix = np.zeros((len(rows), longest), dtype=numbers.dtype)
        matrix[np.arange(longest)[None, :] < lengths[:, None]] = numbers
        return Lists(rows, matrix)


@dataclass(frozen=True)
class _Rows:
    """Rows of a part, and the place of each: key · layers + layer."""

    table: pa.Table
    info: RecordingInfo
    keys: tuple[Key, ...]
    key: NDArray[np.int64]
    layer: NDArray[np.int64]
    whole: dict[str, NDArray[np.int64]]
    unknown: NDArray[np.bool_]
    lists: dict[str, Lists]
    grouping: Grouping

    @staticmethod
    def of(table: pa.Table, info: RecordingInfo) -> _Rows:
        keys, key = row_keys(table)
        whole = {name: _numbers(column(table, name)) for name in SUMS if name not in FLOATS}
        whole["calls"] = _numbers(_calls(table))
        unknown = column(table, "expected_tokens").is_null().to_numpy(zero_copy_only=False)
        factors = len(info.capacity_factors)
        lists = {name: Lists.of(column(table, name), _least(name, factors)) for name in LISTS}
        layer = layer_places(column(table, "layer"), info)
        grouping = Grouping.of(key * len(info.layers) + layer)
        return _Rows(table, info, keys, key, layer, whole, unknown, lists, grouping)

    def wrong(self) -> str:
        """Names of the columns with numbers that are no counts."""
        columns = self.whole | {
            name: values.matrix for name, values in self.lists.items() if name not in FLOATS
        }
        most = min(MOST, 2**62 // len(self.key))
        return ", ".join(
            name
            for name, values in columns.items()
            if values.min(initial=0) < 0 or values.max(initial=0) > most
        )

    def totals(self) -> Totals:
        """Their sums."""
        sums, exact = self._whole_sums(), self._float_sums()
        lists: dict[str, NDArray[Any]] = {}
        for name, values in self.lists.items():
            every = len(values.rows) == len(self.key)
            grouping = self.grouping if every else Grouping.of(self._place[values.rows])
            if name in FLOATS:
                found = sum_rows(values.matrix, grouping, self._places)
                exact[name] = found.reshaped((*self._shape, values.matrix.shape[1]))
            else:
                found_whole = sum_whole(values.matrix, grouping, self._places)
                lists[name] = found_whole.reshape(*self._shape, values.matrix.shape[1])
        return Totals(self.keys, sums, lists, self._largest(), self._windows(), exact=exact)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.keys), len(self.info.layers)

    @property
    def _places(self) -> int:
        return len(self.keys) * len(self.info.layers)

    @property
    def _place(self) -> NDArray[np.int64]:
        return self.key * len(self.info.layers) + self.layer

    def _whole_sums(self) -> dict[str, NDArray[Any]]:
        matrix = np.stack(list(self.whole.values()), axis=1)
        found = sum_whole(matrix, self.grouping, self._places)
        sums = {
            name: np.ascontiguousarray(found[:, number]).reshape(self._shape)
            for number, name in enumerate(self.whole)
        }
        known = np.zeros(self._places, dtype=bool)
        known[self._place[~self.unknown]] = True
        sums["expected_tokens"][~known.reshape(self._shape)] = -1
        return sums

    def _float_sums(self) -> dict[str, Exact]:
        names = sorted(FLOATS.intersection(SUMS))
        columns = [column(self.table, name) for name in names]
        matrix = np.stack([_numbers(values) for values in columns], axis=1)
        found = sum_rows(matrix, self.grouping, self._places)
        for number, values in enumerate(columns):
            if values.null_count:
                known = np.zeros(self._places, dtype=bool)
                known[self._place[_known(values)]] = True
                found.seen[~known, number] = 0
        return {
            name: found.at((slice(None), number)).reshaped(self._shape)
            for number, name in enumerate(names)
        }

    def _largest(self) -> NDArray[np.float64]:
        largest = np.full(self._places, np.nan)
        np.fmax.at(largest, self._place, _numbers(column(self.table, "imbalance_max"), np.nan))
        return largest.reshape(self._shape)

    def _windows(self) -> Windows:
        timed = column(self.table, "end").is_valid().to_numpy(zero_copy_only=False)
        ran = timed & (self.whole["calls"] > 0)
        counts, overflow = self.lists["counts"], self.lists["overflow"]
        size = len(self.key)
        assignments, most = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        assignments[counts.rows] = counts.matrix.sum(1)
        most[counts.rows] = counts.matrix.max(1, initial=0)
        overflows = np.zeros((size, overflow.matrix.shape[1]), dtype=np.int64)
        overflows[overflow.rows] = overflow.matrix
        start, end = (_numbers(column(self.table, name)) for name in ("start", "end"))
        return Windows(
            window=_numbers(column(self.table, "window"))[ran],
            rank=_numbers(column(self.table, "rank"))[ran].astype(np.int64),
            start=start[ran],
            end=end[ran],
            key=self.key[ran],
            layer=self.layer[ran],
            steps=self.whole["steps"][ran],
            tokens=self.whole["tokens"][ran],
            assignments=assignments[ran],
            max_count=most[ran],
            overflow=overflows[ran],
        ).in_order()


def _least(name: str, factors: int) -> int:
    return factors if name in ("overflow", "overflow_steps", "capacity_slots") else 0


def _numbers(values: pa.Array, missing: float = 0) -> NDArray[Any]:
    if values.null_count:
        values = values.fill_null(missing)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _known(values: pa.Array) -> NDArray[np.int64]:
    """Rows that have a value."""
    if not values.null_count:
        return np.arange(len(values))
    return np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))


def _calls(table: pa.Table) -> pa.Array:
    """Calls of the layer, 1 where a converted file has its counts and not how often it ran."""
    calls, counted = column(table, "calls"), column(table, "counts").is_valid()
    return pc.if_else(pc.and_(calls.is_null(), counted), 1, calls)


def row_keys(table: pa.Table) -> tuple[tuple[Key, ...], NDArray[np.int64]]:
    """The keys in their order, and the number of each row's."""
    (phases, phase), (tags, tag) = (_names(column(table, name)) for name in ("phase", "tag"))
    codes, row = np.unique(phase * len(tags) + tag, return_inverse=True)
    pairs = [(phases[code // len(tags)], tags[code % len(tags)]) for code in codes.tolist()]
    keys = tuple(sorted(set(pairs), key=key_order))
    numbers = {key: number for number, key in enumerate(keys)}
    place = np.array([numbers[pair] for pair in pairs], dtype=np.int64)
    return keys, place[row.reshape(-1)]


def _names(values: pa.Array) -> tuple[list[Any], NDArray[np.int64]]:
    """The texts of a dictionary column, None the last of them, and each row's place in them."""
    names = [*values.dictionary.to_pylist(), None]
    indices = values.indices.fill_null(len(names) - 1)
    return names, indices.to_numpy(zero_copy_only=False).astype(np.int64)
