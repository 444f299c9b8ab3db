"""Which experts' ranges break a scale that they share, and what granularity cures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from routeprof.plan.audit.options import MAX_RATIO, check_ratio
from routeprof.plan.weights import SCHEMES, Audit, MatrixAudit

Kind = Literal["not-finite", "outlier", "vanishing", "near-zero"]

NEAR_ZERO = 1e-3
"""Below this part of the median expert's maximum an expert is as good as switched off."""

WORSE = 1.25
"""An error by so much above the best counts as harm; in small matrices chance makes 1.1 of it."""

VANISHED = 0.01
"""So does this share of elements that become zero."""

OWN = ("fp8-expert", "fp8-channel", "fp8-block")
"""Scales that an expert does not share, the coarsest first."""


@dataclass(frozen=True)
class Verdict:
    """Experts of one layer's matrix that are in the same trouble.

    Attributes:
        kind: ``not-finite``: NaN or infinity. ``outlier``: above MAX_RATIO times the median
            expert. ``vanishing``: harmed by the scale that fits the largest. ``near-zero``: so
            small that scales of their own become extreme.
        layer, index, matrix: where.
        experts: the worst first.
        ratio: of the worst, absolute maximum ÷ the median expert's.
        evidence: what that does, with numbers.
        cure: the coarsest scheme of OWN without harm for all of ``experts``; empty where none is.
        suggestion: what to do.
    """

    kind: Kind
    layer: str
    index: int
    matrix: str
    experts: tuple[int, ...]
    ratio: float
    evidence: str
    cure: str
    suggestion: str


def verdicts(audit: Audit, max_ratio: float = MAX_RATIO) -> list[Verdict]:
    """All of a checkpoint, in the order of its layers.

    Raises:
        UsageError: a ratio that is not above 1.
    """
    check_ratio(max_ratio)
    return [one for matrix in audit.matrices for one in _of_matrix(matrix, max_ratio)]


def median(matrix: MatrixAudit) -> float:
    """Absolute maximum of the expert in the middle; NaN where none is finite."""
    known = matrix.largest[~np.isnan(matrix.largest)]
    return float(np.median(known)) if len(known) else float("nan")


def _of_matrix(matrix: MatrixAudit, max_ratio: float) -> list[Verdict]:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = matrix.largest / median(matrix)
    near_zero = ratio < NEAR_ZERO
    outlier = ratio > max_ratio
    vanishing = _vanish(matrix) & ~near_zero
    found = [
        _not_finite(matrix),
        _outliers(matrix, ratio, outlier, int(vanishing.sum())),
        _vanishing(matrix, ratio, vanishing, bool(outlier.any())),
        _near_zero(matrix, ratio, near_zero),
    ]
    return [one for one in found if one is not None]


def _vanish(matrix: MatrixAudit) -> NDArray[np.bool_]:
    """Experts that the scale of the largest harms, and their own would not."""
    shared, own = SCHEMES.index("fp8-tensor"), SCHEMES.index("fp8-expert")
    worse = matrix.error[shared] > WORSE * matrix.error[own]
    vanish = matrix.underflow[shared] > matrix.underflow[own] + VANISHED
    harmed: NDArray[np.bool_] = np.logical_or(worse, vanish)
    return harmed


def _harmed(matrix: MatrixAudit, scheme: str) -> NDArray[np.bool_]:
    """Experts whose error a scheme makes clearly worse than the best of OWN, or which vanish."""
    place = SCHEMES.index(scheme)
    best = np.min([matrix.of(name) for name in OWN], axis=0)
    worse = matrix.error[place] > WORSE * best
    harmed: NDArray[np.bool_] = np.logical_or(worse, matrix.underflow[place] > VANISHED)
    return harmed


def cure_of(matrix: MatrixAudit, experts: Sequence[int]) -> str:
    """The coarsest scheme of OWN under which none of the experts is harmed; empty if none is."""
    for scheme in OWN:
        if not _harmed(matrix, scheme)[list(experts)].any():
            return scheme
    return ""


