"""Routing signatures: where requests of a class send their tokens, and how classes differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray, ratio, shares
from routeprof.metrics.drift import divergence_matrix
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.placements import placed
from routeprof.whatif.requests.served import LayerTokens, Requests, row_loads

TOP_EXPERTS = 3

MOST_COMPARED = 32
"""Of a class with more requests so many are compared with others, spread over its arrivals."""


@dataclass(frozen=True)
class Signature:
    """Where a class sends its tokens.

    Attributes:
        name: the class; ``requests`` how many there are of it; ``tokens`` a request's mean.
        shares: for each layer the mean over requests of an expert's share of the load, [experts].
        within: mean divergence of two of its requests; NaN of a single one.
        top: its largest shares of any layer, as (layer, expert, share).
    """

    name: str
    requests: int
    tokens: float
    shares: tuple[FloatArray, ...]
    within: float
    top: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Signatures:
    """Signatures of all classes.

    Divergences are Jensen–Shannon, base 2, between the loads of two requests, mean over layers.

    Attributes:
        layers: indices, in the order of the shares.
        within: mean over all pairs of requests of the same class; NaN where there is none.
        between: the same of different classes.
    """

    phase: str
    layers: tuple[int, ...]
    classes: tuple[Signature, ...]
    within: float
    between: float


def signatures(requests: Requests) -> Signatures:
    """The signature of each class, fitted on all of its requests, by name."""
    own = [own_shares(request_loads(one)) for one in requests.layers]
    classes = np.array(requests.classes, dtype=object)
    names = sorted(set(requests.classes))
    members = {name: np.flatnonzero(classes == name) for name in names}
    compared = np.concatenate([_some(places) for places in members.values()])
    divergence = _divergences(requests, compared)
    same = classes[compared][:, np.newaxis] == classes[compared]
    pairs = np.triu(np.ones(same.shape, dtype=bool), 1)
    made = []
    for name, places in members.items():
        of_class = classes[compared] == name
        mean = tuple(share[places].mean(axis=0) for share in own)
        made.append(
            Signature(
                name=name,
                requests=len(places),
                tokens=float(requests.tokens[places].mean()),
                shares=mean,
                within=_mean(divergence[pairs & of_class & of_class[:, np.newaxis]]),
                top=_top(mean, requests.layers),
            )
        )
    return Signatures(
        requests.phase,
        tuple(one.layer.index for one in requests.layers),
        tuple(made),
        within=_mean(divergence[pairs & same]),
        between=_mean(divergence[pairs & ~same]),
    )


def expected_by_class(
    requests: Requests, fit: IntArray, judged: IntArray, ranks: int
) -> FloatArray:
    """What the classes of some requests let expect of others.

    Args:
        fit: places of the requests that signatures are fitted on.
        judged: places of those to expect something of. Of a class that ``fit`` has not, what the
            mean of the others does is expected.

    Returns:
        Deviations from even load, of experts and of ranks in all layers: ``[judged, features]``.
    """
    classes = np.array(requests.classes, dtype=object)
    features = []
    for one in requests.layers:
        fitted = request_loads(one)[fit]  # nothing else of the layer is looked at
        own = own_shares(fitted)
        expected = np.tile(own.mean(axis=0), (len(judged), 1))
        for name in set(classes[judged]) & set(classes[fit]):
            expected[classes[judged] == name] = own[classes[fit] == name].mean(axis=0)
        features.append(_deviations(one, expected, ranks))
    return _by_size(requests, judged, features)


def expected_by_prefill(requests: Requests, judged: IntArray, ranks: int) -> FloatArray:
    """What the requests' own prefills let expect of their decode; otherwise as by class."""
    features = [_deviations(one, own_shares(one.prefill)[judged], ranks) for one in requests.layers]
    return _by_size(requests, judged, features)


def request_loads(one: LayerTokens) -> IntArray:
    """Assignments by request and expert, ``[requests, experts]``."""
    return row_loads(one.request, one.ids, len(one.prefill), one.layer.experts)


def own_shares(load: IntArray) -> FloatArray:
    """Shares of load ``[requests, experts]``; the mean of the others where there is no load."""
    own = shares(load.astype(np.float64))
    empty = np.isnan(own).any(axis=1)
    own[empty] = own[~empty].mean(axis=0) if not empty.all() else 1 / load.shape[1]
    return own


def _deviations(one: LayerTokens, expected: FloatArray, ranks: int) -> FloatArray:
    experts = placed(one.layer)
    on_ranks = rank_loads(expected[:, :experts], contiguous(experts, ranks), ranks)
    parts = (expected, on_ranks)
    return np.concatenate([part - part.mean(axis=1, keepdims=True) for part in parts], axis=1)


def _by_size(requests: Requests, judged: IntArray, features: list[FloatArray]) -> FloatArray:
    """A prompt's length is known before it runs; how long its answer gets is not."""
    joined = np.concatenate(features, axis=1)
    if requests.phase == "decode":
        return joined
    return joined * requests.tokens[judged][:, np.newaxis]


def _some(places: IntArray) -> IntArray:
    number = min(len(places), MOST_COMPARED)
    return places[np.arange(number) * len(places) // number]


def _divergences(requests: Requests, places: IntArray) -> FloatArray:
    """Between every two requests, mean over the layers in which both have load."""
    each = np.stack([divergence_matrix(request_loads(one)[places]) for one in requests.layers])
    known = ~np.isnan(each)
    total, number = np.where(known, each, 0.0).sum(axis=0), known.sum(axis=0)
    return ratio(total, number)


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _top(
    mean: tuple[FloatArray, ...], layers: tuple[LayerTokens, ...]
) -> tuple[tuple[int, int, float], ...]:
    """Of equal shares the earlier layer's and the lower expert's."""
    cells = [
        (one.layer.index, expert, float(share[expert]))
        for one, share in zip(layers, mean, strict=True)
        for expert in np.argsort(-share, kind="stable")[:TOP_EXPERTS].tolist()
    ]
    return tuple(sorted(cells, key=lambda cell: -cell[2])[:TOP_EXPERTS])
