"""Opening a recording: what is there, what is missing, and which parts can be read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.errors import NotARecordingError
from routeprof.recording import id_bytes
from routeprof.recording.dropped import Dropped
from routeprof.recording.layers import LayerSource, layer_places, union
from routeprof.recording.places import is_remote, listing, parquet_file, place, snapshot
from routeprof.recording.schema import (
    INFO_FILE,
    KINDS,
    OPTIONAL,
    RANK_FILE,
    SCHEMAS,
    RankState,
    RecordingInfo,
)
from routeprof.recording.seal import Seal, seal_of

RANKS_PER_RUN = 100_000
"""Rank r of the n-th of several runs has the number n · 100,000 + r; runs count from 0."""

_BY_FACTOR = frozenset({"overflow", "overflow_steps", "capacity_slots"})
"""Columns with one number for each capacity factor."""

_RANK = re.compile(r"^rank-(\d{5})$")
_PART = re.compile(r"^(" + "|".join(KINDS) + r")-(\d+)\.parquet$")
_COARSE = re.compile(r"^coarse-(\d+)-(\d+)\.parquet$")
"""A window part in place of those with these numbers, from the first to the last."""


@dataclass(frozen=True)
class Part:
    """One part file.

    Attributes:
        rank: number of its rank among all that were opened; see ``RANKS_PER_RUN``.
        origin: the recording's directory, where several were opened.
        factors: capacity factors of its recording, where those that were opened differ.
        stop: of a coarse part, which stands for all numbers from ``number`` on, the number after
            the last; 0 of others.
    """

    path: Path
    kind: str
    rank: int
    number: int
    origin: str = ""
    factors: tuple[float, ...] | None = None
    stop: int = 0

    @property
    def numbers(self) -> range:
        """Numbers of the parts that it is, or stands for."""
        return range(self.number, self.stop or self.number + 1)

    @property
    def label(self) -> str:
        """How messages name it."""
        name = f"{self.path.parent.name}/{self.path.name}"
        return f"{self.origin}/{name}" if self.origin else name


@dataclass(frozen=True)
class RankFiles:
    """One rank's directory.

    Attributes:
        rank: its number in its own run.
        state: None where ``rank.json`` is missing or damaged.
        directory: the recording that it is in.
        run: number of its run among those that were opened.
        origin: the directory again, where several were opened.
        passes: pass of each layer that it captures, by the layer's index.
        dropped: detail that ``routeprof compact`` has deleted.
    """

    rank: int
    state: RankState | None
    parts: tuple[Part, ...]
    directory: Path = Path()
    run: int = 0
    origin: str = ""
    passes: Mapping[int, str] = field(default_factory=dict)
    dropped: Dropped = field(default_factory=Dropped)

    @property
    def number(self) -> int:
        """Its number among all ranks that were opened, as in tables of steps and tokens."""
        return self.run * RANKS_PER_RUN + self.rank

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"rank {self.rank} of {self.origin}" if self.origin else f"rank {self.rank}"

    @property
    def owns_tokens(self) -> bool:
        """Whether what it counted belongs into sums."""
        return self.state is None or self.state.role.owns_tokens

    def missing(self) -> list[str]:
        """Names of parts that were written, are not there, and were not dropped on purpose."""
        lost = []
        for kind in KINDS:
            present = self.dropped.numbers(kind)
            for part in self.parts:
                if part.kind == kind:
                    present.update(part.numbers)
            written = max(present, default=-1) + 1
            if self.state is not None:
                written = max(written, self.state.parts.get(kind, 0))
            lost += [f"{kind}-{number:06d}" for number in range(written) if number not in present]
        return lost


@dataclass(frozen=True)
class RecordingFiles:
    """A recording, or several, on disk at one moment.

    Attributes:
        directory: the recording, the earliest of several.
        info: what is true for all of them; its layers are those of all ranks.
        remarks: one line for each way in which several recordings differ.
    """

    directory: Path
    info: RecordingInfo
    ranks: tuple[RankFiles, ...] = field(default_factory=tuple)
    remarks: tuple[str, ...] = ()

    @property
    def directories(self) -> tuple[Path, ...]:
        """All directories that ranks were found in."""
        return tuple(dict.fromkeys(rank.directory for rank in self.ranks)) or (self.directory,)

    @property
    def runs(self) -> int:
        """Number of runs that were opened."""
        return len({rank.run for rank in self.ranks}) or 1

    def parts(self, kind: str) -> list[Part]:
        """Parts of a kind from ranks that own the tokens they see, in a fixed order."""
        return [
            part
            for rank in self.ranks
            if rank.owns_tokens
            for part in rank.parts
            if part.kind == kind
        ]


def open_recording(path: str | Path) -> RecordingFiles:
    """List a recording's files.

    Raises:
        NotARecordingError: there is no recording at the path.
        NewerSchemaError: it was written by a newer routeprof.
        MismatchError: two of its ranks have different layers under the same index.
        UnreachableError: it cannot be listed.
    """
    directory = place(path)
    with listing(directory):
        return _listed(directory)


def _listed(directory: Path) -> RecordingFiles:
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
    found, said = [], LayerSource(INFO_FILE, info.layers, info.passes)
    sources = [said]
    for child in sorted(snapshot(directory).iterdir()):
        match = _RANK.match(child.name)
        if match and child.is_dir():
            rank = _rank(child, int(match.group(1)))
            own = rank.state and LayerSource(rank.name, rank.state.layers, rank.state.passes)
            source = own if own and own.layers else said
            sources += [source] * (source is not said)
            found.append(replace(rank, passes=source.by_index()))
    layers, passes = union(sources)
    return RecordingFiles(directory, replace(info, layers=layers, passes=passes), tuple(found))


def _rank(directory: Path, rank: int) -> RankFiles:
    found = _rank_now(directory, rank)
    # A listing takes time, in which parts may become one coarse part that it does not have.
    for _ in range(_LISTINGS):
        if is_remote(directory) or not found.missing():
            break
        again = _rank_now(directory, rank)
        if again.parts == found.parts:
            break
        found = again
    return found


_LISTINGS = 10
"""Of a directory that changes meanwhile, at most."""


def _rank_now(directory: Path, rank: int) -> RankFiles:
    dropped = Dropped.of(directory)
    parts = tuple(counting(all_parts(directory, rank), dropped))
    return RankFiles(rank, _state(directory), parts, directory.parent, dropped=dropped)


def _state(directory: Path) -> RankState | None:
    try:
        return RankState.from_json((directory / RANK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def all_parts(directory: Path, rank: int) -> list[Part]:
    """Every part file in a rank's directory, in no order."""
    found = []
    for path in directory.iterdir():
        if match := _PART.match(path.name):
            found.append(Part(path, match.group(1), rank, int(match.group(2))))
        elif match := _COARSE.match(path.name):
            first, last = int(match.group(1)), int(match.group(2))
            found.append(Part(path, "part", rank, first, stop=last + 1))
    return found


