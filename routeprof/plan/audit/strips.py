"""One expert's matrix, read in strips: the range of all of it, and the errors of groups in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeprof.plan.audit.checkpoint import Source
from routeprof.plan.audit.experts import Part
from routeprof.plan.audit.grids import (
    GROUP,
    SATURATES,
    TOP,
    Floats32,
    Scratch,
    round_e4m3,
    unit,
)
from routeprof.plan.audit.groups import AT_ONCE, BITS, TYPES, Batch, Bits, Patterns, Sums

Numbers = NDArray[np.int64]

STRIP = 4 << 20
"""Bytes to keep at a time, if they are 128 outputs or more."""

WAITING = 1 << 13
"""Groups to gather before they are rounded: 2 MiB in 16 bits."""

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Strip:
    """Some outputs, as patterns; inputs filled up with zeros to 128s.

    Attributes:
        values: [outputs, groups, 128].
        channel: the largest absolute value of each output, [outputs].
        block: that of each 128 outputs and 128 inputs, [blocks, groups].
        rows, groups: of the groups to round, the output and the number within it.
    """

    values: Patterns
    channel: Patterns
    block: Patterns
    rows: Numbers
    groups: Numbers

    def chosen(self) -> Patterns:
        """The groups to round, [n, 128]."""
        return self.values[self.rows, self.groups]

    def shared(self) -> Patterns:
        """The largest of their channel and of their block, [2, n]."""
        block = self.block[self.rows // GROUP, self.groups]
        return np.stack((self.channel[self.rows], block))


class Reader:
    """The buffers that one thread reads and rounds with.

    Args:
        sample: errors are measured in one of so many groups; ranges always of all elements.
    """

    def __init__(self, source: Source, sample: int = 1) -> None:
        self._source = source
        self._sample = sample
        self._bytes = np.empty(0, np.uint8)
        self._waiting: list[tuple[Patterns, Patterns, Sums, torch.dtype]] = []
        self._batches: dict[torch.dtype, Batch] = {}

    def measure(self, parts: Sequence[Part]) -> list[Sums]:
        """Ranges of all elements; errors under scales of channel, block and group.

        Groups to round are gathered first: code and buffers for it leave the cache with every
        strip that is read.
        """
        found = [self._range(part) for part in parts]
        self._round()
        return found

    def _range(self, part: Part) -> Sums:
        dtype = TYPES[part.tensor.dtype]
        bits, sums, top = BITS[dtype], Sums.of(dtype), 0
        for strip in self._strips(part):
            most = int(strip.channel.max())
            if most >= bits.limit:
                sums.broken += int(np.count_nonzero((strip.values & bits.mask) >= bits.limit))
                continue
            top = max(top, most)
            chosen = strip.chosen()
            self._waiting.append((chosen, strip.shared(), sums, dtype))
            sums.seen += int(np.minimum(part.inputs - strip.groups * GROUP, GROUP).sum())
            if sum(len(groups) for groups, *_ in self._waiting) >= WAITING:
                self._round()
        sums.largest = float(_values(np.array([top], bits.signed), dtype)[0])
        return sums

    def _round(self) -> None:
        for number, (groups, shared, sums, dtype) in enumerate(self._waiting, start=1):
            batch = self._batch(dtype)
            batch.add(groups, _values(shared, dtype), sums)
            if number == len(self._waiting) or self._waiting[number][2] is not sums:
                batch.finish(sums)
        self._waiting.clear()

    def under(self, part: Part, scales: Sequence[float], far: float) -> torch.Tensor:
        """A second reading, for types whose values are too many to be counted.

        Args:
            scales: multipliers that take the matrix to E4M3 steps.
            far: elements with a larger absolute value are outliers.

        Returns:
            float64 [4, scales]: squared error, saturated, not zero and outliers, as sums over the
            same elements that ``measure`` rounds.
        """
        dtype = TYPES[part.tensor.dtype]
        found = torch.zeros((4, len(scales)), dtype=torch.float64)
        for strip in self._strips(part):
            for x in torch.split(torch.from_numpy(strip.chosen()).view(dtype), AT_ONCE):
                found[3] += torch.count_nonzero(x.abs() > far)
                for place, scale in enumerate(scales):
                    found[:3, place] += torch.stack([one.sum() for one in fixed_scale(x, scale)])
        return found

    def _batch(self, dtype: torch.dtype) -> Batch:
        if dtype not in self._batches:
            self._batches[dtype] = Batch(dtype)
        return self._batches[dtype]

    def _strips(self, part: Part) -> Iterator[Strip]:
        """All of a matrix, some outputs at a time."""
        bits = BITS[TYPES[part.tensor.dtype]]
        outputs, across = part.outputs, -(-part.inputs // GROUP)
        every = spread(outputs * across, self._sample)
        step = max(1, STRIP // (part.inputs * bits.width * GROUP)) * GROUP
        if part.transposed:
            # Some outputs would be all over the matrix: it is read as a whole.
            step = outputs
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            found = (
                self._turned(part, bits)
                if part.transposed
                else self._upright(part, bits, first, last - first)
            )
            own = slice(*np.searchsorted(every, (first * across, last * across)))
            yield Strip(*found, *divmod(every[own] - first * across, across))

    def _upright(
        self, part: Part, bits: Bits, first: int, outputs: int
    ) -> tuple[Patterns, Patterns, Patterns]:
        """Values and maxima; these are found 128 outputs at a time, which fit a cache."""
        across = -(-part.inputs // GROUP)
        values = self._buffer(bits, outputs, across * GROUP)
        found = []
        for low in range(0, outputs, GROUP):
            band = values[low : low + GROUP]
            start = part.start + (first + low) * part.inputs * bits.width
            if part.inputs % GROUP:
                narrow = np.empty((len(band), part.inputs), bits.signed)
                self._source.read(part.tensor.file, start, narrow)
                band[:, : part.inputs] = narrow
                band[:, part.inputs :] = 0
            else:
                self._source.read(part.tensor.file, start, band)
            found.append((*_extremes(band, bits, 1), *_extremes(band, bits, 0)))
        rows_above, rows_below, above, below = zip(*found, strict=True)
        channel = _larger(np.concatenate(rows_above), np.concatenate(rows_below), bits)
        columns = _larger(np.stack(above), np.stack(below), bits)
        values = values.reshape(outputs, across, GROUP)
        return values, channel, columns.reshape(-1, across, GROUP).max(axis=2)

    def _turned(self, part: Part, bits: Bits) -> tuple[Patterns, Patterns, Patterns]:
        """The same of a whole matrix with outputs last, where all lies the other way round."""
        values = self._buffer(bits, -(-part.rows // GROUP) * GROUP, part.columns)
        self._source.read(part.tensor.file, part.start, values[: part.rows])
        values[part.rows :] = 0
        values = values.reshape(-1, GROUP, part.columns)
        groups = _larger(*_extremes(values, bits, 1), bits)
        firsts = np.arange(0, part.columns, GROUP)
        block: Patterns = np.maximum.reduceat(groups, firsts, axis=1).T
        return values.transpose(2, 0, 1), groups.max(axis=0), block

    def _buffer(self, bits: Bits, rows: int, columns: int) -> Patterns:
        size = rows * columns * bits.width
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        buffer: Patterns = self._bytes[:size].view(bits.signed).reshape(rows, columns)
        return buffer


def _values(patterns: Patterns, dtype: torch.dtype) -> Floats32:
    """Float32 from patterns; for a few of them quicker than by torch."""
    if dtype == torch.bfloat16:  # the upper half of float32
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    plain = patterns.view(np.float16 if dtype == torch.float16 else np.float32)
    return plain.astype(np.float32)


def spread(groups: int, sample: int) -> NDArray[np.int64]:
    """One in each ``sample`` of so many groups, where in it moving on by the golden ratio.

    So they meet all outputs and inputs alike, as every n-th would not. The first is always there.
    """
    number = np.arange(-(-groups // sample))
    chosen = number * sample + (number * _GOLDEN % 1 * sample).astype(np.int64)
    inside: NDArray[np.int64] = chosen[chosen < groups]
    return inside


def _extremes(values: Patterns, bits: Bits, axis: int) -> tuple[Patterns, NDArray[Any]]:
    """The largest as signed and as unsigned integers: quicker than first to take off the sign.

    Patterns of values that are not negative grow with the value. Those of negative ones, as
    unsigned integers, grow with the absolute value, and are above all others.
    """
    above = np.maximum.reduce(values, axis=axis)
    return above, np.maximum.reduce(values.view(bits.unsigned), axis=axis)


def _larger(above: Patterns, below: NDArray[Any], bits: Bits) -> Patterns:
    """Patterns of the largest absolute value, from both extremes.

    Where no value has the one sign, what was found for it looks negative.
    """
    turned = (below ^ bits.unsigned(bits.mask + 1)).view(bits.signed)
    found: Patterns = np.maximum(above, turned)
    return found


def fixed_scale(
    x: torch.Tensor, scale: float | NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What E4M3 makes of each value under one scale; values beyond its range become 448.

    Args:
        x: floating-point values of any shape; every value is exact in float32.
        scale: multiplier to E4M3 steps, a number or what broadcasts with x.

    Returns:
        squared error in units of x, saturated, and not zero afterwards; float64, of the shape that
        x and scale have together.
    """
    wide = np.asarray(scale)
    value = x.float() * torch.from_numpy(wide).float()
    scratch = Scratch(value, torch.empty(value.shape), torch.empty(value.shape))
    size = scratch.value.abs()
    round_e4m3(scratch)
    above = size > SATURATES
    lost = torch.where(size > TOP, size - TOP, scratch.value).double()
    step = torch.from_numpy(unit(wide))
    return (lost * step).square(), above.double(), (scratch.rounded != 0).double()
