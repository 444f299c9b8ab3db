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


@pytest.mark.parametrize("wrong", [None, 7, "x", [3], {"a": 1}])
@pytest.mark.parametrize(
    "field", "level id gate started window_seconds capacity_rule run source batches".split()
)
def test_a_damaged_field_is_one_line(directory, field, wrong):
    data = json.loads((directory / "recording.json").read_text())
    if isinstance(wrong, str | int) and isinstance(data[field], type(wrong) | float):
        wrong = [wrong] if field != "level" else wrong
    change(directory / "recording.json", lambda data: data | {field: wrong})
    with pytest.raises(NotARecordingError) as refused:
        routeprof.load(directory)
    assert documented(str(refused.value), DIR=directory, REASON=f"{field} is {wrong!r}")


@pytest.mark.parametrize("wrong", [None, 7, "x", [3]])
@pytest.mark.parametrize("field", "parts facts problems pid control state updated".split())
def test_a_damaged_rank_is_read_without_its_state(directory, field, wrong):
    before = counts(directory)
    data = json.loads((directory / "rank-00000/rank.json").read_text())
    if isinstance(wrong, type(data[field])) or (field == "updated" and wrong == 7):
        wrong = {"a": "x"}
    change(directory / "rank-00000/rank.json", lambda data: data | {field: wrong})
    profile = routeprof.load(directory)
    assert profile.files.ranks[0].state is None
    assert profile.counts.tolist() == before
    profile.ranks()
    assert "rank-unknown" in {finding.code for finding in profile.findings()}