def counting(parts: Sequence[Part], dropped: Dropped) -> list[Part]:
    """Those that count, in their order: neither dropped nor inside the range of a coarse one."""
    gone = {kind: dropped.numbers(kind) for kind in KINDS}
    coarse = _apart([part for part in parts if part.stop])
    gone["part"].update(number for part in coarse for number in part.numbers)
    alone = [part for part in parts if not part.stop and part.number not in gone[part.kind]]
    return sorted([*alone, *coarse], key=lambda part: (part.kind, part.number))


def _apart(coarse: list[Part]) -> list[Part]:
    """Coarse parts without those inside a wider one.

    Nor those that overlap one half, which nobody writes: the rest of their numbers is missing.
    """
    kept: list[Part] = []
    for part in sorted(coarse, key=lambda part: (part.number, -part.stop)):
        if not kept or part.number >= kept[-1].stop:
            kept.append(part)
    return kept


def read_part(
    part: Part,
    info: RecordingInfo,
    columns: Collection[str] | None = None,
    groups: Sequence[int] | None = None,
) -> pa.Table | str:
    """The part as a table of its kind's schema, or one line that says why it cannot be read.

    Its rank is the part's number, and its lists by capacity factor are of ``info``'s factors.

    Args:
        columns: the columns to read besides the rank; all others are null. None for all.
        groups: numbers of the row groups to read, without the rest of the file; None for all.
    """
    whole, optional = SCHEMAS[part.kind], OPTIONAL.get(part.kind, frozenset())
    names = [name for name in whole.names if columns is None or name in {"rank", *columns}]
    try:
        sealed = Seal.ABSENT if is_remote(part.path) else seal_of(part.path, groups)
        if sealed is Seal.BROKEN:
            return f"{part.label} does not match its checksum"
        table = _read(part.path, names, groups, pages=sealed is not Seal.INTACT)
        missing = [name for name in names if name not in {*table.column_names, *optional}]
        if missing:
            return f"{part.label} lacks the columns {', '.join(missing)}"
        if "ids" in table.column_names:
            table = _with_packed_ids(table, info)
        schema = pa.schema([whole.field(name) for name in names if name in table.column_names])
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
        fault = _fault(table, part, info)
    except (pa.ArrowException, OSError, ValueError) as error:
        return unreadable(part, error)
    return f"{part.label} {fault}" if fault else _placed(table, part, info, whole)


def unreadable(part: Part, error: Exception) -> str:
    """One line for an error of a library that was to read a part."""
    reason = str(error).strip().splitlines()
    return f"{part.label} cannot be read: {reason[0] if reason else type(error).__name__}"


