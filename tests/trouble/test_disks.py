"""A disk that is full, and one that cannot be written, at the beginning and half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from routeprof.capture.recorder import Recording
from routeprof.commands import main
from routeprof.errors import NotWritableError
from tests.capture.recordings import flush, problems
from tests.recording.made import random_parts, write
from tests.trouble.conftest import documented, whole
from tests.trouble.engine import Engine, turn

FULL, READ_ONLY = "No space left on device", "Read-only file system"


def fill(disk: Path) -> Path:
    """Use up all that is free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
                    os.fsync(file.fileno())
    return filler


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_disk_that_is_full_at_the_beginning(tmpfs):
    filler = fill(tmpfs)
    with pytest.raises(NotWritableError) as refused:
        Engine(tmpfs / "runs/a")
    assert documented(str(refused.value), DIR=tmpfs / "runs/a", REASON=FULL)
    filler.unlink()
    engine = Engine(tmpfs / "runs/a")  # what was begun does not stand in the way
    engine.serve()
    whole(tmpfs / "runs/a", engine.said())


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up(kind, request, capsys):
    disk = request.getfixturevalue(kind)
    directory = disk / "runs/a"
    engine = Engine(directory)
    engine.serve()
    flush(engine.recorder)
    filler = fill(disk)
    for _ in range(3):
        engine.serve()
        assert not turn(engine.recorder)
    filler.unlink()
    engine.serve()
    said = engine.said()
    whole(directory, said)
    assert problems(directory)["write_failures"] == 3
    line, *more = capsys.readouterr().err.splitlines()
    assert documented(line, DIR=directory, REASON=FULL)
    assert more == []
    assert not list(directory.rglob("*.tmp"))


def test_a_file_system_that_becomes_read_only(tmpfs, capsys):
    directory = tmpfs / "runs/a"
    engine = Engine(directory)
    engine.serve()
    flush(engine.recorder)
    remount(tmpfs, "ro")
    engine.serve()
    assert not turn(engine.recorder)
    remount(tmpfs, "rw")
    engine.serve()
    whole(directory, engine.said())
    assert documented(capsys.readouterr().err, DIR=directory, REASON=READ_ONLY)


def test_a_file_system_that_stays_read_only(tmpfs):
    directory = tmpfs / "runs/a"
    engine = Engine(directory)
    engine.serve()
    flush(engine.recorder)
    written = engine.counted()
    remount(tmpfs, "ro")
    engine.serve()
    with pytest.warns(RuntimeWarning) as said:
        Recording(engine.recorder, lambda: None).stop()
    assert documented(str(said[0].message), DIR=directory, REASON=READ_ONLY)
    whole(directory, written)


def test_a_directory_that_may_not_be_changed(immutable):
    for directory in (immutable, immutable / "deep/new"):
        with pytest.raises(NotWritableError) as refused:
            Engine(directory)
        reason = "Operation not permitted"
        assert documented(str(refused.value), DIR=directory, REASON=reason)


def test_a_report_that_cannot_be_written_is_one_line(immutable, tmp_path, monkeypatch, capsys):
    write(tmp_path / "a", random_parts(5, parts=1))
    words = ["routeprof", "report", tmp_path / "a", "--csv-only", "-o", immutable / "out"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert documented(said, OUT=immutable / "out", REASON="Operation not permitted")
    assert said.count("\n") == 1


def test_a_directory_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotWritableError, match="Not a directory"):
        Engine(tmp_path / "file/a")
