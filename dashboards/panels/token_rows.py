"""Rows of level tokens: are there any, how many a figure may look at, which belong together."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from routeprof.profile import Profile
from routeprof.token_parts import TokenTable, of_rank

NEEDED = "This needs a recording of level tokens; record with level='tokens'."

MOST_IDS = 20_000_000
"""Ids that one figure looks at, which takes about two seconds."""


def has_tokens(profile: Profile) -> bool:
    """Whether ids of single tokens were recorded at all."""
    return profile.has("tokens") and profile.files is not None


def affordable(profile: Profile) -> int:
    """How many layers' ids a figure may look at, at least two."""
    tokens = profile.totals.sums["tokens"].sum(0)
    ids = [int(tokens[place]) * profile.info.layers[place].top_k for place in profile.captured]
    return max(2, MOST_IDS * len(ids) // max(sum(ids), 1))


def only(table: TokenTable, rows: NDArray[np.bool_]) -> TokenTable:
    """Some of the rows."""
    arrays = (item.name for item in fields(TokenTable) if item.name != "unread")
    return TokenTable(**{name: getattr(table, name)[rows] for name in arrays}, unread=table.unread)


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
    one, other = only(here, np.isin(steps, both)), only(there, np.isin(theirs, both))
    same = (one.request == other.request) & (one.position == other.position)
    return only(one, same), only(other, same)
