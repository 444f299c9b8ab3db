"""Loads of short stretches of time, which resampling draws from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.recording.fold import Key
from routeprof.recording.reader import column, read_part
from routeprof.token_parts import of_rank

if TYPE_CHECKING:
    from routeprof.profile import Profile

MOST_STRETCHES = 32
"""Neighbouring steps are alike: more are added up to so many, which differ by more than that."""

Stretches = dict[tuple[Key, int], FloatArray]
"""For each key (phase and tag) and layer's index: loads ``[stretches, experts]``, in order."""


def stretches(profile: Profile, most: int = MOST_STRETCHES) -> Stretches:
    """Steps where these were recorded, else windows; at most so many stretches of each key.

    The stretches of a key are the same in all layers. A profile made in memory has none.
    """
    if profile.files is None:
        return {}
    return _of_steps(profile, most) if profile.has("steps") else _of_windows(profile, most)


def _of_steps(profile: Profile, most: int) -> Stretches:
    table, found = profile.step_counts(), Stretches()
    codes = of_rank(table.rank, table.step)
    for number, key in enumerate(profile.totals.keys):
        of_key = np.flatnonzero(profile.step_keys == number)
        if not len(of_key):
            continue
        _, first, step = np.unique(codes[of_key], return_index=True, return_inverse=True)
        places = _places(table.time[of_key][first], most)
        for layer in profile.layer_indices:
            own = table.layer[of_key] == layer
            if own.any():
                shape = int(places.max()) + 1, profile.layer(layer).experts
                loads = found[key, layer] = np.zeros(shape)
                np.add.at(loads, places[step[own]], table.counts[of_key[own], : shape[1]])
    return found


def _of_windows(profile: Profile, most: int) -> Stretches:
    windows, found = profile.totals.windows, Stretches()
    codes = of_rank(windows.rank, windows.window)
    known: dict[Key, tuple[IntArray, IntArray]] = {}
    for number, key in enumerate(profile.totals.keys):
        own = windows.key == number
        code, first = np.unique(codes[own], return_index=True)
        if not len(code):
            continue
        places = _places(windows.start[own][first], most)
        known[key] = code, places
        shape = int(places.max()) + 1
        for layer in profile.layer_indices:
            found[key, layer] = np.zeros((shape, profile.layer(layer).experts))
    for key, layer, window, counts in _rows(profile, tuple(known)):
        code, places = known[key]
        place = np.minimum(np.searchsorted(code, window), len(code) - 1)
        there = code[place] == window
        np.add.at(found[key, layer], places[place[there]], counts[there])
    return found


def _places(time: FloatArray, most: int) -> IntArray:
    """The stretch of each moment: as many in each, in the order of time."""
    order = np.argsort(np.argsort(time, kind="stable"))
    return np.asarray(order * min(len(time), most) // max(len(time), 1))


def _rows(profile: Profile, keys: Sequence[Key]) -> Iterator[tuple[Key, int, IntArray, IntArray]]:
    """Of each part: key, layer's index, windows by ``of_rank``, and loads ``[rows, experts]``."""
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
        counts, indices = column(table, "counts"), column(table, "layer").to_numpy()
        there = counts.is_valid().to_numpy(zero_copy_only=False)
        phase, tag = (
            np.array(column(table, name).to_pylist(), object) for name in ("phase", "tag")
        )
        for key in keys:
            mine = there & (phase == key[0]) & (tag == key[1])
            for layer in np.unique(indices[mine]).tolist():
                rows = np.flatnonzero(mine & (indices == layer))
                lists = counts.take(rows).flatten().to_numpy()
                yield key, layer, window[rows], lists.reshape(len(rows), -1)
