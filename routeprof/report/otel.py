"""The same metrics for OpenTelemetry: observable instruments, pushed over OTLP.

An instrument's name may not hold a colon: ``routeprof.imbalance_ratio`` is what Prometheus has as
``routeprof:imbalance_ratio``, and a counter goes without ``_total``, which receivers add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

import routeprof
from routeprof.errors import UsageError
from routeprof.report.monitoring import Metric, Snapshot, chosen

PATH = "/v1/metrics"
"""Where an OTLP receiver takes metrics, in the absence of another path."""

Callback = Callable[[CallbackOptions], Iterable[Observation]]


class Look:
    """One snapshot for all instruments of a collection, which are asked one after the other.

    Args:
        take: the recording as it is now; None where there is nothing yet.
    """

    def __init__(self, take: Callable[[], Snapshot | None]) -> None:
        self._take = take
        self._snapshot: Snapshot | None = None
        self._told: set[str] = set()
        self._fresh = False
        self._lock = Lock()

    def of(self, metric: Metric) -> Snapshot | None:
        """The snapshot; a new one when it was given to this metric before."""
        with self._lock:
            if not self._fresh or metric.name in self._told:
                self._snapshot, self._fresh = self._take(), True
                self._told.clear()
            self._told.add(metric.name)
            return self._snapshot


def provider(
    take: Callable[[], Snapshot | None], reader: MetricReader, *, detailed: bool = False
) -> MeterProvider:
    """A provider of its own, apart from the engine's, whose instruments are the metrics.

    Args:
        take: the recording as it is now; None where there is nothing yet.
        reader: what collects, such as ``pushing``.
        detailed: with the series of each layer and expert, of which there may be thousands.
    """
    # What the environment says of the service (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) counts.
    resource = Resource({"service.name": "routeprof"}).merge(OTELResourceDetector().detect())
    made = MeterProvider([reader], resource)
    meter = made.get_meter("routeprof", routeprof.__version__)
    look = Look(take)
    for metric in chosen(detailed):
        counter = metric.kind == "counter"
        create = meter.create_observable_counter if counter else meter.create_observable_gauge
        create(
            f"routeprof.{metric.name}",
            [_observing(metric, look)],
            unit="s" if metric.name.endswith("_seconds") else "1",
            description=metric.help,
        )
    return made


def _observing(metric: Metric, look: Look) -> Callback:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        snapshot = look.of(metric)
        if snapshot is None:
            return
        model = snapshot.whole.info.model.name
        for values, number in metric.read(snapshot):
            labels = dict(zip(metric.labels, values, strict=True))
            yield Observation(number, {"model_name": model, **labels})

    return observe


def pushing(endpoint: str, seconds: float) -> MetricReader:
    """A reader that pushes to an OTLP receiver over HTTP, again and again.

    Args:
        endpoint: such as ``http://127.0.0.1:4318``; without a path, OTLP's own is added.
        seconds: from one push to the next.

    Raises:
        UsageError: the endpoint is no HTTP address.
    """
    exporter = OTLPMetricExporter(endpoint=_address(endpoint))
    return PeriodicExportingMetricReader(exporter, export_interval_millis=1e3 * seconds)


def _address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{endpoint!r} is no address of an OTLP receiver; write one such as "
            "http://127.0.0.1:4318"
        )
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path=PATH))
