"""Which experts go together: within a token, from one token to the next, and from layer to layer.

All functions take the ids that recordings hold at level ``tokens``: ``[tokens, k]``, best choice
first. An id of -1 (or any that names no expert) is ignored, and a repeated id counts once.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    id_array,
    int_array,
    ratio,
    require_positive,
    require_shape,
)


def coactivation(ids: npt.ArrayLike, experts: int) -> IntArray:
    """Tokens that chose both i and j, over all pairs of a token's choices.

    Returns:
        int64 ``[experts, experts]``, symmetric; the diagonal holds the tokens that chose i.

    Raises:
        UsageError: ids are not integers ``[tokens, k]``.

    >>> coactivation([[0, 2], [2, 1]], experts=3).tolist()
    [[1, 0, 1], [0, 1, 1], [1, 1, 2]]
    """
    chosen = _once(id_array(ids, "ids", experts))
    return _joint(chosen, chosen, experts, experts)


def lift(together: npt.ArrayLike, tokens: int) -> FloatArray:
    """P(ij) ÷ (P(i) · P(j)): 1 is independent, above 1 the two experts attract each other.

    A token never chooses an expert twice, so that a random top-k lies below 1, at
    experts · (k − 1) ÷ (k · (experts − 1)): 0.57 for 2 of 8, 0.88 for 8 of 256.

    Args:
        together: the matrix of `coactivation`, ``[experts, experts]``.
        tokens: number of tokens behind it.

    Returns:
        ``[experts, experts]``, NaN on the diagonal and where an expert was never chosen.

    Raises:
        UsageError: the matrix is not square.
    """
    joint = int_array(together, "together", minimum_axes=2)
    square = (joint.shape[-1], joint.shape[-1])
    require_shape("together", joint.shape, square, "its last axis", joint.shape[-1:])
    chosen = np.diagonal(joint).astype(np.float64)
    lifts = ratio(joint * float(tokens), np.outer(chosen, chosen))
    np.fill_diagonal(lifts, np.nan)
    return lifts


def repetition_first(ids: npt.ArrayLike, request: npt.ArrayLike) -> float:
    """Share of consecutive tokens with the same first choice (Mixtral paper, Table 5).

    Consecutive means: the next token of the same request, wherever a batch puts its row.

    Args:
        ids: ``[tokens, k]``, the tokens of a request in the order of their positions.
        request: the request of each token, ``[tokens]``, any integers.

    Returns:
        The share, NaN without two consecutive tokens that both have a valid first choice.

    Raises:
        UsageError: the shapes do not fit.
    """
    before, after = _consecutive(ids, request)
    valid = (before[:, 0] >= 0) & (after[:, 0] >= 0)
    return float(ratio((valid & (before[:, 0] == after[:, 0])).sum(), valid.sum()))


def repetition_any(ids: npt.ArrayLike, request: npt.ArrayLike) -> float:
    """Share of consecutive tokens with at least one choice in common (Mixtral paper, Table 5).

    Arguments, result and errors as in `repetition_first`; a token without any valid id is left out.
    """
    before, after = _consecutive(ids, request)
    valid = (before >= 0).any(axis=1) & (after >= 0).any(axis=1)
    same = (before[:, :, np.newaxis] == after[:, np.newaxis, :]) & (before >= 0)[:, :, np.newaxis]
    return float(ratio(same.any(axis=(1, 2)).sum(), valid.sum()))


def random_repetition_first(experts: int) -> float:
    """What `repetition_first` is when routing is random: 1 ÷ experts."""
    require_positive(experts=experts)
    return 1 / experts


def random_repetition_any(experts: int, top_k: int) -> float:
    """What `repetition_any` is when routing is random: 1 − C(E − k, k) ÷ C(E, k).

    Raises:
        UsageError: top_k is not in 1…experts.

    >>> round(random_repetition_any(8, 2), 3)
    0.464
    """
    require_positive(experts=experts, top_k=top_k)
    if top_k > experts:
        raise UsageError(f"top_k is {top_k} and experts {experts}: pass top_k up to experts")
    return 1 - comb(experts - top_k, top_k) / comb(experts, top_k)


class Transitions(NamedTuple):
    """Where the tokens of one layer's experts go in another layer.

    Attributes:
        tokens: number of tokens with a valid id in both layers; the others are left out.
        together: int64 ``[experts, experts_next]``, tokens that chose e' here and e there.
        here: int64 ``[experts]``, tokens that chose e' here.
        there: int64 ``[experts_next]``, tokens that chose e there.
    """

    tokens: int
    together: IntArray
    here: IntArray
    there: IntArray

    @property
    def shares(self) -> FloatArray:
        """P(e there | e' here); NaN where e' was never chosen."""
        return ratio(self.together, self.here[:, np.newaxis])

    @property
    def expected(self) -> FloatArray:
        """How often both would be chosen if the two layers chose independently."""
        return ratio(np.outer(self.here, self.there), self.tokens)

    @property
    def lift(self) -> FloatArray:
        """P(e there | e' here) ÷ P(e there): 1 where the layers choose independently."""
        return ratio(self.together, self.expected)


def transitions(
    ids: npt.ArrayLike, ids_next: npt.ArrayLike, experts: int, experts_next: int
) -> Transitions:
    """What `inter_layer` is made of: the same arguments, tokens left out and errors.

    >>> transitions([[0], [0], [1]], [[2], [1], [2]], 2, 3).together.tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    here = _once(id_array(ids, "ids", experts))
    there = _once(id_array(ids_next, "ids_next", experts_next))
    require_shape("ids_next", there.shape, (len(here), there.shape[1]), "ids", here.shape)
    both = (here >= 0).any(axis=1) & (there >= 0).any(axis=1)
    here, there = here[both], there[both]
    return Transitions(
        len(here),
        _joint(here, there, experts, experts_next),
        np.bincount(here[here >= 0], minlength=experts),
        np.bincount(there[there >= 0], minlength=experts_next),
    )


def inter_layer(
    ids: npt.ArrayLike, ids_next: npt.ArrayLike, experts: int, experts_next: int
) -> FloatArray:
    """P(e at the next layer | e' at this one): of the tokens that chose e', the share that chose e.

    Args:
        ids: this layer's choices ``[tokens, k]``.
        ids_next: the same tokens' choices in the next layer, ``[tokens, k']``.
        experts: experts of this layer.
        experts_next: experts of the next one.

    Returns:
        ``[experts, experts_next]``: row e' sums to k'; NaN where e' was never chosen. Tokens
        without a valid id in both layers are left out.

    Raises:
        UsageError: the two arrays have different numbers of tokens.
    """
    return transitions(ids, ids_next, experts, experts_next).shares


def fan_out(ids: npt.ArrayLike, rank_of_expert: npt.ArrayLike) -> IntArray:
    """Distinct ranks (or nodes) that each token is sent to.

    Args:
        ids: ``[tokens, k]``.
        rank_of_expert: the rank, or node, that holds each expert (or slot), ``[experts]``.

    Returns:
        int64 ``[tokens]``; 0 for a token without a valid id.

    Raises:
        UsageError: ids are not integers ``[tokens, k]``, or rank_of_expert has not one axis.

    >>> fan_out([[0, 1], [1, 2]], rank_of_expert=[0, 0, 1]).tolist()
    [1, 2]
    """
    ranks = int_array(rank_of_expert, "rank_of_expert", minimum_axes=1)
    require_shape("rank_of_expert", ranks.shape, ranks.shape[-1:], "ids", np.shape(ids))
    chosen = id_array(ids, "ids", len(ranks))
    in_rank = _once(np.where(chosen >= 0, ranks[chosen], -1))
    return np.asarray((in_rank >= 0).sum(axis=1))


def _once(ids: IntArray) -> IntArray:
    """Rows sorted, with repetitions set to -1."""
    ordered = np.sort(ids, axis=1)
    ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1
    return ordered


def _joint(here: IntArray, there: IntArray, experts: int, experts_next: int) -> IntArray:
    """Rows with i in ``here`` and j in ``there``; a pair of columns at a time, for memory."""
    table = np.zeros(experts * experts_next, dtype=np.int64)
    for first in here.T:
        for second in there.T:
            valid = (first >= 0) & (second >= 0)
            cells = first[valid] * experts_next + second[valid]
            table += np.bincount(cells, minlength=table.size)
    return table.reshape(experts, experts_next)


def _consecutive(ids: npt.ArrayLike, request: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Choices of every token that has a successor in its request, and of that successor."""
    chosen, owner = id_array(ids, "ids"), np.asarray(request)
    require_shape("request", owner.shape, chosen.shape[:1], "ids", chosen.shape)
    order = np.argsort(owner, kind="stable")
    chosen, owner = chosen[order], owner[order]
    follows = owner[1:] == owner[:-1]
    return chosen[:-1][follows], chosen[1:][follows]
