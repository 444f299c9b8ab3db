"""Reading what is damaged, missing, foreign or hostile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import routeprof
from routeprof.errors import EmptyRecordingError, NewerSchemaError, NotARecordingError
from routeprof.recording.reader import open_recording, read_part
from routeprof.recording.schema import STEP_SCHEMA, TOKEN_SCHEMA, WINDOW_SCHEMA
from tests.recording.id_lists import as_bytes
from tests.recording.made import by_hand, info_of, random_parts, write, write_part

INFO = info_of()


@pytest.fixture
def rows():
    return random_parts(seed=3, parts=3, rows=8)


@pytest.fixture
def path(tmp_path, rows) -> Path:
    write(tmp_path / "r", rows)
    return tmp_path / "r"


def part(path: Path, number: int = 1, kind: str = "part") -> Path:
    return path / "rank-00000" / f"{kind}-{number:06d}.parquet"


def codes(profile) -> list[str]:
    return [finding.code for finding in profile.findings()]


def holds(profile, rows) -> None:
    """The profile is the sum of these rows."""
    expected = by_hand(rows)
    tokens = sum(value for (*_, name), value in expected.items() if name == "tokens")
    assert profile.totals.sums["tokens"].sum() == tokens
    assert profile.totals.lists["counts"].sum() == sum(
        sum(value.values()) for (*_, name), value in expected.items() if name == "counts"
    )


def test_a_whole_recording(path, rows):
    profile = routeprof.load(path)
    holds(profile, [row for one in rows for row in one])
    assert "damaged-part" not in codes(profile)


# -- damaged parts


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(np.random.default_rng(0).bytes(500))


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def without_column(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["counts"]), file)


def another_type(file: Path) -> None:
    table = pq.read_table(file)
    place = table.column_names.index("counts")
    pq.write_table(table.set_column(place, "counts", pa.array(["x"] * len(table))), file)


def unknown_layer(file: Path) -> None:
    replaced(file, "layer", lambda values: [99] * len(values))


def no_layer(file: Path) -> None:
    replaced(file, "layer", lambda values: [None] * len(values))


def too_many_experts(file: Path) -> None:
    replaced(file, "counts", lambda values: [[1] * 70] * len(values))


def too_few_factors(file: Path) -> None:
    replaced(file, "overflow", lambda values: [[1]] * len(values))


def replaced(file: Path, name: str, change) -> None:
    table = pq.read_table(file)
    place = table.column_names.index(name)
    values = pa.array(change(table[name].to_pylist()), type=WINDOW_SCHEMA.field(name).type)
    pq.write_table(table.set_column(place, name, values), file)


DAMAGE = [
    truncate,
    empty,
    garbage,
    a_directory,
    without_column,
    another_type,
    unknown_layer,
    no_layer,
    too_many_experts,
    too_few_factors,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_is_named_and_the_others_are_shown(path, rows, damage):
    damage(part(path))
    profile = routeprof.load(path)
    (line,) = profile.totals.unread
    assert line.startswith("rank-00000/part-000001.parquet ")
    assert "\n" not in line
    assert codes(profile).count("damaged-part") == 1
    holds(profile, rows[0] + rows[2])


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_but_damaged_parts(path, damage):
    for number in range(3):
        damage(part(path, number))
    with pytest.raises(EmptyRecordingError, match="restore it"):
        routeprof.load(path)


def test_any_flipped_byte_is_found_or_harmless(tmp_path, rows):
    """Never a traceback, and never other numbers: page checksums and the schema see to it."""
    write(tmp_path / "r", [rows[0][:2]])
    file = part(tmp_path / "r", 0)
    (own,) = open_recording(tmp_path / "r").parts("part")
    whole, data = read_part(own, INFO), file.read_bytes()
    unread, random = 0, np.random.default_rng(0)
    for place in range(0, len(data), 2):
        flipped = bytearray(data)
        flipped[place] ^= 1 << random.integers(8)
        file.write_bytes(flipped)
        found = read_part(own, INFO)
        unread += isinstance(found, str)
        assert isinstance(found, str) or found.equals(whole), place
    assert unread > len(data) / 4


def test_a_flipped_byte_in_the_counts_is_named(path, rows):
    file = part(path)
    column = next(
        column
        for number in range(pq.ParquetFile(file).metadata.num_columns)
        if (column := pq.ParquetFile(file).metadata.row_group(0).column(number)).path_in_schema
        == "counts.list.element"
    )
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 0x10
    file.write_bytes(data)
    profile = routeprof.load(path)
    assert len(profile.totals.unread) == 1
    holds(profile, rows[0] + rows[2])


# -- missing files


def test_a_missing_part_is_named(path, rows):
    part(path).unlink()
    profile = routeprof.load(path)
    holds(profile, rows[0] + rows[2])
    (finding,) = [one for one in profile.findings() if one.code == "missing-parts"]
    assert "part-000001" in finding.evidence


def test_a_missing_last_part_is_known_from_rank_json(path):
    part(path, 2).unlink()
    assert open_recording(path).ranks[0].missing() == ["part-000002"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"role": 3, "parts": {}, "problems": {}}',
        '{"role": {}, "parts": [], "problems": {}}',
        '{"role": {}, "parts": {}, "problems": 7}',
        b"\xff\xfe",
    ],
)
def test_a_missing_or_damaged_rank_json(path, rows, text):
    file = path / "rank-00000/rank.json"
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    profile = routeprof.load(path)
    holds(profile, [row for one in rows for row in one])
    assert "damaged-rank" in codes(profile)


def test_other_files_and_temporary_ones_are_left_alone(path, rows):
    (path / "rank-00000/part-000009.tmp").write_bytes(b"half")
    (path / "rank-00000/notes.txt").write_text("x")
    (path / "rank-x").mkdir()
    (path / "rank-00007").write_text("a file")
    profile = routeprof.load(path)
    holds(profile, [row for one in rows for row in one])
    assert len(profile.files.ranks) == 1


# -- recording.json


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "7",
        "null",
        "{}",
        '{"schema": "one"}',
        '{"schema": null}',
        '{"schema": 1e999}',
        '{"schema": 1}',
        '{"schema": 1, "layers": 3}',
        '{"schema": 1, "layers": [[]]}',
        '{"schema": 1, "layers": [], "passes": [], "model": {"unheard": 1}}',
        '{"schema": 1, "id": "r", "layers": [], "passes": [], "capacity_factors": [], '
        '"model": {"config": ["mixtral"]}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_recording_json(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    (path / "recording.json").write_bytes(data)
    with pytest.raises(NotARecordingError, match=r"recording\.json"):
        routeprof.load(path)


def test_a_newer_schema(path):
    file = path / "recording.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 2, "more": []}))
    with pytest.raises(NewerSchemaError, match="pip install --upgrade"):
        routeprof.load(path)


def test_paths_that_hold_no_recording(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "nothing"):
        with pytest.raises(NotARecordingError, match=name):
            routeprof.load(tmp_path / name)


def test_a_recording_without_any_rank_is_empty_and_says_so(tmp_path):
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "recording.json").write_text(INFO.to_json())
    profile = routeprof.load(directory)
    assert "nothing-captured" in codes(profile)
    assert profile.counts.shape == (0, 0)


# -- readable by others, and back


@pytest.mark.parametrize("name", ["start", "layer", "phase", "tag", "steps", "calls", "counts"])
def test_pandas_and_pyarrow_read_a_part_by_themselves(path, rows, name):
    expected = [row[name] for row in rows[1]]
    assert pq.read_table(part(path))[name].to_pylist() == expected
    frame = pd.read_parquet(part(path))
    found = [None if _missing(value) else value for value in frame[name]]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def _missing(value) -> bool:
    return value is None or (np.isscalar(value) and pd.isna(value))


def test_parts_that_others_rewrote(path, rows):
    """DuckDB and polars write plain strings and row groups of their own."""
    file = part(path)
    table = pq.read_table(file)
    for name in ("phase", "tag"):
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(pa.string()))
    pq.write_table(table, file, row_group_size=3)
    other = part(path, 2)
    pq.write_table(pq.read_table(other), other, row_group_size=2)
    profile = routeprof.load(path)
    assert profile.totals.unread == ()
    holds(profile, [row for one in rows for row in one])


# -- steps and tokens


def step_row(step: int, **changes) -> dict:
    row = {"step": step, "time": 100.5 + step, "rank": 0, "layer": 3, "phase": "decode"}
    row |= {"tag": None, "requests": 1, "tokens": 2, "invalid": 0}
    return row | {"counts": [4, 0, 0, 0, 0, 0, 0, 0]} | changes


def token_row(step: int, ids: list[int | None]) -> dict:
    row = {"step": step, "rank": 0, "layer": 3, "phase": "decode", "tokens": len(ids) // 2}
    return row | {"ids": as_bytes(ids, 8)}


def put(writer, kind, schema, rows) -> None:
    writer.write(kind, schema, {name: [row[name] for row in rows] for name in schema.names})


@pytest.fixture
def detailed(tmp_path, rows) -> Path:
    writer = write(tmp_path / "d", rows[:1], level="tokens")
    tags = (None, "code", "客户")
    for number in range(3):  # each part has a tag dictionary of its own
        put(writer, "steps", STEP_SCHEMA, [step_row(number, tag=tags[number])])
        put(writer, "tokens", TOKEN_SCHEMA, [token_row(number, [number, 1])])
    writer.write_state()
    return tmp_path / "d"


def test_tags_of_different_parts_are_read_together(detailed):
    table = routeprof.load(detailed).step_counts()
    assert table.tag.tolist() == [None, "code", "客户"]
    assert table.step.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["steps", "tokens"])
@pytest.mark.parametrize("damage", [truncate, garbage, empty])
def test_damaged_detail_is_named(detailed, kind, damage):
    damage(part(detailed, 1, kind))
    profile = routeprof.load(detailed)
    steps, tokens = profile.step_counts(), profile.tokens(3)
    assert steps.step.tolist() == ([0, 2] if kind == "steps" else [0, 1, 2])
    assert tokens.step.tolist() == ([0, 2] if kind == "tokens" else [0, 1, 2])
    (line,) = steps.unread + tokens.unread
    assert line.startswith(f"rank-00000/{kind}-000001.parquet ")


def test_detail_that_contradicts_recording_json_is_named(tmp_path, rows):
    writer = write(tmp_path / "d", rows[:1], level="tokens")
    put(writer, "steps", STEP_SCHEMA, [step_row(0)])
    put(writer, "steps", STEP_SCHEMA, [step_row(1, layer=99)])
    put(writer, "steps", STEP_SCHEMA, [step_row(2, counts=[1] * 9)])
    put(writer, "tokens", TOKEN_SCHEMA, [token_row(0, [1, 2])])
    put(writer, "tokens", TOKEN_SCHEMA, [token_row(1, [1, 2, 3])])
    profile = routeprof.load(tmp_path / "d")
    assert len(profile.step_counts().unread) == 2
    assert len(profile.tokens(3).unread) == 1
    assert profile.steps()["step"].tolist() == [0]
    assert profile.tokens(3).ids.tolist() == [[1, 2]]


def test_a_part_that_comes_later_is_seen_by_the_next_load(tmp_path, rows):
    writer = write(tmp_path / "r", rows[:1])
    first = routeprof.load(tmp_path / "r")
    write_part(writer, rows[1])
    holds(first, rows[0])
    holds(routeprof.load(tmp_path / "r"), rows[0] + rows[1])
