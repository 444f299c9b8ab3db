"""One expert's matrix, read in strips of rows and rounded in tiles that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from routeprof.plan.audit.checkpoint import Source
from routeprof.plan.audit.experts import Part
from routeprof.plan.audit.grids import (
    GROUP,
    INT4_TOP,
    INT8_TOP,
    SATURATES,
    TOP,
    Scratch,
    multiplier,
    round_e4m3,
    round_integer,
    unit,
)

SCHEMES = ("fp8-channel", "fp8-block", "int8-group", "int4-group")
"""Schemes whose scales are found within one expert's matrix, strip by strip."""

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
}
"""Integers of the same width, the mask without the sign, and the first pattern not finite."""

CODES = 1 << 15
"""Absolute values that 16 bits can hold."""

WIDTH = 4
"""Groups of columns in a tile: 128 x 512 elements and their buffers fit a cache of 2 MiB."""


@dataclass
class Sums:
    """What was measured of one expert's matrix; squares are in the matrix's own units.

    Attributes:
        codes: how often each absolute value occurs, int32 [32768]; None for 32-bit types.
        largest: absolute maximum of the rows that are finite.
        broken: elements that are NaN or infinite.
        seen: elements that were rounded, fewer than all where tiles were sampled, and
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
    lost: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    kept: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


class Reader:
    """The buffers that one thread reads and rounds with.

    Args:
        sample: errors are measured in one of so many tiles; ranges always of all elements.
    """

    def __init__(self, source: Source, sample: int = 1) -> None:
        self._source = source
        self._sample = sample
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._absolute = torch.empty(0, dtype=torch.uint8)
        size = GROUP * GROUP * WIDTH
        self._x = torch.empty(size)
        self._index = torch.empty(size, dtype=torch.int64)
        self._ones = torch.ones(size, dtype=torch.int32)
        self._scratch = Scratch.of(2 * size)
        self._cuts: dict[torch.Size, tuple[Scratch, torch.Tensor]] = {}

    def strips(self, part: Part) -> Iterator[torch.Tensor]:
        """128 outputs at a time: [rows, inputs], the inputs filled up with zeros to 128s."""
        dtype = TYPES[part.tensor.dtype]
        if part.transposed:
            whole = self._read(part, 0, part.rows, dtype).T
            for first in range(0, part.columns, GROUP):
                yield _filled(whole[first : first + GROUP].contiguous())
            return
        for first in range(0, part.rows, GROUP):
            rows = min(GROUP, part.rows - first)
            yield _filled(self._read(part, first * part.columns * dtype.itemsize, rows, dtype))

    def _read(self, part: Part, offset: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        size = rows * part.columns * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        raw = self._bytes[:size]
        self._source.read(part.tensor.file, part.start + offset, raw)
        return raw.view(dtype).view(rows, part.columns)

    def measure(self, part: Part) -> Sums:
        """Ranges of all elements; errors under scales of channel, block and group."""
        dtype = TYPES[part.tensor.dtype]
        sums = Sums(torch.zeros(CODES, dtype=torch.int32) if dtype.itemsize == 2 else None)
        done = 0
        for strip in self.strips(part):
            absolute, limit = self._without_sign(strip)
            peaks = absolute.view(len(strip), -1, GROUP).amax(dim=2)
            if int(peaks.max()) >= limit:
                sums.broken += int(torch.count_nonzero(absolute >= limit))
                continue
            largest = peaks.view(dtype).float()
            sums.largest = max(sums.largest, float(largest.max()))
            across = -(-peaks.shape[1] // WIDTH)
            tiles = range(-done % self._sample, across, self._sample)
            done += across
            if tiles:
                self._round(strip, absolute, largest, tiles, sums)
                sums.seen += len(strip) * sum(_inputs(part, tile) for tile in tiles)
        if sums.codes is not None:
            _count(sums, sums.codes, dtype)
        return sums

    def _without_sign(self, strip: torch.Tensor) -> tuple[torch.Tensor, int]:
        integer, mask, limit = _BITS[strip.dtype]
        size = strip.numel() * strip.dtype.itemsize
        if len(self._absolute) < size:
            self._absolute = torch.empty(size, dtype=torch.uint8)
        absolute = self._absolute[:size].view(integer).view(strip.shape)
        return torch.bitwise_and(strip.view(integer), mask, out=absolute), limit

    def _round(
        self,
        strip: torch.Tensor,
        absolute: torch.Tensor,
        largest: torch.Tensor,
        tiles: Sequence[int],
        sums: Sums,
    ) -> None:
        scales = _scales(largest)
        lost = torch.zeros(scales.shape)
        kept = torch.zeros((len(SCHEMES), len(tiles)))
        width = WIDTH * GROUP
        for number, tile in enumerate(tiles):
            columns = slice(tile * width, (tile + 1) * width)
            groups = slice(tile * WIDTH, (tile + 1) * WIDTH)
            x = self._values(strip[:, columns], absolute[:, columns], sums)
            self._tile(x, scales[:, :, groups], lost[:, :, groups], kept[:, number])
        sums.lost += (lost.double().square_() * unit(scales)).sum(dim=(1, 2))
        # Norms of ones, below 2^24 of them: their squares are whole numbers but for rounding.
        sums.kept += kept.double().square_().round_().sum(dim=1)

    def _values(self, part: torch.Tensor, absolute: torch.Tensor, sums: Sums) -> torch.Tensor:
        """A tile as float32; counts its values."""
        size = part.numel()
        flat = self._x[:size]
        x = flat.view(part.shape).copy_(part)
        if sums.codes is not None:
            index = self._index[:size]
            index.view(part.shape).copy_(absolute)
            sums.codes.scatter_add_(0, index, self._ones[:size])
        else:
            sums.square += float(torch.dot(flat, flat))
            sums.present += int(torch.count_nonzero(flat))
        return x

    def _tile(
        self, x: torch.Tensor, scales: torch.Tensor, lost: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Norms of what a tile loses by group, and of ones for what does not become zero."""
        x = x.view(1, len(x), -1, GROUP)
        scratch, rows = self._cut(x.shape)
        for first, around in ((0, round_e4m3), (2, round_integer)):
            pair = slice(first, first + 2)
            torch.mul(x, scales[pair, :, :, None], out=scratch.value)
            around(scratch)
            torch.linalg.vector_norm(scratch.value, dim=3, out=lost[pair])
            rows.clamp_(-1.0, 1.0)
            torch.linalg.vector_norm(rows, dim=1, out=kept[pair])

    def under(self, part: Part, scales: Sequence[float], far: float) -> torch.Tensor:
        """A second reading, for types whose values are too many to be counted.

        Args:
            scales: multipliers that take the matrix to E4M3 steps.
            far: elements with a larger absolute value are outliers.

        Returns:
            float64 [4, scales]: squared error, saturated, not zero and outliers, as sums over the
            same elements that ``measure`` rounds.
        """
        found = torch.zeros((4, len(scales)), dtype=torch.float64)
        width, done = WIDTH * GROUP, 0
        for strip in self.strips(part):
            across = -(-strip.shape[1] // width)
            for tile in range(-done % self._sample, across, self._sample):
                x = strip[:, tile * width : (tile + 1) * width].reshape(-1)
                found[3] += torch.count_nonzero(x.abs() > far)
                for place, scale in enumerate(scales):
                    found[:3, place] += torch.stack([one.sum() for one in fixed_scale(x, scale)])
            done += across
        return found

    def _cut(self, shape: torch.Size) -> tuple[Scratch, torch.Tensor]:
        found = self._cuts.get(shape)
        if found is None:
            scratch = self._scratch.cut(torch.Size((2, *shape[1:])))
            found = self._cuts[shape] = (scratch, scratch.rounded.view(2, -1))
        return found


def _inputs(part: Part, tile: int) -> int:
    """Columns of a tile that are elements, and not zeros that fill up a strip."""
    inputs = part.rows if part.transposed else part.columns
    return min(WIDTH * GROUP, inputs - tile * WIDTH * GROUP)


def fixed_scale(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What E4M3 makes of each value under one scale; values beyond its range become 448.

    Args:
        x: float32 or float64 of any shape; every value is exact in float32.
        scale: multiplier to E4M3 steps.

    Returns:
        squared error in units of x, saturated, and not zero afterwards; float64, x's shape.
    """
    scratch = Scratch(x.float() * scale, torch.empty(x.shape), torch.empty(x.shape))
    size = scratch.value.abs()
    round_e4m3(scratch)
    above = size > SATURATES
    lost = torch.where(size > TOP, size - TOP, scratch.value).double()
    weight = scale**-2 if scale > 0 else 0.0
    return lost.square() * weight, above.double(), (scratch.rounded != 0).double()


def _filled(strip: torch.Tensor) -> torch.Tensor:
    missing = -strip.shape[1] % GROUP
    return torch.nn.functional.pad(strip, (0, missing)) if missing else strip


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Multipliers of SCHEMES, [4, rows, groups], from the largest of each group [rows, groups]."""
    channel = largest.amax(dim=1, keepdim=True).expand_as(largest)
    block = largest.amax(dim=0, keepdim=True).expand_as(largest)
    tops = torch.tensor([TOP, TOP, INT8_TOP, INT4_TOP], dtype=torch.float64)
    return multiplier(torch.stack((channel, block, largest, largest)), tops[:, None, None])


def _count(sums: Sums, codes: torch.Tensor, dtype: torch.dtype) -> None:
    """The sum of squares and the elements that are not zero, from how often each value occurs."""
    counts = codes.double()
    sums.square = float(torch.dot(counts, absolute_values(dtype).square()))
    sums.present = float(counts[1:].sum())


@cache
def absolute_values(dtype: torch.dtype) -> torch.Tensor:
    """All absolute values of a 16-bit type by their pattern, float64 [32768]; 0 for not finite."""
    values = torch.arange(CODES, dtype=torch.int32).to(torch.int16).view(dtype).double()
    return values.nan_to_num(nan=0.0, posinf=0.0)
