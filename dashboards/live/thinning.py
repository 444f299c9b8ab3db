"""Keeping the timeline of an endless recording in bounded memory."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from routeprof.recording.fold import Windows

_ADDITIVE = ("steps", "tokens", "assignments", "max_count", "overflow")


def thinned(windows: Windows, limit: int) -> tuple[Windows, bool]:
    """A timeline of at most ``limit`` rows, and whether windows had to be put together for it.

    The shortest windows go first, so that the whole time stays equally fine. Tokens and largest
    counts are added: the imbalance of what was put together is the mean of theirs weighted by
    assignments. Sums over the recording are not touched.
    """
    if len(windows.window) <= limit:
        return windows, False
    since = windows.start - windows.start.min()
    width = 2 * max(float((windows.end - windows.start).min()), 1e-3)
    while True:
        bins = (since // width).astype(np.int64)
        fewer = _joined(windows, bins)
        # With room for what comes next, or else every new window would cause this again.
        if len(fewer.window) <= 0.75 * limit or not bins.any():
            return fewer, True
        width *= 2


def joined(windows: Windows) -> Windows:
    """One row for each rank, layer and key: all windows put together."""
    return _joined(windows, np.zeros(len(windows.window), dtype=np.int64))


def _joined(windows: Windows, bins: NDArray[np.int64]) -> Windows:
    """One row for each rank, bin, layer and key."""
    pair = _codes(windows.rank, bins)
    row = _codes(pair, windows.layer, windows.key)
    first, inverse = np.unique(row, return_index=True, return_inverse=True)[1:]
    values = {item.name: getattr(windows, item.name)[first] for item in fields(Windows)}
    for name in _ADDITIVE:
        values[name] = np.zeros_like(values[name])
        np.add.at(values[name], inverse, getattr(windows, name))
    # All rows of a bin share its number, start and end, whichever windows a layer ran in.
    together = np.unique(pair, return_inverse=True)[1]
    bounds = {"window": np.minimum, "start": np.minimum, "end": np.maximum}
    for name, bound in bounds.items():
        own = getattr(windows, name)
        extreme = own[np.unique(together, return_index=True)[1]].copy()
        bound.at(extreme, together, own)
        values[name] = extreme[together[first]]
    return Windows(**values)


def _codes(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each row, in the order of its columns."""
    codes, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for values in columns:
        own = values - values.min(initial=0)
        size = int(own.max(initial=0)) + 1
        if room * size >= 2**63:
            codes = np.unique(codes, return_inverse=True)[1]
            room = len(codes) + 1
        codes, room = codes * size + own, room * size
    return codes
