"""How many tokens an expert's matrix multiplication gets in a step.

A recording counts (expert, step) cells by size in buckets that double: bucket 0 holds the cells
without tokens, bucket b ≥ 1 those with 2^(b−1) up to 2^b − 1 tokens. A writer with a fixed number
of buckets puts everything larger into its last one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray, int_array, ratio

TILE_TOKENS = 16
"""Rows of a tensor-core tile: a smaller expert GEMM pays for weights that it hardly uses."""

_MAX_BUCKETS = 63  # the edges are int64


class GemmSizes(NamedTuple):
    """A histogram with its sizes written out, one entry per bucket.

    Attributes:
        lower: fewest tokens of a cell in the bucket, ``[buckets]``.
        upper: most tokens, included; in the last bucket as if nothing larger had been put there.
        cells: (expert, step) cells in the bucket, ``[..., buckets]``.
    """

    lower: IntArray
    upper: IntArray
    cells: IntArray


def gemm_bucket(counts: npt.ArrayLike) -> IntArray:
    """Bucket of each count (tokens of one expert in one step), same shape as the input.

    Raises:
        UsageError: negative counts, or not integers.

    >>> gemm_bucket([0, 1, 2, 3, 4, 16]).tolist()
    [0, 1, 2, 2, 3, 5]
    """
    # frexp writes c as m · 2^b with 1/2 <= m < 1, which is the bucket's definition, without logs.
    return np.frexp(int_array(counts, "counts"))[1].astype(np.int64)


def small_gemm_share(hist: npt.ArrayLike) -> FloatArray:
    """Share of the expert GEMMs that ran with fewer than 16 tokens (one tensor-core tile).

    Cells without tokens launch no work, so they are in neither part: a layer that uses few experts
    must not look better than one that spreads the same small batches.

    Args:
        hist: cells per bucket, ``[..., buckets]``.

    Returns:
        ``[...]``, NaN where no cell had tokens.

    Raises:
        UsageError: no axis, an empty last axis, negative counts, or not integers.
    """
    cells = int_array(hist, "hist", minimum_axes=1)
    full = int(gemm_bucket(TILE_TOKENS))
    return ratio(cells[..., 1:full].sum(axis=-1), cells[..., 1:].sum(axis=-1))


def gemm_size_table(hist: npt.ArrayLike) -> GemmSizes:
    """The histogram with the token range of every bucket, for tables and axes.

    Args:
        hist: cells per bucket, ``[..., buckets]``, at most 63 buckets.

    Raises:
        UsageError: no axis, an empty last axis, too many buckets, negative counts, or not integers.

    >>> gemm_size_table([5, 4, 3, 2]).upper.tolist()
    [0, 1, 3, 7]
    """
    cells = int_array(hist, "hist", minimum_axes=1)
    if cells.shape[-1] > _MAX_BUCKETS:
        raise UsageError(f"hist has shape {cells.shape}: pass at most {_MAX_BUCKETS} buckets")
    edges = np.left_shift(np.int64(1), np.arange(cells.shape[-1]))
    return GemmSizes(lower=edges // 2, upper=edges - 1, cells=cells)
