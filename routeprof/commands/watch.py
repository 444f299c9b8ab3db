"""``routeprof watch``: follow a recording, and tell of findings as they come up."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.completion import SEVERITIES, one_of
from routeprof.commands.diagnose import Capacity, Config, Gpus, limits_of
from routeprof.commands.options import AsJson, Recordings
from routeprof.errors import NotARecordingError

if TYPE_CHECKING:
    from routeprof.diagnose.finding import Finding
    from routeprof.report.alerts import Receiver

CATCHING_UP_SECONDS = 0.1
"""Between two looks while there is more to read."""

GRACE_SECONDS = 45.0
"""At the end, alerts that are under way get so long."""


def watch(
    directories: Recordings,
    on_finding: Annotated[
        str | None,
        typer.Option(help="Run this with each alert as JSON on its input.", metavar="COMMAND"),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            help="Post each alert there as JSON.", metavar="URL", envvar="ROUTEPROF_WEBHOOK"
        ),
    ] = None,
    alert_level: Annotated[
        str,
        typer.Option(
            help="Least severity to tell of: info, warning or error.",
            autocompletion=one_of(SEVERITIES),
        ),
    ] = "warning",
    alert_period: Annotated[
        float, typer.Option(help="Seconds between two alerts of one code, at least.", min=0)
    ] = 300.0,
    seconds: Annotated[
        float, typer.Option(help="Length of the newest stretch, which is judged.", min=1)
    ] = 300.0,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600)
    ] = 10.0,
    max_imbalance: Annotated[
        float | None, typer.Option(help="Hottest expert ÷ mean, of a layer and of a tag.")
    ] = None,
    capacity_factor: Capacity = None,
    gpus: Gpus = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Follow a recording until it is stopped; tell once of each finding that comes up.

    Example: routeprof watch runs/mixtral --on-finding ./page-me.sh
    """
    import sys
    from threading import Event
    from time import monotonic, strftime

    from routeprof.commands.extras import make_way
    from routeprof.converted import as_recording
    from routeprof.dashboards.live.source import Source
    from routeprof.dashboards.live.watcher import Watcher
    from routeprof.diagnose.check import severities
    from routeprof.diagnose.news import News
    from routeprof.report.alerts import Delivery
    from routeprof.report.diagnose import finding_line

    limits = limits_of(config, hot_imbalance=max_imbalance, capacity_factor=capacity_factor)
    grave, receivers = severities(alert_level), _receivers(on_finding, webhook)
    for path in directories:
        if not path.exists():
            raise NotARecordingError(f"{path} does not exist; name a recording's directory")

    def say(line: str) -> None:
        print(f"routeprof: {line}", file=sys.stderr, flush=True)

    def tell(finding: Finding, body: bytes) -> None:
        typer.echo(body if as_json else f"{strftime('%H:%M:%S')} {finding_line(finding)}")
        if receivers:
            delivery.send(finding, body)

    source, news = Source(*map(as_recording, directories)), News(alert_period, monotonic)
    delivery = Delivery(receivers, say, news.failed)
    watcher = Watcher(source, news, limits, grave, gpus, seconds, tell, say)
    make_way()
    with suppress(KeyboardInterrupt):
        while watcher.look():
            Event().wait(CATCHING_UP_SECONDS if source.behind else interval)
    with suppress(KeyboardInterrupt):
        delivery.close(GRACE_SECONDS)


def _receivers(on_finding: str | None, url: str | None) -> list[Receiver]:
    from routeprof.report.alerts import command, webhook

    made: list[Receiver] = [] if on_finding is None else [command(on_finding)]
    return made if url is None else [*made, webhook(url)]
