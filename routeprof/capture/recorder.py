"""Recorder: the drain thread that turns snapshots into windows on disk, and its public handle."""

from __future__ import annotations

import atexit
import os
import re
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any

from routeprof.capture import control
from routeprof.capture.base import Capture
from routeprof.capture.layout import Layout
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.snapshot import Snapshot, StepNote, fetch_steps, fetch_tokens
from routeprof.capture.threads import stay_single
from routeprof.capture.windows import row_columns, step_columns, token_columns, window_columns
from routeprof.errors import InvalidTagError
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    WINDOW_SCHEMA,
    RankState,
    RecordingInfo,
    token_schema,
)
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import PHASES, RankRole

RESERVED_TAGS = ("all", "untagged")
MAX_TAG_LENGTH = 200
PATIENCE_SECONDS = 10.0
"""How long a window waits for a forward pass that runs on."""

MAX_UNWRITTEN = 256
"""Windows of tags that are over, kept in memory while the disk takes none."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")


def check_tag(tag: str) -> str:
    """The tag itself, if it can be written to every format as it is.

    Raises:
        InvalidTagError: it is empty or too long, has control characters or line breaks, would
            be a formula in a spreadsheet, or means the sum in tables.
    """
    if not isinstance(tag, str) or not tag.strip():
        raise InvalidTagError("a tag must be text with at least one visible character")
    if len(tag) > MAX_TAG_LENGTH:
        raise InvalidTagError(f"a tag may have {MAX_TAG_LENGTH} characters, this one {len(tag)}")
    if _UNSAFE.search(tag):
        raise InvalidTagError(f"tag {tag!r} has control characters; remove them")
    if tag[0] in "=+-@":
        raise InvalidTagError(
            f"tag {tag!r} would be a formula in a spreadsheet; begin it with another character"
        )
    if tag in RESERVED_TAGS:
        raise InvalidTagError(f"tag {tag!r} is reserved for sums; choose another name")
    return tag


@dataclass
class _Stream:
    """One group of layers: its capture, and how far it has been written."""

    name: str
    capture: Capture
    written: Snapshot | None = None
    steps_read: int = 0
    notes: deque[StepNote] = field(default_factory=deque)
    noted: int = 0
    tokens_read: list[int] = field(default_factory=list)
    rows_read: int = 0

    @property
    def layout(self) -> Layout:
        return self.capture.counters.layout

    def note(self, snapshot: Snapshot) -> None:
        """Keep notes of the steps that are still in the ring; the last is of step noted - 1."""
        self.notes.extend(snapshot.steps)
        self.noted = snapshot.noted


class Recorder:
    """Writes what the captures counted, window by window, until it is closed.

    Args:
        directory: where the recording goes; must not hold anything.
        captures: for each pass name, the capture of its layers.
        info: what ``recording.json`` is to say.
        role: this process's part in a parallel group.
        paused: count nothing until it is switched on, nor while the hooks are being attached.
        own_layers: other ranks hold other layers (pipeline stages), so that this one has to say
            which it has.
    """

    def __init__(
        self,
        directory: Path,
        captures: Mapping[str, Capture],
        info: RecordingInfo,
        role: RankRole | None = None,
        *,
        paused: bool = False,
        own_layers: bool = False,
    ) -> None:
        self.info = info
        self.streams = [_Stream(name, capture) for name, capture in captures.items()]
        for stream in self.streams:
            stream.tokens_read = [0] * len(stream.layout.layers)
            stream.notes = deque(maxlen=stream.capture.step_log.maxlen)
        host, namespace = control.here()
        state = RankState(
            role=role or RankRole(),
            pid=os.getpid(),
            host=host,
            pid_namespace=namespace,
            started=time(),
            flush_seconds=info.window_seconds,
            layers=info.layers if own_layers else (),
            passes=info.passes if own_layers else (),
        )
        self.writer = RecordingWriter(directory, info, state)
        self.problems: dict[str, Any] = {}
        self._tags: dict[int, str | None] = {0: None}
        self._tag_stack: list[int] = [0]
        self._tag_lock = threading.RLock()
        self._collect_lock = threading.RLock()
        self._unwritten: list[dict[str, list[Any]]] = []
        self._window = 0
        self._window_start = time()
        self._listener = control.Listener(directory)
        self._state_lock = threading.RLock()
        self._stop = threading.Event()
        self._when_stopped: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._drain, name="routeprof-drain", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _recorders.add(self)
        if paused:
            self.switch(False)
        self._obey()  # a rank that comes late is to be as the others are
        threading.Thread(target=self._listen, name="routeprof-control", daemon=True).start()

    # -- tags

    @contextmanager
    def tag(self, tag: str) -> Iterator[None]:
        """Label the steps that begin inside the block."""
        check_tag(tag)
        if self._stop.is_set():
            yield
            return
        number = self._open_tag(tag)
        try:
            yield
        finally:
            self._close_tag(number)

    def _open_tag(self, tag: str) -> int:
        with self._tag_lock:
            known = [number for number, name in self._tags.items() if name == tag]
            number = known[0] if known else self._free_tag()
            self._tags[number] = tag
            self._tag_stack.append(number)
            self._use(number)
            return number

    def _close_tag(self, number: int) -> None:
        with self._tag_lock:
            # The newest of that tag; other threads may have opened others since.
            newest = len(self._tag_stack) - 1 - self._tag_stack[::-1].index(number)
            del self._tag_stack[newest]
            self._use(self._tag_stack[-1])

    def _free_tag(self) -> int:
        """A tag number nobody uses; the oldest idle one is written out and emptied for it."""
        limit = self.streams[0].layout.tags
        if len(self._tags) < limit:
            return len(self._tags)
        idle = [number for number in self._tags if number and number not in self._tag_stack]
        if not idle:
            raise InvalidTagError(
                f"more than {limit - 1} tags are open at once; close one before opening another"
            )
        number = idle[0]
        self._recycle(number)
        del self._tags[number]
        return number

    def _recycle(self, number: int) -> None:
        base = number * len(PHASES)
        with self._collect_lock:
            if not self._collect(final=False, patience=10.0, keep=True):
                raise InvalidTagError(
                    f"there is room for {len(self._tags) - 1} tags while a forward pass runs; "
                    "open another tag between passes"
                )
            for stream in self.streams:
                stream.capture.clear(base)
                if stream.written is not None:
                    stream.written = _without_slots(stream.written, base)

    def _use(self, number: int) -> None:
        for stream in self.streams:
            stream.capture.set_base(number * len(PHASES))

    # -- on and off

    def switch(self, on: bool, number: int = 0) -> None:
        """Count, or do not; a recording that was stopped stays so.

        Args:
            number: of the request that this obeys; 0 where it comes from within.
        """
        with self._state_lock:
            if self._stop.is_set():
                return
            for stream in self.streams:
                stream.capture.switch(on)
            state = "recording" if on else "paused"
            try:
                self.writer.write_state(state=state, control=self._number(number))
            except Exception as error:
                self._not_written(error)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have it called once nothing is counted any more, such as to remove the hooks."""
        with self._state_lock:
            if self._stop.is_set():
                callback()
            else:
                self._when_stopped.append(callback)

    def close(self, number: int = 0) -> None:
        """Count no more, remove the hooks, write what is left and end the threads.

        A second call waits for the first and does nothing.
        """
        with self._state_lock:
            if self._stop.is_set():
                return
            self._stop.set()
            try:
                self._finish(number)
            except Exception as error:  # whoever serves the model goes on, and is told
                warnings.warn(
                    f"the end of the recording {self.writer.directory} could not be written "
                    f"({error}); make room and record again",
                    RuntimeWarning,
                    stacklevel=3,
                )
            finally:
                atexit.unregister(self.close)

    def _finish(self, number: int) -> None:
        try:
            # Before the hooks go: a pass that runs on without them would never end.
            for stream in self.streams:
                stream.capture.switch(False)
            self._thread.join()
            with self._collect_lock:
                self._collect(final=True, patience=PATIENCE_SECONDS)
        finally:
            for callback in self._when_stopped:
                callback()
        changes = {"state": "stopped", "control": self._number(number)}
        self.writer.write_state(**changes, **self._report())

    def _number(self, number: int) -> int:
        return max(number, self.writer.state.control)

    def forget(self) -> None:
        """In a forked child: the parent records; threads and their locks did not come along."""
        self._stop, self._state_lock = threading.Event(), threading.RLock()
        self._stop.set()
        atexit.unregister(self.close)
        for stream in self.streams:
            stream.capture.enabled = False
            stream.capture._lock = threading.Lock()
        for callback in self._when_stopped:
            callback()

    # -- the control thread: the drain thread may be waiting for a pass, or for the disk

    def _listen(self) -> None:
        stay_single()
        while not self._stop.wait(control.POLL_SECONDS):
            self._obey()
            if time() - self.writer.state.updated > control.HEARTBEAT_SECONDS:
                with suppress(OSError):  # the drain thread meets it, too, and says so
                    self.writer.write_state()

    def _obey(self) -> None:
        """Do what another process asks for; whatever goes wrong is only noted."""
        try:
            request = self._listener.poll()
            if request is None:
                return
            if request.want == "stopped":
                self.close(request.number)
            else:
                self.switch(request.want == "recording", request.number)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if self.problems.get("last_control_failure") != message:
                self._add("control_failures", 1)
                self.problems["last_control_failure"] = message

    # -- the drain thread

    def _drain(self) -> None:
        stay_single()
        window = self.info.window_seconds
        while not self._stop.wait(window):
            try:
                with self._collect_lock:
                    self._collect(final=False, patience=min(window, PATIENCE_SECONDS))
            except Exception as error:  # the engine must not notice, the reader must
                self._not_written(error)

    def _not_written(self, error: Exception) -> None:
        self._add("write_failures", 1)
        self.problems["last_write_failure"] = f"{type(error).__name__}: {error}"

    def _collect(self, *, final: bool, patience: float, keep: bool = False) -> bool:
        """Write one window: what changed since the last one that was written.

        Args:
            final: give up steps that run on for longer than ``patience``.
            keep: what cannot be written now is kept in memory, instead of in the counters.

        Returns:
            Whether all counters could be read.
        """
        rows: dict[str, list[Any]] = {}
        taken: list[tuple[_Stream, Snapshot, bool]] = []
        for stream in self.streams:
            snapshot = stream.capture.snapshot(patience, force=final)
            if snapshot is None:
                self._add("late_windows", 1)
                continue
            stream.note(snapshot)
            columns = window_columns(stream.layout, stream.written, snapshot, self._tags)
            taken.append((stream, snapshot, bool(columns)))
            for name, values in columns.items():
                rows.setdefault(name, []).extend(values)
        self._write_windows(rows, time(), keep)
        for stream, snapshot, grown in taken:
            if grown:
                stream.written = snapshot
        try:
            for stream, snapshot, _ in taken:
                self._write_detail(stream, snapshot.time)
            self.writer.write_state(**self._report())
        except Exception as error:
            if not keep:
                raise
            self._not_written(error)
        return len(taken) == len(self.streams)

    def _write_windows(self, rows: dict[str, list[Any]], end: float, keep: bool) -> None:
        """Write what was kept, then the rows of the window that ends now."""
        if rows:
            count = len(rows["layer"])
            rows["window"] = [self._window] * count
            rows["start"], rows["end"] = [self._window_start] * count, [end] * count
            self._unwritten.append(rows)
        try:
            while self._unwritten:
                self._write("part", WINDOW_SCHEMA, self._unwritten[0])
                del self._unwritten[0]
        except Exception as error:
            if not keep:
                if rows:
                    self._unwritten.pop()
                raise
            self._not_written(error)
            if len(self._unwritten) > MAX_UNWRITTEN:
                del self._unwritten[0]
                self._add("lost_windows", 1)
        self._window += bool(rows)
        self._window_start = end

    def _write(self, kind: str, schema: Any, rows: dict[str, list[Any]]) -> None:
        rows["rank"] = [self.writer.state.role.rank] * len(next(iter(rows.values())))
        self.writer.write(kind, schema, rows)

    def _write_detail(self, stream: _Stream, when: float) -> None:
        counters = stream.capture.counters
        if counters.step_ring is not None:
            self._write_steps(stream, counters.step_ring, when)
        if counters.token_ring is not None:
            self._write_tokens(stream, counters.token_ring)

    def _write_steps(self, stream: _Stream, ring: StepRing, when: float) -> None:
        # Steps inside a compiled graph are not noted. Of the others, the newest may not be yet.
        noted = not int(stream.capture.counters.folds[0])
        detail = fetch_steps(ring, stream.steps_read, stream.noted if noted else None)
        rows = step_columns(stream.layout, detail, self._tags)
        if rows:
            first = stream.noted - len(stream.notes)
            notes = [
                stream.notes[step - first] if noted else StepNote(when, 0) for step in rows["step"]
            ]
            rows["time"] = [note.time for note in notes]
            rows["requests"] = [note.requests or None for note in notes]
            self._write("steps", STEP_SCHEMA, rows)
        self._add("lost_step_rows", detail.lost)
        stream.steps_read = detail.first + len(detail.rows)

    def _write_tokens(self, stream: _Stream, ring: TokenRing) -> None:
        detail = fetch_tokens(ring, stream.tokens_read, stream.rows_read)
        rows = token_columns(stream.layout, detail)
        if rows["step"]:
            self._write("tokens", token_schema(stream.layout.experts), rows)
        self._add("lost_token_rows", sum(detail.lost))
        fetched = zip(stream.tokens_read, detail.ids, detail.lost, strict=True)
        stream.tokens_read = [start + len(ids) + lost for start, ids, lost in fetched]
        passes = row_columns(detail)
        if passes["step"]:
            passes["pass"] = [stream.name] * len(passes["step"])
            self._write("rows", ROW_SCHEMA, passes)
        stream.rows_read += len(detail.row_step) + detail.rows_lost

    def _add(self, problem: str, count: int) -> None:
        if count:
            self.problems[problem] = self.problems.get(problem, 0) + count

    def _report(self) -> dict[str, Any]:
        """Problems and own cost so far, for ``rank.json``."""
        problems = dict(self.problems)
        captures = [stream.capture for stream in self.streams]
        counted = {
            "aborted_passes": sum(capture.aborted for capture in captures),
            "missed_passes": sum(capture.missed for capture in captures),
            "missed_tokens": sum(capture.missed_tokens for capture in captures),
            "unread_masks": sum(capture.unread_masks for capture in captures),
            "hook_failures": sum(capture.failures.count for capture in captures),
        }
        problems |= {name: count for name, count in counted.items() if count}
        for capture in captures:
            if capture.failures.first:
                problems.setdefault("first_hook_failure", capture.failures.first)
        cost = sum(sum(capture.cost_ns) for capture in captures) / 1e9
        busy = sum(capture.busy_ns for capture in captures) / 1e9
        facts = {name: count for capture in captures for name, count in capture.facts.items()}
        return {
            "problems": problems,
            "facts": facts,
            "cost_seconds": cost,
            "busy_seconds": busy,
        }


