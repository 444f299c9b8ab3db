"""An answer may come after the one that should have overtaken it: requests held back on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeprof.sample_data import RECORDINGS_DIR
from tests.dashboards.test_browser import browser, expect, open_page, serve, window

__all__ = ["browser", "open_page", "serve", "window"]

pytestmark = pytest.mark.browser

CALLBACK = re.compile("_dash-update-component")
RANKS_ONLY = "Slowest / mean rank"
HEALTH_ONLY = "Nothing is known to be missing"


def draws(request: Any, value: str) -> bool:
    """Whether a request asks for the content of a view, for something that it names."""
    asked = request.post_data or ""
    return "cards.children" in asked and f'"value":"{value}"' in asked


def hold_first(page: Any, value: str) -> list[Any]:
    """Hold the first such request back; it is in the list once it has been asked."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        if not held and draws(route.request, value):
            held.append(route)
        else:
            route.continue_()

    page.route(CALLBACK, hold)
    return held


@pytest.fixture
def url(serve: Callable[[Path], str]) -> str:
    return serve(RECORDINGS_DIR / "collapsed")


def test_of_the_view_before(open_page: Callable[..., Any], url: str) -> None:
    page = open_page()
    held = hold_first(page, "ranks")
    with page.expect_request(lambda request: draws(request, "ranks")):
        page.goto(f"{url}/ranks?ranks=8&gains=yes")
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_text(HEALTH_ONLY)).to_be_visible()
    with page.expect_response(lambda answer: draws(answer.request, "health")):
        held[0].continue_()
    expect(page.get_by_text(HEALTH_ONLY)).to_be_visible()
    expect(page.get_by_text(RANKS_ONLY)).to_have_count(0)
