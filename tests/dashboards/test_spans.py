from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.dashboards.live import source as module
from routeprof.dashboards.live import spans
from routeprof.dashboards.live.source import Source
from routeprof.profile import Profile
from tests.dashboards.made import Writer

PHASES, TAGS = ("prefill", "decode"), (None, "code")


def fill(path: Path, windows: int, ranks: int = 1) -> None:
    writers = [Writer(path, rank, world=ranks) for rank in range(ranks)]
    for number in range(windows):
        for writer in writers:
            writer.write(PHASES[number % 2], TAGS[number % 3 == 0], tokens=8 + number)


def same(one: Profile | None, other: Profile) -> None:
    """In every whole number; floats up to the order of their sum."""
    assert one is not None
    assert one.totals.keys == other.totals.keys
    for name, expected in (other.totals.sums | other.totals.lists).items():
        found = (one.totals.sums | one.totals.lists)[name]
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=1e-12)
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("live", [False, True])
def test_ranges_are_those_of_the_parts(
    tmp_path: Path, ranks: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST", 5)
    monkeypatch.setattr(spans, "FEWEST", 2)
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    monkeypatch.setattr(module, "READ_SECONDS", 60.0)
    path = tmp_path / "long"
    source = Source(path)
    if live:
        writers = [Writer(path, rank, world=ranks) for rank in range(ranks)]
        for number in range(40):
            for writer in writers:
                writer.write(PHASES[number % 2], TAGS[number % 3 == 0], tokens=8 + number)
            source.read()
            source._due = 0.0
    else:
        fill(path, 40, ranks)
    reading = source.read()
    whole = routeprof.load(path)
    assert len(source.spans()) <= 5
    assert sum(len(span.parts) for span in source.spans()) == 40 * ranks
    for between in ((0.0, 40.0), (0.0, 1.0), (7.0, 23.5), (12.0, 12.5), (39.5, 50.0)):
        expected = whole.select(between=whole.since_start(between))
        same(source.select(reading, None, None, between), expected)


def test_the_page_comes_before_everything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    path = tmp_path / "long"
    fill(path, 40)
    source = Source(path)
    first = source.read()
    assert first.message == "Still reading: the numbers are of 40% of 40 parts so far."
    assert first.profile is not None
    assert first.profile.totals.sums["steps"].max() < 40
    same(source.exact(), routeprof.load(path))
    while source.read().message:
        pass
    last = source.read()
    assert last.version > first.version
    same(last.profile, routeprof.load(path))


def test_a_range_without_windows_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "short"
    fill(path, 3)
    source = Source(path)
    empty = source.select(source.read(), None, None, (100.0, 200.0))
    assert empty is not None
    assert empty.captured == []
