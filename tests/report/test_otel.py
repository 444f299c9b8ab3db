"""The metrics through OpenTelemetry: what its SDK collects, and what a receiver is sent."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, Sum
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from routeprof.commands.extras import need
from routeprof.errors import MissingExtraError, UsageError
from routeprof.profile import Profile
from routeprof.report.monitoring import METRICS, Snapshot
from routeprof.report.otel import provider, pushing
from routeprof.report.prometheus import registry
from tests.dashboards.made import Writer
from tests.report.conftest import build, moe

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
PATIENCE = 60.0


def exposed(snapshot: Snapshot, *, detailed: bool) -> Samples:
    """What Prometheus is told, by the name as OpenTelemetry has it, and labels."""
    text = generate_latest(registry(lambda: snapshot, detailed=detailed)).decode()
    return {
        (
            sample.name.removesuffix("_total").replace(":", "."),
            frozenset(sample.labels.items()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Metrics by name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    ((scope,),) = [resource.scope_metrics for resource in data.resource_metrics]
    return {metric.name: metric for metric in scope.metrics}


def samples(metrics: dict[str, Any]) -> Samples:
    return {
        (name, frozenset(point.attributes.items())): point.value
        for name, metric in metrics.items()
        for point in metric.data.data_points
    }


@pytest.mark.parametrize("detailed", [False, True])
def test_the_sdk_collects_what_prometheus_is_told(profile: Profile, detailed: bool):
    snapshot, reader = Snapshot(profile, profile), InMemoryMetricReader()
    made = provider(lambda: snapshot, reader, detailed=detailed)
    metrics = collected(reader)
    assert samples(metrics) == exposed(snapshot, detailed=detailed)
    for metric in METRICS:
        found = metrics.get(f"routeprof.{metric.name}")
        if found is None:  # a profile in memory has no files to say how much was captured
            assert metric.detailed or metric.name in {"ranks", "coverage_ratio"}
            continue
        assert found.description == metric.help
        assert found.unit == ("s" if metric.name.endswith("_seconds") else "1")
        assert isinstance(found.data, Sum) == (metric.kind == "counter")
        if isinstance(found.data, Sum):
            assert found.data.is_monotonic
            assert found.data.aggregation_temporality == AggregationTemporality.CUMULATIVE
    made.shutdown()


def test_all_instruments_of_a_collection_see_one_snapshot(counts: np.ndarray):
    """Each look finds one more step; a collection that looked twice would mix two of them."""
    looks = 0

    def take() -> Snapshot | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            return None
        profile = build([moe(index) for index in range(4)], {("decode", None): counts[:looks]})
        return Snapshot(profile, profile)

    reader = InMemoryMetricReader()
    made = provider(take, reader, detailed=True)
    assert collected(reader) == {}
    for collection in (2, 3, 4):
        values = {name: value for (name, _), value in samples(collected(reader)).items()}
        assert values["routeprof.steps"] == collection
        assert values["routeprof.tokens"] == 10 * collection
        assert values["routeprof.assignments"] == 4 * 20 * collection
        assert looks == collection
    made.shutdown()


# -- over HTTP


@pytest.fixture
def receiver() -> Iterator[tuple[str, Queue[tuple[str, ExportMetricsServiceRequest]]]]:
    """An OTLP receiver: its address, and the paths and messages that come."""
    came: Queue[tuple[str, ExportMetricsServiceRequest]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.put((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", came
    server.shutdown()
    server.server_close()
    thread.join()


def received(message: ExportMetricsServiceRequest) -> Samples:
    (resource,) = message.resource_metrics
    (scope,) = resource.scope_metrics
    return {
        (metric.name, frozenset((a.key, a.value.string_value) for a in point.attributes)): (
            point.as_double
        )
        for metric in scope.metrics
        for point in getattr(metric, str(metric.WhichOneof("data"))).data_points
    }


def test_a_receiver_gets_the_same_values(
    receiver: tuple[str, Queue[Any]], profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    url, came = receiver
    snapshot = Snapshot(profile, profile)
    made = provider(lambda: snapshot, pushing(url, 3600.0))
    made.shutdown()  # pushes what there is
    path, message = came.get(timeout=PATIENCE)
    assert path == "/v1/metrics"
    assert received(message) == exposed(snapshot, detailed=False)
    attributes = message.resource_metrics[0].resource.attributes
    of = {attribute.key: attribute.value.string_value for attribute in attributes}
    assert of == {"service.name": "routeprof", "deployment.environment": "test"}


def test_the_verb_pushes_again_and_again_and_once_more_at_its_end(
    receiver: tuple[str, Queue[Any]], tmp_path: Path
):
    url, came = receiver
    writer = Writer(tmp_path / "live")
    writer.write("decode", tokens=64)
    command = [sys.executable, "-m", "routeprof", "serve-metrics", str(writer.path)]
    verb = subprocess.Popen(
        [*command, "--otlp", f"{url}/my/path", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    key = (
        "routeprof.tokens",
        frozenset({("model_name", writer.writer.info.model.name), ("phase", "decode")}),
    )
    try:
        path, message = came.get(timeout=PATIENCE)
        assert path == "/my/path"
        assert received(message)[key] == 4 * 64
        writer.write("decode", tokens=16)
        while received(message)[key] != 4 * (64 + 16):
            _, message = came.get(timeout=PATIENCE)
        verb.send_signal(signal.SIGTERM)
        out, error = verb.communicate(timeout=PATIENCE)
    finally:
        verb.kill()
        verb.communicate()
    assert (verb.returncode, error) == (0, "")
    assert out == f"Metrics go to {url}/my/path every 0.1 s\n"


# -- what cannot be


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://host:4317", "", "http://", "x"])
def test_an_address_that_is_none(endpoint: str):
    with pytest.raises(UsageError, match="is no address of an OTLP receiver; write one such as"):
        pushing(endpoint, 1.0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    wanted = "opentelemetry.sdk is not installed; run: pip install 'routeprof[otel]'"
    with pytest.raises(MissingExtraError, match=re.escape(wanted)):
        need("opentelemetry.sdk", "otel")