def _read(path: Path, names: list[str], groups: Sequence[int] | None, *, pages: bool) -> pa.Table:
    """Some columns, those that are there, of all or some row groups.

    Args:
        pages: whether to verify the checksums of pages.
    """
    with parquet_file(path, page_checksum_verification=pages) as file:
        return file.read(names) if groups is None else file.read_row_groups(list(groups), names)


def _with_packed_ids(table: pa.Table, info: RecordingInfo) -> pa.Table:
    """The table with its ids as bytes, where they are lists as in earlier versions."""
    place = table.column_names.index("ids")
    if not pa.types.is_list(table.schema.field(place).type) or "layer" not in table.column_names:
        return table
    known = {layer.index: layer.experts for layer in info.layers}
    experts = np.array([known.get(own, 2**16) for own in table["layer"].to_pylist()])
    return table.set_column(place, "ids", id_bytes.from_lists(column(table, "ids"), experts))


def _placed(table: pa.Table, part: Part, info: RecordingInfo, schema: pa.Schema) -> pa.Table:
    """The table with all columns of the schema, the part's number as rank, and info's factors."""
    columns = {
        due.name: table[due.name]
        if due.name in table.column_names
        else pa.nulls(table.num_rows, due.type)
        for due in schema
    }
    columns["rank"] = pa.array(np.full(table.num_rows, part.rank, dtype=np.int32))
    if part.factors is not None:
        places = [part.factors.index(factor) for factor in info.capacity_factors]
        for name in _BY_FACTOR.intersection(table.column_names):
            lists = table[name].to_pylist()
            chosen = [own and [own[place] for place in places] for own in lists]
            columns[name] = pa.array(chosen, type=schema.field(name).type)
    return pa.table(columns, schema=schema)


def _kind(kind: pa.DataType) -> str:
    """What may be cast: a rewritten part has other widths and no dictionaries. A flipped byte in
    the footer, which has no checksum, may make integers of floats."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    return "text" if text else "whole" if pa.types.is_integer(kind) else str(kind)


def _fault(table: pa.Table, part: Part, info: RecordingInfo) -> str:
    """What contradicts its place or what ``recording.json`` says; empty if nothing does."""
    ranks = set(column(table, "rank").unique().to_pylist()) - {part.rank % RANKS_PER_RUN}
    if ranks:
        return f"is of rank {', '.join(map(str, ranks))} and lies in another rank's directory"
    if "layer" not in table.column_names:
        return ""
    known = [layer.index for layer in info.layers]
    own = column(table, "layer")
    unknown = set(own.unique().to_pylist()) - set(known)
    if unknown:
        return f"has layers that {INFO_FILE} does not name: {', '.join(map(str, unknown))}"
    place = layer_places(own, info)
    experts = np.array([layer.experts for layer in info.layers], dtype=np.int64)[place]
    lengths = dict.fromkeys(("counts", "probability_mass", "weight_sum"), experts)
    factors = info.capacity_factors if part.factors is None else part.factors
    lengths |= dict.fromkeys(_BY_FACTOR, np.full(len(place), len(factors)))
    wrong = [name for name in lengths if name in table.column_names]
    wrong = [name for name in wrong if not _fits(column(table, name), lengths[name])]
    if "ids" in table.column_names:
        numbers = ids_of_rows(column(table, "tokens"), place, info)
        wrong += ["ids"] * (not id_bytes.fits(column(table, "ids"), numbers))
    return f"has lists of another length than {INFO_FILE} says: {', '.join(wrong)}" if wrong else ""


def ids_of_rows(
    tokens: pa.Array, place: NDArray[np.int64], info: RecordingInfo
) -> NDArray[np.int64]:
    """How many ids each row of a tokens part has, int64 [rows]: tokens · top_k.

    Args:
        place: int64 [rows], position of each row's layer in ``info.layers``.
    """
    top_k = np.array([layer.top_k or 0 for layer in info.layers], dtype=np.int64)
    return np.asarray(tokens.fill_null(0).to_numpy(zero_copy_only=False) * top_k[place])


def _fits(lists: pa.ListArray, lengths: NDArray[np.int64]) -> bool:
    """Whether every list that is there has its length."""
    fits = np.diff(lists.offsets.to_numpy()) == lengths
    if lists.null_count:
        fits |= lists.is_null().to_numpy(zero_copy_only=False)
    return bool(fits.all())


def column(table: pa.Table, name: str) -> Any:
    """One column as a single chunk."""
    chunks = table.column(name)
    if chunks.num_chunks == 1:
        return chunks.chunk(0)
    chunks = chunks.combine_chunks()  # which would copy a single one
    return chunks.chunk(0) if isinstance(chunks, pa.ChunkedArray) else chunks
