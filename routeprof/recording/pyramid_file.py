"""A file of the pyramid: a header in JSON, and arrays behind it, compressed, with a checksum."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.recording.batch import Batch
from routeprof.recording.exact import Exact
from routeprof.recording.fold_part import Ends
from routeprof.recording.totals import Totals, Windows, narrowed

MARK = b"routepyr"
_HEAD = struct.Struct("<8sI")
"""Mark, and the CRC-32 of all that follows."""

_LENGTHS = struct.Struct("<IQ")
"""Bytes of the header, and of the arrays before they were compressed."""

_CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True)
class Kept:
    """What a file holds.

    Attributes:
        ends: as in ``Batch``; known without unpacking the arrays.
    """

    ends: Ends
    _header: dict[str, Any]
    _packed: memoryview
    _size: int

    def batch(self, rank: int, first: int) -> Batch:
        """The sums; the timeline's whole numbers are in narrow types.

        Args:
            rank: its number among all that were opened.
            first: position of its first part.

        Raises:
            ValueError, KeyError, TypeError, ArrowException: the file is of another make.
        """
        arrays = dict(self._arrays())
        held = np.insert(arrays["held"].astype(np.int64), 1, rank, axis=1)
        held[:, 0] += first
        return Batch(_totals(self._header, arrays, rank), held, ends=self.ends)

    def _arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        raw = _CODEC.decompress(self._packed, self._size)
        start = 0
        for name, kind, shape in self._header["arrays"]:
            size = int(np.prod(shape))
            yield name, np.frombuffer(raw, kind, size, start).reshape(shape)
            start += size * np.dtype(kind).itemsize


def read(path: Path, identity: str) -> Kept | None:
    """What is kept of parts with this identity; None if nothing is, or it is damaged."""
    try:
        data = path.read_bytes()
        mark, checksum = _HEAD.unpack_from(data)
        rest = memoryview(data)[_HEAD.size :]
        if mark != MARK or crc32(rest) != checksum:
            return None
        length, size = _LENGTHS.unpack_from(rest)
        stop = _LENGTHS.size + length
        header = json.loads(bytes(rest[_LENGTHS.size : stop]))
        if header["identity"] != identity:
            return None
        return Kept(Ends(*header["ends"]), header, rest[stop:], size)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def write(path: Path, identity: str, batch: Batch, first: int) -> None:
    """Keep the sums of a group's parts.

    Args:
        batch: nothing was left out of it.
        first: position of its first part.

    Raises:
        OSError: it cannot be written.
    """
    header, raw = _packed(identity, batch, first)
    packed = _CODEC.compress(raw, asbytes=True)
    rest = _LENGTHS.pack(len(header), len(raw)) + header + packed
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_bytes(_HEAD.pack(MARK, crc32(rest)) + rest)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def touched(folder: Path) -> None:
    """Have a folder with the time that it is now, by the file system's clock.

    Raises:
        OSError: it cannot be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)


def _packed(identity: str, batch: Batch, first: int) -> tuple[bytes, bytes]:
    arrays = dict(_columns(batch, first))
    header = {
        "identity": identity,
        "ends": [batch.ends.first, batch.ends.last],
        "keys": batch.totals.keys,
        "arrays": [(name, values.dtype.str, values.shape) for name, values in arrays.items()],
    }
    raw = b"".join(values.tobytes() for values in arrays.values())
    return json.dumps(header).encode(), raw


def _columns(batch: Batch, first: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """All numbers, whole ones as narrow as they fit; the rank is that of the directory."""
    totals = batch.totals
    yield "held", narrowed(batch.held[:, (0, 2, 3)] - (first, 0, 0))
    yield "imbalance_max", totals.imbalance_max
    for kind, columns in (("sums", totals.sums), ("lists", totals.lists)):
        for name, values in columns.items():
            yield f"{kind}/{name}", narrowed(values)
    for name, exact in totals.exact.items():
        yield f"seen/{name}", exact.seen
        for place, digits in exact.digits.items():
            yield f"digits/{name}/{place}", narrowed(digits)
    for name, values in totals.windows.__getstate__().items():
        if name != "rank":
            yield f"windows/{name}", values


def _totals(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], rank: int) -> Totals:
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for name, values in arrays.items():
        kind, _, own = name.partition("/")
        found.setdefault(kind, {})[own] = values
    ranks = narrowed(np.array([rank]))
    windows = Windows(**found["windows"], rank=np.repeat(ranks, len(arrays["windows/key"])))
    exact = {name: Exact({}, seen.copy()) for name, seen in found["seen"].items()}
    for name, digits in found.get("digits", {}).items():
        column, _, place = name.partition("/")
        exact[column].digits[int(place)] = digits.astype(np.int64)
    whole = {
        kind: {name: values.astype(np.int64) for name, values in found[kind].items()}
        for kind in ("sums", "lists")
    }
    return Totals(
        tuple((phase, tag) for phase, tag in header["keys"]),
        whole["sums"],
        whole["lists"],
        arrays["imbalance_max"],
        windows,
        exact=exact,
    )
