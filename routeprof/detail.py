"""Steps and tokens of a recording as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.recording.fold import Windows
from routeprof.recording.reader import Part, RecordingFiles, column, read_part
from routeprof.topology import Layer

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


@dataclass(frozen=True)
class TokenTable:
    """One row for each token that a layer routed, in the order in which it ran.

    Attributes:
        step, rank: int64 [tokens].
        request, position: int64 [tokens]; -1 where the layer does not see the pass's own rows.
        ids: int64 [tokens, k], -1 for an id outside the layer's range.
        unread: one line for each part that could not be read.
    """

    step: NDArray[np.int64]
    rank: NDArray[np.int64]
    request: NDArray[np.int64]
    position: NDArray[np.int64]
    ids: NDArray[np.int64]
    unread: tuple[str, ...] = ()


def read_steps(files: RecordingFiles, profile: Profile) -> StepTable:
    """All steps of a profile's phase, tag and windows."""
    table, unread = _read(files, "steps")
    widest = max((layer.experts for layer in profile.info.layers), default=0)
    if table is None:
        whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
        text = np.zeros(0, dtype=object)
        counts = np.zeros((0, widest), dtype=np.int64)
        return StepTable(whole, whole, whole, real, text, text, whole, whole, whole, counts, unread)
    phase, tag = (np.array(column(table, name).to_pylist(), object) for name in ("phase", "tag"))
    time = column(table, "time").to_numpy()
    keep = _selected(phase, tag, profile)
    if profile.between is not None:
        keep &= _in_windows(time, _whole(table, "rank"), profile.totals.windows)
    order = np.lexsort([_whole(table, name) for name in ("layer", "step", "rank")])
    order = order[keep[order]]
    columns = {
        name: _whole(table, name)[order]
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


def read_tokens(files: RecordingFiles, profile: Profile, layer: Layer) -> TokenTable:
    """All tokens of a layer, whatever phase or tag is selected."""
    table, unread = _read(files, "tokens")
    rows, unread_rows = _read(files, "rows")
    width = layer.top_k
    if table is not None:
        table = table.filter(pc.equal(table["layer"], layer.index))
    if table is None or not table.num_rows:
        empty = np.zeros(0, dtype=np.int64)
        return TokenTable(empty, empty, empty, empty, np.zeros((0, width), np.int64), unread)
    order = np.lexsort([_whole(table, "step"), _whole(table, "rank")])
    table = table.take(pa.array(order))
    tokens = _whole(table, "tokens")
    ids = column(table, "ids").flatten().cast(pa.int64()).fill_null(-1).to_numpy()
    step = np.repeat(_whole(table, "step"), tokens)
    rank = np.repeat(_whole(table, "rank"), tokens)
    names = {owner.number: owner.passes.get(layer.index) for owner in files.ranks}
    request, position = _requests(rows, names, _whole(table, "rank"), table, tokens)
    return TokenTable(step, rank, request, position, ids.reshape(-1, width), unread + unread_rows)


def _requests(
    rows: pa.Table | None,
    names: dict[int, str | None],
    ranks: NDArray[np.int64],
    table: pa.Table,
    tokens: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Request and position of each token, by the rows of the step it ran in.

    Args:
        names: for each rank, the layer's pass.
    """
    unknown = np.full(int(tokens.sum()), -1, dtype=np.int64)
    if rows is None:
        return unknown, unknown.copy()
    known: dict[tuple[int, int], tuple[Any, Any]] = {}
    for row in zip(
        _whole(rows, "rank"),
        _whole(rows, "step"),
        column(rows, "pass").to_pylist(),
        column(rows, "request"),
        column(rows, "position"),
        strict=True,
    ):
        rank, step, owner, request, position = row
        if owner.rpartition("@")[0] == names.get(int(rank)):
            known[int(rank), int(step)] = (request.values, position.values)
    request, position, start = unknown, unknown.copy(), 0
    for rank, step, count in zip(ranks, _whole(table, "step"), tokens, strict=True):
        found = known.get((int(rank), int(step)))
        # A layer that chooses its rows, or runs twice, has other rows than the pass.
        if found is not None and len(found[0]) == count:
            request[start : start + count] = found[0].to_numpy()
            position[start : start + count] = found[1].to_numpy()
        start += int(count)
    return request, position


def _read(files: RecordingFiles, kind: str) -> tuple[pa.Table | None, tuple[str, ...]]:
    parts = files.parts(kind)
    read = _without_copies(parts, [read_part(part, files.info) for part in parts])
    tables = [table for table in read if isinstance(table, pa.Table)]
    unread = tuple(line for line in read if isinstance(line, str))
    if not tables:
        return None, unread
    joined = pa.concat_tables(tables)
    return joined.unify_dictionaries().combine_chunks(), unread


def _without_copies(parts: list[Part], read: list[pa.Table | str]) -> list[pa.Table | str]:
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


def _whole(table: pa.Table, name: str) -> NDArray[np.int64]:
    values = column(table, name).fill_null(-1)
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.int64)


def _matrix(lists: pa.ListArray, width: int) -> NDArray[np.int64]:
    lengths = lists.value_lengths().to_numpy()
    matrix = np.zeros((len(lists), width), dtype=np.int64)
    matrix[np.arange(width)[None, :] < lengths[:, None]] = lists.flatten().to_numpy()
    return matrix
