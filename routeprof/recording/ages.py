"""How old the parts of a rank are, by what is in them: file times do not survive a copy."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from routeprof.recording.places import parquet_file
from routeprof.recording.reader import Part, RankFiles, column, unreadable
from routeprof.recording.retention import Detail, Timed
from routeprof.recording.schema import SCHEMAS


def window_ages(rank: RankFiles) -> list[Timed]:
    """Ends of the windows of a rank's window parts, in the order of their numbers.

    Parts that have a window in common are to be left alone: one is a copy, which readers know by
    the window's number.
    """
    found = [_timed(part) for part in rank.parts if part.kind == "part"]
    times = Counter(number for one in found for number in one.windows)
    return [
        replace(
            one,
            last=math.nan,
            fault=f"{one.part.label} holds windows that another part holds too",
        )
        if any(times[number] > 1 for number in one.windows)
        else one
        for one in found
    ]


def _timed(part: Part) -> Timed:
    unknown = Timed(part, math.nan, math.nan, (), bytes_of(part.path))
    table = _read(part, ["window", "start", "end"], SCHEMAS["part"].names)
    if isinstance(table, str):
        return replace(unknown, fault=table)
    window, start, end = (column(table, name) for name in table.column_names)
    if not table.num_rows or window.null_count or start.null_count or end.null_count:
        return unknown
    ends = end.to_numpy()
    if not np.isfinite(ends).all() or not np.isfinite(start.to_numpy()).all():
        return unknown
    windows = tuple(np.unique(window.to_numpy()).tolist())
    return Timed(part, float(ends.min()), float(ends.max()), windows, unknown.size)


def detail_ages(rank: RankFiles) -> list[Detail]:
    """When the last step in each part of a rank's detail ran.

    Tokens and rows have steps and no time: theirs is that of the steps part with their last step.
    """
    steps, layers = _Steps(), dict[str, list[int]]()
    for layer, name in rank.passes.items():
        layers.setdefault(name, []).append(layer)
    found = [steps.add(part) for part in rank.parts if part.kind == "steps"]
    for part in rank.parts:
        if part.kind in ("tokens", "rows"):
            found.append(steps.of(part, layers))
    return found


@dataclass
class _Steps:
    """The last step of each layer in the steps parts so far, and when it had run."""

    _last: dict[int, list[int]] = field(default_factory=dict)
    _time: dict[int, list[float]] = field(default_factory=dict)

    def add(self, part: Part) -> Detail:
        """Take the next steps part."""
        unknown = Detail(part, math.nan, bytes_of(part.path))
        table = _read(part, ["layer", "step", "time"])
        if isinstance(table, str):
            return replace(unknown, fault=table)
        times = column(table, "time").to_numpy(zero_copy_only=False)
        if not len(times) or not np.isfinite(times).all():
            return unknown
        time = float(times.max())
        for layer, step in _largest(table, "layer").items():
            own, when = self._last.setdefault(layer, []), self._time.setdefault(layer, [])
            own.append(max([step, *own[-1:]]))
            when.append(max([time, *when[-1:]]))
        return replace(unknown, time=time)

    def of(self, part: Part, layers: Mapping[str, Sequence[int]]) -> Detail:
        """A part of tokens or rows.

        Args:
            layers: indices of the layers of each pass.
        """
        unknown = Detail(part, math.nan, bytes_of(part.path))
        by = "layer" if part.kind == "tokens" else "pass"
        table = _read(part, [by, "step"])
        if isinstance(table, str):
            return replace(unknown, fault=table)
        times = []
        for name, step in _largest(table, by).items():
            pass_layers = [name] if by == "layer" else layers.get(name.rpartition("@")[0], ())
            known = [self._time_of(layer, step) for layer in pass_layers]
            times.append(min((time for time in known if not math.isnan(time)), default=math.nan))
        some = math.nan if not times or any(map(math.isnan, times)) else max(times)
        return replace(unknown, time=some)

    def _time_of(self, layer: int, step: int) -> float:
        last = self._last.get(layer, [])
        place = bisect_left(last, step)
        return self._time[layer][place] if place < len(last) else math.nan


def _largest(table: pa.Table, by: str) -> dict[Any, int]:
    """The largest step by layer or by pass."""
    keys, steps = column(table, by).to_pylist(), column(table, "step").to_pylist()
    found: dict[Any, int] = {}
    for key, step in zip(keys, steps, strict=True):
        found[key] = max(step, found.get(key, step))
    return found


def _read(part: Part, columns: list[str], known: Collection[str] = ()) -> pa.Table | str:
    """Some columns, or one line that says why they cannot be read.

    Args:
        known: all that the part may have: others, of a later routeprof, would be lost.
    """
    try:
        # Window parts are checked, whole, before they are put together.
        file = parquet_file(part.path, page_checksum_verification=part.kind != "part")
        others = sorted(set(file.schema_arrow.names) - set(known)) if known else []
        if others:
            return f"{part.label} has columns of a later routeprof: {', '.join(others)}"
        return file.read(columns).select(columns)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return unreadable(part, error)


def bytes_of(path: Path) -> int:
    """Size of a file; 0 of one that is gone, as a temporary file of a live rank."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
