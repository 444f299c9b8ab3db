"""Opening a recording: what is there, what is missing, and which parts can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeprof.errors import NotARecordingError
from routeprof.recording.schema import INFO_FILE, KINDS, RANK_FILE, RankState, RecordingInfo

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


def read_part(part: Part, schema: pa.Schema | None = None) -> pa.Table | str:
    """The part as a table, or one line that says why it cannot be read."""
    try:
        table = pq.ParquetFile(part.path, page_checksum_verification=True).read()
        if schema is not None:
            missing = [name for name in schema.names if name not in table.column_names]
            if missing:
                return f"{part.label} lacks the columns {', '.join(missing)}"
        return table
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()
        return f"{part.label} cannot be read: {reason[0] if reason else type(error).__name__}"


def column(table: pa.Table, name: str) -> Any:
    """One column as a single chunk."""
    chunks = table.column(name).combine_chunks()
    return chunks.chunk(0) if isinstance(chunks, pa.ChunkedArray) else chunks
