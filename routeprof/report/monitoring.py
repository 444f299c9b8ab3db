"""Metrics of a recording for monitoring systems: what each is called, and how it is read.

Counters are of the whole recording and only grow; gauges of balance are of its newest stretch, so
that a dashboard shows what goes on now and not the mean of a day. What is not known, such as the
tokens of a layer that was not captured, has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import time
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from routeprof.capture.control import Want, health
from routeprof.metrics.gemm import small_gemm_share
from routeprof.profile import Profile, State
from routeprof.report.summary import own_cost
from routeprof.tables import column

RECENT_SECONDS = 60.0
"""Gauges are of windows that ended at most so long before the newest one."""

RANK_STATES = (*get_args(Want), "dead", "not responding")
"""What ``health`` may say of a rank."""

Sample = tuple[tuple[str, ...], float]
"""Values of a metric's own labels, and its value."""


@dataclass(frozen=True)
class Snapshot:
    """A recording at one moment: all of it, and its newest stretch."""

    whole: Profile
    recent: Profile

    @cached_property
    def layers(self) -> pd.DataFrame:
        """``Profile.layers`` of the newest stretch."""
        return self.recent.layers()


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the ``_total`` that a counter ends in.
        labels: besides ``model_name``.
        detailed: one series for each layer or expert, and exported only on request.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Snapshot], Iterator[Sample]]
    labels: tuple[str, ...] = ()
    detailed: bool = False

    @property
    def exposed(self) -> str:
        """The name in Prometheus' queries."""
        return f"routeprof:{self.name}" + ("_total" if self.kind == "counter" else "")


# -- reading the numbers


def _phases(snapshot: Snapshot) -> Iterator[tuple[str, Profile]]:
    """Each phase and what is of it."""
    for phase in snapshot.whole.phases:
        yield phase, snapshot.whole.narrowed(phase, None)


def _tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for phase, part in _phases(snapshot):
        known = [place for place in part.captured if part.info.layers[place].top_k is not None]
        if known:
            yield (phase,), float(part.totals.sums["tokens"][:, known].sum(0).max())


def _steps(snapshot: Snapshot) -> Iterator[Sample]:
    """Nothing of a converted file that does not say which tokens ran together."""
    for phase, part in _phases(snapshot) if snapshot.whole.info.batches else ():
        steps = part.totals.sums["steps"].sum(0).max()
        if steps:
            yield (phase,), float(steps)


def _assignments(snapshot: Snapshot) -> Iterator[Sample]:
    for phase, part in _phases(snapshot):
        if part.captured:
            yield (phase,), float(part.totals.lists["counts"].sum())


def _invalid(snapshot: Snapshot) -> Iterator[Sample]:
    """Nothing of another tool's sums: they do not tell what was left out of them."""
    info = snapshot.whole.info
    if snapshot.whole.captured and not (info.source and info.level == "windows"):
        yield (), float(snapshot.whole.totals.sums["invalid"].sum())


