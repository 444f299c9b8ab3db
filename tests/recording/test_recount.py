"""Counting again from steps and tokens, against windows made of the same random assignments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from routeprof.recording.fold import fold
from routeprof.recording.reader import RecordingFiles, open_recording
from routeprof.recording.recount import recounted
from routeprof.recording.schema import STEP_SCHEMA, TOKEN_SCHEMA, WINDOW_SCHEMA, RankState
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import RankRole
from tests.recording.id_lists import as_bytes
from tests.recording.made import LAYERS, info_of

INFO = info_of(level="tokens")
MOE = LAYERS[1:]


def tokens_of(random: np.random.Generator, rank: int) -> list[dict]:
    """What a rank's layers chose in some steps; None is an id outside the range."""
    found = []
    for step in range(12):
        for layer in MOE:
            tokens = int(random.integers(1, 9))
            ids = random.integers(-1, layer.experts, tokens * layer.top_k).tolist()
            row = {"step": step, "time": 101.0, "rank": rank, "layer": layer.index}
            row |= {"phase": "decode", "tag": None, "requests": 1, "tokens": tokens}
            counts = np.bincount([one for one in ids if one >= 0], minlength=layer.experts)
            known = [None if one < 0 else one for one in ids]
            row |= {"ids": as_bytes(known, layer.experts), "invalid": ids.count(-1)}
            found.append(row | {"counts": counts.tolist()})
    return found


def window_of(rows: list[dict], window: int, rank: int) -> list[dict]:
    """The rows' window: a row for each layer."""
    found = []
    for layer in MOE:
        own = [row for row in rows if row["layer"] == layer.index]
        row = dict.fromkeys(WINDOW_SCHEMA.names) | {"window": window, "rank": rank}
        row |= {"start": 100.0 + window, "end": 101.0 + window, "layer": layer.index}
        row |= {"phase": "decode", "steps": len(own), "calls": len(own)}
        row["tokens"] = sum(one["tokens"] for one in own)
        row["counts"] = np.sum([one["counts"] for one in own], axis=0).tolist()
        found.append(row)
    return found


@pytest.fixture
def recorded(tmp_path: Path):
    """Two ranks of three windows each with all of their detail, and the true counts."""
    random, counts = np.random.default_rng(4), {layer.index: 0 for layer in MOE}
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        writer = RecordingWriter(tmp_path / "r", INFO, RankState(role=role))
        for window in range(3):
            rows = tokens_of(random, rank)
            for row in rows:
                counts[row["layer"]] = counts[row["layer"]] + np.array(row["counts"])
            parts = {
                "part": (WINDOW_SCHEMA, window_of(rows, window, rank)),
                "steps": (STEP_SCHEMA, rows),
                "tokens": (TOKEN_SCHEMA, rows),
            }
            for kind, (schema, own) in parts.items():
                columns = {name: [row[name] for row in own] for name in schema.names}
                writer.write(kind, schema, columns)
        writer.write_state(state="stopped")
    return open_recording(tmp_path / "r"), counts


def counted(files: RecordingFiles, level: str, executor=None):
    totals = fold(files.parts("part"), files.info)
    return recounted(totals, files, level, executor)


@pytest.mark.parametrize("level", ["steps", "tokens"])
def test_a_whole_recording_agrees(recorded, level):
    files, counts = recorded
    found = counted(files, level)
    assert found["equal"] is True
    assert found["gaps"] == []
    assert found["layers"] == [
        {"layer": index, "assignments": total, "recounted": total, "difference": 0}
        for index, total in ((index, int(own.sum())) for index, own in counts.items())
    ]
    with ThreadPoolExecutor(2) as executor:
        assert counted(files, level, executor) == found


@pytest.mark.parametrize("level", ["steps", "tokens"])
def test_one_assignment_to_another_expert_is_seen(recorded, level):
    files, _ = recorded
    totals = fold(files.parts("part"), files.info)
    totals.lists["counts"][0, 2, :2] += (1, -1)
    found = recounted(totals, files, level, None)
    assert found["equal"] is False
    assert [layer["difference"] for layer in found["layers"]] == [0, 2]
    assert found["gaps"] == []


@pytest.mark.parametrize("level", ["steps", "tokens"])
def test_what_is_missing_is_said(recorded, level):
    files, _ = recorded
    lost = files.parts(level)[1].path
    lost.unlink()
    damaged = files.parts(level)[4].path
    damaged.write_bytes(damaged.read_bytes()[:-9])
    found = counted(open_recording(files.directory), level)
    assert found["equal"] is False
    assert f"rank 0 lacks {level}-000001" in found["gaps"]
    assert any(f"rank-00001/{level}-000001.parquet cannot be read" in s for s in found["gaps"])


def test_ranks_that_go_on_and_what_they_lost_are_said(recorded):
    files, _ = recorded
    for rank, changes in ((0, {"state": "recording"}), (1, {"problems": {"lost_token_rows": 7}})):
        state = files.ranks[rank].state
        for name, value in changes.items():
            setattr(state, name, value)
        (files.directory / f"rank-0000{rank}" / "rank.json").write_text(state.to_json())
    found = counted(open_recording(files.directory), "tokens")
    assert found["gaps"] == [
        "rank 0 was not stopped (state recording)",
        "rank 1: lost_token_rows 7",
    ]
