"""fold: the sum of additive parts, in any order, by any executor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.recording.reader import Part, column, read_part
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

_FLOATS = {"cost_seconds", "entropy_sum", "top1_sum", "margin_sum", "z_sum", "probability_mass"}
_FLOATS.add("weight_sum")
_NULLABLE = {"entropy_sum", "top1_sum", "margin_sum", "z_sum", "weight_sum", "probability_mass"}


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

    def only(self, rows: NDArray[np.bool_]) -> Windows:
        """Some of the rows."""
        return Windows(**{item.name: getattr(self, item.name)[rows] for item in fields(Windows)})

    @staticmethod
    def joined(tables: Sequence[Windows]) -> Windows:
        """The rows of all tables."""
        return Windows(
            **{
                item.name: np.concatenate([getattr(table, item.name) for table in tables])
                for item in fields(Windows)
            }
        )


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
        unread: one line for each part that could not be read.
    """

    keys: tuple[Key, ...]
    sums: dict[str, NDArray[Any]]
    lists: dict[str, NDArray[Any]]
    imbalance_max: NDArray[np.float64]
    windows: Windows
    unread: tuple[str, ...] = field(default_factory=tuple)


def fold(
    parts: Sequence[Part],
    info: RecordingInfo,
    *,
    executor: Executor | None = None,
    between: tuple[float, float] | None = None,
    columns: Collection[str] | None = None,
) -> Totals:
    """Add up window parts.

    The result does not depend on the order in which they are given, to the last bit. Totals that
    were folded apart and then merged agree in every whole number, and in floats up to rounding.
    A part with windows that another part of its rank holds too adds nothing but a message.

    Args:
        executor: any ``concurrent.futures`` executor; the result does not depend on it.
        between: seconds since the epoch; only windows that end after the first and not
            after the second are added.
        columns: the columns to read, for speed; sums of all others are as if nobody knew them.
    """
    parts = sorted(parts, key=lambda part: (str(part.path.parent), part.number))
    one = partial(fold_part, info=info, between=between, columns=columns)
    done: Iterable[Totals] = executor.map(one, parts) if executor else map(one, parts)
    seen: dict[tuple[int, int], Part] = {}
    kept = []
    for part, totals in zip(parts, done, strict=True):
        line = repeated(part, totals, seen)
        kept.append(merge([], info, (line,)) if line else totals)
    return merge(kept, info)


def repeated(part: Part, totals: Totals, seen: dict[tuple[int, int], Part]) -> str:
    """One line if another part holds windows of this one; else they are added to ``seen``.

    Args:
        seen: the part that holds each window, by rank and number of the window.
    """
    windows = [(part.rank, int(number)) for number in np.unique(totals.windows.window)]
    twice = [seen[window] for window in windows if window in seen]
    if twice:
        return f"{part.label} holds windows that {twice[0].label} holds too: one is a copy"
    seen.update(dict.fromkeys(windows, part))
    return ""


def fold_part(
    part: Part,
    info: RecordingInfo,
    between: tuple[float, float] | None,
    columns: Collection[str] | None = None,
) -> Totals:
    """Totals of one part; a part that cannot be read adds nothing but its message."""
    table = read_part(part, info, columns)
    if isinstance(table, str):
        return merge([], info, (table,))
    if between is not None:
        end = column(table, "end").to_numpy(zero_copy_only=False)  # NaN where it is not known
        table = table.filter(pa.array((end > between[0]) & (end <= between[1])))
    if not table.num_rows:
        return merge([], info)
    return _add_rows(table, info)


def _add_rows(table: pa.Table, info: RecordingInfo) -> Totals:
    positions = {layer.index: position for position, layer in enumerate(info.layers)}
    phases, tags = (column(table, name).to_pylist() for name in ("phase", "tag"))
    row_keys = list(zip(phases, tags, strict=True))
    keys = tuple(sorted(set(row_keys), key=key_order))
    numbers = {key: number for number, key in enumerate(keys)}
    key = np.array([numbers[item] for item in row_keys])
    layer = np.array([positions[index] for index in column(table, "layer").to_pylist()])
    place = (key, layer)
    shape = (len(keys), len(info.layers))
    columns = {name: column(table, name) for name in SUMS} | {"calls": _calls(table)}
    sums = {name: _sum(values, name, place, shape) for name, values in columns.items()}
    factors = len(info.capacity_factors)
    padded = {name: _padded(column(table, name), factors) for name in LISTS}
    lists = {name: _sum_lists(padded[name], name, place, shape) for name in LISTS}
    imbalance_max = np.full(shape, np.nan)
    seen = column(table, "imbalance_max").fill_null(np.nan).to_numpy(zero_copy_only=False)
    np.fmax.at(imbalance_max, place, seen)
    return Totals(keys, sums, lists, imbalance_max, _windows(table, key, layer, padded))


def _calls(table: pa.Table) -> pa.Array:
    """Calls of the layer, 1 where a converted file has its counts and not how often it ran."""
    calls, counted = column(table, "calls"), column(table, "counts").is_valid()
    return pc.if_else(pc.and_(calls.is_null(), counted), 1, calls)


def _numbers(values: pa.Array, missing: float) -> NDArray[Any]:
    return np.asarray(values.fill_null(missing).to_numpy(zero_copy_only=False))


