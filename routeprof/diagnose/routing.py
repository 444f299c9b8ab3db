"""Rules that a table of layers is enough for: quick, for pages that ask again and again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from routeprof.diagnose.finding import Finding, layer_count, layer_list
from routeprof.diagnose.thresholds import Thresholds

if TYPE_CHECKING:
    from routeprof.profile import Profile


def routing_findings(profile: Profile, limits: Thresholds) -> Iterator[Finding]:
    """Hot experts, collapse, dead experts, small GEMMs."""
    yield from hot_experts(profile, limits)
    yield from collapse(profile, limits)
    yield from dead_experts(profile)
    yield from small_gemms(profile, limits)


def routed(profile: Profile) -> pd.DataFrame:
    """Rows of ``Profile.layers`` with assignments."""
    table = profile.layers()
    return table[table["assignments"].fillna(0) > 0]


def judgeable(table: pd.DataFrame, limits: Thresholds) -> pd.Series[bool]:
    """Which of these layers have assignments enough for the share of an expert to mean something.

    Of fewer, one expert has a multiple of the mean, and two have nearly all, by chance.
    """
    return table["assignments"] >= limits.min_load * table["experts"]


def too_few(profile: Profile, limits: Thresholds) -> str:
    """Which layers have too few assignments for that; empty where none has."""
    table = routed(profile)
    few = table[~judgeable(table, limits)]
    if not len(few):
        return ""
    which = "layer" if len(few) == 1 else "layers"
    return (
        f"needs {limits.min_load:g} assignments an expert, which {which} "
        f"{layer_list(_indices(few))} lack{'s' if len(few) == 1 else ''}: record more"
    )


def hot_experts(
    profile: Profile, limits: Thresholds, but: Collection[int] = ()
) -> Iterator[Finding]:
    """Layers whose hottest expert has several times the mean.

    Args:
        but: indices of layers that something else is said of.
    """
    table = routed(profile)
    table = table[judgeable(table, limits) & ~table["layer"].isin(but)]
    hot = table[table["imbalance_ratio"] > limits.hot_imbalance]
    if len(hot):
        worst = hot.sort_values("imbalance_ratio").iloc[-1]
        yield Finding(
            "hot-experts",
            "warning",
            f"in layer {worst['layer']} expert {worst['hottest_expert']} gets "
            f"{worst['imbalance_ratio']:.2f} times the mean; above {limits.hot_imbalance:g} in "
            f"{layer_count(len(hot))}",
            "compare tags: skew that differs by tag comes from the data, mix requests; skew that "
            "does not is the model's, replicate hot experts",
            _indices(hot),
            figures={"imbalance_ratio": float(worst["imbalance_ratio"])},
        )


def collapse(profile: Profile, limits: Thresholds) -> Iterator[Finding]:
    """Layers in which two experts do nearly everything."""
    table = routed(profile)
    table = table[judgeable(table, limits) & (table["experts"] > 4)]
    collapsed = table[table["top2_share"] > limits.collapse_share]
    if len(collapsed):
        worst = collapsed.sort_values("top2_share").iloc[-1]
        yield Finding(
            "collapse",
            "error",
            f"two experts take {worst['top2_share']:.1%} of layer {worst['layer']}",
            "check the model: a router that collapses on every prompt needs training",
            _indices(collapsed),
            figures={"top2_share": float(worst["top2_share"])},
        )


def dead_experts(profile: Profile) -> Iterator[Finding]:
    """Layers in which experts got nothing."""
    table = routed(profile)
    dead = table[table["dead_experts"] > 0]
    if len(dead):
        worst = dead.sort_values("dead_experts").iloc[-1]
        yield Finding(
            "dead-experts",
            "info",
            f"{int(worst['dead_experts'])} of {worst['experts']} experts of layer "
            f"{worst['layer']} got no token; some in {layer_count(len(dead))}",
            "record more traffic before you conclude: small samples show false dead experts",
            _indices(dead),
            figures={"dead_experts": int(worst["dead_experts"])},
        )


def small_gemms(profile: Profile, limits: Thresholds) -> Iterator[Finding]:
    """Decode whose experts get few tokens."""
    if "decode" not in profile.phases:
        return
    table = profile.select(phase="decode").gemm()
    share = table["small_gemm_share"].mean()
    if np.isfinite(share) and share > limits.small_gemm_share:
        yield Finding(
            "small-gemms",
            "info",
            f"in decode {share:.0%} of the expert GEMMs have fewer than 16 tokens",
            "they are bound by reading weights: a larger batch costs little time",
            phase="decode",
            figures={"small_gemm_share": float(share)},
        )


def _indices(rows: pd.DataFrame) -> tuple[int, ...]:
    return tuple(int(index) for index in rows["layer"])
