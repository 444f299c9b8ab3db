"""A stream: one group of layers that run together, and how far it has been written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from routeprof.capture.base import Capture
from routeprof.capture.layout import Layout
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.snapshot import Snapshot, StepNote, fetch_steps, fetch_tokens
from routeprof.capture.windows import row_columns, step_columns, token_columns, window_columns
from routeprof.recording.schema import ROW_SCHEMA, STEP_SCHEMA, TOKEN_SCHEMA
from routeprof.topology import PHASES

Rows = dict[str, list[Any]]
Write = Callable[[str, Any, Rows], None]
"""Takes the kind of file, its schema and its columns."""

Tags = dict[int, str | None]
"""The name behind each tag number that is in use."""


@dataclass
class Stream:
    """One capture: what it counted, and what of that is on disk.

    What could not be written stays where it is and comes with the next window.

    Attributes:
        phases: of steps whose tokens are not on disk yet, by their number.
    """

    name: str
    capture: Capture
    written: Snapshot | None = None
    steps_read: int = 0
    notes: deque[StepNote] = field(init=False)
    noted: int = 0
    tokens_read: list[int] = field(init=False)
    rows_read: int = 0
    phases: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.notes = deque(maxlen=self.capture.step_log.maxlen)
        self.tokens_read = [0] * len(self.layout.layers)

    @property
    def layout(self) -> Layout:
        """Layers and experts of the counters."""
        return self.capture.counters.layout

    def window(self, snapshot: Snapshot, tags: Tags) -> Rows:
        """What changed since the last window that was written; nothing if nothing did."""
        # The notes are of the steps that are still in the ring; the last is of step noted - 1.
        self.notes.extend(snapshot.steps)
        self.noted = snapshot.noted
        return window_columns(self.layout, self.written, snapshot, tags)

    def forget(self, base: int) -> None:
        """Empty the slots of one tag, which begins again from zero."""
        self.capture.clear(base)
        if self.written is not None:
            self.written = _without_slots(self.written, base)

    def write_detail(self, write: Write, tags: Tags, when: float) -> dict[str, int]:
        """Write the steps and tokens that are new.

        Args:
            when: unix time, for steps that were not noted.

        Returns:
            How many rows were overwritten before they could be read, by kind of problem.
        """
        counters = self.capture.counters
        lost = {}
        if counters.step_ring is not None:
            lost["lost_step_rows"] = self._write_steps(counters.step_ring, write, tags, when)
        if counters.token_ring is not None:
            lost["lost_token_rows"] = self._write_tokens(counters.token_ring, write)
        return lost

    def _write_steps(self, ring: StepRing, write: Write, tags: Tags, when: float) -> int:
        # Steps inside a compiled graph are not noted. Of the others, the newest may not be yet.
        noted = not int(self.capture.counters.folds[0])
        detail = fetch_steps(ring, self.steps_read, self.noted if noted else None)
        rows = step_columns(self.layout, detail, tags)
        if rows:
            first = self.noted - len(self.notes)
            notes = [
                self.notes[step - first] if noted else StepNote(when, 0) for step in rows["step"]
            ]
            rows["time"] = [note.time for note in notes]
            rows["requests"] = [note.requests or None for note in notes]
            if self.capture.counters.token_ring is not None:
                self.phases |= zip(rows["step"], rows["phase"], strict=True)
            write("steps", STEP_SCHEMA, rows)
        self.steps_read = detail.first + len(detail.rows)
        return detail.lost

    def _write_tokens(self, ring: TokenRing, write: Write) -> int:
        detail = fetch_tokens(ring, self.tokens_read, self.rows_read)
        rows = token_columns(self.layout, detail, self.phases)
        if rows["step"]:
            write("tokens", TOKEN_SCHEMA, rows)
            last = max(rows["step"])
            self.phases = {step: name for step, name in self.phases.items() if step > last}
        fetched = zip(self.tokens_read, detail.ids, detail.lost, strict=True)
        self.tokens_read = [start + len(ids) + lost for start, ids, lost in fetched]
        passes = row_columns(detail)
        if passes["step"]:
            passes["pass"] = [self.name] * len(passes["step"])
            write("rows", ROW_SCHEMA, passes)
        self.rows_read += len(detail.row_step) + detail.rows_lost
        return sum(detail.lost)


def _without_slots(snapshot: Snapshot, base: int) -> Snapshot:
    keep = (snapshot.slots < base) | (snapshot.slots >= base + len(PHASES))
    return replace(
        snapshot,
        slots=snapshot.slots[keep],
        totals=snapshot.totals[keep],
        gate=None if snapshot.gate is None else snapshot.gate[keep],
        imbalance_max=snapshot.imbalance_max[keep],
        expected=snapshot.expected[keep],
    )
