"""Steps of a recording as arrays, and how parts of one kind are read together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.recording.fold import Windows
from routeprof.recording.reader import Part, RecordingFiles, column, read_part

if TYPE_CHECKING:
    from routeprof.profile import Profile


@dataclass(frozen=True)
class StepTable:
    """One entry for each step and layer that ran in it, in the order of rank, step and layer.

    Attributes:
        step, rank, layer, tokens, invalid, requests: int64 [entries]; layer is its index,
            requests -1 where the host did not see the step.
        time: float64 [entries], seconds since the epoch.
        phase, tag: [entries].
        counts: int64 [entries, experts], 0 beyond a layer's own experts.
        unread: one line for each part that could not be read.
    """

    step: NDArray[np.int64]
    rank: NDArray[np.int64]
    layer: NDArray[np.int64]
    time: NDArray[np.float64]
    phase: NDArray[np.object_]
    tag: NDArray[np.object_]
    tokens: NDArray[np.int64]
    invalid: NDArray[np.int64]
    requests: NDArray[np.int64]
    counts: NDArray[np.int64]
    unread: tuple[str, ...] = ()


def read_steps(files: RecordingFiles, profile: Profile) -> StepTable:
    """All steps of a profile's phase, tag and windows."""
    table, unread = read_kind(files, "steps")
    widest = max((layer.experts for layer in profile.info.layers), default=0)
    if table is None:
        number, real = np.zeros(0, dtype=np.int64), np.zeros(0)
        text = np.zeros(0, dtype=object)
        counts = np.zeros((0, widest), dtype=np.int64)
        return StepTable(
            number, number, number, real, text, text, number, number, number, counts, unread
        )
    phase, tag = (np.array(column(table, name).to_pylist(), object) for name in ("phase", "tag"))
    time = column(table, "time").to_numpy(zero_copy_only=False)  # NaN where it is not known
    keep = _selected(phase, tag, profile)
    if profile.between is not None:
        keep &= _in_windows(time, whole(table, "rank"), profile.totals.windows)
    order = np.lexsort([whole(table, name) for name in ("layer", "step", "rank")])
    order = order[keep[order]]
    columns = {
        name: whole(table, name)[order]
        for name in ("step", "rank", "layer", "tokens", "invalid", "requests")
    }
    return StepTable(
        **columns,
        time=time[order],
        phase=phase[order],
        tag=tag[order],
        counts=_matrix(column(table, "counts"), widest)[order],
        unread=unread,
    )


def read_kind(files: RecordingFiles, kind: str) -> tuple[pa.Table | None, tuple[str, ...]]:
    """All parts of a kind one after another, without a copy; None where none can be read.

    Returns:
        The table, and one line for each part that could not be read.
    """
    parts = files.parts(kind)
    read = without_copies(parts, [read_part(part, files.info) for part in parts])
    tables = [table for table in read if isinstance(table, pa.Table)]
    unread = tuple(line for line in read if isinstance(line, str))
    if not tables:
        return None, unread
    return pa.concat_tables(tables).unify_dictionaries(), unread


def without_copies(parts: list[Part], read: list[pa.Table | str]) -> list[pa.Table | str]:
    """What was read; instead of a part that repeats another, one line that says so."""
    alike: dict[object, list[tuple[Part, pa.Table]]] = {}
    kept: list[pa.Table | str] = []
    for part, table in zip(parts, read, strict=True):
        if isinstance(table, pa.Table) and table.num_rows:
            others = alike.setdefault((part.rank, table.num_rows, table["step"][0].as_py()), [])
            copied = [other for other, known in others if known.equals(table)]
            if copied:
                table = f"{part.label} holds the same as {copied[0].label}: one is a copy"
            else:
                others.append((part, table))
        kept.append(table)
    return kept


def _selected(
    phase: NDArray[np.object_], tag: NDArray[np.object_], profile: Profile
) -> NDArray[np.bool_]:
    keep = np.ones(len(phase), dtype=bool)
    if profile.phase is not None:
        keep &= phase == profile.phase
    if profile.tag is not None:
        wanted = None if profile.tag == "untagged" else profile.tag
        keep &= np.array([name == wanted for name in tag], dtype=bool)
    return keep


def _in_windows(
    time: NDArray[np.float64], rank: NDArray[np.int64], windows: Windows
) -> NDArray[np.bool_]:
    """Whether each step ended within its rank's windows, which follow one another."""
    inside = np.zeros(len(time), dtype=bool)
    for number in np.unique(windows.rank):
        own = windows.rank == number
        first, last = windows.start[own].min(), windows.end[own].max()
        inside |= (rank == number) & (time > first) & (time <= last)
    return inside


def whole(table: pa.Table, name: str) -> NDArray[np.int64]:
    """A column of whole numbers, -1 where there is none."""
    values = column(table, name).fill_null(-1)
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.int64)


def _matrix(lists: pa.ListArray, width: int) -> NDArray[np.int64]:
    lengths = lists.value_lengths().to_numpy()
    matrix = np.zeros((len(lists), width), dtype=np.int64)
    matrix[np.arange(width)[None, :] < lengths[:, None]] = lists.flatten().to_numpy()
    return matrix
