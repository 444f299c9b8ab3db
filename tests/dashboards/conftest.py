from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import pytest

import routeprof
from routeprof.dashboards.live.source import Source
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from tests.dashboards.made import HOSTILE, LONG, Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """A recording that has just begun."""
    return Writer(tmp_path / "growing")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished recording with phases and tags, some of them hostile."""
    path = tmp_path_factory.mktemp("recordings") / "made-up"
    writer = Writer(path)
    for phase, tokens in (("prefill", 64), ("decode", 4)):
        for tag in (None, "code", HOSTILE, LONG):
            writer.write(phase, tag, tokens)
    writer.stop(problems={"missed_passes": 2})
    return path


@pytest.fixture(scope="session")
def context(recorded: Path) -> Callable[..., Context]:
    """Makes what a view draws from: ``context(phase="decode", layer=2)``."""

    source, whole = Source(recorded), routeprof.load(recorded)
    reading = source.read()

    def make(scheme: Any = "light", **state: Any) -> Context:
        chosen = ViewState(**state)
        between = None if chosen.between is None else whole.since_start(chosen.between)
        profile = whole.select(phase=chosen.phase, tag=chosen.tag, between=between)
        return Context(
            whole, profile, chosen, scheme, reading.activity, time(), spans=source.spans()
        )

    return make
