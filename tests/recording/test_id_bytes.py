"""Ids as bytes: against Python's own whole numbers, and lists that an earlier version wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import routeprof
from routeprof.recording import id_bytes
from routeprof.recording.reader import open_recording
from routeprof.recording.recount import count_tokens
from tests.recording.id_lists import as_bytes, as_list

OLD = Path(__file__).parent / "token_lists"


@st.composite
def rows_of_ids(draw: st.DrawFn) -> tuple[int, list[list[int | None]]]:
    """A number of experts, and rows of ids of which None is none of them."""
    experts = draw(st.sampled_from([1, 8, 255, 256, 257, 512, 65535]))
    one = st.one_of(st.integers(0, experts - 1), st.none())
    rows = draw(st.lists(st.lists(one, max_size=6), min_size=1, max_size=8))
    return experts, [*rows, [experts - 1], [None]]


@given(rows_of_ids(), st.sampled_from([pa.binary(), pa.large_binary()]))
def test_ids_come_back(case, kind):
    experts, rows = case
    given_ids = [np.array([-1 if one is None else one for one in row], dtype=int) for row in rows]
    packs = [id_bytes.packed(row, experts) for row in given_ids]
    assert packs == [as_bytes(row, experts) for row in rows]
    assert rows == [as_list(*pair, experts) for pair in zip(packs, map(len, rows), strict=True)]
    numbers = np.array([len(row) for row in rows])
    column = pa.array(packs, type=kind)
    assert id_bytes.fits(column, numbers)
    found = id_bytes.unpacked(column, numbers, experts)
    assert found.tolist() == np.concatenate(given_ids).tolist()
    cut = column.slice(1)
    assert id_bytes.unpacked(cut, numbers[1:], experts).tolist() == (
        np.concatenate(given_ids[1:]).tolist()
    )
    lists = pa.array(rows, type=pa.list_(pa.uint16()))
    old = id_bytes.from_lists(lists, np.full(len(rows), experts))
    assert old.to_pylist() == packs


def test_ids_beyond_the_experts_are_outside():
    assert id_bytes.packed(np.array([7, 8, -5]), 8) == bytes([7, 255, 255])


@pytest.mark.parametrize("numbers", [[1, 1], [3, 1], [2, 3]])
def test_a_row_of_another_length_does_not_fit(numbers):
    column = pa.array([bytes(2), bytes(4)], type=pa.binary())
    assert id_bytes.fits(column, np.array([2, 2]))
    assert id_bytes.fits(column, np.array([1, 2]))
    assert id_bytes.fits(column, np.array(numbers)) is (numbers == [1, 4])


def test_lists_of_an_earlier_version_are_read():
    """A recording of 30 November; ids.json has what its layers were given."""
    truth = json.loads((OLD / "ids.json").read_text())
    profile = routeprof.load(OLD / "recording")
    counted = count_tokens(profile.files.parts("tokens"), profile.info)
    assert counted.unread == ()
    assert np.array_equal(counted.counts, profile.totals.lists["counts"].sum(0))
    for place, steps in truth.items():
        layer = profile.info.layers[int(place)]
        ids = np.concatenate([np.array(step) for step in steps])
        ids[(ids < 0) | (ids >= layer.experts)] = -1
        table = profile.tokens(layer.index)
        assert table.unread == ()
        assert table.ids.tolist() == ids.tolist()
        decode = np.concatenate([np.array(step) for step in steps[::2]])
        decode[(decode < 0) | (decode >= layer.experts)] = -1
        assert profile.select(phase="decode").tokens(layer.index).ids.tolist() == decode.tolist()


def test_the_earlier_recording_is_one_of_lists():
    (first, *_) = open_recording(OLD / "recording").parts("tokens")
    import pyarrow.parquet as pq

    assert pq.read_schema(first.path).field("ids").type == pa.list_(
        pa.field("element", pa.uint16())
    )
