"""Views without a page: what a static file and a notebook draw from."""

from __future__ import annotations

from time import time
from typing import Any

import plotly.graph_objects as go

from routeprof.dashboards.figures.palette import Scheme
from routeprof.dashboards.live.activity import WAITING, activity
from routeprof.dashboards.live.follower import Follower
from routeprof.dashboards.live.spans import Span
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from routeprof.dashboards.views import VIEWS
from routeprof.errors import UsageError
from routeprof.profile import Profile


def context_for(
    profile: Profile, state: ViewState | None = None, scheme: Scheme = "light", *, now: float
) -> Context:
    """What a view draws from, for a profile that is at hand.

    Args:
        now: seconds since the epoch.
    """
    chosen = state or ViewState(phase=profile.phase, tag=profile.tag)
    files = profile.files
    doing, spans = WAITING, tuple[Span, ...]()
    if files is not None:
        end = profile.totals.windows.end
        newest = float(end.max()) if len(end) else None
        doing = activity(files.ranks, newest, now)
        follower = Follower(files.info)
        follower.update(files, float("inf"))
        spans = follower.spans()
    own = profile.narrowed(chosen.phase, chosen.tag)
    return Context(profile, own, chosen, scheme, doing, now, spans=spans)


def figure(
    profile: Profile, view: str, panel: str | None = None, scheme: Scheme = "light", **state: Any
) -> go.Figure:
    """One figure of the dashboard.

    Args:
        view, panel: as in the addresses and the sources of the views; the first panel if None.
        state: fields of ``ViewState``, such as ``phase="decode"`` or ``layer=3``.

    Raises:
        UsageError: there is no such view, panel or field.
    """
    found = next((item for item in VIEWS if item.path == view), None)
    if found is None:
        raise UsageError(f"there is no view {view!r}; there are {_listed(v.path for v in VIEWS)}")
    names = [item.name for item in found.panels]
    name = panel or names[0]
    if name not in names:
        raise UsageError(f"view {view!r} has no panel {panel!r}; it has {_listed(names)}")
    try:
        chosen = ViewState(**{"phase": profile.phase, "tag": profile.tag} | state)
    except TypeError as error:
        raise UsageError(f"{error}; see routeprof.dashboards.state.ViewState") from error
    filled = found.fill(context_for(profile, chosen, scheme, now=time())).panels[name]
    height = next(item.height for item in found.panels if item.name == name)
    return filled.figure.update_layout(height=height)


def _listed(names: Any) -> str:
    return ", ".join(names)
