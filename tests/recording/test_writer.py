"""Who may write where."""

from __future__ import annotations

import errno
import json

import pyarrow.parquet as pq
import pytest

from routeprof.errors import RecordingExistsError
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, ModelInfo, RankRole
from tests.recording.made import info_of, random_parts, write, write_part


def writer(directory, rank=0, world_size=1) -> RecordingWriter:
    return RecordingWriter(directory, info_of(), RankState(RankRole(rank, world_size)))


def test_a_new_and_an_empty_directory(tmp_path):
    writer(tmp_path / "deep/new")
    (tmp_path / "empty").mkdir()
    writer(tmp_path / "empty")
    assert open_recording(tmp_path / "empty").ranks[0].rank == 0


def test_a_directory_that_holds_something(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordingExistsError, match="choose another"):
        writer(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file(tmp_path, world_size):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecordingExistsError, match="is a file"):
        writer(tmp_path / "file", 0, world_size)


def test_ranks_share_a_directory_and_each_has_one_writer(tmp_path):
    for rank in range(3):
        writer(tmp_path / "r", rank, 3)
    with pytest.raises(RecordingExistsError, match="rank-00001"):
        writer(tmp_path / "r", 1, 3)
    assert [rank.rank for rank in open_recording(tmp_path / "r").ranks] == [0, 1, 2]


def test_a_second_recording_in_the_same_place(tmp_path):
    writer(tmp_path / "r")
    with pytest.raises(RecordingExistsError):
        writer(tmp_path / "r")


def test_recording_json_comes_back_as_it_went(tmp_path):
    info = info_of(
        layers=(Layer(0, "a\n\"客户'", experts=3, top_k=1, drops=True, note="=1+1"),),
        passes=("x",),
        model=ModelInfo(
            "m", hidden_size=4, extra={"deep": [1, None]}, config={"model_type": "m", "x": [[0.5]]}
        ),
        level="tokens",
        gate=False,
        window_seconds=0.5,
        started=1e9 + 0.1,
    )
    assert RecordingInfo.from_json(info.to_json(), "here") == info


def test_a_recording_without_a_configuration_is_read_on():
    data = json.loads(info_of(model=ModelInfo("m")).to_json())
    del data["model"]["config"]
    assert RecordingInfo.from_json(json.dumps(data), "here").model == ModelInfo("m")


def test_rank_json_comes_back_as_it_went():
    state = RankState(RankRole(3, 8, tp=1, owns_tokens=False), parts={"part": 2}, cost_seconds=0.1)
    assert RankState.from_json(state.to_json()) == state


def test_a_part_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    recording = write(tmp_path / "r", [])
    rows = random_parts(1, parts=1)[0]

    def half(self, table, **options):
        self.file_handle.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetWriter, "write_table", half)
        with pytest.raises(OSError, match="No space"):
            write_part(recording, rows)
    assert recording.state.parts == {}
    assert [item.name for item in (tmp_path / "r/rank-00000").iterdir()] == ["rank.json"]
    write_part(recording, rows)
    assert recording.state.parts == {"part": 1}
    assert [part.number for part in open_recording(tmp_path / "r").parts("part")] == [0]
