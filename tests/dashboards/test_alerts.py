"""The alert rules in docs/monitoring.md, judged by Prometheus' own tool; and the page's tables."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from routeprof.report.monitoring import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text("utf-8")
(RULES,) = re.findall(r"```yaml\n(groups:\n.+?)```", PAGE, re.DOTALL)
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load(RULES)["groups"][0]["rules"]}

LABELS = '{instance="a:9464", job="moe", model_name="m"'
HOUR = 61
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ExpertsImbalanced": (
        {f"routeprof:imbalance_ratio{LABELS}}}": f"3.5x{HOUR}"},
        {f"routeprof:imbalance_ratio{LABELS}}}": f"2.9x{HOUR}"},
    ),
    "StepsImbalanced": (
        {f"routeprof:step_imbalance_p95{LABELS}}}": f"6x{HOUR}"},
        {f"routeprof:step_imbalance_p95{LABELS}}}": f"4x{HOUR}"},
    ),
    "RoutingPartlyCaptured": (
        {f"routeprof:coverage_ratio{LABELS}}}": f"0.98x{HOUR}"},
        {f"routeprof:coverage_ratio{LABELS}}}": f"1x{HOUR}"},
    ),
    "LayersNotCaptured": (
        {f'routeprof:layers{LABELS}, state="silent"}}': f"2x{HOUR}"},
        {f'routeprof:layers{LABELS}, state="captured"}}': f"2x{HOUR}"},
    ),
    "InvalidExpertIds": (
        {f"routeprof:invalid_assignments_total{LABELS}}}": f"0+5x{HOUR}"},
        {f"routeprof:invalid_assignments_total{LABELS}}}": f"7x{HOUR}"},
    ),
    "RecordingRankLost": (
        {f'routeprof:ranks{LABELS}, state="not responding"}}': f"1x{HOUR}"},
        {f'routeprof:ranks{LABELS}, state="recording"}}': f"8x{HOUR}"},
    ),
    "RecordingCostly": (
        {
            f"routeprof:own_seconds_total{LABELS}}}": f"0+3x{HOUR}",
            f"routeprof:busy_seconds_total{LABELS}}}": f"0+50x{HOUR}",
        },
        {
            f"routeprof:own_seconds_total{LABELS}}}": f"0+0.3x{HOUR}",
            f"routeprof:busy_seconds_total{LABELS}}}": f"0+50x{HOUR}",
        },
    ),
    "RoutingNotMeasured": (
        {'up{instance="a:9464", job="moe"}': f"1x{HOUR}"},
        {f'routeprof:layers{LABELS}, state="captured"}}': f"2x{HOUR}"},
    ),
}
"""For each alert, series with which it must fire, and with which it must not."""

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool; Debian has it with prometheus"
)


def promtool(*arguments: object) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_when_it_must_and_only_then(tmp_path: Path):
    assert CASES.keys() == ALERTS.keys()
    rules = tmp_path / "rules.yml"
    rules.write_text(RULES)
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", rules)
    tests = [
        case(name, series, fires)
        for name, both in CASES.items()
        for series, fires in zip(both, (True, False), strict=True)
    ]
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", tmp_path / "tests.yml")


def case(name: str, series: dict[str, str], fires: bool) -> dict[str, Any]:
    """A test of promtool's: how many of an alert there are after an hour, by its own query."""
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    wanted = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "1m",
        "name": f"{name}, {'fires' if fires else 'silent'}",
        "input_series": [
            {"series": one, "values": expanded(values)} for one, values in series.items()
        ],
        "promql_expr_test": [{"expr": query, "eval_time": "1h", "exp_samples": wanted}],
    }


def expanded(values: str) -> str:
    """``3x61`` as promtool writes it: a value and how often it follows itself."""
    return values if "+" in values else values.replace("x", "+0x")


def test_alerts_and_tables_of_the_page_name_what_exists():
    exposed = {metric.exposed: metric for metric in METRICS}
    for rule in ALERTS.values():
        assert set(re.findall(r"routeprof:\w+", rule["expr"])) <= exposed.keys()
    rows = re.findall(r"^\| `(routeprof:\w+)` \| (\w+) \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(exposed)
    for name, kind, labels in rows:
        metric = exposed[name]
        assert kind == metric.kind
        assert tuple(re.findall(r"`(\w+)`", labels)) == metric.labels
