"""compact as a user sees it."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

import routeprof
from routeprof.commands.quantities import bytes_text, parse_bytes, parse_seconds
from routeprof.errors import UsageError
from tests.commands.conftest import Cli
from tests.recording.made import random_parts, write


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """30 windows of a second, the last 20 of them two hours later."""
    parts = random_parts(3, parts=30)
    for rows in parts[10:]:
        for row in rows:
            row |= {"start": row["start"] + 7200, "end": row["end"] + 7200}
    write(tmp_path / "r", parts)
    return tmp_path / "r"


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_it_says_what_it_did_in_one_line(cli: Cli, made: Path):
    before, size = routeprof.load(made).counts, size_of(made)
    said = cli("compact", made, "--dry-run")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("would be 30 -> 21 parts, ")
    assert said.stdout.endswith("; nothing was changed, sizes are estimates\n")
    assert len(list(made.rglob("*.parquet"))) == 30
    done = cli("compact", made)
    assert (done.returncode, done.stderr) == (0, "")
    due = f"30 -> 21 parts, {bytes_text(size)} -> {bytes_text(size_of(made))}\n"
    assert done.stdout == due
    assert (routeprof.load(made).counts == before).all()
    assert cli("compact", made).stdout.startswith("21 -> 21 parts, ")


def test_detail_that_was_dropped_is_a_finding_and_a_gap(cli: Cli, recording: Path, tmp_path: Path):
    copy = shutil.copytree(recording, tmp_path / "copy")
    assert cli("fold", copy, "--level", "steps").returncode == 0
    done = cli("compact", copy, "--max-size", f"{size_of(copy) - 1}B")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("parts of detail deleted\n")
    folded = cli("fold", copy, "--level", "steps")
    assert folded.returncode == 0, folded.stderr  # not equal, and it says why
    assert "steps dropped before 2" in " ".join(folded.stdout.split())
    assert "steps dropped before 2" in " ".join(cli("summary", copy).stdout.split())
    assert cli("report", copy, "-o", "out").returncode == 0


def test_what_cannot_fit_is_said_in_one_line(cli: Cli, made: Path):
    done = cli("compact", made, "--max-size", "1KB")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "cannot be made to fit 1.0 KB: it takes " in line
    assert f"{size_of(made):,} bytes" in line
    assert len(list(made.rglob("*.parquet"))) == 1


def test_what_was_left_is_said(cli: Cli, made: Path):
    part = made / "rank-00000" / "part-000004.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    done = cli("compact", made)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("routeprof: rank-00000/part-000004.parquet cannot be read: ")
    assert part.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "yesterday"], "'yesterday' is not a duration, such as 30m, 24h or 7d"),
        (["--keep", "0h"], "'0h' is not a duration"),
        (["--keep", "-3h"], "'-3h' is not a duration"),
        (["--max-size", "10"], "'10' is not a size, such as 500MB or 10GB"),
        (["--max-size", "1e3GB"], "'1e3GB' is not a size"),
    ],
)
def test_what_cannot_be_right_is_one_line(cli: Cli, made: Path, words: list[str], said: str):
    done = cli("compact", made, *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"routeprof: {said}")
    assert len(list(made.rglob("*.parquet"))) == 30


def test_only_a_local_recording_can_be_compacted(cli: Cli, tmp_path: Path):
    for place, said in (("s3://bucket/r", "is no local directory"), ("none", "does not exist")):
        done = cli("compact", place)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert said in line


def test_a_second_one_says_that_another_is_at_work(cli: Cli, made: Path):
    with (made / "compact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cli("compact", made)
    assert done.returncode == 2
    assert done.stderr == (
        f"routeprof: another compact is at work in {made}; wait until it has ended\n"
    )
    assert len(list(made.rglob("*.parquet"))) == 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500MB", 500 * 10**6),
        ("10 gb", 10**10),
        ("1.5GiB", 3 * 2**29),
        ("7B", 7),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("1w", 604800)],
)
def test_durations(text: str, seconds: float):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "nan h", "1 hour", "9" * 400 + "h"])
def test_what_is_no_duration(text: str):
    with pytest.raises(UsageError, match="is not a duration"):
        parse_seconds(text)
