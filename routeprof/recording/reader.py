"""Opening a recording: what is there, what is missing, and which parts can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from routeprof.errors import NotARecordingError
from routeprof.recording.schema import (
    INFO_FILE,
    KINDS,
    RANK_FILE,
    SCHEMAS,
    RankState,
    RecordingInfo,
)

_RANK = re.compile(r"^rank-(\d+)$")
_PART = re.compile(r"^(" + "|".join(KINDS) + r")-(\d+)\.parquet$")


@dataclass(frozen=True)
class Part:
    """One part file."""

    path: Path
    kind: str
    rank: int
    number: int

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True)
class RankFiles:
    """One rank's directory; ``state`` is None where ``rank.json`` is missing or damaged."""

    rank: int
    state: RankState | None
    parts: tuple[Part, ...]

    def missing(self) -> list[str]:
        """Names of parts that were written and are not there."""
        lost = []
        for kind in KINDS:
            present = {part.number for part in self.parts if part.kind == kind}
            written = max(present, default=-1) + 1
            if self.state is not None:
                written = max(written, self.state.parts.get(kind, 0))
            lost += [f"{kind}-{number:06d}" for number in range(written) if number not in present]
        return lost


@dataclass(frozen=True)
class RecordingFiles:
    """A recording on disk at one moment."""

    directory: Path
    info: RecordingInfo
    ranks: tuple[RankFiles, ...] = field(default_factory=tuple)

    def parts(self, kind: str) -> list[Part]:
        """Parts of a kind from ranks that own the tokens they see, in a fixed order."""
        return [
            part
            for rank in self.ranks
            if rank.state is None or rank.state.role.owns_tokens
            for part in rank.parts
            if part.kind == kind
        ]


def open_recording(path: str | Path) -> RecordingFiles:
    """List a recording's files.

    Raises:
        NotARecordingError: there is no recording at the path.
        NewerSchemaError: it was written by a newer routeprof.
    """
    directory = Path(path)
    info_file = directory / INFO_FILE
    if not directory.exists():
        raise NotARecordingError(f"{directory} does not exist; name a recording's directory")
    if not info_file.is_file():
        raise NotARecordingError(
            f"{directory} has no {INFO_FILE}; name a directory that routeprof.record or "
            "routeprof run wrote"
        )
    try:
        text = info_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotARecordingError(f"{info_file} cannot be read ({error}); check it") from error
    info = RecordingInfo.from_json(text, str(info_file))
    return RecordingFiles(directory, info, tuple(_ranks(directory)))


def _ranks(directory: Path) -> list[RankFiles]:
    ranks = []
    for child in sorted(directory.iterdir()):
        match = _RANK.match(child.name)
        if match and child.is_dir():
            number = int(match.group(1))
            ranks.append(RankFiles(number, _state(child), tuple(_parts(child, number))))
    return ranks


def _state(directory: Path) -> RankState | None:
    try:
        return RankState.from_json((directory / RANK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _parts(directory: Path, rank: int) -> list[Part]:
    parts = []
    for path in directory.iterdir():
        match = _PART.match(path.name)
        if match:
            parts.append(Part(path, match.group(1), rank, int(match.group(2))))
    return sorted(parts, key=lambda part: (part.kind, part.number))


def read_part(part: Part, info: RecordingInfo) -> pa.Table | str:
    """The part as a table of its kind's schema, or one line that says why it cannot be read."""
    schema = SCHEMAS[part.kind]
    try:
        table = pq.ParquetFile(part.path, page_checksum_verification=True).read()
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            return f"{part.label} lacks the columns {', '.join(missing)}"
        table = table.select(schema.names)
        wrong = [
            own.name
            for own, due in zip(table.schema, schema, strict=True)
            if _kind(own.type) != _kind(due.type)
        ]
        if wrong:
            return f"{part.label} has columns of another type: {', '.join(wrong)}"
        table = table.cast(schema)
        table.validate(full=True)
        fault = _fault(table, info)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        fault = f"cannot be read: {reason[0] if reason else type(error).__name__}"
    return f"{part.label} {fault}" if fault else table


def _kind(kind: pa.DataType) -> str:
    """What may be cast: a rewritten part has other widths and no dictionaries. A flipped byte in
    the footer, which has no checksum, may make integers of floats."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    return "text" if text else "whole" if pa.types.is_integer(kind) else str(kind)


def _fault(table: pa.Table, info: RecordingInfo) -> str:
    """What contradicts ``recording.json``; empty if nothing does."""
    if "layer" not in table.column_names:
        return ""
    layers = {layer.index: layer for layer in info.layers}
    indices = column(table, "layer").to_pylist()
    unknown = set(indices) - layers.keys()
    if unknown:
        return f"has layers that {INFO_FILE} does not name: {', '.join(map(str, unknown))}"
    experts = np.array([layers[index].experts for index in indices], dtype=np.int64)
    lengths = dict.fromkeys(("counts", "probability_mass", "weight_sum"), experts)
    factors = np.full(len(indices), len(info.capacity_factors))
    lengths |= dict.fromkeys(("overflow", "overflow_steps", "capacity_slots"), factors)
    if "ids" in table.column_names:
        top_k = np.array([layers[index].top_k for index in indices], dtype=np.int64)
        lengths["ids"] = column(table, "tokens").fill_null(0).to_numpy() * top_k
    wrong = [name for name in lengths if name in table.column_names]
    wrong = [name for name in wrong if not _fits(column(table, name), lengths[name])]
    return f"has lists of another length than {INFO_FILE} says: {', '.join(wrong)}" if wrong else ""


def _fits(lists: pa.ListArray, lengths: NDArray[np.int64]) -> bool:
    """Whether every list that is there has its length."""
    valid = lists.is_valid().to_numpy(zero_copy_only=False)
    found = lists.value_lengths().fill_null(0).to_numpy()
    return bool((found == lengths)[valid].all())


def column(table: pa.Table, name: str) -> Any:
    """One column as a single chunk."""
    chunks = table.column(name).combine_chunks()
    return chunks.chunk(0) if isinstance(chunks, pa.ChunkedArray) else chunks
