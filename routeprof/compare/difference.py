"""What changed between two recordings, phase by phase and tag by tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.compare.comparable import caveats, incomparable, shared
from routeprof.compare.dependence import MOST
from routeprof.compare.noise import Judged, Pair, enough, judge, require_level
from routeprof.compare.stretches import Stretches, stretches
from routeprof.errors import MismatchError, UsageError
from routeprof.metrics._arrays import FloatArray, ratio, shares
from routeprof.metrics.balance import imbalance_ratio
from routeprof.metrics.drift import jensen_shannon
from routeprof.recording.fold import Key
from routeprof.tables import moe_layers, tag_name
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

BoolArray: TypeAlias = NDArray[np.bool_]

LEVEL = 0.05
"""Chance that anything is called significant where nothing changed, unless told."""

STILL_ALIKE = 0.2
"""Correlation left between neighbouring stretches above which the reader is told."""

LAYER_COLUMNS = (
    "phase tag layer experts assignments_a assignments_b imbalance_a imbalance_b divergence "
    "noise_bound p significant experts_changed"
).split()
EXPERT_COLUMNS = (
    "phase tag layer expert assignments_a assignments_b share_a share_b share_change "
    "relative_change noise_bound p significant"
).split()


@dataclass(frozen=True)
class Group:
    """One phase and tag.

    Attributes:
        layers: those with assignments in both.
        counts: of A and of B, each [layers, experts]; 0 beyond a layer's own experts.
        judged: differences and their noise; None where noise is not known.
        reason: why it is not known, or what to know about it.
    """

    key: Key
    layers: tuple[Layer, ...]
    counts: tuple[FloatArray, FloatArray]
    judged: Judged | None
    reason: str = ""

    @property
    def assignments(self) -> tuple[int, int]:
        """Of A and of B, in all layers."""
        return int(self.counts[0].sum()), int(self.counts[1].sum())


@dataclass(frozen=True)
class Difference:
    """What changed from A to B.

    Attributes:
        alpha: chance that anything is significant where nothing changed.
        groups: phases and tags that both have.
        caveats: what to know, a sentence each.
        layers, experts: tables, the largest significant change first. NaN where noise is not
            known; ``significant`` is then missing, too. ``p`` and ``noise_bound`` allow for all
            layers and experts that were compared.
    """

    alpha: float
    groups: tuple[Group, ...]
    caveats: tuple[str, ...]
    layers: pd.DataFrame
    experts: pd.DataFrame

    @property
    def judged(self) -> bool:
        """Whether noise is known anywhere."""
        return any(group.judged is not None for group in self.groups)

    @property
    def significant(self) -> bool:
        """Whether anything changed by more than noise."""
        return bool(self.layers["significant"].eq(True).any())


def compare(one: Profile, other: Profile, *, alpha: float = LEVEL, seed: int = 0) -> Difference:
    """Hold B, the other one, against A.

    Raises:
        MismatchError: recordings of different models.
        UsageError: no phase and tag in common, or a level that cannot be.
    """
    require_level(alpha)
    groups = _in_both(one, other)
    cuts = stretches(one, MOST), stretches(other, MOST)
    pairs = {group.key: pair for group in groups if (pair := _pair(cuts, group)) is not None}
    fit = {key: pair for key, pair in pairs.items() if enough(len(pair[0]), len(pair[1]), alpha)}
    found = judge(fit, alpha, seed)
    groups = [_with(group, found.get(group.key), pairs.get(group.key)) for group in groups]
    return _told(one, other, groups, alpha)


def unjudged(one: Profile, other: Profile, why: str) -> Difference:
    """The same without noise, which may take long to find: quick, and nothing is significant.

    Args:
        why: why noise is not known, in a sentence.

    Raises:
        MismatchError, UsageError: as of ``compare``.
    """
    groups = [replace(group, reason=why) for group in _in_both(one, other)]
    return _told(one, other, groups, LEVEL)


def _in_both(one: Profile, other: Profile) -> list[Group]:
    """Phases and tags with assignments of a layer in both, not judged yet."""
    why = incomparable(one, other)
    if why:
        raise MismatchError(f"A and B cannot be compared. {why} Compare recordings of one model")
    groups = [_counted(one, other, key) for key in shared(one, other)]
    groups = [group for group in groups if group.layers]
    if not groups:
        raise UsageError(
            "A and B have no phase and tag in common with assignments of a layer in both: "
            "choose others with --phase, --tag and --between, or record both alike"
        )
    return groups


def _told(one: Profile, other: Profile, groups: Sequence[Group], alpha: float) -> Difference:
    layers = pd.concat([_layer_rows(group, alpha) for group in groups], ignore_index=True)
    experts = pd.concat([_expert_rows(group, alpha) for group in groups], ignore_index=True)
    return Difference(
        alpha,
        tuple(groups),
        tuple(caveats(one, other)),
        _ordered(layers, "divergence"),
        _ordered(experts, "share_change"),
    )


def _counted(one: Profile, other: Profile, key: Key) -> Group:
    sides = [_counts(profile, key) for profile in (one, other)]
    layers = tuple(
        layer for _, layer in moe_layers(one) if all(side[layer.index].any() for side in sides)
    )
    counts = tuple(_stacked([side[layer.index] for layer in layers]) for side in sides)
    return Group(key, layers, (counts[0], counts[1]), None)


def _counts(profile: Profile, key: Key) -> dict[int, FloatArray]:
    counts = profile.totals.lists["counts"][profile.totals.keys.index(key)]
    return {
        layer.index: counts[place, : layer.experts].astype(np.float64)
        for place, layer in moe_layers(profile)
    }


def _stacked(loads: list[FloatArray]) -> FloatArray:
    """[…, layers, experts] of […, experts] each, 0 beyond a layer's own."""
    width = max((each.shape[-1] for each in loads), default=0)
    padded = [
        np.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, width - each.shape[-1])]) for each in loads
    ]
    return np.stack(padded, axis=-2) if padded else np.zeros((0, 0))


