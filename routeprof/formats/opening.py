"""What readers share: one line for whatever a hostile or damaged file makes of its parser."""

from __future__ import annotations

import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError

HEADER_DAMAGE = (SyntaxError, tokenize.TokenError)
"""What NumPy makes of a damaged header of an array, besides ValueError."""

MOST_CELLS = 1 << 24
"""Layers × experts of a step; DeepSeek-V3 has 15,616."""

MOST = 1 << 44
"""Of one expert, so that int64 holds the sums; a model's whole training has some 10**13 tokens."""


def reason_of(error: BaseException) -> str:
    """The first line of a parser's message, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def one_of(paths: Sequence[Path]) -> Path:
    """The only path.

    Raises:
        UsageError: there are several.
    """
    if len(paths) != 1:
        raise UsageError(f"{len(paths)} files of this kind are {len(paths)} runs: pass one by one")
    return paths[0]


def whole_counts(values: Any, where: str) -> NDArray[np.int64]:
    """Counts as int64; floats must be whole numbers.

    Raises:
        UsageError: something else, a number below 0 or too large, or a fraction.
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise UsageError(f"{where} has rows of several lengths: pass another copy") from None
    if array.dtype.kind not in "iuf":
        raise UsageError(f"{where} holds {array.dtype}, not counts: pass whole numbers")
    if array.size and (not np.isfinite(array).all() or array.min() < 0 or array.max() > MOST):
        raise UsageError(f"{where} holds numbers that are no counts: pass whole numbers from 0 on")
    counts = array.astype(np.int64)
    if array.dtype.kind == "f" and not np.array_equal(counts, array):
        raise UsageError(f"{where} holds fractions, not counts: pass whole numbers")
    return counts
