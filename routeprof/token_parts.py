"""Tokens of a recording as arrays, a layer at a time: what else there is, is not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.detail import read_kind, whole, without_copies
from routeprof.recording.id_bytes import unpacked
from routeprof.recording.reader import RecordingFiles, column, read_part
from routeprof.recording.row_groups import RowGroup, row_groups
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

KEPT = 1 << 30
"""Bytes of row groups that a profile keeps for who asks again."""

_PER_RANK = 2**36
_NO_STEPS = np.zeros(0, dtype=np.int64)


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


Steps = Mapping[int, NDArray[np.int64]]
"""Numbers of steps, ascending, for each rank by its number; a rank that is absent has none."""


class TokenParts:
    """Parts of level tokens: a row group is read when it is asked for.

    What was read is kept, a byte or two an id, up to ``KEPT`` bytes.

    Attributes:
        rows: one row for each step and pass, with lists of requests and positions; or None.
        passes: for each rank by its number, the pass of each layer by its index.
    """

    def __init__(self, files: RecordingFiles) -> None:
        self._info = files.info
        rows, self._unread_rows = read_kind(files, "rows")
        self.rows = None if rows is None else rows.combine_chunks()  # every layer looks at them
        self.passes = {owner.number: owner.passes for owner in files.ranks}
        found = [row_groups(part) for part in files.parts("tokens")]
        self._unread_feet = tuple(line for line in found if isinstance(line, str))
        self._groups = [own for groups in found if not isinstance(groups, str) for own in groups]
        self._kept: dict[tuple[Path, int], pa.Table] = {}
        self._size = 0

    def of_layer(
        self, layer: Layer, steps: Steps | None, phase: str | None
    ) -> tuple[pa.Table | None, tuple[str, ...]]:
        """The layer's rows, of all steps or of these and perhaps more; None without any.

        Returns:
            The rows, one for each step, and one line for each part that could not be read.
        """
        wanted = [own for own in self._groups if _may_hold(own, layer, steps, phase)]
        read = without_copies([own.part for own in wanted], [self._read(own) for own in wanted])
        lines = [line for line in read if isinstance(line, str)]
        unread = (*self._unread_feet, *dict.fromkeys(lines), *self._unread_rows)
        mine = [
            table.filter(pc.equal(table["layer"], layer.index))
            for table in read
            if isinstance(table, pa.Table)
        ]
        return (pa.concat_tables(mine) if mine else None), unread

    def _read(self, group: RowGroup) -> pa.Table | str:
        place = (group.part.path, group.number)
        if place in self._kept:
            return self._kept[place]
        table = read_part(group.part, self._info, groups=[group.number])
        if isinstance(table, pa.Table):
            self._kept[place] = table
            self._size += table.nbytes
            while self._size > KEPT and len(self._kept) > 1:
                self._size -= self._kept.pop(next(iter(self._kept))).nbytes
        return table


def _may_hold(group: RowGroup, layer: Layer, steps: Steps | None, phase: str | None) -> bool:
    """Whether a row group may have rows of the layer, in one of the steps and in the phase."""
    if not group.may_hold("layer", layer.index):
        return False
    if phase is not None and not group.may_hold("phase", phase):
        return False
    return steps is None or group.may_hold_step(steps.get(group.part.rank, _NO_STEPS))


def layer_tokens(
    parts: TokenParts, profile: Profile, layer: Layer, request: Mapping[int, int] | None = None
) -> TokenTable:
    """The tokens of a layer in a profile's phase, tag and windows.

    Args:
        request: number of the only request that is wanted, for each rank that sees it.
    """
    steps = _wanted(parts, profile, layer, request)
    runs, unread = _runs(parts, layer, steps, profile.phase)
    if runs is None or not runs.num_rows:
        empty = np.zeros(0, dtype=np.int64)
        ids = np.zeros((0, layer.choices), dtype=np.int64)
        return TokenTable(empty, empty, empty, empty, ids, unread)
    tokens, step, rank = (whole(runs, name) for name in ("tokens", "step", "rank"))
    ids = unpacked(column(runs, "ids"), tokens * layer.choices, layer.experts)
    own, position = _rows(parts, layer, of_rank(rank, step), tokens)
    table = TokenTable(
        np.repeat(step, tokens),
        np.repeat(rank, tokens),
        own,
        position,
        ids.reshape(-1, layer.choices),
        unread,
    )
    return table if request is None else _only(table, _is_of(request, table.rank, own))


def _is_of(
    request: Mapping[int, int], rank: NDArray[np.int64], number: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which of some tokens are of the request."""
    mine = np.zeros(len(rank), dtype=bool)
    for owner, wanted in request.items():
        mine |= (rank == owner) & (number == wanted)
    return mine


def _wanted(
    parts: TokenParts, profile: Profile, layer: Layer, request: Mapping[int, int] | None
) -> Steps | None:
    """The steps of the profile's selection in which the request has tokens; None for all."""
    steps = None
    if not profile.is_whole:
        kept = profile.step_counts()
        mine = kept.layer == layer.index
        steps = _by_rank(kept.rank[mine], kept.step[mine])
    if request is None:
        return steps
    own = _steps_of(parts, request)
    if steps is None:
        return own
    return {
        rank: np.intersect1d(numbers, steps.get(rank, _NO_STEPS)) for rank, numbers in own.items()
    }


