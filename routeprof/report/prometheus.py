"""Prometheus metrics of a recording, named as vLLM and SGLang name theirs.

Counters are of the whole recording and only grow; gauges of balance are of its newest stretch, so
that a dashboard shows what goes on now and not the mean of a day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time
from typing import Any, Literal

import numpy as np
import pandas as pd
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from routeprof.capture.control import health
from routeprof.metrics.gemm import small_gemm_share
from routeprof.profile import Profile
from routeprof.recording.fold import Totals
from routeprof.tables import column

RECENT_SECONDS = 60.0
"""Gauges are of windows that ended at most so long before the newest one."""

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
        """The name in queries."""
        return f"routeprof:{self.name}" + ("_total" if self.kind == "counter" else "")


class Exporter(Collector):
    """What a Prometheus client registry collects.

    Args:
        take: the recording as it is now; None where there is nothing yet.
        detailed: with the series of each layer and expert, of which there may be thousands.
    """

    def __init__(self, take: Callable[[], Snapshot | None], *, detailed: bool = False) -> None:
        self._take = take
        self._metrics = [metric for metric in METRICS if detailed or not metric.detailed]

    def collect(self) -> Iterator[Any]:
        """One family for each metric."""
        snapshot = self._take()
        if snapshot is None:
            return
        model = snapshot.whole.info.model.name
        for metric in self._metrics:
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            labels = ["model_name", *metric.labels]
            family = made(f"routeprof:{metric.name}", metric.help, labels=labels)
            for values, number in metric.read(snapshot):
                family.add_metric([model, *values], number)
            yield family

    def describe(self) -> Iterator[Any]:
        """Nothing is collected when it is registered: there may be no recording yet."""
        yield from ()


def registry(take: Callable[[], Snapshot | None], *, detailed: bool = False) -> CollectorRegistry:
    """A registry of its own, apart from the engine's; arguments as of ``Exporter``."""
    own = CollectorRegistry()
    own.register(Exporter(take, detailed=detailed))
    return own


def server(registry: CollectorRegistry, host: str, port: int) -> ThreadingHTTPServer:
    """A server of ``/metrics`` that listens already; ``serve_forever`` serves.

    Always in the text format: in OpenMetrics the client library writes ``routeprof_`` for
    ``routeprof:``, and which of them a scraper asks for would decide what a metric is called.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.partition("?")[0] in ("/", "/metrics")
            body = generate_latest(registry) if known else b"Metrics are at /metrics.\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4 if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """One line a second would say nothing."""

    return ThreadingHTTPServer((host, port), Handler)


# -- reading the numbers


def _phases(profile: Profile) -> Iterator[tuple[str, Totals]]:
    """Each phase and what is of it."""
    for phase in profile.phases:
        yield phase, profile.narrowed(phase, None).totals


def _by_phase(name: str) -> Callable[[Snapshot], Iterator[Sample]]:
    """A sum of the layer with the most of it, by phase."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for phase, totals in _phases(snapshot.whole):
            yield (phase,), float(totals.sums[name].sum(0).max())

    return read


def _assignments(snapshot: Snapshot) -> Iterator[Sample]:
    for phase, totals in _phases(snapshot.whole):
        yield (phase,), float(totals.lists["counts"].sum())


def _invalid(snapshot: Snapshot) -> Iterator[Sample]:
    yield (), float(snapshot.whole.totals.sums["invalid"].sum())


def _overflow(snapshot: Snapshot) -> Iterator[Sample]:
    totals = snapshot.whole.totals.lists["overflow"].sum((0, 1))
    for factor, count in zip(snapshot.whole.info.capacity_factors, totals, strict=False):
        yield (f"{factor:g}",), float(count)


def _seconds(name: str) -> Callable[[Snapshot], Iterator[Sample]]:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        files = snapshot.whole.files
        states = [rank.state for rank in files.ranks if rank.state is not None] if files else []
        yield (), float(sum(getattr(state, name) for state in states))

    return read


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
    share = float(small_gemm_share(cells)) if cells.size else np.nan
    if np.isfinite(share):
        yield (), share


def _layers(snapshot: Snapshot) -> Iterator[Sample]:
    for state, number in sorted(Counter(snapshot.whole.states).items()):
        yield (state,), float(number)


def _ranks(snapshot: Snapshot) -> Iterator[Sample]:
    files, now = snapshot.whole.files, time()
    states = [rank.state for rank in files.ranks if rank.state is not None] if files else []
    for state, number in sorted(Counter(health(one, now) for one in states).items()):
        yield (state,), float(number)


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
    Metric(
        "tokens", "counter", "Tokens that the busiest layer routed", _by_phase("tokens"), ("phase",)
    ),
    Metric("steps", "counter", "Forward passes of the engine", _by_phase("steps"), ("phase",)),
    Metric("assignments", "counter", "(token, chosen expert) pairs", _assignments, ("phase",)),
    Metric("invalid_assignments", "counter", "Assignments that name no expert", _invalid),
    Metric(
        "overflow_assignments",
        "counter",
        "Assignments above the capacity of their expert, step by step",
        _overflow,
        ("capacity_factor",),
    ),
    Metric("own_seconds", "counter", "Time of the hooks in the engine", _seconds("cost_seconds")),
    Metric("busy_seconds", "counter", "Time of the engine's steps", _seconds("busy_seconds")),
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
"""Every metric; the Grafana dashboard uses these."""
