"""Conversions and checks that every metric shares; a message names the shapes that disagree."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

_KINDS = {"integers": "iu", "numbers": "iuf"}


def float_array(values: npt.ArrayLike, name: str, minimum_axes: int = 1) -> FloatArray:
    """Non-negative numbers as float64, with at least so many axes and a last axis that holds some.

    Raises:
        UsageError: other types, too few axes, an empty last axis, or something negative.
    """
    return _checked(values, name, minimum_axes, "numbers").astype(np.float64, copy=False)


def int_array(values: npt.ArrayLike, name: str, minimum_axes: int = 0) -> IntArray:
    """Non-negative integers as int64; small unsigned types would wrap around when subtracted.

    Raises:
        UsageError: other types, too few axes, an empty last axis, or something negative.
    """
    return _checked(values, name, minimum_axes, "integers").astype(np.int64, copy=False)


def id_array(ids: npt.ArrayLike, name: str, experts: int | None = None) -> IntArray:
    """Expert ids [tokens, k] as int64, with everything that names no expert set to -1.

    Raises:
        UsageError: not integers, or not two axes.
    """
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 2:
        raise UsageError(
            f"{name} has shape {array.shape} and type {array.dtype}: pass integers [tokens, k]"
        )
    array = array.astype(np.int64, copy=False)
    outside = array < 0 if experts is None else (array < 0) | (array >= experts)
    return np.where(outside, -1, array)


def require_shape(
    name: str,
    shape: tuple[int, ...],
    needed: tuple[int, ...],
    other: str,
    other_shape: tuple[int, ...],
) -> None:
    """Check that ``name`` fits ``other``.

    Raises:
        UsageError: ``shape`` is not ``needed``; the message names both arrays' shapes.
    """
    if shape != needed:
        raise UsageError(
            f"{name} has shape {shape} and {other} has shape {other_shape}: "
            f"pass {name} with shape {needed}"
        )


def require_positive(**numbers: int) -> None:
    """Check sizes such as ``experts`` or ``top_k``.

    Raises:
        UsageError: one of them is below 1.
    """
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} is {number}: pass 1 or more")


def require_fraction(name: str, value: float) -> None:
    """Check a quantile or a rate.

    Raises:
        UsageError: outside 0…1.
    """
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} is {value}: pass a number from 0 to 1")


def ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """Quotient as float64: NaN for 0/0 (a ratio over nothing), infinity for x/0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.true_divide(numerator, denominator), dtype=np.float64)


def shares(counts: FloatArray) -> FloatArray:
    """Counts [..., n] divided by their sum over the last axis; NaN where that is 0."""
    return ratio(counts, counts.sum(axis=-1, keepdims=True))


def entropy(probabilities: FloatArray) -> FloatArray:
    """Entropy over the last axis, in nats, with 0 · ln 0 = 0; NaN stays NaN."""
    logarithm = np.log(np.where(probabilities > 0, probabilities, 1.0))
    # Not negated: that would turn the entropy of a single choice into -0.0.
    return np.asarray(np.abs((probabilities * logarithm).sum(axis=-1)), dtype=np.float64)


def _checked(
    values: npt.ArrayLike, name: str, minimum_axes: int, kind: str
) -> npt.NDArray[np.generic]:
    array = np.asarray(values)
    if array.dtype.kind not in _KINDS[kind]:
        raise UsageError(f"{name} has type {array.dtype}: pass {kind}")
    if array.ndim < minimum_axes or (minimum_axes and array.shape[-1] == 0):
        raise UsageError(
            f"{name} has shape {array.shape}: pass at least {minimum_axes} axes, the last not empty"
        )
    if np.any(array < 0):
        raise UsageError(f"{name} of shape {array.shape} has negative values: pass 0 or more")
    return array