def _steps_of(parts: TokenParts, request: Mapping[int, int]) -> Steps:
    """The steps in which a request has tokens."""
    if parts.rows is None:
        return {}
    lists = column(parts.rows, "request")
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    row = np.repeat(np.arange(len(lengths)), lengths)
    rank, step = whole(parts.rows, "rank"), whole(parts.rows, "step")
    number = lists.flatten().fill_null(-1).to_numpy()
    mine = np.unique(row[_is_of(request, rank[row], number)])
    return _by_rank(rank[mine], step[mine])


def _by_rank(rank: NDArray[np.int64], step: NDArray[np.int64]) -> Steps:
    return {int(owner): np.unique(step[rank == owner]) for owner in np.unique(rank)}


def of_rank(rank: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each step, or each request, of each rank: by rank, then in their order."""
    return rank * _PER_RANK + number


def rank_and_number(
    joined: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What ``of_rank`` joined."""
    rank, number = np.divmod(joined, _PER_RANK)
    return rank, number


def last_places(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each wanted key the last place where ``keys`` has it, -1 where it has not."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    found = order[np.searchsorted(keys, wanted, side="right", sorter=order) - 1]
    return np.where(keys[found] == wanted, found, -1)


def side_by_side(here: TokenTable, there: TokenTable) -> tuple[TokenTable, TokenTable]:
    """Rows of the same tokens in two layers.

    Of the steps that have as many rows in both layers, the rows whose request and position agree.
    """
    steps, theirs = of_rank(here.rank, here.step), of_rank(there.rank, there.step)
    numbers, counts = np.unique(steps, return_counts=True)
    their_numbers, their_counts = np.unique(theirs, return_counts=True)
    common, first, second = np.intersect1d(
        numbers, their_numbers, assume_unique=True, return_indices=True
    )
    both = common[counts[first] == their_counts[second]]
    one, other = _only(here, np.isin(steps, both)), _only(there, np.isin(theirs, both))
    same = (one.request == other.request) & (one.position == other.position)
    return _only(one, same), _only(other, same)


def _only(table: TokenTable, rows: NDArray[np.bool_]) -> TokenTable:
    """Some of the rows."""
    arrays = (item.name for item in fields(TokenTable) if item.name != "unread")
    return TokenTable(**{name: getattr(table, name)[rows] for name in arrays}, unread=table.unread)


def _runs(
    parts: TokenParts, layer: Layer, steps: Steps | None, phase: str | None
) -> tuple[pa.Table | None, tuple[str, ...]]:
    """The layer's rows of the tokens parts, in the order of rank and step, and what is unread."""
    runs, unread = parts.of_layer(layer, steps, phase)
    if runs is None:
        return None, unread
    ran = of_rank(whole(runs, "rank"), whole(runs, "step"))
    order = np.argsort(ran, kind="stable")
    if steps is not None:
        wanted = [of_rank(np.full(len(own), rank), own) for rank, own in steps.items()]
        order = order[np.isin(ran, np.concatenate([_NO_STEPS, *wanted]))[order]]
    in_order = len(order) == len(ran) and bool((np.diff(order) == 1).all())
    return (runs if in_order else runs.take(pa.array(order))), unread


def _rows(
    parts: TokenParts, layer: Layer, steps: NDArray[np.int64], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Request and position of each token, by the rows of the step it ran in.

    Args:
        steps: number of each step, by ``of_rank``; ``tokens`` the tokens that it has here.
    """
    total = int(tokens.sum())
    request = np.full(total, -1, dtype=np.int64)
    position = request.copy()
    rows = None if parts.rows is None else _of_pass(parts, parts.rows, layer)
    if rows is None or not rows.num_rows:
        return request, position
    lists = [column(rows, name) for name in ("request", "position")]
    lengths, others = (own.value_lengths().fill_null(0).to_numpy() for own in lists)
    place = last_places(of_rank(whole(rows, "rank"), whole(rows, "step")), steps)
    # A layer that chooses its rows, or runs twice, has other rows than the pass.
    known = (place >= 0) & (lengths[place] == tokens) & (others[place] == tokens)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    ahead = np.cumsum(tokens) - tokens
    source = np.repeat(starts[place] - ahead, tokens) + np.arange(total)
    inside = np.repeat(known, tokens)
    for target, own in zip((request, position), lists, strict=True):
        target[inside] = own.flatten().fill_null(-1).to_numpy()[source[inside]]
    return request, position


def _of_pass(parts: TokenParts, rows: pa.Table, layer: Layer) -> pa.Table:
    """The rows of the layer's pass, which may have another name on each rank."""
    owner: Any = column(rows, "pass")
    names = [name.rpartition("@")[0] for name in owner.dictionary.to_pylist()]
    code, rank = owner.indices.fill_null(-1).to_numpy(), whole(rows, "rank")
    mine = np.zeros(rows.num_rows, dtype=bool)
    for number, passes in parts.passes.items():
        own = [place for place, name in enumerate(names) if name == passes.get(layer.index)]
        mine |= (rank == number) & np.isin(code, own)
    return rows if mine.all() else rows.filter(pa.array(mine))
