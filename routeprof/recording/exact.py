"""Sums of float64 without rounding: whole numbers in base 2^32, rounded once at the end.

Whatever the order and the grouping in which numbers are added, the sum is the same to the last
bit, and it is the true sum of the numbers rounded once, as ``math.fsum`` gives it.

A number is cut into digits by adding and taking away a power of two (Rump, Ogita and Oishi,
"Accurate floating-point summation", SIAM J. Sci. Comput. 31, 2008); digits of a kind then add up
without rounding, since they are whole multiples of one power of two and few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.recording.grouping import Grouping, add_groups

BITS = 32
"""Width of a digit; digit d at place p stands for d · 2^(32 p)."""

_LOWEST, _HIGHEST = -34, 31
_HUGE, _SHIFT = 2.0**900, 8
"""Numbers from here on are cut 2^256 times smaller: their digits' guards would be infinite."""

KNOWN, NAN, PLUS, MINUS = 1, 2, 4, 8
"""Bits of ``Exact.seen``: a number at all, and which numbers that are not finite."""


@dataclass(frozen=True)
class Exact:
    """Sums of float64, each known to the last bit.

    Attributes:
        digits: by place, int64 of the shape of ``seen``, each from -2^31 to 2^31 - 1; a place
            whose digits are all 0 is left out. The same sums have the same digits.
        seen: uint8, which kinds of numbers were added; 0 where none was.
    """

    digits: dict[int, NDArray[np.int64]]
    seen: NDArray[np.uint8]

    @staticmethod
    def of(values: NDArray[np.float64]) -> Exact:
        """Each value as a sum of one number; NaN as a sum of none."""
        flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1, 1)
        known = ~np.isnan(flat[:, 0])
        alone = Grouping.of(np.flatnonzero(known))
        found = sum_rows(flat[known], alone, len(flat))
        return found.reshaped(values.shape)

    def reshaped(self, shape: tuple[int, ...]) -> Exact:
        """The same sums in another shape."""
        digits = {place: values.reshape(shape) for place, values in self.digits.items()}
        return Exact(digits, self.seen.reshape(shape))

    def at(self, chosen: Any) -> Exact:
        """Some of the sums, by any index of numpy's."""
        digits = {place: values[chosen] for place, values in self.digits.items()}
        return Exact(_canonical(digits), self.seen[chosen])

    def rounded(self, missing: float = np.nan) -> NDArray[np.float64]:
        """The nearest float64 of each sum, ties to even.

        NaN where a NaN or both infinities were added; infinite where one was, or where the sum
        is beyond the largest float64; ``missing`` where nothing was added.
        """
        total = _nearest(self.digits, self.seen.shape)
        for bit, value in ((PLUS, np.inf), (MINUS, -np.inf), (NAN, np.nan)):
            total[(self.seen & bit) != 0] = value
        total[(self.seen & (PLUS | MINUS)) == PLUS | MINUS] = np.nan
        total[self.seen == 0] = missing
        return total

    def terms(self) -> Iterator[NDArray[np.float64]]:
        """Arrays of float64 that add up to the sums without an error: the nearest, then the rest.

        Of finite numbers; whoever stores all of these arrays loses no bit.
        """
        most = np.finfo(np.float64).max
        rest: Exact = self
        while rest.digits:
            term = np.clip(_nearest(rest.digits, self.seen.shape), -most, most)
            yield term
            rest = merged([rest, Exact.of(-term)])


def sum_rows(matrix: NDArray[np.float64], grouping: Grouping, places: int) -> Exact:
    """Add up the rows of a matrix that have the same place.

    Args:
        matrix: [rows, width].

    Returns:
        [places, width].
    """
    width = matrix.shape[1]
    digits: dict[int, NDArray[np.int64]] = {}
    seen = np.zeros((places, width), dtype=np.uint8)
    for rows, targets, starts in grouping.pieces(width):
        seen[targets] |= KNOWN
        piece = matrix[rows]
        largest = max(piece.max(initial=0.0), -piece.min(initial=0.0))
        if not largest < _HUGE:  # NaN is not
            _add_odd(piece, digits, seen, targets, starts)
            largest = np.abs(piece).max(initial=0.0)
        if largest:
            _add_digits(piece, digits, seen.shape, targets, starts, 0)
    return Exact(_carried(digits), seen)


