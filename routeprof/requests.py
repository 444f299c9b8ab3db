"""What each request did: the table of requests.csv (level tokens)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.metrics import drift

if TYPE_CHECKING:
    from routeprof.profile import Profile

REQUEST_COLUMNS = (
    "request tokens prefill_tokens decode_tokens other_tokens divergence_from_all top_experts"
).split()
TOP_EXPERTS = 3


def requests_table(profile: Profile) -> pd.DataFrame:
    """One row for each request, in the order of arrival.

    Ranks that see the same requests, as stages of a pipeline, share a row. Where there are
    several replicas, a request is named after the first rank of its own: ``rank/request``.

    Tokens are counted in the layer that saw most of them. ``divergence_from_all`` is the
    Jensen–Shannon divergence (base 2) between the request's load and that of all requests, mean
    over layers. ``top_experts`` are its largest shares of a layer, as ``layer:expert``.

    Raises:
        LevelRequiredError: the recording has no tokens.
    """
    per_layer = [_tokens(profile, index) for index in profile.layer_indices]
    tokens = pd.concat(per_layer) if per_layer else pd.DataFrame({"request": []})
    tokens = tokens[tokens["request"] >= 0]
    if not len(tokens):
        return pd.DataFrame(columns=REQUEST_COLUMNS)
    rows = _phases(tokens)
    counts = _counts(profile, tokens, _multi(rows))
    divergences = [drift.jensen_shannon(own, own.sum(0)) for own in counts.values()]
    rows["divergence_from_all"] = pd.DataFrame(divergences).mean().to_numpy()
    rows["top_experts"] = _top_experts(counts)
    rows = rows.reset_index()
    several = len(set(_replicas(profile).values())) > 1
    names = rows["request"].astype(str)
    rows["request"] = rows["rank"].astype(str) + "/" + names if several else names
    return rows[REQUEST_COLUMNS]


def _tokens(profile: Profile, index: int) -> pd.DataFrame:
    """One row for each token of a layer; ``row`` is its place in ``profile.tokens(index)``."""
    table, replicas = profile.tokens(index), _replicas(profile)
    steps = profile.step_counts()
    mine = steps.layer == index
    ran = zip(steps.rank[mine], steps.step[mine], strict=True)
    phase = dict(zip(ran, steps.phase[mine], strict=True))
    ran = zip(table.rank, table.step, strict=True)
    return pd.DataFrame(
        {
            "layer": index,
            "rank": [replicas.get(rank, rank) for rank in table.rank.tolist()],
            "request": table.request,
            "phase": [phase.get(key, "unknown") for key in ran],
            "row": np.arange(len(table.step)),
        }
    )


def _replicas(profile: Profile) -> dict[int, int]:
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


def _phases(tokens: pd.DataFrame) -> pd.DataFrame:
    """Tokens by phase for each rank and request, from the layer that saw most."""
    kind = tokens["phase"].where(tokens["phase"].isin(["prefill", "decode"]), "other")
    counted = tokens.groupby(["rank", "request", "layer", kind]).size().unstack(fill_value=0)
    for name in ("prefill", "decode", "other"):
        counted[name] = counted.get(name, 0)
    counted["tokens"] = counted[["prefill", "decode", "other"]].sum(axis=1)
    most = counted.sort_values("tokens").groupby(["rank", "request"]).tail(1)
    rows = most.reset_index("layer", drop=True).sort_index().rename_axis(columns=None)
    return rows.rename(columns={name: f"{name}_tokens" for name in ("prefill", "decode", "other")})


def _multi(rows: pd.DataFrame) -> pd.MultiIndex:
    assert isinstance(rows.index, pd.MultiIndex)
    return rows.index


def _counts(
    profile: Profile, tokens: pd.DataFrame, requests: pd.MultiIndex
) -> dict[int, NDArray[np.int64]]:
    """For each layer, assignments [requests, experts]."""
    counts = {}
    for layer in (profile.layer(index) for index in profile.layer_indices):
        mine = tokens[tokens["layer"] == layer.index]
        ids = profile.tokens(layer.index).ids[mine["row"]]
        place = requests.get_indexer(pd.MultiIndex.from_frame(mine[["rank", "request"]]))
        own = np.zeros((len(requests), layer.experts), dtype=np.int64)
        rows, choices = np.nonzero(ids >= 0)
        np.add.at(own, (place[rows], ids[rows, choices]), 1)
        counts[layer.index] = own
    return counts


def _top_experts(counts: dict[int, NDArray[np.int64]]) -> list[str]:
    names = [f"{layer}:{expert}" for layer, own in counts.items() for expert in range(own.shape[1])]
    shares = [own / np.maximum(own.sum(1, keepdims=True), 1) for own in counts.values()]
    order = np.argsort(-np.concatenate(shares, axis=1), axis=1, kind="stable")
    return [" ".join(names[place] for place in row[:TOP_EXPERTS]) for row in order]
