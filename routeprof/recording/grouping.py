"""Adding up the rows of a matrix by group, in pieces that fit a processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 15
"""Numbers of a piece, 256 KiB."""

_MOST_ROWS = 1 << 19
"""Rows of a piece: so many digits below 2^32 add up without rounding in a float64."""

Piece = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Rows, the distinct places that they go to, and where each place's rows start."""


@dataclass(frozen=True)
class Grouping:
    """Rows sorted by the place that they are added to.

    Attributes:
        rows: int64 [rows], row numbers, those of one place side by side.
        places: int64 [rows], the place of each.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]

    @staticmethod
    def of(places: NDArray[np.int64]) -> Grouping:
        """Of the place of each row."""
        rows = np.argsort(places, kind="stable")
        return Grouping(rows, places[rows])

    def pieces(self, width: int) -> Iterator[Piece]:
        """Pieces of a matrix with this many columns; a place may go on in the next piece."""
        size = min(max(PIECE // max(width, 1), 1), _MOST_ROWS)
        for start in range(0, len(self.rows), size):
            rows, places = self.rows[start : start + size], self.places[start : start + size]
            starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
            yield rows, places[starts], starts


def add_groups(
    total: NDArray[Any],
    values: NDArray[Any],
    targets: NDArray[np.int64],
    starts: NDArray[np.int64],
    converted: Callable[[NDArray[Any]], NDArray[Any]] = lambda sums: sums,
) -> None:
    """Add the rows of a piece to their places.

    Args:
        converted: what is added to the total, of the sums of the piece.
    """
    if len(starts) == len(values):
        total[targets] += converted(values)
        return
    sums = np.empty((len(starts), values.shape[1]), dtype=values.dtype)
    stops = np.append(starts[1:], len(values))
    # ufunc.reduceat over the first axis takes fourteen times as long.
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        values[start:stop].sum(axis=0, out=sums[number])
    total[targets] += converted(sums)


def sum_whole(matrix: NDArray[np.int64], grouping: Grouping, places: int) -> NDArray[np.int64]:
    """Add up the rows of a matrix [rows, width] that have the same place: [places, width]."""
    total = np.zeros((places, matrix.shape[1]), dtype=np.int64)
    for rows, targets, starts in grouping.pieces(matrix.shape[1]):
        add_groups(total, matrix[rows], targets, starts)
    return total
