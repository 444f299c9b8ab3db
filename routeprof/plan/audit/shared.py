"""Errors under scales that many values share: known once all experts of a layer are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from routeprof.plan.audit.experts import Part
from routeprof.plan.audit.grids import STEP, TOP, multiplier
from routeprof.plan.audit.groups import TYPES, Sums, occurrences
from routeprof.plan.audit.strips import Reader, fixed_scale

Floats = NDArray[np.float64]

FIXED = ("fp8-unscaled", "fp8-median", "fp8-tensor", "fp8-expert")
"""Schemes with one scale for a whole matrix.

``fp8-unscaled`` casts as it is; ``fp8-median`` fits one scale for the layer to the expert in the
middle, ``fp8-tensor`` to the largest; ``fp8-expert`` has one for each expert.
"""

FAR = 6.0
"""Outliers are beyond so many times the root mean square."""


@dataclass(frozen=True)
class Fixed:
    """Sums for each of FIXED and each expert, float64 [4, experts]; outliers [experts]."""

    lost: Floats
    saturated: Floats
    kept: Floats
    outliers: Floats


def fixed_scales(
    parts: Sequence[Part], sums: Sequence[Sums], largest: Floats, reader: Reader
) -> Fixed:
    """Errors under the scales of FIXED.

    Args:
        parts, sums: of one matrix, an entry for each expert.
        largest: absolute maxima, float64 [experts]; NaN for experts that are not finite.
        reader: to read once more what could not be counted.
    """
    scales = _multipliers(largest)
    found = np.full((4, 4, len(parts)), np.nan)
    for expert, (part, one) in enumerate(zip(parts, sums, strict=True)):
        if np.isnan(largest[expert]):
            continue
        far = FAR * np.sqrt(one.square / max(one.seen, 1))
        own = scales[:, expert].tolist()
        if one.codes is None:
            found[:, :, expert] = reader.under(part, own, far).numpy()
    if sums[0].codes is not None:
        found = _counted(sums, scales, TYPES[parts[0].tensor.dtype])
        found[:, :, np.isnan(largest)] = np.nan
    return Fixed(found[0], found[1], found[2], found[3, 0])


def _multipliers(largest: Floats) -> Floats:
    """Of FIXED, float64 [4, experts]; what takes an expert to E4M3 steps."""
    known = largest[~np.isnan(largest)]
    peaks = np.empty((3, len(largest)))
    peaks[0] = np.median(known) if len(known) else 0.0
    peaks[1] = known.max(initial=0.0)
    peaks[2] = np.nan_to_num(largest)
    return np.concatenate((np.full((1, len(largest)), 1 / STEP), multiplier(peaks, TOP)))


def _counted(sums: Sequence[Sums], scales: Floats, dtype: torch.dtype) -> Floats:
    """From how often each value occurs: [lost, saturated, kept, outliers] x FIXED x experts."""
    counts, values = occurrences(sums, dtype)
    found = torch.zeros((4, len(FIXED), len(sums)), dtype=torch.float64)
    for place in range(len(FIXED) - 1):  # shared: all experts at once
        terms = torch.stack(fixed_scale(values, float(scales[place, 0])))
        found[:3, place] = terms @ counts.T
    own = fixed_scale(values, scales[-1][:, None])
    found[:3, -1] = torch.stack([torch.linalg.vecdot(one, counts) for one in own])
    far = torch.tensor([FAR * np.sqrt(one.square / max(one.seen, 1)) for one in sums])
    found[3] = torch.linalg.vecdot((values > far[:, None]).double(), counts)
    return found.numpy()
