"""Counting a recording again from its detail: do the windows say the same?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.recording import id_bytes
from routeprof.recording.fold_part import Lists
from routeprof.recording.grouping import Grouping, sum_whole
from routeprof.recording.layers import layer_places
from routeprof.recording.reader import Part, RecordingFiles, column, ids_of_rows, read_part
from routeprof.recording.schema import RecordingInfo
from routeprof.recording.spread import batches, found_anywhere, spread
from routeprof.recording.totals import Totals


@dataclass(frozen=True)
class Recount:
    """Assignments by layer and expert as a level's parts have them.

    Attributes:
        counts: int64 [layers, widest]; rows are those of ``RecordingInfo.layers``.
        unread: one line for each part that could not be read, sorted.
    """

    counts: NDArray[np.int64]
    unread: tuple[str, ...] = ()


def count_steps(
    parts: Sequence[Part], info: RecordingInfo, executor: Executor | None = None
) -> Recount:
    """Add up the counts of steps parts, a few at a time."""
    return _added(_count_steps, parts, info, executor)


def count_tokens(
    parts: Sequence[Part], info: RecordingInfo, executor: Executor | None = None
) -> Recount:
    """Count the expert ids of tokens parts, a few parts at a time."""
    return _added(_count_tokens, parts, info, executor)


def _added(
    one: Callable[[Part, RecordingInfo], NDArray[np.int64] | str],
    parts: Sequence[Part],
    info: RecordingInfo,
    executor: Executor | None,
) -> Recount:
    total, unread = _nothing(info), list[str]()
    batch = partial(_count_batch, one, info=info)
    tasks = batches(found_anywhere(parts, executor), executor)
    for _, found in spread(tasks, batch, executor):
        total += found.counts
        unread += found.unread
    return Recount(total, tuple(sorted(unread)))


def _nothing(info: RecordingInfo) -> NDArray[np.int64]:
    widest = max((layer.experts for layer in info.layers), default=0)
    return np.zeros((len(info.layers), widest), dtype=np.int64)


def _count_batch(
    one: Callable[[Part, RecordingInfo], NDArray[np.int64] | str],
    parts: Sequence[Part],
    info: RecordingInfo,
) -> Recount:
    total, unread = _nothing(info), list[str]()
    for part in parts:
        counts = one(part, info)
        if isinstance(counts, str):
            unread.append(counts)
        else:
            total += counts
    return Recount(total, tuple(unread))


def _count_steps(part: Part, info: RecordingInfo) -> NDArray[np.int64] | str:
    table = read_part(part, info, ["step", "layer", "counts"])
    if isinstance(table, str):
        return table
    total, lists = _nothing(info), Lists.of(column(table, "counts"))
    place = layer_places(column(table, "layer"), info)[lists.rows]
    matrix = lists.matrix.astype(np.int64)
    if matrix.min(initial=0) < 0:
        return f"{part.label} has numbers that are no counts: counts"
    total[:, : matrix.shape[1]] += sum_whole(matrix, Grouping.of(place), len(info.layers))
    return total


def _count_tokens(part: Part, info: RecordingInfo) -> NDArray[np.int64] | str:
    table = read_part(part, info, ["layer", "tokens", "ids"])
    if isinstance(table, str):
        return table
    total = _nothing(info)
    for batch in table.to_batches():  # a row group each, which is not copied
        place, ids = layer_places(batch["layer"], info), batch["ids"]
        numbers = ids_of_rows(batch["tokens"], place, info)
        if np.count_nonzero(np.diff(place)) >= len(info.layers):  # not layer after layer
            order = np.argsort(place, kind="stable")
            place, numbers, ids = place[order], numbers[order], ids.take(pa.array(order))
        edges = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
        for first, last in pairwise([*edges, len(place)]):
            layer = info.layers[place[first]]
            counts = _counts(ids[first:last], numbers[first:last], layer.experts)
            if counts[layer.experts :].any():
                return (
                    f"{part.label} has ids beyond the {layer.experts} experts "
                    f"of layer {layer.index}"
                )
            total[place[first], : layer.experts] += counts[: layer.experts]
    return total


def _counts(ids: pa.BinaryArray, numbers: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """How often each id occurs in rows of one layer, int64 [experts or more]."""
    total = np.zeros(2**16, dtype=np.int64)
    for own in id_bytes.runs(ids, numbers):
        counts = _histogram(own, experts)
        nobody = id_bytes.outside(own.dtype, experts)
        if 0 <= nobody < len(counts):
            counts[nobody] = 0
        total[: len(counts)] += counts
    return total


_PIECE = 1 << 16
"""Ids at once: numpy makes 64-bit copies of them, which stay in the processor's cache."""


def _histogram(ids: NDArray[Any], least: int) -> NDArray[np.int64]:
    """How often each id occurs, int64 [largest id + 1, or ``least``]; as ``numpy.bincount``."""
    width = max(int(ids.max(initial=0)) + 1, least)
    total = np.zeros(width, dtype=np.int64)
    for start in range(0, len(ids), _PIECE):
        total += np.bincount(ids[start : start + _PIECE], minlength=width)
    return total


_COUNTED = {"steps": count_steps, "tokens": count_tokens}


def differences(totals: Totals, recount: Recount) -> NDArray[np.int64]:
    """For each layer, int64 [layers]: sum over experts of |windows - recount|."""
    windows = totals.lists["counts"].sum(0)
    width = max(windows.shape[1], recount.counts.shape[1])
    one, other = (
        np.pad(values, ((0, 0), (0, width - values.shape[1])))
        for values in (windows, recount.counts)
    )
    return np.asarray(np.abs(one - other).sum(1))


def gaps(files: RecordingFiles, *unread: str) -> list[str]:
    """Why windows and detail need not agree, one line each; nothing if the recording is whole."""
    lines = list(unread)
    for rank in files.ranks:
        if not rank.owns_tokens:
            continue
        if rank.state is None or rank.state.state != "stopped":
            state = "no readable rank.json" if rank.state is None else f"state {rank.state.state}"
            lines.append(f"{rank.name} was not stopped ({state})")
        missing = rank.missing()
        if missing:
            lines.append(f"{rank.name} lacks {', '.join(missing[:3])}{' …' * (len(missing) > 3)}")
        if rank.dropped:
            lines.append(f"{rank.name}: {rank.dropped.text}")
        lost = [] if rank.state is None else sorted(rank.state.problems.items())
        lines += [f"{rank.name}: {name} {number}" for name, number in lost if "lost" in name]
    return lines


def recounted(
    totals: Totals, files: RecordingFiles, level: str, executor: Executor | None
) -> dict[str, Any]:
    """Count again, and compare with the windows.

    Returns:
        ``equal``, ``gaps`` and ``layers``: for each layer that either has assignments of its
        index, ``assignments``, ``recounted`` and ``difference``.
    """
    parts, info = files.parts(level), files.info
    recount = _COUNTED[level](parts, info, executor)
    differ = differences(totals, recount)
    windows, detail = totals.lists["counts"].sum((0, 2)), recount.counts.sum(1)
    layers = [
        {
            "layer": layer.index,
            "assignments": int(windows[place]),
            "recounted": int(detail[place]),
            "difference": int(differ[place]),
        }
        for place, layer in enumerate(info.layers)
        if windows[place] or detail[place]
    ]
    lines = gaps(files, *totals.unread, *recount.unread)
    return {"equal": not differ.any(), "gaps": lines, "layers": layers}
