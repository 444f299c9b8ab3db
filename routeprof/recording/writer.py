"""RecordingWriter: part files under a temporary name, renamed when they are whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeprof.errors import RecordingExistsError
from routeprof.recording.row_groups import BOUNDED, in_groups
from routeprof.recording.schema import (
    INFO_FILE,
    RANK_FILE,
    RankState,
    RecordingInfo,
    part_name,
    rank_directory,
)
from routeprof.recording.seal import seal


class RecordingWriter:
    """Writes one rank's part of a recording.

    Raises:
        RecordingExistsError: the directory holds something already.
    """

    def __init__(self, directory: Path, info: RecordingInfo, state: RankState) -> None:
        self.directory, self.info, self.state = directory, info, state
        self.rank = directory / rank_directory(state.role.rank)
        self._lock = threading.Lock()
        _claim(directory, self.rank, info, state.role.world_size)
        self.write_state()

    def write(self, kind: str, schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the next part of a kind; returns once it is whole on disk.

        Args:
            columns: one sequence for each field of the schema, all of the same length.
        """
        number = self.state.parts.get(kind, 0)
        table = pa.table(
            [pa.array(columns[field.name], type=field.type) for field in schema], schema=schema
        )
        target = self.rank / part_name(kind, number)
        temporary = target.with_suffix(".tmp")
        write_sealed(temporary, in_groups(table) if kind == "tokens" else [table])
        temporary.replace(target)
        with self._lock:  # another thread may be writing the state out
            self.state = replace(self.state, parts=self.state.parts | {kind: number + 1})

    def write_info(self, info: RecordingInfo) -> None:
        """Replace ``recording.json``."""
        self.info = info
        write_whole(self.directory / INFO_FILE, info.to_json())

    def write_state(self, **changes: Any) -> None:
        """Update ``rank.json``; the user's thread and the recorder's threads all do."""
        with self._lock:
            self.state = replace(self.state, updated=time(), **changes)
            write_whole(self.rank / RANK_FILE, self.state.to_json())


def write_sealed(temporary: Path, groups: Sequence[pa.Table]) -> None:
    """Write a part of these row groups under a temporary name, with its checksums.

    Raises:
        OSError: it cannot be written; what there was of it is gone.
    """
    try:
        _write(temporary, groups)
        seal(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, groups: Sequence[pa.Table]) -> None:
    """Write a Parquet file of these row groups."""
    schema = groups[0].schema
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        **_encodings(schema),
        write_statistics=list(BOUNDED) if "ids" in schema.names else False,
        write_page_checksum=True,
    ) as file:
        for group in groups:
            file.write_table(group)


_ASCENDING = ("request", "position")
"""Lists whose numbers mostly follow one another."""


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """How numbers are written so that they take their width in bits and not in words.

    Parquet knows no integers below 32 bits: a list of small numbers takes four bytes for each, of
    which zstd does not win back all. Counts have few values, which a dictionary numbers in as few
    bits as it takes; numbers that follow one another are written as differences; bytes, which the
    expert ids are, as they are, their lengths apart.
    """
    text = [field.name for field in schema if pa.types.is_dictionary(field.type)]
    whole = [field.name for field in schema if pa.types.is_integer(field.type)]
    lists = [
        field.name
        for field in schema
        if pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type)
    ]
    differences = [*whole, *(_numbers(name) for name in lists if name in _ASCENDING)]
    packed = [field.name for field in schema if pa.types.is_binary(field.type)]
    return {
        "use_dictionary": [*text, *(_numbers(name) for name in lists if name not in _ASCENDING)],
        "column_encoding": dict.fromkeys(differences, "DELTA_BINARY_PACKED")
        | dict.fromkeys(packed, "DELTA_LENGTH_BYTE_ARRAY"),
    }


def _numbers(name: str) -> str:
    """Parquet's path of the numbers in a list column."""
    return f"{name}.list.element"


def _claim(directory: Path, rank: Path, info: RecordingInfo, world_size: int) -> None:
    """Make the directories, and be the only one to have made this rank's."""
    if directory.exists() and not directory.is_dir():
        raise RecordingExistsError(f"{directory} is a file; choose a directory")
    if world_size == 1 and directory.exists() and any(directory.iterdir()):
        raise RecordingExistsError(
            f"{directory} is not empty; choose another directory or remove it first"
        )
    directory.mkdir(parents=True, exist_ok=True)
    try:
        rank.mkdir()
    except FileExistsError:
        raise RecordingExistsError(
            f"{rank} exists: another process records this rank; choose another directory"
        ) from None
    if not (directory / INFO_FILE).exists():
        write_whole(directory / INFO_FILE, info.to_json())


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it sees the old text or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
