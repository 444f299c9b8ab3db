"""Expert ids as bytes: one or two each, which Parquet stores as they are.

Parquet knows no numbers below 32 bits, and a list has levels beside its numbers: decoding these
takes several times as long as counting the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_WIDE = np.dtype("<u2")


def packed(ids: NDArray[np.integer], experts: int) -> bytes:
    """Ids in the narrowest words that hold them; whatever is no expert is the largest number.

    256 experts leave no number of one byte for it: only ids with such a one take two bytes each.
    """
    inside = (ids >= 0) & (ids < experts)
    narrow = experts < 256 or (experts == 256 and bool(inside.all()))
    kind = np.dtype(np.uint8) if narrow else _WIDE
    return np.where(inside, ids, np.iinfo(kind).max).astype(kind).tobytes()


def outside(kind: np.dtype[Any], experts: int) -> int:
    """The number that stands for an id outside the range; -1 where none does."""
    return -1 if kind.itemsize == 1 and experts >= 256 else int(np.iinfo(kind).max)


def fits(values: pa.BinaryArray, numbers: NDArray[np.int64]) -> bool:
    """Whether every row has one or two bytes for each of its ids."""
    lengths = np.diff(_offsets(values))
    return not values.null_count and bool(((lengths == numbers) | (lengths == 2 * numbers)).all())


def runs(values: pa.BinaryArray, numbers: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """The ids of all rows one after another, without a copy; uint8 or uint16, a run of rows each.

    Args:
        values: rows that fit.
        numbers: int64 [rows], ids of each row.
    """
    if not len(values):
        return
    offsets, data = _offsets(values), np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)
    wide = np.diff(offsets) > numbers
    edges = (np.flatnonzero(np.diff(wide)) + 1).tolist()
    for first, last in zip([0, *edges], [*edges, len(values)], strict=True):
        own = data[offsets[first] : offsets[last]]
        yield own.view(_WIDE) if wide[first] else own


def unpacked(values: pa.BinaryArray, numbers: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """The ids of all rows, int64 [sum of ``numbers``]; -1 for one outside the range.

    Args:
        values: rows of one layer that fit.
    """
    found = [np.zeros(0, dtype=np.int64)]
    for own in runs(values, numbers):
        ids = own.astype(np.int64)
        ids[ids == outside(own.dtype, experts)] = -1
        found.append(ids)
    return found[1] if len(found) == 2 else np.concatenate(found)


def from_lists(lists: pa.ListArray, experts: NDArray[np.int64]) -> pa.Array:
    """Packed rows of lists of ids, in which null is an id outside: how they were stored before.

    Args:
        experts: int64 [rows].
    """
    flat = lists.flatten().cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    rows = np.split(flat, np.cumsum(lists.value_lengths().fill_null(0).to_numpy())[:-1])
    packs = [packed(row, most) for row, most in zip(rows, experts.tolist(), strict=False)]
    return pa.array(packs, type=pa.binary())


def _offsets(values: pa.BinaryArray) -> NDArray[Any]:
    """Where each row starts and the last ends."""
    kind = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    every = np.frombuffer(values.buffers()[1], dtype=kind)
    return every[values.offset : values.offset + len(values) + 1]
