"""Rounding to FP8 and to integers, in few passes over memory, all of them without a copy.

E4M3 (no infinities, largest 448, least normal 2^-6, step 2^-9 below it) as in "FP8 Formats for
Deep Learning", Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433. Values are counted in
steps of 2^-9 here, so that every E4M3 value is an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

E4M3_MAX = 448.0
STEP = 2.0**-9
TOP = E4M3_MAX / STEP
"""The largest E4M3 value in steps."""

SATURATES = 464.0 / STEP
"""Above it the nearest value would be beyond 448: it saturates, or becomes NaN by a plain cast."""

INT8_TOP, INT4_TOP = 127.0, 7.0
"""Largest code of symmetric integers; -128 and -8 stay unused."""

GROUP = 128
"""Columns that share a scale in INT8 and INT4 groups; rows and columns of an FP8 block."""

Floats32 = NDArray[np.float32]

_EXPONENT = 0x7F800000
_LEAST_BINADE = 8.0  # 2^-6 in steps: below it the step no longer shrinks
# Added to a value, 1.5 * 2^20 times the power of two below it leaves a last bit worth an eighth of
# that power: float32 itself then rounds to three mantissa bits, ties to even.
_MAGIC = 1.5 * 2.0**20


@dataclass
class Scratch:
    """Buffers of one thread, float32 of a tile's size each."""

    value: torch.Tensor
    binade: torch.Tensor
    rounded: torch.Tensor

    @classmethod
    def of(cls, size: int) -> Scratch:
        """Buffers for tiles of up to ``size`` elements."""
        return cls(torch.empty(size), torch.empty(size), torch.empty(size))

    def cut(self, shape: torch.Size) -> Scratch:
        """The same memory in the shape of a smaller tile."""
        size = shape.numel()
        return Scratch(*(one[:size].view(shape) for one in (self.value, self.binade, self.rounded)))

    def first(self, count: int) -> Scratch:
        """The first entries of each."""
        return Scratch(self.value[:count], self.binade[:count], self.rounded[:count])


def round_e4m3(scratch: Scratch) -> None:
    """``rounded`` becomes the E4M3 value nearest to ``value``, ``value`` what it lost by that.

    Both in steps; values beyond TOP are rounded as if E4M3 went on.
    """
    value, binade, rounded = scratch.value, scratch.binade, scratch.rounded
    torch.bitwise_and(value.view(torch.int32), _EXPONENT, out=binade.view(torch.int32))
    binade.clamp_min_(_LEAST_BINADE)
    torch.add(value, binade, alpha=_MAGIC, out=rounded)
    rounded.sub_(binade, alpha=_MAGIC)
    value.sub_(rounded)


def round_integer(scratch: Scratch) -> None:
    """The same for integers."""
    torch.round(scratch.value, out=scratch.rounded)
    scratch.value.sub_(scratch.rounded)


def multiplier(largest: NDArray[np.floating], top: float | NDArray[np.floating]) -> Floats32:
    """What takes the largest absolute value to ``top``, float32; 0 where all are zero.

    Kept finite: where the largest value is tiny, not all of the range is used.
    """
    with np.errstate(divide="ignore"):
        wide = np.minimum(top / largest.astype(np.float64), 1e38)
    return np.where(largest > 0, wide, 0.0).astype(np.float32)


def unit(multiplier: NDArray[np.floating]) -> NDArray[np.float64]:
    """What one step stands for: float64; 0 where nothing has a step."""
    wide = multiplier.astype(np.float64)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
