"""Recorder: the drain thread that turns snapshots into windows on disk, and its public handle."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any

from routeprof.capture import clock, control
from routeprof.capture.base import Capture
from routeprof.capture.snapshot import Snapshot
from routeprof.capture.stream import Rows, Stream
from routeprof.capture.tags import check_tag
from routeprof.capture.threads import stay_single
from routeprof.errors import InvalidTagError
from routeprof.recording.schema import WINDOW_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter, reason
from routeprof.topology import PHASES, RankRole

PATIENCE_SECONDS = 10.0
"""How long a window waits for a forward pass that runs on."""

MAX_UNWRITTEN = 256
"""Windows of tags that are over, kept in memory while the disk takes none."""

_NOT_WRITTEN = (
    "routeprof: {} cannot be written ({}); counting goes on in memory: make room, or make it "
    "writable, before the program ends"
)


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
        self.streams = [Stream(name, capture) for name, capture in captures.items()]
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
        self._unwritten: list[Rows] = []
        self._window = 0
        self._window_start = clock.now()
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
                stream.forget(base)

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
                    f"({reason(error)}); make room or make it writable, and record again",
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
            # However the clock was set meanwhile.
            if abs(time() - self.writer.state.updated) > control.HEARTBEAT_SECONDS:
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
        """Count it, and say it once: where nothing can be written, ``rank.json`` cannot tell."""
        if "write_failures" not in self.problems:
            with suppress(Exception):  # there may be no stream to say it on
                line = _NOT_WRITTEN.format(self.writer.rank, reason(error))
                print(line, file=sys.stderr, flush=True)
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
        rows: Rows = {}
        taken: list[tuple[Stream, Snapshot, bool]] = []
        for stream in self.streams:
            snapshot = stream.capture.snapshot(patience, force=final)
            if snapshot is None:
                self._add("late_windows", 1)
                continue
            columns = stream.window(snapshot, self._tags)
            taken.append((stream, snapshot, bool(columns)))
            for name, values in columns.items():
                rows.setdefault(name, []).extend(values)
        # A window ends when its sums were taken, however long the writing of others took.
        end = max((snapshot.time for _, snapshot, _ in taken), default=self._window_start)
        self._write_windows(rows, end, keep)
        for stream, snapshot, grown in taken:
            if grown:
                stream.written = snapshot
        try:
            for stream, snapshot, _ in taken:
                lost = stream.write_detail(self._write, self._tags, snapshot.time)
                for problem, count in lost.items():
                    self._add(problem, count)
            self.writer.write_state(**self._report())
        except Exception as error:
            if not keep:
                raise
            self._not_written(error)
        return len(taken) == len(self.streams)

    def _write_windows(self, rows: Rows, end: float, keep: bool) -> None:
        """Write what was kept, then the rows of the window that ended then."""
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

    def _write(self, kind: str, schema: Any, rows: Rows) -> None:
        rows["rank"] = [self.writer.state.role.rank] * len(next(iter(rows.values())))
        self.writer.write(kind, schema, rows)

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