def _without_slots(snapshot: Snapshot, base: int) -> Snapshot:
    """The snapshot without the slots of one tag, which start again from zero."""
    keep = (snapshot.slots < base) | (snapshot.slots >= base + len(PHASES))
    return replace(
        snapshot,
        slots=snapshot.slots[keep],
        totals=snapshot.totals[keep],
        gate=None if snapshot.gate is None else snapshot.gate[keep],
        imbalance_max=snapshot.imbalance_max[keep],
        expected=snapshot.expected[keep],
    )


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _forget_all() -> None:
    for recorder in list(_recorders):
        recorder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class Recording:
    """A recording under way: what ``routeprof.record`` returns.

    Use it as a context manager, or call ``stop``. Leaving the block removes the hooks.
    """

    def __init__(
        self, recorder: Recorder, detach: Callable[[], None], messages: Sequence[str] = ()
    ) -> None:
        self._recorder = recorder
        recorder.on_stop(detach)
        self.messages = tuple(messages)
        """What the user should know about attaching, one line each."""

    @property
    def directory(self) -> Path:
        """Where the recording is written."""
        return self._recorder.writer.directory

    @property
    def info(self) -> RecordingInfo:
        """What is recorded: model, layers, level."""
        return self._recorder.info

    def tag(self, tag: str) -> Any:
        """Label the passes that begin inside a ``with recording.tag("code"):`` block.

        Raises:
            InvalidTagError: the tag cannot be written to every format as it is.
        """
        return self._recorder.tag(check_tag(tag))

    def pause(self) -> None:
        """Stop counting from the next pass on; the hooks stay."""
        self._recorder.switch(False)

    def start(self) -> None:
        """Count again from the next pass on."""
        self._recorder.switch(True)

    def stop(self) -> None:
        """Remove the hooks and write what is left. Calling it again does nothing."""
        self._recorder.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