def _pair(cuts: tuple[Stretches, Stretches], group: Group) -> Pair | None:
    """Stretches of both; None where there are none, or not of all that was counted."""
    sides = []
    for cut, counts in zip(cuts, group.counts, strict=True):
        loads = [cut.get((group.key, layer.index)) for layer in group.layers]
        known = [each for each in loads if each is not None]
        if len(known) < len(loads):
            return None
        side = _stacked(known)
        if not np.array_equal(side.sum(axis=0), counts):
            return None
        sides.append(side)
    return sides[0], sides[1]


def _with(group: Group, judged: Judged | None, pair: Pair | None) -> Group:
    if judged is not None:
        reason = (
            "neighbouring stretches of time stay alike: where requests last longer than a tenth of "
            "a recording, noise is larger than the bounds say; record longer"
            if judged.alike > STILL_ALIKE
            else ""
        )
    elif pair is None:
        reason = (
            "noise is not known: A or B does not say when, or not by how many steps, all of this "
            "was counted"
        )
    else:
        reason = "noise is not known from so few steps or windows: record longer"
    return Group(group.key, group.layers, group.counts, judged, reason)


# -- tables


def _layer_rows(group: Group, alpha: float) -> pd.DataFrame:
    a, b = group.counts
    judged, number = group.judged, len(group.layers)
    unknown = np.full(number, np.nan)
    changed = _changed(judged, alpha)
    p = judged.divergence_p if judged else unknown
    if judged:
        p = np.minimum(p, judged.p.min(axis=1))
    own = [layer.experts for layer in group.layers]
    rows: dict[str, Any] = {
        "phase": group.key[0],
        "tag": tag_name(group.key[1]),
        "layer": [layer.index for layer in group.layers],
        "experts": own,
        "assignments_a": a.sum(axis=1).astype(np.int64),
        "assignments_b": b.sum(axis=1).astype(np.int64),
        "imbalance_a": _imbalance(a, own),
        "imbalance_b": _imbalance(b, own),
        "divergence": jensen_shannon(a, b),
        "noise_bound": judged.divergence_bound if judged else unknown,
        "p": p,
        "significant": _flags(p <= alpha if judged else None, number),
        "experts_changed": pd.Series(
            [None] * number if changed is None else changed.sum(axis=1), dtype="Int64"
        ),
    }
    return pd.DataFrame(rows)[LAYER_COLUMNS]


def _expert_rows(group: Group, alpha: float) -> pd.DataFrame:
    judged, changed = group.judged, _changed(group.judged, alpha)
    a, b = group.counts
    own = np.arange(a.shape[1]) < np.array([[layer.experts] for layer in group.layers])
    layer, expert = np.nonzero(own)
    one, other = shares(a)[own], shares(b)[own]
    unknown = np.full(len(layer), np.nan)
    rows: dict[str, Any] = {
        "phase": group.key[0],
        "tag": tag_name(group.key[1]),
        "layer": np.array([layer.index for layer in group.layers])[layer],
        "expert": expert,
        "assignments_a": a[own].astype(np.int64),
        "assignments_b": b[own].astype(np.int64),
        "share_a": one,
        "share_b": other,
        "share_change": other - one,
        "relative_change": ratio(other, one) - 1,
        "noise_bound": judged.bound[own] if judged else unknown,
        "p": judged.p[own] if judged else unknown,
        "significant": _flags(None if changed is None else changed[own], len(layer)),
    }
    return pd.DataFrame(rows)[EXPERT_COLUMNS]


def _changed(judged: Judged | None, alpha: float) -> BoolArray | None:
    return None if judged is None else np.asarray(judged.p <= alpha)


def _flags(known: BoolArray | None, number: int) -> pd.Series[Any]:
    return pd.Series([None] * number if known is None else known, dtype="boolean")


def _imbalance(counts: FloatArray, experts: list[int]) -> list[float]:
    pairs = zip(counts, experts, strict=True)
    return [float(imbalance_ratio(own[:number])) for own, number in pairs]


def _ordered(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Significant rows first, then by the size of the change; what is not judged last."""
    order = pd.DataFrame(
        {
            "significant": table["significant"].astype("Float64").fillna(-1).astype(float),
            "size": table[by].abs(),
        }
    ).sort_values(["significant", "size"], ascending=False, kind="stable")
    return table.loc[order.index].reset_index(drop=True)
