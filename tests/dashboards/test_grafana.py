"""The Grafana dashboard: against Grafana's own model of one, and with a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

import routeprof
from routeprof.dashboards.grafana.model import dashboard
from routeprof.report.monitoring import METRICS
from tests.dashboards.made import Writer

FILE = Path(routeprof.__file__).parent / "dashboards" / "grafana" / "routeprof.json"
FOUND = json.loads(FILE.read_text("utf-8"))
QUERIES = [target["expr"] for panel in FOUND["panels"] for target in panel["targets"]]


def test_the_file_is_what_the_module_says() -> None:
    assert dashboard() == FOUND


def test_grafanas_own_model_takes_all_of_it() -> None:
    """Everything that goes into Grafana's classes comes out of them again."""
    model = Dashboard.from_json(FOUND)
    back = json.loads(json.dumps(model, cls=JSONEncoder))
    assert lost(FOUND, back) == []


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Paths of what is in the first and not, or otherwise, in the second."""
    if isinstance(given, dict):
        return [
            path
            for name, value in given.items()
            if value is not None
            for path in (
                lost(value, kept[name], f"{where}.{name}")
                if isinstance(kept, dict) and name in kept
                else [f"{where}.{name}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = zip(given, kept, strict=True)
        return [path for n, pair in enumerate(pairs) for path in lost(*pair, f"{where}[{n}]")]
    return [] if given == kept else [where]


def test_conventions() -> None:
    assert FOUND["id"] is None
    assert [panel["id"] for panel in FOUND["panels"]] == list(range(1, len(FOUND["panels"]) + 1))
    for panel in FOUND["panels"]:
        assert re.search(r"\. Metric: `.+`$", panel["description"])
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["noValue"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in FOUND["panels"]}
    assert len(places) == len(FOUND["panels"])


def test_queries_name_metrics_that_exist_and_every_metric_is_shown() -> None:
    named = {name for query in QUERIES for name in re.findall(r"routeprof:\w+", query)}
    exposed = {metric.exposed for metric in METRICS}
    assert named <= exposed
    assert exposed - named == {"routeprof:expert_tokens_total"}


# -- a real Prometheus


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until(check: Callable[[], Any], limit: float = 40.0) -> Any:
    """What the check gives once it is true; it is asked again and again."""
    deadline = monotonic() + limit
    while True:
        try:
            found = check()
        except (OSError, urllib.error.URLError):
            found = None
        if found:
            return found
        assert monotonic() < deadline, "it did not come true in time"
        sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A Prometheus that scrapes ``serve-metrics`` of a recording that grows: its address."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus; Debian has it in a package of that name")
    folder = tmp_path_factory.mktemp("prometheus")
    writer = Writer(folder / "live")
    writer.write()
    command = "serve-metrics --port 0 --detailed".split()
    exporter = subprocess.Popen(
        [sys.executable, "-m", "routeprof", *command, str(folder / "live")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert exporter.stdout is not None
    target = re.search(r"http://([^/]+)/", exporter.stdout.readline())
    assert target is not None
    port = free_port()
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: moe\n"
        f"  static_configs: [{{targets: ['{target[1]}']}}]\n"
    )
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "log.level": "error",
    }
    server = subprocess.Popen(
        ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: ask(url, "count_over_time(routeprof:tokens_total[1h]) >= 1"))
        writer.write()  # rates need two values
        until(lambda: ask(url, "increase(routeprof:tokens_total[1h]) > 0"))
        yield url, folder / "live"
    finally:
        for process in (server, exporter):
            process.terminate()
            process.wait()
        exporter.stdout.close()


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """What Prometheus answers to an instant query."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_returns_data(prometheus: tuple[str, Path], query: str) -> None:
    variables = {"$job": ".*", "$model_name": ".*", "$instance": ".*", "$__rate_interval": "1h"}
    for name, value in variables.items():
        query = query.replace(name, value)
    assert ask(prometheus[0], query)


def test_values_are_those_of_the_tables(prometheus: tuple[str, Path]) -> None:
    url, path = prometheus
    profile = routeprof.load(path)
    layers = profile.layers()
    values = {
        "routeprof:imbalance_ratio": layers["imbalance_ratio"].max(),
        "sum(routeprof:tokens_total)": layers["tokens"].max(),
        "sum(routeprof:assignments_total)": layers["assignments"].sum(),
        'routeprof:layers{state="captured"}': len(profile.captured),
        "routeprof:coverage_ratio": profile.coverage,
        "sum(routeprof:expert_tokens_total)": profile.experts()["tokens"].sum(),
        'routeprof:layer_imbalance_ratio{layer="2"}': layers["imbalance_ratio"].iloc[1],
    }
    for query, expected in values.items():
        (found,) = ask(url, query)
        assert float(found["value"][1]) == pytest.approx(float(expected), rel=1e-12), query