def _verdict(
    kind: Kind,
    matrix: MatrixAudit,
    experts: Sequence[int],
    ratio: NDArray[np.float64],
    evidence: str,
    suggestion: str | None = None,
) -> Verdict:
    cure = cure_of(matrix, experts) if suggestion is None else ""
    if suggestion is None:
        suggestion = (
            f"quantise with a scale for each {cure.removeprefix('fp8-')}, or keep these in 16 bits"
            if cure
            else "keep these experts in 16 bits"
        )
    return Verdict(
        kind,
        matrix.layer,
        matrix.index,
        matrix.name,
        tuple(int(expert) for expert in experts),
        float(ratio[experts[0]]),
        evidence,
        cure,
        suggestion,
    )


def _not_finite(matrix: MatrixAudit) -> Verdict | None:
    experts = np.flatnonzero(matrix.broken)
    if not len(experts):
        return None
    count = int(matrix.broken.sum())
    evidence = f"{count:,} elements are NaN or infinite: every token sent there becomes NaN"
    empty = np.full(matrix.experts, np.nan)
    return _verdict("not-finite", matrix, experts.tolist(), empty, evidence, "repair the weights")


def _outliers(
    matrix: MatrixAudit, ratio: NDArray[np.float64], which: NDArray[np.bool_], vanishing: int
) -> Verdict | None:
    if not which.any():
        return None
    experts = _worst_first(which, ratio)
    first = experts[0]
    share = matrix.saturated[SCHEMES.index("fp8-median"), first]
    # In a sample the one that is sure to saturate may be missing.
    share = max(float(share), 1 / (matrix.outputs * matrix.inputs))
    evidence = (
        f"absolute maximum {matrix.largest[first]:.4g}, {ratio[first]:.3g} times the median "
        f"expert's: a shared scale that fits the median saturates {percent(share)} of it (NaN by a "
        f"plain cast), one that fits it harms {vanishing} of {matrix.experts} experts"
    )
    return _verdict("outlier", matrix, experts, ratio, evidence)


def _vanishing(
    matrix: MatrixAudit, ratio: NDArray[np.float64], which: NDArray[np.bool_], outliers: bool
) -> Verdict | None:
    if not which.any():
        return None
    place = SCHEMES.index("fp8-tensor")
    experts = _worst_first(which, matrix.underflow[place])
    first = experts[0]
    cause = "an outlier's" if outliers else "the largest expert's"
    evidence = (
        f"under {cause} scale {percent(matrix.underflow[place, first])} of its elements become "
        f"zero, error {percent(matrix.error[place, first])} instead of "
        f"{percent(matrix.of('fp8-expert')[first])}"
    )
    return _verdict("vanishing", matrix, experts, ratio, evidence)


def _near_zero(
    matrix: MatrixAudit, ratio: NDArray[np.float64], which: NDArray[np.bool_]
) -> Verdict | None:
    if not which.any():
        return None
    experts = _worst_first(which, -ratio)
    evidence = (
        f"absolute maximum {matrix.largest[experts[0]]:.4g}, "
        f"{ratio[experts[0]]:.2g} of the median expert's: as good as switched off"
    )
    advice = "clamp their scales from below: kernels have made NaN of scales near zero"
    return _verdict("near-zero", matrix, experts, ratio, evidence, advice)


def _worst_first(which: NDArray[np.bool_], by: NDArray[np.float64]) -> list[int]:
    experts = np.flatnonzero(which)
    ordered: list[int] = experts[np.argsort(-np.nan_to_num(by[experts]), kind="stable")].tolist()
    return ordered


def percent(value: float) -> str:
    """A share in per cent, with the digits that it needs."""
    return "–" if np.isnan(value) else f"{value * 100:.3g}%"
