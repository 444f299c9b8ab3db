"""A precision for each expert, by how many assignments a recording has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.errors import MismatchError, UsageError
from routeprof.plan.audit.options import SCHEME_OF, check_plan
from routeprof.plan.precision import FORMATS
from routeprof.plan.weights import Audit, MatrixAudit

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.topology import Layer

SOURCE_BYTES = {"BF16": 2.0, "F16": 2.0, "F32": 4.0}
HOT_SHARE = 0.5

Sizes = dict[str, list[MatrixAudit]]
"""Matrices by the path of their layer."""


@dataclass(frozen=True)
class Mixed:
    """What to serve in which precision.

    Attributes:
        rows: DataFrame, a row for each layer and expert: layer, name, expert, assignments, share
            (of the layer's), precision, bytes, source_bytes, error (the worst matrix's).
        layers: DataFrame, a row a recorded layer: layer, hot_experts, low_share (share of
            assignments that go to experts of the low precision) and bounds or the count of the
            share of tokens that meet one: tokens_touched_lower, tokens_touched_upper.
        hot, cold: precisions.
        not_recorded: layers without counts, kept as they are.
    """

    rows: pd.DataFrame
    layers: pd.DataFrame
    hot: str
    cold: str
    not_recorded: tuple[str, ...]

    @property
    def bytes(self) -> float:
        return float(self.rows["bytes"].sum())

    @property
    def source_bytes(self) -> float:
        return float(self.rows["source_bytes"].sum())

    @property
    def low_share(self) -> float:
        """Share of all recorded assignments that go to experts of the low precision."""
        known = self.rows.dropna(subset=["assignments"])
        low = known["precision"] == self.cold
        return float(known.loc[low, "assignments"].sum() / known["assignments"].sum())


def mixed(
    audit: Audit,
    profile: Profile,
    *,
    hot: str = "source",
    cold: str = "int4",
    hot_share: float | None = None,
    budget: float | None = None,
) -> Mixed:
    """Hot experts in the high precision, the others in the low one.

    Args:
        hot, cold: one of ``options.PRECISIONS``.
        hot_share: the fewest experts of each layer that take this share of its assignments are
            hot; 0.5 if neither this nor a budget is given.
        budget: bytes for all expert weights; experts become hot by assignments, the most first,
            as long as they fit.

    Raises:
        UsageError: a precision or a share that is none, both limits, or too small a budget.
        MismatchError: the recording is of another model.
    """
    check_plan(hot, cold, hot_share, budget)
    sizes = _by_layer(audit)
    counts = _counts(profile, sizes)
    table = _experts(sizes, counts)
    cost = {name: _bytes(table, sizes, name) for name in (hot, cold, "source")}
    known = table["assignments"].notna().to_numpy()
    if budget is None:
        is_hot = _share_hot(table, HOT_SHARE if hot_share is None else hot_share)
    else:
        is_hot = _budget_hot(table, known, cost[hot], cost[cold], cost["source"], budget)
    table["precision"] = np.where(known, np.where(is_hot, hot, cold), "source")
    table["bytes"] = np.select([known & is_hot, known], [cost[hot], cost[cold]], cost["source"])
    table["source_bytes"] = cost["source"]
    table["error"] = _errors(table, sizes)
    touched = _touched(table, profile, counts, cold)
    missing = tuple(name for name in sizes if name not in counts)
    return Mixed(table, touched, hot, cold, missing)


def _by_layer(audit: Audit) -> dict[str, list[MatrixAudit]]:
    found: dict[str, list[MatrixAudit]] = {}
    for matrix in audit.matrices:
        found.setdefault(matrix.layer, []).append(matrix)
    for name, members in found.items():
        if len({one.experts for one in members}) > 1:
            raise UsageError(f"matrices of {name} have different experts; check the checkpoint")
    return found


def _counts(profile: Profile, sizes: Sizes) -> dict[str, tuple[Layer, NDArray[np.int64]]]:
    """By the checkpoint's layers, the recorded ones with their experts' assignments."""
    rows = dict(zip(profile.layer_indices, profile.counts, strict=True))
    found = {}
    for layer in profile.info.layers:
        if layer.kind != "moe":
            continue
        name, experts = _name_of(layer, sizes), layer.experts - layer.zero_experts
        if name is None or len(sizes[name][0].largest) != experts:
            has = f"{sizes[name][0].experts} experts" if name else "no experts"
            raise MismatchError(
                f"the recording has {experts} experts in layer {layer.index} where the "
                f"checkpoint has {has}; pass a recording of this model"
            )
        if layer.index in rows:
            found[name] = layer, np.asarray(rows[layer.index])[:experts].astype(np.int64)
    if not sum(int(own.sum()) for _, own in found.values()):
        raise UsageError("the recording holds no assignment; record while the model runs")
    return found


def _name_of(layer: Layer, sizes: Sizes) -> str | None:
    """The checkpoint's path of a recorded layer; engines may put something before it."""
    own = layer.name.removesuffix(".experts")
    for name in sizes:
        if own == name or own.endswith(f".{name}") or name.endswith(f".{own}"):
            return name
    same = [name for name, members in sizes.items() if members[0].index == layer.index]
    return same[0] if len(same) == 1 else None


