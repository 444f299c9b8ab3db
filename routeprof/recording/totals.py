"""Totals: sums over windows, which add up to the same in any order, and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import OverflowingError
from routeprof.recording.exact import KNOWN, Exact, placed
from routeprof.recording.schema import RecordingInfo

Key = tuple[str, str | None]
"""Phase and tag; no tag is None."""

SUMS = (
    "steps",
    "calls",
    "tokens",
    "expected_tokens",
    "invalid",
    "max_load_sum",
    "gate_rows",
    "cost_seconds",
    "entropy_sum",
    "top1_sum",
    "margin_sum",
    "z_sum",
)
"""Columns with one number a row."""

LISTS = (
    "counts",
    "imbalance_histogram",
    "gemm_histogram",
    "overflow",
    "overflow_steps",
    "capacity_slots",
    "probability_mass",
    "weight_sum",
)
"""Columns with a list a row; lists of one column may differ in length."""

FLOATS = frozenset(
    "cost_seconds entropy_sum top1_sum margin_sum z_sum probability_mass weight_sum".split()
)
"""Those of them that are float64; all others are whole."""

NULLABLE = FLOATS - {"cost_seconds"}
"""Floats that are NaN where no row knew the number."""


@dataclass(frozen=True)
class Windows:
    """One entry for each window, layer and key: the timeline without its experts.

    All arrays have the length of the table. ``key`` indexes ``Totals.keys``; ``layer`` is a
    position in ``RecordingInfo.layers``.
    """

    window: NDArray[np.int64]
    rank: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    key: NDArray[np.int64]
    layer: NDArray[np.int64]
    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    assignments: NDArray[np.int64]
    max_count: NDArray[np.int64]
    overflow: NDArray[np.int64]

    @staticmethod
    def empty(factors: int) -> Windows:
        """A table without rows."""
        columns: dict[str, NDArray[Any]] = {
            item.name: np.zeros(0, dtype=np.int64) for item in fields(Windows)
        }
        columns["start"] = columns["end"] = np.zeros(0, dtype=np.float64)
        columns["overflow"] = np.zeros((0, factors), dtype=np.int64)
        return Windows(**columns)

    def renumbered(self, place: NDArray[Any]) -> Windows:
        """The same rows for other keys: key number n becomes ``place[n]``."""
        return replace(self, key=place[self.key])

    def only(self, rows: NDArray[Any]) -> Windows:
        """Some of the rows."""
        return Windows(**{item.name: getattr(self, item.name)[rows] for item in fields(Windows)})

    def in_order(self) -> Windows:
        """The rows by rank, window, layer and key; what is alike in these stays as it is."""
        if not len(self.window):
            return self
        place, room = np.zeros(len(self.window), dtype=np.int64), 1
        for values in (self.rank, self.window, self.layer, self.key):
            own, size = values - values.min(), int(values.max()) - int(values.min()) + 1
            if room * size >= 2**63:
                distinct, own = np.unique(values, return_inverse=True)
                size = len(distinct)
            place, room = place * size + own.reshape(-1), room * size
        if (place[1:] >= place[:-1]).all():
            return self
        return self.only(np.argsort(place, kind="stable"))

    @staticmethod
    def joined(tables: Sequence[Windows]) -> Windows:
        """The rows of all tables."""
        return Windows(
            **{
                item.name: np.concatenate([getattr(table, item.name) for table in tables])
                for item in fields(Windows)
            }
        )

    def __getstate__(self) -> dict[str, NDArray[Any]]:
        """Whole numbers as narrow as they fit, for the way between processes."""
        return {name: narrowed(values) for name, values in self.__dict__.items()}

    def widened(self) -> Windows:
        """The same with all whole numbers as int64."""
        wide = Windows.__new__(Windows)
        wide.__setstate__(self.__dict__)
        return wide

    def __setstate__(self, state: Mapping[str, NDArray[Any]]) -> None:
        for name, values in state.items():
            wide = values if name in ("start", "end") else values.astype(np.int64)
            object.__setattr__(self, name, wide)


def narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the smallest signed type that holds them; floats as they are."""
    if values.dtype.kind not in "iu" or not values.size:
        return values
    least, most = int(values.min()), int(values.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return values.astype(kind)
    return values


@dataclass(frozen=True)
class Totals:
    """Sums over windows: additive, and therefore free of any order.

    Attributes:
        keys: the phases and tags that occur.
        sums: for each name in SUMS, [keys, layers]; NaN (or -1 for expected_tokens) where no
            row knew the number.
        lists: for each name in LISTS, [keys, layers, width].
        imbalance_max: [keys, layers], the largest max / mean load of any step.
        windows: the timeline; windows without a time have no place on it.
        unread: one line for each part that could not be read, sorted.
        exact: for each name in FLOATS, its sums without rounding; those in ``sums`` and
            ``lists`` are the nearest float64. A name that is absent is as exact as they are.
    """

    keys: tuple[Key, ...]
    sums: dict[str, NDArray[Any]]
    lists: dict[str, NDArray[Any]]
    imbalance_max: NDArray[np.float64]
    windows: Windows
    unread: tuple[str, ...] = field(default_factory=tuple)
    exact: dict[str, Exact] = field(default_factory=dict)

    def exactly(self, name: str) -> Exact:
        """One float column's sums without rounding."""
        if name in self.exact:
            return self.exact[name]
        return Exact.of(self.sums[name] if name in self.sums else self.lists[name])

    def only(self, wanted: Callable[[Key], bool]) -> Totals:
        """The totals of some keys alone."""
        kept = [number for number, key in enumerate(self.keys) if wanted(key)]
        place = np.full(len(self.keys), -1)
        place[kept] = np.arange(len(kept))
        return replace(
            self,
            keys=tuple(self.keys[number] for number in kept),
            sums={name: values[kept] for name, values in self.sums.items()},
            lists={name: values[kept] for name, values in self.lists.items()},
            imbalance_max=self.imbalance_max[kept],
            windows=self.windows.only(np.isin(self.windows.key, kept)).renumbered(place),
            exact={name: sums.at(kept) for name, sums in self.exact.items()},
        )


def key_order(key: Key) -> tuple[str, str, str]:
    """Order of keys: by tag, the untagged first, then by phase."""
    phase, tag = key
    return ("" if tag is None else "1", tag or "", phase)


def merge(parts: Sequence[Totals], info: RecordingInfo, unread: tuple[str, ...] = ()) -> Totals:
    """Add totals up; the result is the same in any order and grouping, to the last bit.

    Raises:
        OverflowingError: whole numbers add up to 2^63 or more.
    """
    return rounded(merge_exact(parts, info, unread))


def rounded(totals: Totals) -> Totals:
    """The totals with the float64 nearest to each exact sum in ``sums`` and ``lists``."""
    floats = {
        name: exact.rounded(missing=np.nan if name in NULLABLE else 0.0)
        for name, exact in totals.exact.items()
    }
    return replace(
        totals,
        sums={name: floats[name] if name in floats else totals.sums[name] for name in SUMS},
        lists={name: floats[name] if name in floats else totals.lists[name] for name in LISTS},
    )


def merge_exact(
    parts: Sequence[Totals], info: RecordingInfo, unread: tuple[str, ...] = ()
) -> Totals:
    """The same without the floats in ``sums`` and ``lists``, for what is merged again."""
    keys = tuple(sorted({key for part in parts for key in part.keys}, key=key_order))
    numbers = {key: number for number, key in enumerate(keys)}
    places = [np.array([numbers[key] for key in part.keys], dtype=int) for part in parts]
    shape = (len(keys), len(info.layers))
    exact = {name: _merged_floats(parts, places, name, shape) for name in sorted(FLOATS)}
    sums = {
        name: _merged([part.sums[name] for part in parts], places, name, shape)
        for name in SUMS
        if name not in FLOATS
    }
    lists = {}
    for name in LISTS:
        if name not in FLOATS:
            columns = [part.lists[name] for part in parts]
            width = max((column.shape[-1] for column in columns), default=0)
            lists[name] = _merged(columns, places, name, (*shape, width))
    imbalance_max = np.full(shape, np.nan)
    for part, place in zip(parts, places, strict=True):
        imbalance_max[place] = np.fmax(imbalance_max[place], part.imbalance_max)
    tables = [Windows.empty(len(info.capacity_factors))]
    tables += [part.windows.renumbered(own) for part, own in zip(parts, places, strict=True)]
    filled = [table for table in tables if len(table.window)] or tables[:1]
    windows = (filled[0] if len(filled) == 1 else Windows.joined(filled)).in_order()
    lines = sorted([*(line for part in parts for line in part.unread), *unread])
    return Totals(keys, sums, lists, imbalance_max, windows, tuple(lines), exact)


def _merged_floats(
    parts: Sequence[Totals], places: Sequence[NDArray[Any]], name: str, shape: tuple[int, ...]
) -> Exact:
    own = [part.exactly(name) for part in parts]
    if name in SUMS:
        return placed(list(zip(own, places, strict=True)), shape)
    width = max((one.seen.shape[-1] for one in own), default=0)
    found = placed(list(zip(own, places, strict=True)), (*shape, width))
    # A shorter list has zeros behind it.
    return Exact(found.digits, found.seen | (found.seen[..., :1] & np.uint8(KNOWN)))


def _merged(
    columns: Sequence[NDArray[Any]],
    places: Sequence[NDArray[Any]],
    name: str,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """One whole column of the sum."""
    missing = -1 if name == "expected_tokens" else 0
    total = np.full(shape, missing, dtype=np.int64)
    for column, place in zip(columns, places, strict=True):
        block = total[place]
        within = block[..., : column.shape[-1]]
        added = within + column
        if missing:
            added = np.where(column == missing, within, np.where(within == missing, column, added))
        if added.min(initial=missing) < missing:
            raise overflowing(name)
        block[..., : column.shape[-1]] = added
        total[place] = block
    return total


def overflowing(name: str) -> OverflowingError:
    """What to say of a column whose sums do not fit."""
    return OverflowingError(
        f"{name} of this recording add up to more than 2^63: these are no counts; "
        "restore it from a copy"
    )
