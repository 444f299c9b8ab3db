"""As many parts as hours of recording make. ``ROUTEPROF_PARTS=10000`` writes them all."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

import routeprof
from routeprof.dashboards.live.source import Source
from tests.recording.made import by_hand, random_row, write, write_part

PARTS = int(os.environ.get("ROUTEPROF_PARTS", "150"))
HANDLES = 100


@pytest.fixture
def few_handles():
    """A process that may open few files more than it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_thousands_of_parts(tmp_path, few_handles):
    random = np.random.default_rng(3)
    rows = [random_row(random, window) for window in range(PARTS)]
    writer = write(tmp_path / "a", [])
    for row in rows:
        write_part(writer, [row])
    writer.write_state(state="stopped")
    sums = by_hand(rows)
    truth = sum(sum(into.values()) for place, into in sums.items() if place[2] == "counts")

    profile = routeprof.load(tmp_path / "a")
    assert profile.totals.unread == ()
    assert int(profile.totals.lists["counts"].sum()) == truth
    ran = sum(1 for row in rows if row["calls"])
    assert len(profile.totals.windows.window) == ran

    source = Source(tmp_path / "a")
    while source.read() and source.behind:
        pass
    reading = source.read()
    assert reading.message == ""
    assert int(reading.profile.totals.lists["counts"].sum()) == truth
