"""Prometheus metrics of a recording, named as vLLM and SGLang name theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from routeprof.report.monitoring import Snapshot, chosen


class Exporter(Collector):
    """What a Prometheus client registry collects.

    Args:
        take: the recording as it is now; None where there is nothing yet.
        detailed: with the series of each layer and expert, of which there may be thousands.
    """

    def __init__(self, take: Callable[[], Snapshot | None], *, detailed: bool = False) -> None:
        self._take = take
        self._metrics = chosen(detailed)

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
            status, body = _answer(registry, self.path.partition("?")[0])
            kind = CONTENT_TYPE_PLAIN_0_0_4 if status == 200 else "text/plain; charset=utf-8"
            with suppress(ConnectionError):  # the scraper gave up
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """One line a second would say nothing."""

    return ThreadingHTTPServer((host, port), Handler)


def _answer(registry: CollectorRegistry, path: str) -> tuple[int, bytes]:
    """Status and body; a scrape that fails is seen as one, and the next may succeed."""
    if path not in ("/", "/metrics"):
        return 404, b"Metrics are at /metrics.\n"
    try:
        return 200, generate_latest(registry)
    except Exception as error:
        return 500, f"The recording cannot be read ({type(error).__name__}: {error}).\n".encode()
