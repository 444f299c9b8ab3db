from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import routeprof
from routeprof.dashboards.live import follower
from routeprof.dashboards.live import source as module
from routeprof.dashboards.live.activity import activity
from routeprof.dashboards.live.source import Reading, Source
from routeprof.profile import Profile
from routeprof.recording.reader import RankFiles
from routeprof.recording.schema import RankState
from routeprof.report.csv import available, csv_text
from tests.dashboards.made import Writer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)


def read(source: Source) -> Reading:
    source._due = 0.0
    return source.read()


def profile_of(source: Source) -> Profile:
    profile = read(source).profile
    assert profile is not None
    return profile


def same(one: Profile, other: Profile) -> None:
    for name in available(other):
        assert csv_text(one, name) == csv_text(other, name)


def test_incremental_equals_load(writer: Writer) -> None:
    source = Source(writer.path)
    for number in range(4):
        writer.write("decode" if number % 2 else "prefill", "code" if number > 1 else None)
        same(profile_of(source), routeprof.load(writer.path))


def test_several_ranks_and_twins(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    writers = [Writer(path, rank, world=2) for rank in range(2)]
    source = Source(path)
    for writer in (*writers, *reversed(writers)):
        writer.write()
        same(profile_of(source), routeprof.load(path))


def test_each_part_is_read_once(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fold_one = follower.fold_one

    def counting(place: int, part: Any, *rest: Any) -> Any:
        seen.append(part.label)
        return fold_one(place, part, *rest)

    monkeypatch.setattr(follower, "fold_one", counting)
    source = Source(writer.path)
    for _ in range(3):
        writer.write()
        read(source)
        read(source)
    assert len(seen) == len(set(seen)) == 3


def test_version_changes_with_what_is_shown(writer: Writer) -> None:
    source = Source(writer.path)
    versions = [read(source).version, read(source).version]
    writer.write()
    versions += [read(source).version, read(source).version]
    writer.stop()
    versions += [read(source).version]
    first = versions[0]
    assert versions == [first, first, first + 1, first + 1, first + 2]


@pytest.mark.parametrize("what", ["missing", "empty", "file", "other json", "newer", "wrong types"])
def test_what_is_no_recording_is_said_in_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "place"
    if what == "file":
        path.write_text("hello")
    elif what != "missing":
        path.mkdir()
    text = {
        "other json": '["no"]',
        "newer": '{"schema": 99}',
        "wrong types": '{"schema": 1, "id": 3, "layers": [3], "passes": 3, "model": {}}',
    }.get(what)
    if text:
        (path / "recording.json").write_text(text)
    reading = Source(path).read()
    assert reading.profile is None
    assert reading.message
    assert "\n" not in reading.message
    assert reading.activity.kind == "waiting"


def test_a_recording_may_appear_and_vanish(tmp_path: Path) -> None:
    source = Source(tmp_path / "later")
    assert read(source).profile is None
    writer = Writer(tmp_path / "later")
    assert read(source).message == ""
    writer.write()
    assert profile_of(source).captured
    shutil.rmtree(writer.path)
    reading = read(source)
    assert "does not exist" in reading.message
    assert reading.profile is not None


def test_another_recording_at_the_same_place_starts_anew(writer: Writer) -> None:
    writer.write()
    source = Source(writer.path)
    read(source)
    shutil.rmtree(writer.path)
    again = Writer(writer.path, id="another")
    again.write(tokens=8)
    same(profile_of(source), routeprof.load(writer.path))


def test_a_damaged_part_is_reported_and_tried_again_once_restored(writer: Writer) -> None:
    for _ in range(2):
        writer.write()
    part = writer.path / "rank-00000" / "part-000001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    source = Source(writer.path)
    profile = profile_of(source)
    assert [finding.code for finding in profile.findings()].count("damaged-part") == 1
    same(profile, routeprof.load(writer.path))
    part.write_bytes(whole)
    profile = profile_of(source)
    assert not profile.totals.unread
    same(profile, routeprof.load(writer.path))


def test_a_damaged_rank_file_is_no_obstacle(writer: Writer) -> None:
    writer.write()
    (writer.path / "rank-00000" / "rank.json").write_text("{")
    reading = Source(writer.path).read()
    assert reading.profile is not None
    assert reading.profile.captured
    assert reading.activity.kind == "waiting"


def test_unknown_trouble_is_a_line_too(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("boom\nboom")

    monkeypatch.setattr(module, "open_recordings", broken)
    message = Source(writer.path).read().message
    assert "boom boom" in message


def test_a_long_timeline_is_thinned_and_its_sums_are_not(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "TIMELINE_ROWS", 12)
    source = Source(writer.path)
    for _ in range(20):
        writer.write()
        profile_of(source)
    profile, whole = profile_of(source), routeprof.load(writer.path)
    windows = profile.totals.windows
    assert len(windows.window) <= 12
    assert windows.tokens.sum() == whole.totals.windows.tokens.sum()
    assert (windows.end - windows.start).max() >= 4
    assert csv_text(profile, "layers") == csv_text(whole, "layers")
    exact = source.exact(windows=True)
    assert csv_text(exact, "windows") == csv_text(whole, "windows")


def test_many_threads(writer: Writer) -> None:
    source, failures = Source(writer.path), []
    done = threading.Event()

    def follow() -> None:
        while not done.is_set():
            reading = source.read()
            if reading.profile is None or reading.message:
                failures.append(reading.message)

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        writer.write()
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    same(profile_of(source), routeprof.load(writer.path))


def rank(state: str = "recording", updated: float = 100.0) -> RankFiles:
    return RankFiles(0, RankState(state=state, updated=updated, flush_seconds=1.0), ())


@pytest.mark.parametrize(
    ("ranks", "tokens", "kind"),
    [
        ([], None, "waiting"),
        ([rank()], 99.0, "live"),
        ([rank()], 50.0, "idle"),
        ([rank()], None, "idle"),
        ([rank("paused")], 99.0, "paused"),
        ([rank(updated=50.0)], 50.0, "quiet"),
        ([rank("paused", updated=50.0)], 50.0, "quiet"),
        ([rank(), rank(updated=10.0)], 99.0, "quiet"),
        ([rank("stopped", updated=10.0), rank()], 99.0, "live"),
        ([rank("stopped", updated=10.0)], 9.0, "stopped"),
    ],
)
def test_activity(ranks: list[RankFiles], tokens: float | None, kind: str) -> None:
    found = activity(ranks, tokens, 100.0)
    assert found.kind == kind
    assert found.text.endswith(".")


def test_the_state_of_a_recording_is_read_from_its_ranks(writer: Writer) -> None:
    writer.write()
    source = Source(writer.path)
    assert read(source).activity.kind == "live"
    file = writer.path / "rank-00000" / "rank.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"updated": 1.0}))
    assert read(source).activity.kind == "quiet"
    writer.stop()
    assert read(source).activity.kind == "stopped"


def test_a_process_that_dies_changes_what_is_shown(writer: Writer) -> None:
    writer.write()
    source = Source(writer.path)
    before = read(source).version
    file = writer.path / "rank-00000" / "rank.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"updated": 1.0}))
    assert read(source).version == before + 1
