"""Tokens of a recording as arrays: read once, given out a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from routeprof.detail import read_kind, whole
from routeprof.recording.reader import RecordingFiles, column
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

_PER_RANK = 2**36


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


@dataclass(frozen=True)
class TokenParts:
    """All parts of level tokens, as narrow as they were read: two bytes an id, eight a row.

    Attributes:
        tokens: one row for each step and layer, with a list of ids; None where there are none.
        rows: one row for each step and pass, with lists of requests and positions; or None.
        passes: for each rank by its number, the pass of each layer by its index.
        unread: one line for each part that could not be read.
    """

    tokens: pa.Table | None
    rows: pa.Table | None
    passes: Mapping[int, Mapping[int, str]]
    unread: tuple[str, ...] = ()


def read_token_parts(files: RecordingFiles) -> TokenParts:
    """Read every part of level tokens once."""
    tokens, unread = read_kind(files, "tokens")
    rows, unread_rows = read_kind(files, "rows")
    passes = {owner.number: owner.passes for owner in files.ranks}
    joined = None if rows is None else rows.combine_chunks()  # every layer looks at all of them
    return TokenParts(tokens, joined, passes, unread + unread_rows)


def layer_tokens(parts: TokenParts, profile: Profile, layer: Layer) -> TokenTable:
    """The tokens of a layer in a profile's phase, tag and windows."""
    runs = _runs(parts, profile, layer)
    if runs is None or not runs.num_rows:
        empty = np.zeros(0, dtype=np.int64)
        ids = np.zeros((0, layer.choices), dtype=np.int64)
        return TokenTable(empty, empty, empty, empty, ids, parts.unread)
    tokens, step, rank = (whole(runs, name) for name in ("tokens", "step", "rank"))
    ids = column(runs, "ids").flatten().cast(pa.int64()).fill_null(-1).to_numpy()
    request, position = _rows(parts, layer, of_rank(rank, step), tokens)
    return TokenTable(
        np.repeat(step, tokens),
        np.repeat(rank, tokens),
        request,
        position,
        ids.reshape(-1, layer.choices),
        parts.unread,
    )


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


def _runs(parts: TokenParts, profile: Profile, layer: Layer) -> pa.Table | None:
    """The layer's rows of the tokens parts, in the order of rank and step."""
    if parts.tokens is None:
        return None
    runs = parts.tokens.filter(pc.equal(parts.tokens["layer"], layer.index))
    steps = of_rank(whole(runs, "rank"), whole(runs, "step"))
    order = np.argsort(steps, kind="stable")
    if not profile.is_whole:
        kept = profile.step_counts()
        mine = kept.layer == layer.index
        ran = np.isin(steps, of_rank(kept.rank[mine], kept.step[mine]))
        order = order[ran[order]]
    in_order = len(order) == len(steps) and bool((np.diff(order) == 1).all())
    return runs if in_order else runs.take(pa.array(order))


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