def _experts(sizes: Sizes, counts: dict[str, tuple[Layer, NDArray[np.int64]]]) -> pd.DataFrame:
    tables = []
    for name, members in sizes.items():
        experts = members[0].experts
        assignments = np.full(experts, np.nan)
        if name in counts:
            assignments = counts[name][1].astype(np.float64)
        total = assignments.sum()
        share = assignments / total if total else np.full(experts, np.nan)
        columns = {"layer": members[0].index, "name": name, "expert": np.arange(experts)}
        tables.append(pd.DataFrame({**columns, "assignments": assignments, "share": share}))
    return pd.concat(tables, ignore_index=True)


def _bytes(table: pd.DataFrame, sizes: Sizes, precision: str) -> NDArray[np.float64]:
    """Bytes of each row's expert in a precision, scales included."""
    each = {
        name: sum(
            one.outputs
            * one.inputs
            * (SOURCE_BYTES[one.dtype] if precision == "source" else FORMATS[precision].bytes)
            for one in members
        )
        for name, members in sizes.items()
    }
    return np.array([each[name] for name in table["name"]], dtype=np.float64)


def _share_hot(table: pd.DataFrame, share: float) -> NDArray[np.bool_]:
    hot = np.zeros(len(table), dtype=bool)
    for _, rows in table.groupby("name"):
        loads = rows["assignments"].to_numpy()
        if np.isnan(loads).any() or share == 0:
            continue
        order = np.argsort(-loads, kind="stable")
        before = np.cumsum(loads[order]) - loads[order]
        wanted = (before < share * loads.sum()) & (loads[order] > 0)
        hot[rows.index.to_numpy()[order[wanted]]] = True
    return hot


def _budget_hot(
    table: pd.DataFrame,
    known: NDArray[np.bool_],
    high: NDArray[np.float64],
    low: NDArray[np.float64],
    source: NDArray[np.float64],
    budget: float,
) -> NDArray[np.bool_]:
    least = float(np.where(known, low, source).sum())
    left = budget - least
    if left < 0:
        raise UsageError(
            f"the budget of {budget:.0f} bytes is below {least:.0f}, all experts in the low "
            "precision; raise it or pass a lower one"
        )
    hot = np.zeros(len(table), dtype=bool)
    more = high - low
    loads = np.where(known, np.nan_to_num(table["assignments"].to_numpy()), -1.0)
    for row in np.argsort(-loads / more, kind="stable"):
        if loads[row] > 0 and more[row] <= left:
            hot[row] = True
            left -= more[row]
    return hot


def _errors(table: pd.DataFrame, sizes: Sizes) -> NDArray[np.float64]:
    """The worst matrix's error in the precision of each row; 0 as it is."""
    found = np.zeros(len(table))
    names, experts = table["name"].to_numpy(), table["expert"].to_numpy()
    for precision, scheme in SCHEME_OF.items():
        for name, members in sizes.items():
            rows = (table["precision"].to_numpy() == precision) & (names == name)
            worst = np.max([one.of(scheme) for one in members], axis=0)
            found[rows] = worst[experts[rows]]
    return found


def _touched(
    table: pd.DataFrame,
    profile: Profile,
    counts: dict[str, tuple[Layer, NDArray[np.int64]]],
    cold: str,
) -> pd.DataFrame:
    """How much of each recorded layer's traffic the low precision touches."""
    rows = []
    for name, (layer, loads) in counts.items():
        low = (table.loc[table["name"] == name, "precision"] == cold).to_numpy()
        share = float(loads[low].sum() / loads.sum()) if loads.sum() else float("nan")
        # A token of k assignments meets the low precision at least once.
        lower, upper = share, min(1.0, share * layer.top_k) if layer.top_k else float("nan")
        if profile.info.level == "tokens":
            lower = upper = _tokens(profile, layer.index, low)
        rows.append(
            {
                "layer": layer.index,
                "name": name,
                "experts": len(low),
                "hot_experts": int((~low).sum()),
                "low_share": share,
                "tokens_touched_lower": lower,
                "tokens_touched_upper": upper,
            }
        )
    return pd.DataFrame(rows)


def _tokens(profile: Profile, layer: int, low: NDArray[np.bool_]) -> float:
    """Share of a layer's tokens with an expert in the low precision."""
    ids = profile.tokens(layer).ids
    wide = np.zeros(max(int(ids.max(initial=0)) + 2, len(low) + 1), dtype=bool)
    wide[: len(low)] = low  # the last one, which -1 names, stays out
    return float(wide[ids].any(axis=1).mean()) if len(ids) else float("nan")
