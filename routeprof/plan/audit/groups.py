"""Rounding groups of 128 inputs, some hundred at a time, so that they stay in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from routeprof.plan.audit.grids import (
    GROUP,
    INT4_TOP,
    INT8_TOP,
    TOP,
    Floats32,
    Scratch,
    multiplier,
    round_e4m3,
    round_integer,
    unit,
)

Floats = NDArray[np.float64]
Patterns = NDArray[np.signedinteger]
"""Values of a floating-point type as signed integers of its width."""

SCHEMES = ("fp8-channel", "fp8-block", "int8-group", "int4-group")
"""Schemes whose scales are found within one expert's matrix."""

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

CODES = 1 << 15
"""Absolute values that 16 bits can hold."""

AT_ONCE = 512
"""Groups that are rounded together: their buffers fit a cache of 2 MiB."""

COUNTED = 128 * GROUP
"""Elements that are counted together."""

_TOPS = np.array([TOP, TOP, INT8_TOP, INT4_TOP])[:, None]
_ROUNDING = (round_e4m3, round_e4m3, round_integer, round_integer)


@dataclass(frozen=True)
class Bits:
    """A type's integers of the same width, the mask without sign, the first pattern not finite."""

    signed: type[np.signedinteger]
    unsigned: type[np.unsignedinteger]
    mask: int
    limit: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.signed).itemsize


BITS = {
    torch.bfloat16: Bits(np.int16, np.uint16, 0x7FFF, 0x7F80),
    torch.float16: Bits(np.int16, np.uint16, 0x7FFF, 0x7C00),
    torch.float32: Bits(np.int32, np.uint32, 0x7FFFFFFF, 0x7F800000),
}


@dataclass
class Sums:
    """What was measured of one expert's matrix; squares are in the matrix's own units.

    Attributes:
        codes: how often each absolute value occurs, int32 [32768]; None for 32-bit types.
        largest: absolute maximum of the rows that are finite.
        broken: elements that are NaN or infinite.
        seen: elements that were rounded, fewer than all where blocks were sampled, and
        square: the sum of their squares, and
        present: those that are not zero, and
        lost: for each of SCHEMES the sum of squared errors, float64 [4], and
        kept: for each of SCHEMES those that did not become zero, float64 [4].
    """

    codes: torch.Tensor | None
    largest: float = 0.0
    broken: int = 0
    seen: int = 0
    square: float = 0.0
    present: float = 0.0
    lost: Floats = field(default_factory=lambda: np.zeros(len(SCHEMES)))
    kept: Floats = field(default_factory=lambda: np.zeros(len(SCHEMES)))

    @classmethod
    def of(cls, dtype: torch.dtype) -> Sums:
        """Nothing yet, of a matrix of that type."""
        return cls(torch.zeros(CODES, dtype=torch.int32) if dtype.itemsize == 2 else None)


class Batch:
    """Groups of one matrix, rounded as soon as there are AT_ONCE; the buffers are used again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._bits = dtype, BITS[dtype]
        self._raw = np.empty((AT_ONCE, GROUP), self._bits.signed)
        self._absolute = np.empty_like(self._raw)
        self._shared = np.empty((2, AT_ONCE), np.float32)
        self._x = torch.empty((AT_ONCE, GROUP))
        self._scratch = Scratch.of(self._x.numel()).cut(self._x.shape)
        self._norms = torch.empty((len(SCHEMES), AT_ONCE))
        self._not_zero = np.empty(self._raw.shape, bool)
        self._index = torch.empty(COUNTED, dtype=torch.int64)
        self._ones = torch.ones(COUNTED, dtype=torch.int32)
        self._count = 0

    def add(self, groups: Patterns, shared: Floats32, sums: Sums) -> None:
        """More groups.

        Args:
            groups: patterns of values, [groups, 128].
            shared: absolute maxima of the channel and of the block of each, [2, groups].
            sums: what to add to.
        """
        done = 0
        while done < len(groups):
            own = slice(done, done + AT_ONCE - self._count)
            done += len(groups[own])
            place = slice(self._count, self._count + len(groups[own]))
            self._raw[place], self._shared[:, place] = groups[own], shared[:, own]
            self._count = place.stop
            if self._count == AT_ONCE:
                self.finish(sums)

    def finish(self, sums: Sums) -> None:
        """Round what is left."""
        count, self._count = self._count, 0
        if not count:
            return
        raw, absolute, x = self._raw[:count], self._absolute[:count], self._x[:count]
        np.bitwise_and(raw, self._bits.mask, out=absolute)
        patterns = torch.from_numpy(absolute)
        x.copy_(torch.from_numpy(raw).view(self._dtype))
        self._occurrences(x.view(-1), patterns.view(-1), sums)
        own = patterns.amax(dim=1).view(self._dtype).float().numpy()
        scales = multiplier(np.stack((*self._shared[:, :count], own, own)), _TOPS)
        norms, scratch = self._norms[:, :count], self._scratch.first(count)
        multipliers = torch.from_numpy(scales)[:, :, None]
        for place, around in enumerate(_ROUNDING):
            torch.mul(x, multipliers[place], out=scratch.value)
            around(scratch)
            torch.linalg.vector_norm(scratch.value, dim=1, out=norms[place])
            kept = np.not_equal(scratch.rounded.numpy(), 0, out=self._not_zero[:count])
            sums.kept[place] += np.count_nonzero(kept)
        sums.lost += np.square(norms.numpy() * unit(scales)).sum(axis=1)

    def _occurrences(self, x: torch.Tensor, patterns: torch.Tensor, sums: Sums) -> None:
        if sums.codes is None:
            sums.square += float(torch.dot(x, x))
            sums.present += int(torch.count_nonzero(x))
            return
        for some in torch.split(patterns, COUNTED):
            index = self._index[: len(some)].copy_(some)
            sums.codes.scatter_add_(0, index, self._ones[: len(some)])


def occurrences(sums: Sequence[Sums], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each absolute value occurs, and the values: float64 [experts, n] and [n].

    Sets what follows from it, ``square`` and ``present``.
    """
    codes = torch.stack([one.codes for one in sums if one.codes is not None])
    occurs = codes.amax(dim=0).nonzero().ravel()
    counts, values = codes[:, occurs].double(), absolute_values(dtype)[occurs]
    squares, present = counts @ values.square(), counts @ (values > 0).double()
    for one, square, number in zip(sums, squares.tolist(), present.tolist(), strict=True):
        one.square, one.present = square, number
    return counts, values


@cache
def absolute_values(dtype: torch.dtype) -> torch.Tensor:
    """All absolute values of a 16-bit type by their pattern, float64 [32768]; 0 for not finite."""
    values = torch.arange(CODES, dtype=torch.int32).to(torch.int16).view(dtype).double()
    return values.nan_to_num(nan=0.0, posinf=0.0)
