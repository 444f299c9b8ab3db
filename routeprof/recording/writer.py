"""RecordingWriter: part files under a temporary name, renamed when they are whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeprof.errors import NotWritableError, RecordingExistsError
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
        NotWritableError: nothing can be written there.
    """

    def __init__(self, directory: Path, info: RecordingInfo, state: RankState) -> None:
        self.directory, self.info, self.state = directory, info, state
        self.rank = directory / rank_directory(state.role.rank)
        self._lock = threading.Lock()
        try:
            _claim(directory, self.rank, info, state.role.world_size)
            self.write_state()
        except OSError as error:
            _take_back(directory, self.rank, alone=state.role.world_size == 1)
            raise NotWritableError(
                f"{directory} cannot be written ({reason(error)}); make room, make it writable or "
                "choose another directory"
            ) from error

    def write(self, kind: str, schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the next part of a kind; returns once it is whole on disk.

        Args:
            columns: one sequence for each field of the schema, all of the same length.
        """
        number = self.state.parts.get(kind, 0)
        table = pa.table(
            [pa.array(columns[field.name], type=field.type) for field in schema], schema=schema
        )
        with _becoming(self.rank / part_name(kind, number)) as temporary:
            write_sealed(temporary, in_groups(table) if kind == "tokens" else [table])
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


def write_sealed(path: Path, groups: Sequence[pa.Table]) -> None:
    """Write a part of these row groups, with its checksums.

    Raises:
        OSError: it cannot be written.
    """
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
    seal(path)


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
            f"{rank} exists: this rank is recorded there, or was before it was started again; "
            "choose another directory"
        ) from None
    _write_first(directory / INFO_FILE, info.to_json())


def reason(error: Exception) -> str:
    """What went wrong, without the name of a temporary file."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else f"{type(error).__name__}: {error}"


def _take_back(directory: Path, rank: Path, *, alone: bool) -> None:
    """Remove what was begun, so that the same directory will do once it can be written."""
    with suppress(OSError):
        rank.rmdir()
        if alone:
            (directory / INFO_FILE).unlink(missing_ok=True)


def _write_first(path: Path, text: str) -> None:
    """Write a file that ranks race for: the first one's stays, and is whole when it appears."""
    temporary = _beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # no hard links here: ranks that come at the same moment replace it
            if not path.exists():
                temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it sees the old text or the new one."""
    with _becoming(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def _becoming(path: Path) -> Iterator[Path]:
    """A file to write, which then becomes the one at the path; if that fails, none is left."""
    temporary = _beside(path)
    try:
        yield temporary
        _rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _rename(temporary: Path, path: Path) -> None:
    """Rename a file that is there; over NFS it may be done and an answer lost."""
    try:
        temporary.replace(path)
    except FileNotFoundError:  # to the request that was sent again
        if not path.exists():
            raise


def _beside(path: Path) -> Path:
    """A name that no other process and no other thread uses."""
    return path.with_name(f"{path.name}.{os.getpid()}.{token_hex(4)}.tmp")
