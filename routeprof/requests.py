"""What each request did: the table of requests.csv (level tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.metrics import drift
from routeprof.token_parts import TokenTable, last_places, of_rank, rank_and_number
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

REQUEST_COLUMNS = (
    "request tokens prefill_tokens decode_tokens other_tokens divergence_from_all top_experts"
).split()
TOP_EXPERTS = 3

_KINDS = ("prefill", "decode", "other")


@dataclass(frozen=True)
class _Seen:
    """What one layer saw of each request.

    Attributes:
        requests: int64 [requests], their numbers by ``of_rank``, ascending.
        tokens: int64 [requests, 3], by ``_KINDS``.
        divergence: float64 [requests].
        shares, experts: [requests, up to TOP_EXPERTS], the largest shares first.
    """

    layer: int
    requests: NDArray[np.int64]
    tokens: NDArray[np.int64]
    divergence: NDArray[np.float64]
    shares: NDArray[np.float64]
    experts: NDArray[np.int64]


def requests_table(profile: Profile) -> pd.DataFrame:
    """One row for each request, in the order of arrival.

    Ranks that see the same requests, as stages of a pipeline, share a row. Where there are
    several replicas, a request is named after the first rank of its own: ``rank/request``.

    Tokens are counted in the layer that saw most of them. ``divergence_from_all`` is the
    Jensen–Shannon divergence (base 2) between the request's load and that of all requests, mean
    over layers. ``top_experts`` are its largest shares of a layer, as ``layer:expert``. Requests
    and tokens are those of the profile's phase, tag and time.

    Raises:
        LevelRequiredError: the recording has no tokens.
    """
    replicas = replica_ranks(profile)
    seen = [_seen(profile, profile.layer(index), replicas) for index in profile.layer_indices]
    seen = [own for own in seen if len(own.requests)]
    if not seen:
        return pd.DataFrame(columns=REQUEST_COLUMNS)
    requests = np.unique(np.concatenate([own.requests for own in seen]))
    tokens, divergence = _most(seen, requests), _mean_divergence(seen, requests)
    several = len(set(replicas.values())) > 1
    return pd.DataFrame(
        {
            "request": request_names(requests, with_rank=several),
            "tokens": tokens.sum(1),
            **{f"{kind}_tokens": tokens[:, place] for place, kind in enumerate(_KINDS)},
            "divergence_from_all": divergence,
            "top_experts": _top_experts(seen, requests),
        },
        columns=REQUEST_COLUMNS,
    )


def _seen(profile: Profile, layer: Layer, replicas: dict[int, int]) -> _Seen:
    """What a layer saw: its tokens are read, counted and let go."""
    table = profile.tokens(layer.index)
    known = table.request >= 0
    rank = table.rank.copy()
    for own, first in replicas.items():
        rank[table.rank == own] = first
    numbers = of_rank(rank, table.request)[known]
    requests, place = np.unique(numbers, return_inverse=True)
    kinds = place * len(_KINDS) + _kinds(profile, layer, table)[known]
    tokens = np.bincount(kinds, minlength=len(requests) * len(_KINDS))
    ids = table.ids[known]
    valid = (ids >= 0) & (ids < layer.experts)
    cells = (place[:, None] * layer.experts + ids)[valid]
    load = np.bincount(cells, minlength=len(requests) * layer.experts)
    load = load.reshape(len(requests), layer.experts)
    shares = load / np.maximum(load.sum(1, keepdims=True), 1)
    best = np.argsort(-shares, axis=1, kind="stable")[:, :TOP_EXPERTS]
    return _Seen(
        layer.index,
        requests,
        tokens.reshape(len(requests), len(_KINDS)),
        np.asarray(drift.jensen_shannon(load, load.sum(0))),
        np.take_along_axis(shares, best, axis=1),
        best,
    )


def _kinds(profile: Profile, layer: Layer, table: TokenTable) -> NDArray[np.int64]:
    """For each token of a layer the place of its kind in ``_KINDS``, by the phase of its step."""
    steps = profile.step_counts()
    mine = steps.layer == layer.index
    phases = steps.phase[mine]
    kind = np.full(len(phases) + 1, _KINDS.index("other"))  # the last is of steps not known
    for place, name in enumerate(_KINDS[:2]):
        kind[:-1][phases == name] = place
    ran = of_rank(steps.rank[mine], steps.step[mine])
    return np.asarray(kind[last_places(ran, of_rank(table.rank, table.step))])


def replica_ranks(profile: Profile) -> dict[int, int]:
    """For each rank that owns tokens, the first of those that see the same requests.

    They have the same data-parallel rank and are told apart by another one. Ranks that are told
    apart by nothing are replicas that nobody numbered.
    """
    replicas: dict[tuple[object, ...], int] = {}
    taken: dict[tuple[object, ...], set[tuple[int, int]]] = {}
    firsts = {}
    for rank in profile.files.ranks if profile.files else ():
        if not rank.owns_tokens:
            continue
        role = rank.state.role if rank.state else None
        replica = (rank.run, role.dp) if role else (rank.run, None, rank.rank)
        places = taken.setdefault(replica, set())
        place = (role.pp, role.tp) if role else (0, 0)
        if place in places:
            replica = (*replica, rank.rank)
        places.add(place)
        firsts[rank.number] = replicas.setdefault(replica, rank.number)
    return firsts


def ranks_of_request(profile: Profile, name: str) -> dict[int, int]:
    """The number of a request on each rank that sees it, by its name in ``requests_table``.

    Raises:
        UsageError: the name is none of a request.
    """
    replicas = replica_ranks(profile)
    first, slash, number = name.rpartition("/")
    known = (
        first in {str(own) for own in replicas.values()} if slash else len({*replicas.values()}) < 2
    )
    if not known or not number.isdecimal():
        form = "RANK/REQUEST, as 0/17" if len({*replicas.values()}) > 1 else "a number, as 17"
        raise UsageError(f"{name!r} names no request: requests of this recording are {form}")
    return {rank: int(number) for rank, own in replicas.items() if not slash or str(own) == first}


def request_names(requests: NDArray[np.int64], *, with_rank: bool) -> list[str]:
    ranks, numbers = rank_and_number(requests)
    names = [str(number) for number in numbers.tolist()]
    pairs = zip(ranks.tolist(), names, strict=True)
    return [f"{rank}/{name}" for rank, name in pairs] if with_rank else names


def _most(seen: Sequence[_Seen], requests: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens by kind [requests, 3], from the layer that saw most of the request."""
    most = np.zeros((len(requests), len(_KINDS)), dtype=np.int64)
    for own in seen:
        place = np.searchsorted(requests, own.requests)
        more = own.tokens.sum(1) >= most[place].sum(1)
        most[place[more]] = own.tokens[more]
    return most


