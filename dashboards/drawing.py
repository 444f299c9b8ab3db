"""From a view's content to what its components show: plain functions behind the callbacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Any

from dash import html, no_update

from routeprof.dashboards import grids
from routeprof.dashboards.components import card, notice
from routeprof.dashboards.controls import chosen_time, scrubber
from routeprof.dashboards.downloads import csv_href
from routeprof.dashboards.figures.palette import Scheme
from routeprof.dashboards.formats import clock
from routeprof.dashboards.live.library import Library, Opened
from routeprof.dashboards.live.source import Reading, Source
from routeprof.dashboards.state import ViewState, duration, time_stops
from routeprof.dashboards.view import Against, Content, Context, Exact, Panel, View
from routeprof.profile import Profile
from routeprof.report.csv import available

SAME_SECONDS = 5
"""How long one content may be shown to others: it says how long ago the engine was heard of."""


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
        version=f"{opened.version}/{against.version}" if against else opened.version,
        answers=library.answers,
        exact=_exact(opened.source, opened.state.between),
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
    if opened.source is None:
        return None
    return opened.source.select(opened.reading, None, None, opened.state.between)


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
    found = _other(library, opened)
    if found is None:
        return None
    source, reading = found
    profile = source.select(reading, opened.state.phase, opened.state.tag, None)
    if profile is None:
        return None
    name = _other_name(library, opened)
    return Against(
        name,
        reading.profile or profile,
        profile,
        reading.message,
        f"{reading.version}/{source.born}/{name}",
        _exact(source, None),
    )


def _exact(source: Source, between: tuple[float, float] | None) -> Exact | None:
    return None if source.behind else partial(source.exact, between, windows=True)


def version(library: Library, opened: Opened, view: View | None) -> str:
    """Another one whenever a view has something else to show."""
    if view is None or "against" not in view.controls:
        return opened.version
    opened = single(library, opened)
    found = _other(library, opened)
    return f"{opened.version}/{found[1].version if found else ''}"


def _other(library: Library, opened: Opened) -> tuple[Source, Reading] | None:
    source = library.source(_other_name(library, opened))
    return None if source is None else (source, source.read())


def _other_name(library: Library, opened: Opened) -> str:
    others = (name for name in library.singles() if name != opened.name)
    return opened.state.against or next(others, "")


@dataclass(frozen=True)
class Places:
    """What there is on the page to be filled.

    Attributes:
        figures: names, in their order there.
        grids: those whose numbers were unfolded before, in their order there.
        opened: those whose numbers are unfolded now; the others' rows are not sent.
        end: how far the slider of time reaches; None where there is none yet.
    """

    figures: Sequence[str]
    grids: Sequence[str]
    opened: Collection[str]
    end: float | None = None


@dataclass(frozen=True)
class Numbers:
    """What a page says without figures: the components of its places."""

    notices: list[Any]
    cards: list[Any]
    lead: list[Any]
    body: list[Any]
    downloads: list[Any]
    scrubber: list[Any]
    time: list[Any]
    hidden: bool


NO_NUMBERS = Numbers([], [], [], [], [], [], [], False)


def messages_of(opened: Opened) -> list[str]:
    """Lines for the top of the page."""
    return [*opened.ignored, *filter(None, [opened.reading.message])]


def content_of(library: Library, view: View, context: Context | None) -> Content | None:
    """What a view shows; computed once for all pages that show the same of the same state."""
    if context is None or not context.version:
        return _filled(view, context)
    moment = int(context.now // SAME_SECONDS)
    key = (view.path, context.scheme, context.version, context.state, moment)
    return library.contents.get(key, lambda: _filled(view, context))


def _filled(view: View, context: Context | None) -> Content | None:
    if context is None:
        return None
    content = view.fill(context)
    for filled in content.panels.values():
        filled.figure.update_layout(uirevision=revision(view, context.state))
    return content


def numbers(
    view: View, context: Context | None, content: Content | None, messages: Sequence[str]
) -> Numbers:
    """The page without its figures.

    Args:
        context: None while there is nothing to show.
        content: what the view shows of it.
        messages: lines for the top of the page.
    """
    notices = [notice(text) for text in messages]
    if context is None or content is None:
        return replace(NO_NUMBERS, notices=notices, hidden=True)
    if not context.profile.captured and context.whole.captured:
        notices.append(notice("Nothing was recorded with this phase and tag in this time."))
    shown = "between" in view.controls and not context.apart
    whole, state = context.whole, context.state
    return Numbers(
        notices,
        [card(item) for item in content.cards],
        list(content.lead),
        list(content.body),
        downloads(view, whole, state),
        scrubber(whole, state) if shown else [],
        chosen_time(whole, state, shown=shown),
        hidden=False,
    )


def draw(
    view: View,
    context: Context | None,
    content: Content | None,
    places: Places,
    messages: Sequence[str],
) -> tuple[Any, ...]:
    """What the page shows, in the order of the callback's outputs.

    Args:
        context: None while there is nothing to show.
        content: what the view shows of it.
        messages: lines for the top of the page.
    """
    said = numbers(view, context, content, messages)
    first = said.notices, said.cards, said.lead, said.body
    last = said.downloads, _scrubber(context, said, places), said.time, said.hidden
    if context is None or content is None:
        still = [no_update] * len(places.figures)
        unfilled = [no_update] * len(places.grids)
        return *first, still, still, still, unfilled, unfilled, *last
    return *first, *_panels(content, places), *_tables(content, places), *last


def _scrubber(context: Context | None, said: Numbers, places: Places) -> Any:
    """The slider, unless the same is there: its reader may have moved it on in the meantime."""
    same = context is not None and said.scrubber and places.end == time_stops(context.whole)[0]
    return no_update if same else said.scrubber


def _panels(content: Content, places: Places) -> tuple[list[Any], list[Any]]:
    """Figures and captions; none where the page is changing and they are of the view before."""
    found = [content.panels.get(name) for name in places.figures]
    return (
        [filled.figure if filled else no_update for filled in found],
        [filled.caption if filled else no_update for filled in found],
    )


def _tables(content: Content, places: Places) -> tuple[list[Any], list[Any], list[Any]]:
    """Grids for the tables unfolded for the first time; columns and rows of those there are."""
    tables = {
        name: filled.table for name, filled in content.panels.items() if name in places.opened
    }
    fresh = tables.keys() - set(places.grids)
    return (
        [grids.grid(name, tables[name]) if name in fresh else no_update for name in places.figures],
        [grids.columns(tables[name]) if name in tables else no_update for name in places.grids],
        [grids.rows(tables[name]) if name in tables else no_update for name in places.grids],
    )


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
