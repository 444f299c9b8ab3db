"""Which experts go together: affinity.csv, transitions.csv and repetition.csv (level tokens)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.metrics import affinity
from routeprof.token_parts import TokenTable, of_rank, side_by_side
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

AFFINITY_COLUMNS = "layer expert partner together together_expected lift lift_random".split()
TRANSITION_COLUMNS = (
    "layer expert next_layer next_expert together together_expected lift next_share "
    "next_share_random"
).split()
REPETITION_COLUMNS = (
    "layer repetition_first repetition_first_random repetition_any repetition_any_random"
).split()

MOST_PARTNERS = 32
"""Rows of one expert: 256 experts in 58 layers then have at most half a million."""


@dataclass(frozen=True)
class Pairs:
    """How often every two experts of a layer serve the same token.

    Attributes:
        tokens: number of tokens.
        together: int64 [experts, experts]; the diagonal holds each expert's own tokens.
        lifts: float64 [experts, experts], NaN on the diagonal and without tokens.
        random: the lift where every set of top-k experts is equally likely.
    """

    tokens: int
    together: NDArray[np.int64]
    lifts: NDArray[np.float64]
    random: float

    @property
    def expected(self) -> NDArray[np.float64]:
        """How often independent choices would bring two experts together."""
        alone = np.diagonal(self.together).astype(np.float64)
        return np.asarray(np.outer(alone, alone) / max(self.tokens, 1))


def pairs(ids: NDArray[np.int64], layer: Layer) -> Pairs:
    """The pairs in a layer's ids, ``[tokens, k]`` with k of at least 2."""
    tokens = int((ids >= 0).any(axis=1).sum())
    together = affinity.coactivation(ids, layer.experts)
    random = layer.experts * (layer.choices - 1) / (layer.choices * (layer.experts - 1))
    return Pairs(tokens, together, affinity.lift(together, tokens), random)


def affinity_table(profile: Profile) -> pd.DataFrame:
    """One row for each layer, expert and partner that served a token together.

    Of an expert with more partners, the ``MOST_PARTNERS`` with the most tokens together; a pair
    is listed under both experts, as far as it is among the first of each.

    Raises:
        LevelRequiredError: the recording has no tokens.
    """
    layers = (profile.layer(index) for index in profile.layer_indices)
    frames = [
        _partners(layer, pairs(profile.tokens(layer.index).ids, layer))
        for layer in layers
        if layer.choices > 1
    ]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        return pd.DataFrame(columns=AFFINITY_COLUMNS)
    return pd.concat(frames, ignore_index=True)


def _partners(layer: Layer, found: Pairs) -> pd.DataFrame:
    together = found.together.copy()
    np.fill_diagonal(together, 0)
    cells = _listed(together)
    columns = (layer.index, *cells, together[cells], found.expected[cells], found.lifts[cells])
    names = zip(AFFINITY_COLUMNS, (*columns, found.random), strict=True)
    return pd.DataFrame(dict(names), index=range(len(cells[0])))


def _listed(together: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the pairs that met, of each row at most ``MOST_PARTNERS``."""
    most = np.argsort(-together, axis=1, kind="stable")[:, :MOST_PARTNERS]
    listed = np.zeros(together.shape, dtype=bool)
    np.put_along_axis(listed, most, values=True, axis=1)
    one, other = np.nonzero(listed & (together > 0))
    return one, other


def transition_table(profile: Profile) -> pd.DataFrame:
    """One row for each layer, expert, and expert that its tokens chose in the next layer.

    The next layer is the next one with tokens. Of an expert whose tokens go to more experts, the
    ``MOST_PARTNERS`` with the most of them.

    Raises:
        LevelRequiredError: the recording has no tokens.
    """
    tables = ((profile.layer(index), profile.tokens(index)) for index in profile.layer_indices)
    busy = ((layer, table) for layer, table in tables if len(table.ids))
    frames = [_successors(*here, *there) for here, there in pairwise(busy)]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        return pd.DataFrame(columns=TRANSITION_COLUMNS)
    return pd.concat(frames, ignore_index=True)


def _successors(
    layer: Layer, tokens: TokenTable, following: Layer, theirs: TokenTable
) -> pd.DataFrame:
    found = transitions(layer, tokens, following, theirs)
    expert, successor = cells = _listed(found.together)
    random = following.choices / following.experts
    columns = (
        *(layer.index, expert, following.index, successor),
        *(values[cells] for values in (found.together, found.expected, found.lift, found.shares)),
        random,
    )
    names = zip(TRANSITION_COLUMNS, columns, strict=True)
    return pd.DataFrame(dict(names), index=range(len(expert)))


def transitions(
    layer: Layer, tokens: TokenTable, following: Layer, theirs: TokenTable
) -> affinity.Transitions:
    """Where the tokens of a layer go in a following one, of the tokens that both know."""
    here, there = side_by_side(tokens, theirs)
    return affinity.transitions(here.ids, there.ids, layer.experts, following.experts)


def repetition_table(profile: Profile) -> pd.DataFrame:
    """How often a request's next token keeps an expert, one row for each layer with tokens.

    Raises:
        LevelRequiredError: the recording has no tokens.
    """
    rows = []
    for index in profile.layer_indices:
        table = profile.tokens(index)
        if len(table.ids):
            rows.append(repetition_row(profile.layer(index), table))
    return pd.DataFrame(rows, columns=REPETITION_COLUMNS)


def repetition_row(layer: Layer, table: TokenTable) -> tuple[int, float, float, float, float]:
    """``REPETITION_COLUMNS`` of a layer's tokens; NaN where no request has two of them."""
    known = table.request >= 0
    ids, request = table.ids[known], of_rank(table.rank[known], table.request[known])
    return (
        layer.index,
        affinity.repetition_first(ids, request),
        affinity.random_repetition_first(layer.experts),
        affinity.repetition_any(ids, request),
        affinity.random_repetition_any(layer.experts, layer.choices),
    )
