"""Routing: from an address to the page's content."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from flask import has_request_context, request

from routeprof.dashboards import shell
from routeprof.dashboards.drawing import (
    NO_NUMBERS,
    content_of,
    context_of,
    messages_of,
    numbers,
    version,
)
from routeprof.dashboards.live.library import Library, Opened
from routeprof.dashboards.recordings import recordings_page
from routeprof.dashboards.views import view_at


def layout(library: Library, title: str, *, control: bool = False) -> Any:
    """The whole page, for the address that its reader has opened.

    The view is there from the start and says its numbers: they are read before the browser has
    loaded what draws the figures. Where it does not tell the address, a callback brings the view.
    """
    address = urlsplit((request.referrer or "") if has_request_context() else "")
    pathname = address.path or None
    search = f"?{address.query}" if address.query else ""
    opened = library.open(search)
    frame = shell.Frame(title, pathname, search, control)
    if pathname is None:
        return shell.shell(frame, opened, shell.Start())
    start = shell.Start(
        version(library, opened, view_at(pathname)),
        identity(opened),
        contents(library, pathname, opened, said=True),
        menu(library, pathname, opened),
    )
    return shell.shell(frame, opened, start)


def contents(
    library: Library, pathname: str | None, opened: Opened, *, said: bool = False
) -> list[Any]:
    """A view without figures, the list of recordings, or word that there is no such thing.

    Args:
        said: with the view's numbers.
    """
    view = view_at(pathname)
    if shell.wants_list(pathname) or (not opened.name and view is not None):
        return recordings_page(library.runs(), opened.state)
    if view is None:
        return shell.not_found()
    first = NO_NUMBERS
    if said:
        context = context_of(library, opened, view, "light")
        content = content_of(library, view, context)
        first = numbers(view, context, content, messages_of(opened))
    return shell.page(view, opened, library.names(), first)


def menu(library: Library, pathname: str | None, opened: Opened) -> list[Any]:
    """Links to the views, of which the open one is marked."""
    several = len(library.names()) > 1
    return shell.menu(pathname, opened.state, several=several)


def identity(opened: Opened) -> str:
    """Another one when it is another recording, whose controls offer other things."""
    profile = opened.reading.profile
    return f"{profile.info.id}/{opened.name}" if profile else opened.name
