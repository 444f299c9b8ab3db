"""From a view's content to what its components show: plain functions behind the callbacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import time
from typing import Any

from dash import html, no_update

from routeprof.dashboards import grids
from routeprof.dashboards.components import card, notice
from routeprof.dashboards.controls import scrubber
from routeprof.dashboards.downloads import csv_href
from routeprof.dashboards.figures.palette import Scheme
from routeprof.dashboards.formats import clock
from routeprof.dashboards.live.library import Library, Opened
from routeprof.dashboards.state import ViewState, duration
from routeprof.dashboards.view import Against, Content, Context, Panel, View
from routeprof.profile import Profile
from routeprof.report.csv import available


def context_of(library: Library, opened: Opened, view: View, scheme: Scheme) -> Context | None:
    """What a view draws from; None while there is nothing to show."""
    asked = opened
    if "against" in view.controls:
        opened = single(library, opened)
    profile = selected(opened)
    whole, state = opened.reading.profile, opened.state
    if profile is None or whole is None or opened.source is None:
        return None
    against = compared(library, opened) if "against" in view.controls else None
    doing, spans = opened.reading.activity, opened.source.spans()
    return Context(
        whole,
        profile,
        state,
        scheme,
        doing,
        time(),
        against,
        spans,
        opened.name,
        timed(opened),
        apart=opened is not asked,
    )


def selected(opened: Opened) -> Profile | None:
    """The phase, tag and time of the recording that the numbers are of."""
    # A range in which the phase or the tag does not occur has no numbers, which is no error.
    state = opened.state
    if opened.source is None:
        return None
    return opened.source.select(opened.reading, state.phase, state.tag, state.between)


def timed(opened: Opened) -> Profile | None:
    """The time of the recording that the numbers are of, with all phases and tags."""
    reading, between = opened.reading, opened.state.between
    if reading.profile is None or opened.source is None:
        return None
    if between is None:
        return reading.profile
    return opened.source.between(reading, between) or reading.profile


def single(library: Library, opened: Opened) -> Opened:
    """Where the sum of several is open, one of them: a sum is not compared with its part.

    All of its time: the range is one of the sum's time, which began elsewhere.
    """
    others = [name for name in library.singles() if name != opened.state.against]
    if opened.source is None or len(opened.source.paths) < 2 or not others:
        return opened
    return library.open(opened.state.query(run=others[0], between=None))


def compared(library: Library, opened: Opened) -> Against | None:
    """The recording to compare with: the chosen one, else the first other one."""
    others = [name for name in library.singles() if name != opened.name]
    name = opened.state.against or next(iter(others), "")
    source = library.source(name)
    reading = source.read() if source is not None else None
    if source is None or reading is None or reading.profile is None:
        return None
    state = opened.state
    profile = source.select(reading, state.phase, state.tag, None) or reading.profile
    if source.behind:
        library.look_again()
    return Against(name, profile, source.spans(), reading.message)


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
        return notices, [], [], [], still, still, still, still, [], [], True
    if not context.profile.captured and context.whole.captured:
        notices.append(notice("Nothing was recorded with this phase and tag in this time."))
    content = view.fill(context)
    shown = "between" in view.controls and not context.apart
    return (
        notices,
        [card(item) for item in content.cards],
        list(content.lead),
        list(content.body),
        *_panels(view, context, content, names, opened),
        downloads(view, context.whole, context.state),
        scrubber(context.whole, context.state, shown=shown),
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
    query = state.query(phase=None, tag=None, between=None, factor=None)
    return f"{view.path}{query}"


def downloads(view: View, profile: Profile, state: ViewState) -> list[Any]:
    """Links to the CSV reports that hold the view's numbers."""
    return [
        html.A(
            f"{name}.csv",
            href=csv_href(name, state),
            download=f"{name}.csv",
            className="button download",
            title="Download the report of what is selected",
        )
        for name in view.reports
        if name in available(profile)
    ]


def click_target(panel: Panel, click: Any, state: ViewState) -> tuple[str, str] | None:
    """Path and query of what was clicked on, where the figure leads anywhere."""
    try:
        point = click["points"][0]
        if panel.leads == "cell":
            layer = int(str(point["y"]).split(" ", maxsplit=1)[0])
            return "/expert", state.query(layer=layer, expert=int(point["text"]))
        if panel.leads == "expert":
            return "/expert", state.query(expert=int(point["customdata"]))
        if panel.leads == "layer":
            return "/layer", state.query(layer=int(point["x"]), expert=None)
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    return None


def picked_range(drag: Any, profile: Profile | None) -> tuple[float, float] | None:
    """The range of seconds that was dragged over in a figure over time."""
    try:
        low, high = sorted(float(value) for value in drag["range"]["x"])
    except (KeyError, TypeError, ValueError):
        return None
    scale, _ = clock(duration(profile))
    between = (round(max(low, 0.0) * scale, 3), round(high * scale, 3))
    return between if between[0] < between[1] else None
