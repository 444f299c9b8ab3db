"""What many pages show is computed once, and never that of another state."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from routeprof.dashboards.drawing import content_of, context_of
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.view import Content, Context, View
from routeprof.dashboards.views import overview
from tests.dashboards.made import Writer


def test_one_computes_and_the_others_wait() -> None:
    memo: Memo[int] = Memo(2)
    begun, may_end, calls = threading.Event(), threading.Event(), []

    def make() -> int:
        calls.append(1)
        begun.set()
        assert may_end.wait(10)
        return 7

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(memo.get, "key", make)
        assert begun.wait(10)
        others = [pool.submit(memo.get, "key", make) for _ in range(3)]
        assert memo.get("another", lambda: 8) == 8  # which does not wait
        may_end.set()
        assert [one.result(10) for one in (first, *others)] == [7] * 4
    assert calls == [1]


def test_the_last_used_are_kept() -> None:
    memo: Memo[int] = Memo(2)
    calls = []

    def get(key: str) -> None:
        memo.get(key, lambda: calls.append(key) or 0)

    for key in ("a", "b", "a", "c", "a", "b"):
        get(key)
    assert calls == ["a", "b", "c", "b"]


def test_an_error_is_everybodys_and_then_forgotten() -> None:
    memo: Memo[int] = Memo(2)
    with pytest.raises(ZeroDivisionError):
        memo.get("key", lambda: 1 // 0)
    assert memo.get("key", lambda: 1) == 1


class Counted:
    """A view that counts how often it is filled."""

    def __init__(self, view: View) -> None:
        self.times = 0
        self.view = replace(view, fill=self._fill)

    def _fill(self, context: Context) -> Content:
        self.times += 1
        return overview.VIEW.fill(context)


def shown(library: Library, view: View, query: str = "", scheme: str = "light") -> str:
    """The first card of a page."""
    for name in library.names():
        source = library.source(name)
        assert source is not None
        source._due = 0.0
    context = context_of(library, library.open(query), view, scheme)  # type: ignore[arg-type]
    assert context is not None
    content = content_of(library, view, replace(context, now=0.0))
    assert content is not None
    return content.cards[0].value


def test_pages_that_show_the_same_share_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "growing")
    writer.write("prefill")
    library, counted = Library(writer.path), Counted(overview.VIEW)
    assert [shown(library, counted.view) for _ in range(3)] == ["256"] * 3
    assert counted.times == 1
    assert shown(library, counted.view, scheme="dark") == "256"
    assert counted.times == 2
    writer.write("decode")
    assert shown(library, counted.view) == "512"
    assert shown(library, counted.view, "?phase=decode") == "256"
    assert counted.times == 4


def test_a_source_that_begins_anew_is_another_one(tmp_path: Path) -> None:
    """It counts its versions from one again."""
    writer = Writer(tmp_path / "growing")
    writer.write("prefill")
    library = Library(writer.path)
    assert shown(library, overview.VIEW) == "256"
    writer.write("prefill")
    library._sources.clear()
    assert shown(library, overview.VIEW) == "512"