def _add_odd(
    piece: NDArray[np.float64],
    digits: dict[int, NDArray[np.int64]],
    seen: NDArray[np.uint8],
    targets: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> None:
    """Add the huge, the infinite and what is no number, and put 0 in their place."""
    kinds = ((NAN, np.isnan(piece)), (PLUS, piece == np.inf), (MINUS, piece == -np.inf))
    for bit, hit in kinds:
        found = np.logical_or.reduceat(hit, starts, axis=0)
        seen[targets] |= (found * bit).astype(np.uint8)
        piece[hit] = 0.0
    huge = np.abs(piece) >= _HUGE
    if huge.any():
        shrunk = np.where(huge, piece, 0.0) * 2.0 ** (-BITS * _SHIFT)
        piece[huge] = 0.0
        _add_digits(shrunk, digits, seen.shape, targets, starts, _SHIFT)


def _add_digits(
    rest: NDArray[np.float64],
    digits: dict[int, NDArray[np.int64]],
    shape: tuple[int, ...],
    targets: NDArray[np.int64],
    starts: NDArray[np.int64],
    shift: int,
) -> None:
    """Cut finite numbers below 2^900 into digits, highest first; ``rest`` is used up."""
    largest = max(rest.max(initial=0.0), -rest.min(initial=0.0))
    place = max((int(np.frexp(largest)[1]) - 1) // BITS, _LOWEST)
    part = np.empty_like(rest)
    while True:
        guard = np.ldexp(1.5, BITS * place + 52)
        np.add(rest, guard, out=part)
        np.subtract(part, guard, out=part)
        np.subtract(rest, part, out=rest)
        if part.any():
            if place + shift not in digits:
                digits[place + shift] = np.zeros(shape, dtype=np.int64)
            add_groups(
                digits[place + shift],
                part,
                targets,
                starts,
                partial(_units, place),
            )
        if place == _LOWEST or not rest.any():
            return
        place -= 1


def _units(place: int, sums: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.ldexp(sums, -BITS * place), dtype=np.int64)


def merged(sums: Sequence[Exact]) -> Exact:
    """Sums of the same shape, added up."""
    return placed([(one, slice(None)) for one in sums], sums[0].seen.shape)


def placed(sums: Sequence[tuple[Exact, Any]], shape: tuple[int, ...]) -> Exact:
    """Add sums up in a larger array, each where its index says; indices may not repeat.

    The last dimension of an addend may be shorter.
    """
    digits: dict[int, NDArray[np.int64]] = {}
    seen = np.zeros(shape, dtype=np.uint8)
    for number, (one, index) in enumerate(sums):
        where = _within(index, one.seen.shape, shape)
        seen[where] |= one.seen
        for place, values in one.digits.items():
            if place not in digits:
                digits[place] = np.zeros(shape, dtype=np.int64)
            digits[place][where] += values
        if number % 2**20 == 2**20 - 1:  # long before 2^63
            digits = _carried(digits)
    return Exact(_carried(digits), seen)


def _within(index: Any, own: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The index with the rest of the dimensions; the last one as far as the addend goes."""
    if len(own) <= 1 or own[-1] == shape[-1]:
        return index
    return (index, ..., slice(own[-1]))


def _carried(digits: dict[int, NDArray[np.int64]]) -> dict[int, NDArray[np.int64]]:
    """The same sums with digits from -2^31 to 2^31 - 1."""
    done: dict[int, NDArray[np.int64]] = {}
    waiting = dict(digits)
    while waiting:
        place = min(waiting)
        values = waiting.pop(place)
        carry = (values + 2 ** (BITS - 1)) >> BITS
        done[place] = values - (carry << BITS)
        if carry.any():
            above = waiting.get(place + 1)
            waiting[place + 1] = carry if above is None else above + carry
    return _canonical(done)


def _canonical(digits: dict[int, NDArray[np.int64]]) -> dict[int, NDArray[np.int64]]:
    return {place: digits[place] for place in sorted(digits) if digits[place].any()}


def _nearest(digits: dict[int, NDArray[np.int64]], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The float64 nearest to each sum, ties to even.

    As in ``math.fsum``: from the top, exactly until a digit no longer fits; then what is below
    decides a tie.
    """
    top = max(digits, default=0)
    total = _from_top(digits, shape, 0)
    if top >= _HIGHEST - 1:
        scale = _SHIFT // 2
        large = np.zeros(shape, dtype=bool)
        for place in range(_HIGHEST - 1, top + 1):
            large |= digits[place] != 0 if place in digits else False
        with np.errstate(over="ignore"):
            scaled = np.ldexp(_from_top(digits, shape, scale), BITS * scale)
        total[large] = scaled[large]
    return total


def _from_top(
    digits: dict[int, NDArray[np.int64]], shape: tuple[int, ...], scale: int
) -> NDArray[np.float64]:
    total, error = np.zeros(shape), np.zeros(shape)
    below = np.zeros(shape, dtype=np.int64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for place in sorted(digits, reverse=True):
            digit = digits[place]
            term = np.ldexp(digit.astype(np.float64), BITS * (place - scale))
            more = total + term
            exact = error == 0
            below = np.where(~exact & (below == 0), np.sign(digit), below)
            error = np.where(exact, term - (more - total), error)
            total = np.where(exact, more, total)
        twice = 2 * error
        other = total + twice
        tie = (np.sign(error) * below > 0) & (other - total == twice)
    return np.where(tie, other, total)
