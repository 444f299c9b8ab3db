"""A source as a recording, written as it is read: memory is that of a window."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import routeprof
from routeprof.capture.layout import DEFAULT_CAPACITY_FACTORS
from routeprof.errors import UsageError
from routeprof.formats.source import Source, Step
from routeprof.formats.sums import stepped, summed
from routeprof.recording.id_bytes import packed
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    TOKEN_SCHEMA,
    WINDOW_SCHEMA,
    RankState,
    RecordingInfo,
)
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, RankRole

MOST_STEPS, MOST_IDS, MOST_COUNTS = 256, 1 << 20, 1 << 22
"""Steps, and ids and counts of experts in them, after which a window ends."""

WINDOW_SECONDS = 10.0
PASS = "model"


def write_recording(source: Source, directory: Path) -> Path:
    """Write what a reader found; returns the directory.

    Raises:
        RecordingExistsError: the directory holds something already.
        UsageError: the source has no steps, steps of no layer, or numbers that a recording has no
            room for.
    """
    try:
        return _written(source, directory)
    except (OverflowError, pa.ArrowInvalid):
        raise UsageError(
            f"the {source.tool} file has numbers too large to be true: pass another copy"
        ) from None


def _written(source: Source, directory: Path) -> Path:
    info = _info(source)
    writers: dict[int, _Rank] = {}
    for step in source.steps:
        if step.rank not in writers:
            role = source.roles.get(step.rank, RankRole(step.rank))
            writer = RecordingWriter(directory, info, RankState(role=role, state="recording"))
            writers[step.rank] = _Rank(source, info, writer)
        writers[step.rank].add(step)
    if not writers:
        raise UsageError(f"the {source.tool} file holds no steps: pass one with counts")
    for rank in writers.values():
        rank.close()
    return directory


def _info(source: Source) -> RecordingInfo:
    stepwise = source.level != "windows" and source.batches
    known = stepwise and all(layer.top_k is not None for layer in source.layers)
    return RecordingInfo(
        id=uuid.uuid4().hex,
        layers=source.layers,
        passes=(PASS,) * len(source.layers),
        model=source.model,
        level=source.level,
        gate=False,
        window_seconds=WINDOW_SECONDS,
        capacity_factors=DEFAULT_CAPACITY_FACTORS if known else (),
        routeprof=routeprof.__version__,
        source=source.tool,
        notes=source.notes,
        batches=source.batches,
    )


@dataclass
class _Rank:
    """Steps of a rank, until they are a window.

    Attributes:
        steps: of the window, and ``first`` the number of its first one in the recording.
    """

    source: Source
    info: RecordingInfo
    writer: RecordingWriter
    steps: list[Step] = field(default_factory=list)
    ids: int = 0
    counts: int = 0
    first: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        self.layers = {layer.index: layer for layer in self.info.layers}

    def add(self, step: Step) -> None:
        since = self.steps[0].time if self.steps else None
        late = since is not None and step.time is not None and step.time - since > WINDOW_SECONDS
        full = self.ids >= MOST_IDS or self.counts >= MOST_COUNTS
        if late or full or len(self.steps) >= MOST_STEPS:
            self.flush()
        self.steps.append(_counted(step, self.layers))
        self.ids += sum(ids.size for ids in step.ids.values())
        self.counts += sum(len(counts) for counts in self.steps[-1].counts.values())

    def flush(self) -> None:
        """Write the window."""
        rank = self.writer.state.role.rank
        rows = list(_window_rows(self.steps, self.layers, self.info))
        place = {"window": self.window, "rank": rank}
        _write(self.writer, "part", WINDOW_SCHEMA, [row | place for row in rows])
        if self.source.level != "windows":
            numbered = list(enumerate(self.steps, self.first))
            _write(self.writer, "steps", STEP_SCHEMA, list(_step_rows(numbered, self.layers)))
            if self.source.level == "tokens":
                _write(self.writer, "tokens", TOKEN_SCHEMA, list(_id_rows(numbered, self.layers)))
                _write(self.writer, "rows", ROW_SCHEMA, list(_request_rows(numbered)))
        self.first += len(self.steps)
        self.window += 1
        self.steps, self.ids, self.counts = [], 0, 0

    def close(self) -> None:
        """Write what is left; the recording is whole then."""
        self.flush()
        self.writer.write_state(state="stopped")


def _counted(step: Step, layers: Mapping[int, Layer]) -> Step:
    """The step with counts of its ids."""
    counts, invalid = dict(step.counts), dict(step.invalid)
    for index, ids in step.ids.items():
        real = ids[ids >= 0]
        counts[index] = np.bincount(real, minlength=layers[index].experts)
        invalid[index] = ids.size - real.size
    return replace(step, counts=counts, invalid=invalid)


def _write(
    writer: RecordingWriter, kind: str, schema: pa.Schema, rows: Sequence[dict[str, Any]]
) -> None:
    if rows:
        writer.write(kind, schema, {name: [row.get(name) for row in rows] for name in schema.names})


def _window_rows(
    steps: Sequence[Step], layers: Mapping[int, Layer], info: RecordingInfo
) -> Iterator[dict[str, Any]]:
    times = [step.time for step in steps if step.time is not None]
    span = {"start": min(times), "end": max(times)} if times else {}
    groups: dict[tuple[str, str | None, int], list[Step]] = {}
    for step in steps:
        for index in step.counts:
            groups.setdefault((step.phase, step.tag, index), []).append(step)
    for (phase, tag, index), own in groups.items():
        counts = np.stack([step.counts[index] for step in own]).astype(np.int64)
        tokens = None
        if layers[index].top_k is not None:
            tokens = np.array([_tokens(step, layers[index]) for step in own], dtype=np.int64)
        if info.level == "windows" or not info.batches:
            row = summed(counts, tokens)
        else:
            row = stepped(counts, tokens, layers[index], info.capacity_factors)
        row |= {"phase": phase, "tag": tag, "layer": index, **span}
        yield row | {"invalid": sum(step.invalid.get(index, 0) for step in own)}


def _tokens(step: Step, layer: Layer) -> int | None:
    """Rows of a layer in a step, as told or as top_k makes them of assignments."""
    if layer.top_k is None or step.tokens is not None:
        return None if layer.top_k is None else step.tokens
    if layer.index in step.ids:
        return len(step.ids[layer.index])
    made = int(step.counts[layer.index].sum()) + step.invalid.get(layer.index, 0)
    tokens, rest = divmod(made, layer.top_k)
    if rest:
        raise UsageError(
            f"layer {layer.index} has {made:,} assignments, which {layer.top_k} experts for each "
            "token do not make: pass the model's own --top-k, or none"
        )
    return tokens


def _step_rows(
    numbered: Sequence[tuple[int, Step]], layers: Mapping[int, Layer]
) -> Iterator[dict[str, Any]]:
    for number, step in numbered:
        facts = {"step": number, "rank": step.rank, "time": step.time, "phase": step.phase}
        for index, counts in step.counts.items():
            own = {"layer": index, "tag": step.tag, "invalid": step.invalid.get(index, 0)}
            yield facts | own | {"tokens": _tokens(step, layers[index]), "counts": counts}


def _id_rows(
    numbered: Sequence[tuple[int, Step]], layers: Mapping[int, Layer]
) -> Iterator[dict[str, Any]]:
    for number, step in numbered:
        for index, ids in step.ids.items():
            facts = {"step": number, "rank": step.rank, "layer": index, "phase": step.phase}
            own = packed(ids, layers[index].experts)
            yield facts | {"tokens": len(ids), "ids": own}


def _request_rows(numbered: Sequence[tuple[int, Step]]) -> Iterator[dict[str, Any]]:
    for number, step in numbered:
        if step.request is not None and step.position is not None:
            facts = {"step": number, "rank": step.rank, "pass": f"{PASS}@host"}
            yield facts | {"request": step.request, "position": step.position}
