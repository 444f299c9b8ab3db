"""Loads of short stretches of time, which resampling draws from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.recording.fold import Key
from routeprof.recording.reader import column, read_part
from routeprof.token_parts import of_rank

if TYPE_CHECKING:
    import pyarrow as pa

    from routeprof.profile import Profile

MOST_STRETCHES = 32
"""Neighbouring steps are alike: more are added up to so many, which differ by more than that."""

Stretches = dict[tuple[Key, int], FloatArray]
"""For each key (phase and tag) and layer's index: loads ``[stretches, experts]``, in order."""


def stretches(profile: Profile) -> Stretches:
    """Steps where these were recorded, else windows; at most `MOST_STRETCHES` of each key.

    A profile made in memory has none.
    """
    if profile.files is None:
        return {}
    return _of_steps(profile) if profile.has("steps") else _of_windows(profile)


def _of_steps(profile: Profile) -> Stretches:
    table, found = profile.step_counts(), Stretches()
    for layer in profile.layer_indices:
        own, experts = table.layer == layer, profile.layer(layer).experts
        for number, key in enumerate(profile.totals.keys):
            rows = np.flatnonzero(own & (profile.step_keys == number))
            if len(rows):
                places = _places(table.time[rows])
                loads = found[key, layer] = np.zeros((int(places.max()) + 1, experts))
                np.add.at(loads, places, table.counts[rows, :experts])
    return found


def _of_windows(profile: Profile) -> Stretches:
    windows, found = profile.totals.windows, Stretches()
    codes = of_rank(windows.rank, windows.window)
    for number, key in enumerate(profile.totals.keys):
        own = windows.key == number
        code, first = np.unique(codes[own], return_index=True)
        if not len(code):
            continue
        places = _places(windows.start[own][first])
        shape = int(places.max()) + 1
        for layer in profile.layer_indices:
            found[key, layer] = np.zeros((shape, profile.layer(layer).experts))
        for layer, window, counts in _rows(profile, key):
            place = np.minimum(np.searchsorted(code, window), len(code) - 1)
            known = code[place] == window
            np.add.at(found[key, layer], places[place[known]], counts[known])
    return found


def _places(time: FloatArray) -> IntArray:
    """The stretch of each moment: as many in each, in the order of time."""
    order = np.argsort(np.argsort(time, kind="stable"))
    return np.asarray(order * min(len(time), MOST_STRETCHES) // max(len(time), 1))


def _rows(profile: Profile, key: Key) -> Iterator[tuple[int, IntArray, IntArray]]:
    """For each part and layer: its index, windows by ``of_rank``, and loads ``[rows, experts]``."""
    seen = np.zeros(0, dtype=np.int64)
    for part in profile.files.parts("part") if profile.files else ():
        table = read_part(part, profile.info, ("window", "layer", "phase", "tag", "counts"))
        if isinstance(table, str):
            continue
        window = column(table, "window").to_numpy()
        window = of_rank(np.full(len(window), part.rank, dtype=np.int64), window)
        if np.isin(window, seen).any():  # a copy of another part
            continue
        seen = np.union1d(seen, window)
        mine = _is(table, "phase", key[0]) & _is(table, "tag", key[1])
        mine &= column(table, "counts").is_valid().to_numpy(zero_copy_only=False)
        indices = column(table, "layer").to_numpy()
        for layer in profile.layer_indices:
            rows = np.flatnonzero(mine & (indices == layer))
            lists = column(table, "counts").take(rows).flatten().to_numpy()
            if len(rows):
                yield layer, window[rows], lists.reshape(len(rows), -1)


def _is(table: pa.Table, name: str, value: str | None) -> IntArray:
    found = column(table, name).to_pylist()
    return np.array([own == value for own in found], dtype=bool)