def _sum(
    values: pa.Array, name: str, place: tuple[NDArray[Any], NDArray[Any]], shape: tuple[int, int]
) -> NDArray[Any]:
    total = np.zeros(shape, dtype=np.float64 if name in _FLOATS else np.int64)
    np.add.at(total, place, _numbers(values, 0))
    if name in _NULLABLE or name == "expected_tokens":
        known = np.zeros(shape, dtype=bool)
        np.logical_or.at(known, place, values.is_valid().to_numpy(zero_copy_only=False))
        total[~known] = np.nan if name in _NULLABLE else -1
    return total


def _padded(values: pa.ListArray, least: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A list column as a matrix [rows, longest], and which rows have a list at all."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.where(valid, _numbers(values.value_lengths(), 0), 0)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    matrix = np.zeros((len(values), int(lengths.max(initial=least))), dtype=flat.dtype)
    matrix[np.arange(matrix.shape[1])[None, :] < lengths[:, None]] = flat
    return matrix, valid


def _sum_lists(
    padded: tuple[NDArray[Any], NDArray[np.bool_]],
    name: str,
    place: tuple[NDArray[Any], NDArray[Any]],
    shape: tuple[int, int],
) -> NDArray[Any]:
    matrix, valid = padded
    total = np.zeros((*shape, matrix.shape[1]), dtype=matrix.dtype)
    np.add.at(total, place, matrix)
    if name in _NULLABLE:
        known = np.zeros(shape, dtype=bool)
        np.logical_or.at(known, place, valid)
        total[~known] = np.nan
    return total


def _windows(
    table: pa.Table,
    key: NDArray[np.int64],
    layer: NDArray[np.int64],
    padded: dict[str, tuple[NDArray[Any], NDArray[np.bool_]]],
) -> Windows:
    counts = padded["counts"][0]
    timed = column(table, "end").is_valid().to_numpy(zero_copy_only=False)
    ran = timed & (_numbers(_calls(table), 0) > 0)
    whole = {name: _numbers(column(table, name), 0) for name in ("window", "rank", "steps")}
    return Windows(
        window=whole["window"][ran].astype(np.int64),
        rank=whole["rank"][ran].astype(np.int64),
        start=_numbers(column(table, "start"), 0)[ran],
        end=_numbers(column(table, "end"), 0)[ran],
        key=key[ran],
        layer=layer[ran],
        steps=whole["steps"][ran],
        tokens=_numbers(column(table, "tokens"), 0)[ran],
        assignments=counts.sum(1)[ran],
        max_count=counts.max(1, initial=0)[ran],
        overflow=padded["overflow"][0][ran],
    )


def key_order(key: Key) -> tuple[str, str, str]:
    """Order of keys: by tag, the untagged first, then by phase."""
    phase, tag = key
    return ("" if tag is None else "1", tag or "", phase)


def merge(parts: Sequence[Totals], info: RecordingInfo, unread: tuple[str, ...] = ()) -> Totals:
    """Add totals up, in the order given."""
    keys = tuple(sorted({key for part in parts for key in part.keys}, key=key_order))
    shape = (len(keys), len(info.layers))
    numbers = {key: number for number, key in enumerate(keys)}
    placed = [(part, np.array([numbers[key] for key in part.keys], dtype=int)) for part in parts]
    sums = {name: _merge_sums(placed, name, shape) for name in SUMS}
    lists = {name: _merge_lists(placed, name, shape) for name in LISTS}
    imbalance_max = np.full(shape, np.nan)
    for part, place in placed:
        imbalance_max[place] = np.fmax(imbalance_max[place], part.imbalance_max)
    windows = Windows.empty(len(info.capacity_factors))
    if placed:
        renumbered = [part.windows.renumbered(place) for part, place in placed]
        windows = Windows.joined([windows, *renumbered])
    lines = tuple(line for part in parts for line in part.unread) + unread
    return Totals(keys, sums, lists, imbalance_max, windows, lines)


def _merge_sums(
    placed: list[tuple[Totals, NDArray[Any]]], name: str, shape: tuple[int, int]
) -> NDArray[Any]:
    missing = np.nan if name in _NULLABLE else -1 if name == "expected_tokens" else 0
    total = np.full(shape, missing, dtype=np.float64 if name in _FLOATS else np.int64)
    for part, place in placed:
        total[place] = _known_sum(total[place], part.sums[name], missing)
    return total


def _merge_lists(
    placed: list[tuple[Totals, NDArray[Any]]], name: str, shape: tuple[int, int]
) -> NDArray[Any]:
    width = max((part.lists[name].shape[-1] for part, _ in placed), default=0)
    missing = np.nan if name in _NULLABLE else 0
    dtype = np.float64 if name in _FLOATS else np.int64
    total = np.full((*shape, width), missing, dtype=dtype)
    for part, place in placed:
        added = part.lists[name]
        block = total[place]
        block[..., : added.shape[-1]] = _known_sum(block[..., : added.shape[-1]], added, missing)
        total[place] = block
    return total


def _known_sum(one: NDArray[Any], other: NDArray[Any], missing: float) -> NDArray[Any]:
    """Elementwise sum in which a missing number leaves the other as it is."""
    if missing == 0:
        return np.asarray(one + other)
    unknown_one = np.isnan(one) if np.isnan(missing) else one == missing
    unknown_other = np.isnan(other) if np.isnan(missing) else other == missing
    return np.where(unknown_one, other, np.where(unknown_other, one, one + other))
