"""Rows of level tokens that belong to a selection; read from disk, so read them once."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from routeprof.detail import TokenTable
from routeprof.profile import Profile
from routeprof.topology import Layer

NEEDED = "This needs a recording of level tokens; record with level='tokens'."

MOST_READ = 40_000_000
"""Ids that are read for one view, about a second; a look at one layer reads those of all."""

_PART = 60_000
"""Ids that could be read in the time that it takes to open a part file."""

_STEPS = 2**36


def has_tokens(profile: Profile) -> bool:
    """Whether ids of single tokens were recorded at all."""
    return profile.has("tokens") and profile.files is not None


def affordable(profile: Profile) -> int:
    """How many looks at a layer's tokens a view may take, at least two."""
    tokens = profile.totals.sums["tokens"].sum(0)
    ids = sum(
        int(number) * layer.top_k
        for number, layer in zip(tokens, profile.info.layers, strict=True)
        if layer.kind == "moe"
    )
    files = profile.files
    parts = len(files.parts("tokens")) + len(files.parts("rows")) if files is not None else 0
    return max(2, MOST_READ // (ids + _PART * parts + 1))


def selected_tokens(profile: Profile, layer: Layer) -> TokenTable:
    """Tokens of a layer in the profile's phase, tag and time, in the order in which they ran."""
    table = profile.tokens(layer.index)
    if profile.is_whole:
        return table
    steps = profile.step_counts()
    mine = steps.layer == layer.index
    ran = _steps(steps.rank[mine], steps.step[mine])
    return only(table, np.isin(_steps(table.rank, table.step), ran))


def only(table: TokenTable, rows: NDArray[np.bool_]) -> TokenTable:
    """Some of the rows."""
    arrays = (item.name for item in fields(TokenTable) if item.name != "unread")
    return TokenTable(**{name: getattr(table, name)[rows] for name in arrays}, unread=table.unread)


def requests_of(table: TokenTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids ``[tokens, k]`` and request ``[tokens]`` of the rows whose request is known.

    Ranks number their requests apart; here each has a number of its own.
    """
    known = table.request >= 0
    return table.ids[known], table.rank[known] * _STEPS + table.request[known]


def side_by_side(here: TokenTable, there: TokenTable) -> tuple[TokenTable, TokenTable]:
    """Rows of the same tokens in two layers.

    Of the steps that have as many rows in both layers, the rows whose request and position agree.
    """
    steps, theirs = _steps(here.rank, here.step), _steps(there.rank, there.step)
    numbers, counts = np.unique(steps, return_counts=True)
    their_numbers, their_counts = np.unique(theirs, return_counts=True)
    common, first, second = np.intersect1d(
        numbers, their_numbers, assume_unique=True, return_indices=True
    )
    both = common[counts[first] == their_counts[second]]
    one, other = only(here, np.isin(steps, both)), only(there, np.isin(theirs, both))
    same = (one.request == other.request) & (one.position == other.position)
    return only(one, same), only(other, same)


def _steps(rank: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each step of each rank."""
    return rank * _STEPS + step