def _mean_divergence(seen: Sequence[_Seen], requests: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean over the layers that know it, NaN where none does."""
    total, layers = np.zeros(len(requests)), np.zeros(len(requests))
    for own in seen:
        known = ~np.isnan(own.divergence)
        place = np.searchsorted(requests, own.requests[known])
        total[place] += own.divergence[known]
        layers[place] += 1
    mean = np.full(len(requests), np.nan)
    np.divide(total, layers, out=mean, where=layers > 0)
    return mean


def _top_experts(seen: Sequence[_Seen], requests: NDArray[np.int64]) -> list[str]:
    """The largest shares of each request over all layers; of equal ones the earlier layer's."""
    columns = sum(own.experts.shape[1] for own in seen)
    shares = np.full((len(requests), columns), -1.0)
    experts = np.zeros((len(requests), columns), dtype=np.int64)
    layers, start = [], 0
    for own in seen:
        end = start + own.experts.shape[1]
        place = np.searchsorted(requests, own.requests)
        shares[place, start:end], experts[place, start:end] = own.shares, own.experts
        layers += [own.layer] * (end - start)
        start = end
    order = np.argsort(-shares, axis=1, kind="stable")[:, :TOP_EXPERTS]
    found = np.take_along_axis(experts, order, axis=1)
    pairs = zip(np.array(layers)[order].tolist(), found.tolist(), strict=True)
    return [
        " ".join(f"{layer}:{expert}" for layer, expert in zip(*row, strict=True)) for row in pairs
    ]
