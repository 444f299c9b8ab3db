"""The views, in the order of the menu. A new one needs its module and a line here."""

from __future__ import annotations

from routeprof.dashboards.view import View
from routeprof.dashboards.views import (
    affinity,
    compare,
    expert,
    findings,
    health,
    heatmap,
    layer,
    layouts,
    overflow,
    overview,
    plan,
    prompts,
    ranks,
    timeline,
)

VIEWS: tuple[View, ...] = (
    overview.VIEW,
    findings.VIEW,
    heatmap.VIEW,
    layer.VIEW,
    expert.VIEW,
    timeline.VIEW,
    overflow.VIEW,
    ranks.VIEW,
    layouts.VIEW,
    plan.VIEW,
    prompts.VIEW,
    affinity.VIEW,
    compare.VIEW,
    health.VIEW,
)


def view_at(pathname: str | None) -> View | None:
    """The view with that address; the first for the bare address, None for an unknown one."""
    path = (pathname or "").strip("/")
    return next((view for view in VIEWS if view.path == path), None if path else VIEWS[0])
