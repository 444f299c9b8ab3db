"""The dashboard: a local web page about a recording, live while it is being written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeprof.dashboards.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import Dash on first use: ``import routeprof.dashboards`` stays cheap."""
    if name != "create_app":
        raise AttributeError(f"module 'routeprof.dashboards' has no attribute {name!r}")
    from routeprof.dashboards.app import create_app

    return create_app
