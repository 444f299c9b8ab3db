"""Following a recording of which sums are kept: the same page, and parts are not read again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import routeprof
from routeprof.dashboards.live import follower, kept
from routeprof.dashboards.live import source as module
from routeprof.dashboards.live.source import Source
from routeprof.recording import groups
from routeprof.recording.schema import part_name
from tests.dashboards.made import Writer
from tests.dashboards.test_source import profile_of, same


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of few parts, and no waiting."""
    for room, name, value in (
        (groups, "FEWEST", 4),
        (groups, "SIZE", 2),
        (kept, "SIZE", 2),
        (groups, "FANOUT", 2),
        (module, "_PAUSE", 0.0),
        (module, "READ_SECONDS", 600.0),
    ):
        monkeypatch.setattr(room, name, value)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that are read."""
    seen: list[str] = []
    fold_one = follower.fold_one

    def noting(place: int, part: Any, *rest: Any) -> Any:
        seen.append(part.path.name)
        return fold_one(place, part, *rest)

    monkeypatch.setattr(follower, "fold_one", noting)
    return seen


def recorded(path: Path, windows: int = 37) -> Writer:
    writer = Writer(path)
    for number in range(windows):
        writer.write("decode" if number % 2 else "prefill", "code" if number % 3 else None)
    return writer


def test_what_one_page_read_the_next_takes(tmp_path: Path, read: list[str]) -> None:
    writer = recorded(tmp_path / "r")
    same(profile_of(Source(writer.path)), routeprof.load(writer.path))
    assert len(read) == 37
    read.clear()
    source = Source(writer.path)
    profile = profile_of(source)
    assert read == [part_name("part", 36)]
    assert sum(len(span.parts) for span in source.spans()) == 37
    same(profile, routeprof.load(writer.path))
    for between in ((0.0, 37.0), (3.5, 20.0)):
        found = source.select(source.read(), None, None, between)
        assert found is not None
        wanted = routeprof.load(writer.path).select(between=profile.since_start(between))
        assert (found.counts == wanted.counts).all()
    writer.write()
    same(profile_of(source), routeprof.load(writer.path))


def test_a_copy_is_named_by_every_page(tmp_path: Path) -> None:
    writer = recorded(tmp_path / "r")
    routeprof.load(writer.path)
    rank = writer.path / "rank-00000"
    shutil.copy(rank / part_name("part", 5), rank / part_name("part", 20))
    for _ in range(2):
        profile = profile_of(Source(writer.path))
        assert profile.totals.unread == routeprof.load(writer.path).totals.unread
        assert len(profile.totals.unread) == 1
