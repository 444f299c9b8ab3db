"""The Grafana dashboard as data, after the conventions of vLLM's own dashboards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECT = '{job=~"$job", model_name=~"$model_name", instance=~"$instance"}'
HOT, COLD_LIMIT = 3.0, 0.33


@dataclass(frozen=True)
class Shown:
    """A panel.

    Attributes:
        queries: PromQL and the legend of each; ``SELECT`` stands for ``{}``.
        worse: value from which on it is drawn as bad, below it with ``falling``.
        width: of 24 columns.
    """

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    worse: float | None = None
    falling: bool = False
    width: int = 12


STATS = (
    Shown(
        "Imbalance, worst layer",
        "Load of the hottest expert ÷ mean load; 1 is perfect, above 3 is hot.",
        (("max(routeprof:imbalance_ratio{})", ""),),
        kind="stat",
        worse=HOT,
        width=4,
    ),
    Shown(
        "Step imbalance p95",
        "What the slow steps look like; the engine waits in each of them.",
        (("max(routeprof:step_imbalance_p95{})", ""),),
        kind="stat",
        worse=HOT,
        width=4,
    ),
    Shown(
        "Tokens per second",
        "Tokens that the busiest layer routed.",
        (("sum(rate(routeprof:tokens_total{}[$__rate_interval]))", ""),),
        kind="stat",
        width=4,
    ),
    Shown(
        "Cold experts",
        "Experts without a single token in the newest minute, all layers.",
        (("sum(routeprof:cold_experts{})", ""),),
        kind="stat",
        width=4,
    ),
    Shown(
        "Coverage",
        "Captured ÷ made assignments. Below 100 % all other numbers are of a part only.",
        (("min(routeprof:coverage_ratio{})", ""),),
        "percentunit",
        kind="stat",
        worse=1.0,
        falling=True,
        width=4,
    ),
    Shown(
        "Own cost",
        "Time of routeprof's hooks ÷ time of the engine's steps.",
        (
            (
                "sum(rate(routeprof:own_seconds_total{}[$__rate_interval])) / "
                "sum(rate(routeprof:busy_seconds_total{}[$__rate_interval]))",
                "",
            ),
        ),
        "percentunit",
        kind="stat",
        worse=0.03,
        width=4,
    ),
)

SERIES = (
    Shown(
        "Imbalance",
        "Worst layer over the newest minute, and the 95th percentile of its steps.",
        (
            ("max(routeprof:imbalance_ratio{})", "worst layer"),
            ("max(routeprof:step_imbalance_p95{})", "steps, p95"),
        ),
        worse=HOT,
    ),
    Shown(
        "Balancedness",
        "Mean ÷ largest load: 1 is balanced. Over layers.",
        (
            ("min(routeprof:balancedness_min{})", "worst layer"),
            ("avg(routeprof:balancedness_p50{})", "median layer"),
            ("avg(routeprof:balancedness_avg{})", "mean"),
        ),
        worse=COLD_LIMIT,
        falling=True,
    ),
    Shown(
        "Tokens per second by phase",
        "Tokens that the busiest layer routed.",
        (("sum by (phase) (rate(routeprof:tokens_total{}[$__rate_interval]))", "{{phase}}"),),
    ),
    Shown(
        "Overflow by capacity factor",
        "Assignments above capacity ÷ all: what a capacity limit would drop.",
        (
            (
                "sum by (capacity_factor) "
                "(rate(routeprof:overflow_assignments_total{}[$__rate_interval])) / on() "
                "group_left() sum(rate(routeprof:assignments_total{}[$__rate_interval]))",
                "factor {{capacity_factor}}",
            ),
        ),
        "percentunit",
    ),
    Shown(
        "Small expert GEMMs",
        "Share of expert matrix products with fewer than 16 tokens: bound by reading weights.",
        (("avg(routeprof:small_gemm_ratio{})", "below 16 tokens"),),
        "percentunit",
    ),
    Shown(
        "Effective experts, worst layer",
        "exp of the entropy of the load: as many equally used experts would be as diverse.",
        (("min(routeprof:effective_experts_min{})", "worst layer"),),
    ),
    Shown(
        "Steps per second by phase",
        "Forward passes of the engine.",
        (("sum by (phase) (rate(routeprof:steps_total{}[$__rate_interval]))", "{{phase}}"),),
    ),
    Shown(
        "Ranks, layers, invalid ids",
        "Ranks by what they do, layers that were not captured, ids that name no expert.",
        (
            ("sum by (state) (routeprof:ranks{})", "ranks {{state}}"),
            ('sum(routeprof:layers{state!~"captured|dense"})', "layers not captured"),
            (
                "sum(increase(routeprof:invalid_assignments_total{}[$__rate_interval]))",
                "invalid ids",
            ),
        ),
    ),
    Shown(
        "Age of the newest window",
        "Seconds since a window with tokens ended: grows while nothing is served.",
        (("time() - max(routeprof:newest_window_timestamp_seconds{})", "age"),),
        "s",
    ),
    Shown(
        "Imbalance by layer (serve-metrics --detailed)",
        "The ten worst layers.",
        (("topk(10, routeprof:layer_imbalance_ratio{})", "layer {{layer}}"),),
        worse=HOT,
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON model."""
    return {
        "id": None,
        "uid": "routeprof-overview",
        "title": "routeprof / Overview",
        "description": "Expert routing and load balance of a Mixture-of-Experts model.",
        "tags": ["routeprof", "moe"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "routeprof",
                "tags": ["routeprof"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables()},
        "panels": _placed(STATS, SERIES),
        "version": 1,
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    filters = {
        "name": "filters",
        "label": "Filters",
        "type": "adhoc",
        "datasource": DATASOURCE,
    }
    chained = {"job": "", "model_name": 'job=~"$job"', "instance": 'job=~"$job"'}
    return [source, *(_variable(name, scope) for name, scope in chained.items()), filters]


def _variable(name: str, scope: str) -> dict[str, Any]:
    of = "routeprof:layers" + (f"{{{scope}}}" if scope else "")
    return {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({of}, {name})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(*groups: Sequence[Shown]) -> list[dict[str, Any]]:
    """Panels side by side, as many in a row as fit."""
    panels: list[dict[str, Any]] = []
    x = y = tallest = 0
    for shown in (one for group in groups for one in group):
        height = 4 if shown.kind == "stat" else 8
        if x + shown.width > 24 or (panels and height != tallest):
            x, y = 0, y + tallest
        panels.append(
            _panel(shown, len(panels) + 1, {"h": height, "w": shown.width, "x": x, "y": y})
        )
        x, tallest = x + shown.width, height
    return panels


def _panel(shown: Shown, number: int, place: dict[str, int]) -> dict[str, Any]:
    queries = [(_selected(query), legend) for query, legend in shown.queries]
    metrics = ", ".join(f"`{query.replace('{}', '')}`" for query, _ in shown.queries)
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    if shown.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return {
        "id": number,
        "type": shown.kind,
        "title": shown.title,
        "description": f"{shown.about} Metric: {metrics}",
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": shown.unit,
                "noValue": "not captured",
                "thresholds": {"mode": "absolute", "steps": _steps(shown)},
                "color": {"mode": "thresholds" if shown.kind == "stat" else "palette-classic"},
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "range": True,
            }
            for place, (query, legend) in enumerate(queries)
        ],
    }


def _selected(query: str) -> str:
    """The query of the series that the variables choose."""
    inside = SELECT[1:-1]
    return query.replace("{}", SELECT).replace("{state!~", f"{{{inside}, state!~")


def _steps(shown: Shown) -> list[dict[str, Any]]:
    """Colours that also differ in brightness: blue is well, orange is not."""
    well, ill = ("orange", "blue") if shown.falling else ("blue", "orange")
    if shown.worse is None:
        return [{"color": "blue", "value": None}]
    return [{"color": well, "value": None}, {"color": ill, "value": shown.worse}]
