"""The watcher on a recording that grows, with nothing to wait for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from routeprof.dashboards.live.source import Source
from routeprof.dashboards.live.watcher import Watcher
from routeprof.diagnose import DEFAULTS
from routeprof.diagnose.news import News
from tests.dashboards.made import Writer


class Watched:
    """A watcher, what it told, and a clock."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.told: list[dict[str, object]] = []
        self.said: list[str] = []
        self.source = Source(path)
        self.watcher = Watcher(
            self.source,
            News(300, lambda: self.now),
            DEFAULTS,
            ("error", "warning"),
            None,
            300.0,
            lambda _, body: self.told.append(json.loads(body)),
            self.said.append,
        )

    def codes(self, more: bool = True) -> list[object]:
        """Codes that one look tells."""
        before, self.source._due = len(self.told), 0.0  # read anew
        assert self.watcher.look() == more
        return [one["code"] for one in self.told[before:]]


def test_it_tells_what_comes_up_once_and_ends_with_the_recording(tmp_path: Path):
    writer = Writer(tmp_path / "run")
    watched = Watched(writer.path)
    writer.write("decode", None, 64)
    first = watched.codes()
    assert {"silent-layers", "unsupported-layers"} <= set(first)
    assert watched.codes() == []
    writer.write("decode", None, 64)
    writer.writer.write_state(problems={"hook_failures": 2})
    assert watched.codes() == ["hook-failures"]
    assert watched.told[-1]["severity"] == "error"
    assert watched.told[-1]["recordings"] == [str(writer.path)]
    writer.stop()
    assert watched.codes(more=False) == []
    assert watched.said == []


def test_a_recording_that_cannot_be_read_is_said_once(tmp_path: Path):
    (tmp_path / "run").mkdir()
    watched = Watched(tmp_path / "run")
    assert watched.codes() == []
    assert watched.codes() == []
    assert len(watched.said) == 1
    assert "no recording" in watched.said[0]


def test_a_rule_that_breaks_does_not_end_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = Writer(tmp_path / "run")
    writer.write("decode", None, 64)
    watched = Watched(writer.path)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("of\na rule")

    with monkeypatch.context() as patch:
        patch.setattr("routeprof.dashboards.live.watcher.found_now", broken)
        assert watched.codes() == []
        assert watched.codes() == []
    assert watched.said == ["cannot judge the recording (ZeroDivisionError: of a rule)"]
    assert "silent-layers" in watched.codes()
