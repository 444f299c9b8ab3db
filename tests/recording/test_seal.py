"""One flipped bit anywhere in a part, also where Parquet has no checksum."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from routeprof.recording.reader import open_recording, read_part
from routeprof.recording.seal import MARK, Seal, seal_of
from tests.recording.made import info_of, random_parts, write

INFO = info_of()


@pytest.fixture
def own(tmp_path):
    write(tmp_path / "r", [random_parts(seed=3, parts=1, rows=2)[0]])
    (part,) = open_recording(tmp_path / "r").parts("part")
    return part


def test_every_bit_is_found_or_harmless(own):
    """Every bit of what has no checksum of Parquet's: headers of pages, and the foot."""
    whole, data = read_part(own, INFO), own.path.read_bytes()
    harmless = 0
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        own.path.write_bytes(flipped)
        if seal_of(own.path) is Seal.BROKEN:
            continue
        found = read_part(own, INFO)
        assert isinstance(found, str) or found.equals(whole), place
        harmless += not isinstance(found, str)
    assert harmless <= len(MARK)


def test_a_part_of_another_writer_has_none(own):
    """Older recordings, and parts that were written anew with pandas."""
    whole = read_part(own, INFO)
    pq.write_table(pq.read_table(own.path), own.path)
    assert seal_of(own.path) is Seal.ABSENT
    assert read_part(own, INFO).equals(whole)


def test_it_does_not_hide_the_numbers_from_others(own):
    assert MARK in own.path.read_bytes()
    table = pq.read_table(own.path)
    assert table.num_rows == pq.ParquetFile(own.path).metadata.num_rows
    whole = read_part(own, INFO)
    assert np.array_equal(table["steps"].to_numpy(), whole["steps"].to_numpy())