def _overflow(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.whole.captured:
        totals = snapshot.whole.totals.lists["overflow"].sum((0, 1))
        for factor, count in zip(snapshot.whole.info.capacity_factors, totals, strict=False):
            yield (f"{factor:g}",), float(count)


def _own_seconds(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _known_seconds(snapshot, own_cost(snapshot.whole)[0])


def _busy_seconds(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _known_seconds(snapshot, own_cost(snapshot.whole)[1])


def _known_seconds(snapshot: Snapshot, seconds: float) -> Iterator[Sample]:
    """Nothing of a converted file: no hooks of ours ran."""
    if np.isfinite(seconds) and not snapshot.whole.info.source:
        yield (), seconds


def _over_layers(name: str, over: Callable[[Any], Any]) -> Callable[[Snapshot], Iterator[Sample]]:
    """A column of ``Profile.layers`` of the newest stretch; nothing where nothing was routed."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        values = column(snapshot.layers, name)
        known = values[np.isfinite(values)]
        if len(known):
            yield (), float(over(known))

    return read


def _coverage(snapshot: Snapshot) -> Iterator[Sample]:
    if np.isfinite(snapshot.whole.coverage):
        yield (), snapshot.whole.coverage


def _small_gemms(snapshot: Snapshot) -> Iterator[Sample]:
    cells = snapshot.recent.totals.lists["gemm_histogram"].sum((0, 1))
    known = cells.size and snapshot.recent.info.batches
    share = float(small_gemm_share(cells)) if known else np.nan
    if np.isfinite(share):
        yield (), share


def _layers(snapshot: Snapshot) -> Iterator[Sample]:
    yield from _states(get_args(State), snapshot.whole.states)


def _ranks(snapshot: Snapshot) -> Iterator[Sample]:
    files, now = snapshot.whole.files, time()
    states = [rank.state for rank in files.ranks if rank.state is not None] if files else []
    if states:
        yield from _states(RANK_STATES, [health(one, now) for one in states])


def _states(names: Sequence[str], found: Iterable[str]) -> Iterator[Sample]:
    """How many are in each state, also in those that nothing is in: that is known."""
    number = Counter(found)
    for state in names:
        yield (state,), float(number[state])


def _newest(snapshot: Snapshot) -> Iterator[Sample]:
    end = snapshot.whole.totals.windows.end
    if len(end):
        yield (), float(end.max())


def _imbalance(snapshot: Snapshot) -> Iterator[Sample]:
    table = snapshot.layers
    for layer, ratio in zip(table["layer"], column(table, "imbalance_ratio"), strict=True):
        if np.isfinite(ratio):
            yield (str(layer),), float(ratio)


def _experts(snapshot: Snapshot) -> Iterator[Sample]:
    table = snapshot.whole.experts()
    for layer, expert, tokens in zip(table["layer"], table["expert"], table["tokens"], strict=True):
        yield (str(layer), str(expert)), float(tokens)


METRICS: tuple[Metric, ...] = (
    Metric("tokens", "counter", "Tokens that the busiest layer routed", _tokens, ("phase",)),
    Metric("steps", "counter", "Forward passes of the engine", _steps, ("phase",)),
    Metric("assignments", "counter", "(token, chosen expert) pairs", _assignments, ("phase",)),
    Metric("invalid_assignments", "counter", "Assignments that name no expert", _invalid),
    Metric(
        "overflow_assignments",
        "counter",
        "Assignments above the capacity of their expert, step by step",
        _overflow,
        ("capacity_factor",),
    ),
    Metric("own_seconds", "counter", "Time of the hooks in the engine", _own_seconds),
    Metric("busy_seconds", "counter", "Time of the engine's steps", _busy_seconds),
    Metric("coverage_ratio", "gauge", "Captured ÷ made assignments", _coverage),
    Metric("layers", "gauge", "Layers by what is known of them", _layers, ("state",)),
    Metric("ranks", "gauge", "Ranks by what they do", _ranks, ("state",)),
    Metric("newest_window_timestamp_seconds", "gauge", "End of the newest window", _newest),
    Metric(
        "balancedness_min",
        "gauge",
        "Mean ÷ largest expert load of the worst layer, newest minute",
        _over_layers("balancedness", np.min),
    ),
    Metric(
        "balancedness_p50",
        "gauge",
        "Mean ÷ largest expert load of the median layer, newest minute",
        _over_layers("balancedness", np.median),
    ),
    Metric(
        "balancedness_avg",
        "gauge",
        "Mean ÷ largest expert load, mean over layers, newest minute",
        _over_layers("balancedness", np.mean),
    ),
    Metric(
        "imbalance_ratio",
        "gauge",
        "Largest ÷ mean expert load of the worst layer, newest minute",
        _over_layers("imbalance_ratio", np.max),
    ),
    Metric(
        "step_imbalance_p95",
        "gauge",
        "95th percentile of the steps' largest ÷ mean load, worst layer, newest minute",
        _over_layers("step_imbalance_p95", np.max),
    ),
    Metric(
        "effective_experts_min",
        "gauge",
        "exp of the entropy of the load, worst layer, newest minute",
        _over_layers("effective_experts", np.min),
    ),
    Metric(
        "cold_experts",
        "gauge",
        "Experts without a token, all layers, newest minute",
        _over_layers("dead_experts", np.sum),
    ),
    Metric(
        "small_gemm_ratio",
        "gauge",
        "Share of expert matrix products with fewer than 16 tokens, newest minute",
        _small_gemms,
    ),
    Metric(
        "layer_imbalance_ratio",
        "gauge",
        "Largest ÷ mean expert load of each layer, newest minute",
        _imbalance,
        ("layer",),
        detailed=True,
    ),
    Metric(
        "expert_tokens",
        "counter",
        "Assignments of each expert",
        _experts,
        ("layer", "expert"),
        detailed=True,
    ),
)
"""Every metric: Prometheus, OpenTelemetry and the Grafana dashboard use these."""


def chosen(detailed: bool) -> list[Metric]:
    """The metrics to export: those of each layer and expert only on request."""
    return [metric for metric in METRICS if detailed or not metric.detailed]
