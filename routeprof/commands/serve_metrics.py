"""``routeprof serve-metrics``: Prometheus metrics of a recording, live while it is written."""

from __future__ import annotations

from typing import Annotated

import typer

from routeprof.commands.options import Directory


def serve_metrics(
    directory: Directory,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 9464,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Also series of each layer and expert.")
    ] = False,
) -> None:
    """Serve the metrics of a recording for Prometheus.

    Example: routeprof serve-metrics runs/mixtral --port 9464
    """
    from routeprof.commands.extras import make_way, need

    need("prometheus_client", "metrics")
    from routeprof.dashboards.live.source import Source
    from routeprof.errors import UsageError
    from routeprof.report.prometheus import RECENT_SECONDS, Snapshot, registry, server

    make_way()
    source = Source(directory)

    def take() -> Snapshot | None:
        reading = source.read()
        if reading.profile is None:
            return None
        return Snapshot(reading.profile, source.newest(reading, RECENT_SECONDS))

    try:
        serving = server(registry(take, detailed=detailed), host, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port"
        ) from error
    typer.echo(f"Metrics at http://{host}:{serving.server_port}/metrics (Ctrl+C stops it)")
    try:
        serving.serve_forever()
    except KeyboardInterrupt:
        serving.server_close()
