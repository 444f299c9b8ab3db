"""Tokens of a layer, a phase or a request are read without the rest: which is damaged here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.recording import row_groups
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    TOKEN_SCHEMA,
    WINDOW_SCHEMA,
    RankState,
    RecordingInfo,
)
from routeprof.recording.seal import Seal, seal_of
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, RankRole

LAYERS = tuple(Layer(index, f"layers.{index}.mlp", "moe", 64, 4) for index in (2, 5, 9))
STEPS, PARTS = 8, 3
"""Steps of a part, by turns prefill and decode; parts of a rank."""


def write(writer: RecordingWriter, kind, schema, rows) -> None:
    writer.write(kind, schema, {name: [row.get(name) for row in rows] for name in schema.names})


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, dict]:
    """Two replicas, and the ids [tokens, 4] by rank, step and layer.

    In a prefill step a request of its own has 9,000 tokens, in a decode step it has 3,000.
    """
    random, truth = np.random.default_rng(8), {}
    info = RecordingInfo("made", LAYERS, ("model",) * 3, level="tokens", started=50.0)
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        writer = RecordingWriter(tmp_path / "r", info, RankState(role=role))
        for number in range(PARTS):
            steps, tokens, rows = [], [], []
            for step in range(number * STEPS, (number + 1) * STEPS):
                count = 3000 if step % 2 else 9000
                facts = {"step": step, "rank": rank, "phase": "decode" if step % 2 else "prefill"}
                requests, positions = np.full(count, step // 2), np.arange(count)
                rows.append(facts | {"pass": "model@cpu", "request": requests})
                rows[-1]["position"] = positions
                for layer in LAYERS:
                    ids = random.integers(0, 64, (count, 4))
                    truth[rank, step, layer.index] = ids
                    own = facts | {"layer": layer.index, "tokens": count}
                    tokens.append(own | {"ids": ids.astype(np.uint8).tobytes()})
                    counts = np.bincount(ids.ravel(), minlength=64)
                    steps.append(own | {"time": 100.5 + number, "invalid": 0, "counts": counts})
            windows = [
                dict.fromkeys(WINDOW_SCHEMA.names)
                | {"window": number, "start": 100.0 + number, "end": 101.0 + number, "rank": rank}
                | {"layer": row["layer"], "phase": row["phase"], "steps": 1, "calls": 1}
                | {"tokens": row["tokens"], "counts": row["counts"]}
                for row in steps
            ]
            write(writer, "part", WINDOW_SCHEMA, windows)
            write(writer, "steps", STEP_SCHEMA, steps)
            write(writer, "tokens", TOKEN_SCHEMA, tokens)
            write(writer, "rows", ROW_SCHEMA, rows)
        writer.write_state(state="stopped")
    return tmp_path / "r", truth


def damage(directory: Path, spared) -> int:
    """Flip a bit in the middle of every row group of tokens parts that is not spared.

    Args:
        spared: asked with the set of (rank, part, layer, phase) that a row group holds.
    """
    done = 0
    for path in sorted(directory.glob("rank-*/tokens-*.parquet")):
        metadata, data = pq.read_metadata(path), bytearray(path.read_bytes())
        starts = [metadata.row_group(n).column(0) for n in range(metadata.num_row_groups)]
        starts = [one.dictionary_page_offset or one.data_page_offset for one in starts]
        for number, start in enumerate(starts):
            group = pq.ParquetFile(path).read_row_group(number, columns=["layer", "phase"])
            place = int(path.parent.name[-5:]), int(path.stem[-6:])
            held = {(*place, row["layer"], row["phase"]) for row in group.to_pylist()}
            if not spared(held):
                last = metadata.row_group(number).column(5)
                middle = last.data_page_offset + last.total_compressed_size // 2
                assert middle > start
                data[middle] ^= 4
                done += 1
        path.write_bytes(data)
    return done


def same(found, expected) -> None:
    assert found.unread == ()
    assert np.array_equal(found.ids, np.concatenate(expected))


def test_a_row_group_is_of_one_layer_and_phase(recording):
    for path in recording[0].glob("rank-*/tokens-*.parquet"):
        file = pq.ParquetFile(path)
        held = [file.read_row_group(n).to_pylist() for n in range(file.num_row_groups)]
        kinds = [{(row["layer"], row["phase"]) for row in rows} for rows in held]
        if row_groups.LEAST <= 4 * 3000 * STEPS // 2:
            assert [len(own) for own in kinds] == [1] * 6
        steps = [[row["step"] for row in rows] for rows in held]
        assert all(own == sorted(own) for own in steps)


def test_small_layers_share_a_row_group(tmp_path):
    writer = RecordingWriter(tmp_path / "r", RecordingInfo("a", LAYERS, ("",) * 3), RankState())
    facts = {"step": 0, "rank": 0, "tokens": 1, "ids": b"abcd"}
    rows = [facts | {"layer": layer.index} for layer in LAYERS]
    write(writer, "tokens", TOKEN_SCHEMA, rows)
    (path,) = (tmp_path / "r").glob("rank-*/tokens-*.parquet")
    assert pq.read_metadata(path).num_row_groups == 1


def test_a_layer_is_read_without_the_others(recording):
    directory, truth = recording
    assert damage(directory, lambda held: any(layer == 5 for _, _, layer, _ in held))
    profile = routeprof.load(directory)
    same(profile.tokens(5), [ids for (_, _, layer), ids in sorted(truth.items()) if layer == 5])
    lines = profile.tokens(9).unread
    assert len(lines) == 2 * PARTS
    assert all(line.endswith("does not match its checksum") for line in lines)


def test_a_phase_is_read_without_the_other(recording):
    directory, truth = recording
    assert damage(directory, lambda held: any(phase == "decode" for *_, phase in held))
    profile = routeprof.load(directory).select(phase="decode")
    for layer in LAYERS:
        expected = [own for key, own in sorted(truth.items()) if key[2] == layer.index]
        same(profile.tokens(layer.index), expected[1::2])


def test_a_time_is_read_without_the_rest(recording):
    directory, truth = recording
    assert damage(directory, lambda held: any(number == 1 for _, number, *_ in held))
    profile = routeprof.load(directory).select(between=(101.0, 102.0))
    for layer in LAYERS:
        wanted = [
            own
            for (_, step, index), own in sorted(truth.items())
            if index == layer.index and step // STEPS == 1
        ]
        same(profile.tokens(layer.index), wanted)


def test_a_request_is_read_without_the_rest(recording):
    directory, truth = recording
    assert damage(directory, lambda held: any(own[:2] == (1, 2) for own in held))
    profile = routeprof.load(directory)
    table = profile.tokens(9, request="1/9")
    same(table, [truth[1, 18, 9], truth[1, 19, 9]])
    assert set(table.request.tolist()) == {9}
    assert set(table.rank.tolist()) == {1}
    decode = profile.select(phase="decode").tokens(9, request="1/9")
    same(decode, [truth[1, 19, 9]])
    assert len(profile.tokens(9, request="1/900").ids) == 0


@pytest.mark.parametrize("name", ["9", "7/9", "1/x", "", "1/9/3", "-1"])
def test_a_name_that_is_of_no_request(recording, name):
    with pytest.raises(UsageError, match=r"names no request: .* RANK/REQUEST"):
        routeprof.load(recording[0]).tokens(9, request=name)


def test_every_table_is_that_of_the_truth(recording):
    directory, truth = recording
    profile = routeprof.load(directory)
    for layer in LAYERS:
        same(
            profile.tokens(layer.index),
            [own for key, own in sorted(truth.items()) if key[2] == layer.index],
        )


def test_what_is_kept_has_a_limit(recording, monkeypatch):
    directory, truth = recording
    monkeypatch.setattr("routeprof.token_parts.KEPT", 1)
    profile = routeprof.load(directory)
    for _ in range(2):
        for layer in LAYERS:
            expected = [own for key, own in sorted(truth.items()) if key[2] == layer.index]
            same(profile.tokens(layer.index), expected)
    assert len(profile._token_parts._kept) == 1


# -- checksums of row groups


def test_every_byte_of_some_row_groups_is_found(recording):
    """Bits of the wanted row groups and of the foot are found; of the others they do not matter."""
    part = open_recording(recording[0]).parts("tokens")[0]
    data = part.path.read_bytes()
    metadata = pq.read_metadata(part.path)
    starts = [
        min(filter(None, (one.dictionary_page_offset, one.data_page_offset)))
        for one in (metadata.row_group(n).column(0) for n in range(metadata.num_row_groups))
    ]
    foot = len(data) - 8 - metadata.serialized_size
    ends = [*starts[1:], foot - 12 - 16 - 12 * len(starts)]
    record = range(foot - 12 - 16, foot - 12)
    wanted = (1, 3)
    inside = {n: range(starts[n], ends[n]) for n in range(len(starts))}
    random = np.random.default_rng(2)
    edges = [at for n in inside for at in (inside[n][0], inside[n][-1])]
    some_bytes = random.integers(4, len(data), 60).tolist()
    for place in [*some_bytes, *edges, *range(ends[-1], len(data), 5)]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        part.path.write_bytes(flipped)
        some, whole = seal_of(part.path, wanted), seal_of(part.path)
        owner = next((n for n, own in inside.items() if place in own), None)
        assert whole is not Seal.INTACT, place
        if owner is not None:
            assert some is (Seal.BROKEN if owner in wanted else Seal.INTACT), place
        elif place >= foot or place in record:
            assert some is not Seal.INTACT, place
    part.path.write_bytes(data)
    assert {seal_of(part.path, wanted), seal_of(part.path)} == {Seal.INTACT}
