"""From a view's content to what its components show: plain functions behind the callbacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import time
from typing import Any

from dash import html, no_update

from routeprof.dashboards import grids
from routeprof.dashboards.components import card, notice
from routeprof.dashboards.downloads import csv_href, select
from routeprof.dashboards.palette import Scheme
from routeprof.dashboards.source import Reading
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Content, Context, View
from routeprof.profile import Profile
from routeprof.report.csv import available


def context_of(reading: Reading, state: ViewState, scheme: Scheme) -> Context | None:
    """What a view draws from; None while there is nothing to show."""
    if reading.profile is None:
        return None
    profile = select(reading.profile, state)
    return Context(reading.profile, profile, state, scheme, reading.activity, time())


def draw(
    view: View,
    context: Context | None,
    names: Sequence[str],
    opened: Collection[str],
    messages: Sequence[str],
) -> tuple[Any, ...]:
    """What the page shows, in the order of the callback's outputs.

    Args:
        context: None while there is nothing to show.
        names: the figures on the page, in their order there.
        opened: those whose numbers are unfolded; the others' rows are not sent.
        messages: lines for the top of the page.
    """
    notices = [notice(text) for text in messages]
    still = [no_update] * len(names)
    if context is None:
        return notices, [], [], [], still, still, still, still, [], True
    if not context.profile.captured and context.profile.totals.keys != context.whole.totals.keys:
        notices.append(notice("Nothing was recorded with this phase and this tag."))
    content = view.fill(context)
    return (
        notices,
        [card(item) for item in content.cards],
        list(content.lead),
        list(content.body),
        *_panels(view, context, content, names, opened),
        downloads(view, context.whole, context.state),
        False,
    )


def _panels(
    view: View,
    context: Context,
    content: Content,
    names: Sequence[str],
    opened: Collection[str],
) -> tuple[list[Any], ...]:
    figures: list[Any] = []
    captions: list[Any] = []
    columns: list[Any] = []
    rows: list[Any] = []
    for name in names:
        filled = content.panels.get(name)
        if filled is None:  # the page is changing: these figures are of the view before
            for values in (figures, captions, columns, rows):
                values.append(no_update)
            continue
        figures.append(filled.figure.update_layout(uirevision=revision(view, context.state)))
        captions.append(filled.caption)
        columns.append(grids.columns(filled.table) if name in opened else no_update)
        rows.append(grids.rows(filled.table) if name in opened else no_update)
    return figures, captions, columns, rows


def revision(view: View, state: ViewState) -> str:
    """Stays the same while a figure's axes mean the same, so that the reader's zoom stays."""
    return f"{view.path}{state.query(phase=None, tag=None, factor=None)}"


def downloads(view: View, profile: Profile, state: ViewState) -> list[Any]:
    """Links to the CSV reports that hold the view's numbers."""
    return [
        html.A(
            f"{name}.csv",
            href=csv_href(name, state),
            download=f"{name}.csv",
            className="button download",
            title="Download the report of this phase and tag",
        )
        for name in view.reports
        if name in available(profile)
    ]


def click_target(click: Any) -> int | None:
    """The layer that was clicked on, where the figure's axes tell one."""
    try:
        point = click["points"][0]
        label = point["y"] if "z" in point else point["x"]
        return int(str(label).split(" ", maxsplit=1)[0])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
