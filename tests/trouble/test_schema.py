"""Recordings of an older and of a newer routeprof, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import routeprof
from routeprof.errors import NewerSchemaError, NotARecordingError
from routeprof.recording.schema import SCHEMA_VERSION
from tests.recording.made import random_parts, write
from tests.trouble.conftest import documented

FIRST = "id layers passes model level gate window_seconds capacity_factors started schema".split()
"""What recording.json has said from the first version on."""

FIRST_OF_RANK = "role pid host state started updated parts problems".split()


@pytest.fixture
def directory(tmp_path) -> Path:
    write(tmp_path / "a", random_parts(8, parts=2))
    return tmp_path / "a"


def change(path: Path, changed) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))


def counts(directory: Path) -> list[list]:
    return routeprof.load(directory).counts.tolist()


def test_an_older_recording_is_read(directory):
    """Without what later versions added: fields, and checksums of parts."""
    before = counts(directory)
    for name, first in (("recording.json", FIRST), ("rank-00000/rank.json", FIRST_OF_RANK)):
        change(directory / name, lambda data, kept=first: {key: data[key] for key in kept})
    for part in directory.glob("rank-*/part-*.parquet"):
        pq.write_table(pq.read_table(part), part)
    assert counts(directory) == before
    profile = routeprof.load(directory)
    assert profile.totals.unread == ()


def test_a_newer_one_of_the_same_schema_is_read(directory):
    """With fields and columns that this routeprof does not know."""
    before = counts(directory)
    for name in ("recording.json", "rank-00000/rank.json"):
        change(directory / name, lambda data: data | {"news": {"deep": [1]}})
    for part in directory.glob("rank-*/part-*.parquet"):
        table = pq.read_table(part)
        news = pa.array(["news"] * len(table))
        pq.write_table(table.append_column("news", news), part)
    assert counts(directory) == before
    assert routeprof.load(directory).totals.unread == ()


def test_a_newer_schema_is_refused_in_one_line(directory):
    newer = {"schema": SCHEMA_VERSION + 1}
    change(directory / "recording.json", lambda data: data | newer)
    with pytest.raises(NewerSchemaError) as refused:
        routeprof.load(directory)
    assert documented(str(refused.value), DIR=directory)


TEXTS = "id level capacity_rule routeprof run source".split()


@pytest.mark.parametrize("field", [*TEXTS, "gate", "batches", "started", "window_seconds"])
def test_a_damaged_field_is_one_line(directory, field):
    for wrong in (None, [3], {"a": 1}, *(["x"] if field not in TEXTS or field == "level" else [7])):
        change(directory / "recording.json", lambda data, new=wrong: data | {field: new})
        with pytest.raises(NotARecordingError) as refused:
            routeprof.load(directory)
        assert documented(str(refused.value), DIR=directory, REASON=f"{field} is {wrong!r}")


@pytest.mark.parametrize("field", "parts facts problems pid control state updated".split())
def test_a_damaged_rank_is_read_without_its_state(directory, field):
    before = counts(directory)
    for wrong in (None, [3], {"part": "x"} if field == "parts" else "x"):
        if (field, wrong) == ("state", "x"):
            continue
        change(directory / "rank-00000/rank.json", lambda data, new=wrong: data | {field: new})
        profile = routeprof.load(directory)
        assert profile.files.ranks[0].state is None
        assert profile.counts.tolist() == before
        profile.ranks()
        (finding,) = [one for one in profile.findings() if one.code == "damaged-rank"]
        assert documented(finding.evidence)


def test_a_damaged_part_is_left_out_and_named(directory):
    part = directory / "rank-00000/part-000001.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    profile = routeprof.load(directory)
    write(directory.with_name("first"), random_parts(8, parts=2)[:1])
    assert profile.counts.tolist() == counts(directory.with_name("first"))
    (finding,) = [one for one in profile.findings() if one.code == "damaged-part"]
    assert documented(finding.evidence)
