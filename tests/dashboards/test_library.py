from __future__ import annotations

from pathlib import Path

import pytest

from routeprof.dashboards.live import library as module
from routeprof.dashboards.live.library import Library
from tests.dashboards.made import Writer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Two recordings, one of them a level deeper, and what is none."""
    for number, name in enumerate(("monday", "week/tuesday")):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        Writer(tmp_path / "runs" / name, id=name, started=1000.0 + number).write()
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "secret").mkdir()
    Writer(tmp_path / "secret" / "own", id="own").write()
    return tmp_path / "runs"


def test_one_recording_is_just_opened(parent: Path) -> None:
    library = Library(parent / "monday")
    assert library.names() == ["monday"]
    assert not library.is_list
    assert library.open("").reading.profile is not None


def test_a_directory_of_recordings_is_a_list(parent: Path) -> None:
    library = Library(parent)
    assert library.names() == ["monday", "week/tuesday"]
    assert library.is_list
    assert library.open("").source is None
    assert [run.name for run in library.runs()] == ["week/tuesday", "monday"]
    opened = library.open("?run=week%2Ftuesday")
    assert opened.reading.profile is not None
    assert opened.reading.profile.info.id == "week/tuesday"


@pytest.mark.parametrize("name", ["../secret/own", "/etc", "week", "notes", "monday/rank-00000"])
def test_only_names_of_the_list_open_anything(parent: Path, name: str) -> None:
    opened = Library(parent).open(f"?run={name}")
    assert opened.source is None
    assert "There is no recording" in opened.reading.message


def test_new_recordings_turn_up_and_lost_ones_go(parent: Path) -> None:
    library = Library(parent)
    library.names()
    Writer(parent / "wednesday", id="wednesday")
    assert "wednesday" in library.names()


def test_several_are_their_sum_and_each_alone(parent: Path) -> None:
    library = Library(parent / "monday", parent / "week" / "tuesday")
    assert library.names() == ["monday + tuesday", "monday", "tuesday"]
    both = library.open("").reading.profile
    one = library.open("?run=monday").reading.profile
    assert both is not None
    assert one is not None
    assert both.totals.sums["steps"].sum() == 2 * one.totals.sums["steps"].sum()


def test_recordings_of_the_same_name_keep_apart(parent: Path, tmp_path: Path) -> None:
    Writer(tmp_path / "other" / "monday", id="another").write()
    library = Library(parent / "monday", tmp_path / "other" / "monday")
    assert library.names()[1:] == [str(parent / "monday"), str(tmp_path / "other" / "monday")]


def test_a_broken_recording_has_a_line_in_the_list(parent: Path) -> None:
    (parent / "monday" / "recording.json").write_text("{")
    runs = {run.name: run for run in Library(parent).runs()}
    assert runs["monday"].info is None
    assert "recording.json" in runs["monday"].problem


def test_memory_holds_few_recordings(tmp_path: Path) -> None:
    for number in range(8):
        Writer(tmp_path / f"run-{number}", id=str(number)).write()
    library = Library(tmp_path)
    for name in library.names():
        assert library.open(f"?run={name}").reading.profile is not None
    assert len(library._sources) == module.OPEN
