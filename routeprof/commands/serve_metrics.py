"""``routeprof serve-metrics``: metrics of a recording, live while it is written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.options import Directory

if TYPE_CHECKING:
    from routeprof.report.monitoring import Snapshot

PORT = 9464


def serve_metrics(
    directory: Directory,
    port: Annotated[
        int | None,
        typer.Option(help=f"Port, {PORT} if unset; 0 takes a free one.", min=0, max=65535),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Also series of each layer and expert.")
    ] = False,
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Push to this OpenTelemetry receiver, and serve only where --port is given.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds from one push to the next.", min=0.1, max=3600)
    ] = 15.0,
    beside: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the metrics of a recording for Prometheus, or push them over OTLP.

    Example: routeprof serve-metrics runs/mixtral --port 9464

    Example: routeprof serve-metrics runs/mixtral --otlp http://127.0.0.1:4318
    """
    from routeprof.commands.beside import ended, listening, silence
    from routeprof.commands.extras import make_way, need

    serves = otlp is None or port is not None
    if serves:
        need("prometheus_client", "metrics")
    if otlp is not None:
        need("opentelemetry.sdk", "otel")
        need("opentelemetry.exporter.otlp.proto.http", "otel")
    over = Event() if beside is None else ended(beside)
    make_way()
    take, stops = _taking(directory), list[Callable[[], object]]()
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the last push is still made
        if serves:
            from routeprof.report.prometheus import registry, server

            number = PORT if port is None else port
            with listening(host, number, "--port"):
                serving = server(registry(take, detailed=detailed), host, number)
            Thread(target=serving.serve_forever, daemon=True).start()
            stops += [serving.shutdown, serving.server_close]
            hint = " (Ctrl+C stops it)" if beside is None else ""
            typer.echo(f"Metrics at http://{host}:{serving.server_port}/metrics{hint}")
        if otlp is not None:
            from routeprof.report.otel import provider, pushing

            made = provider(take, pushing(otlp, interval), detailed=detailed)
            stops.append(made.shutdown)
            typer.echo(f"Metrics go to {otlp} every {interval:g} s")
        if beside is not None:
            silence()
        elif not directory.exists():
            typer.echo(f"{directory} does not exist yet; metrics come as soon as it does", err=True)
        over.wait()
    for stop in stops:
        stop()


def _taking(directory: Path) -> Callable[[], Snapshot | None]:
    """The recording as it is now; of another tool's file, a recording that is made of it."""
    from routeprof.converted import as_recording
    from routeprof.dashboards.live.source import Source
    from routeprof.report.monitoring import RECENT_SECONDS, Snapshot

    source = Source(as_recording(directory))

    def take() -> Snapshot | None:
        reading = source.read()
        if reading.profile is None:
            return None
        return Snapshot(reading.profile, source.newest(reading, RECENT_SECONDS))

    return take
