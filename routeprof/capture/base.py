"""Capture: what every way of following forward passes shares, and what the recorder asks of it."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.snapshot import HostCopy, Snapshot, StepNote
from routeprof.topology import PHASES

MAX_FAILURES = 3
"""So many failures of one hook take it out."""


@dataclass
class Failures:
    """What went wrong inside our own code while the engine ran."""

    count: int = 0
    first: str = ""
    by_layer: dict[int, int] = field(default_factory=dict)

    def add(self, position: int, error: BaseException) -> None:
        """Note a failure in the hook of the layer at ``position`` (-1: the step itself)."""
        self.count += 1
        self.first = self.first or f"{type(error).__name__}: {error}"
        self.by_layer[position] = self.by_layer.get(position, 0) + 1

    def out(self, position: int) -> bool:
        """Whether that hook failed too often to be run again."""
        return self.by_layer.get(position, 0) >= MAX_FAILURES


class Capture:
    """Counters of one group of layers, and the steps that were counted into them.

    A step runs on one thread, ``_thread`` while it does. Subclasses open and close steps; the
    recorder reads, from other threads, between two of them.

    Attributes:
        enabled: the switch, as the host sees it.
        base: first slot of the current tag.
        cost_ns: own time per layer, and of whole steps in the last entry.
        busy_ns: time between begin and end of the steps that were followed.
        aborted, missed: passes that failed, and passes that ran beside another one.
        missed_tokens: rows of the missed passes, padding included.
        unread_masks: passes with a mask that was not understood.
        step_log: notes of the newest steps since the last snapshot, when the recording keeps
            steps: no more than its ring has room for. ``noted`` counts all there ever were.
        facts: what else a reader should know, counted by name.
    """

    def __init__(self, counters: RoutingCounters) -> None:
        self.counters = counters
        self.layers = counters.layout.layers
        self.enabled = True
        self.base = 0
        self.cost_ns = [0] * (len(self.layers) + 1)
        self.busy_ns = 0
        self.failures = Failures()
        self.aborted = self.missed = self.missed_tokens = self.unread_masks = 0
        ring = counters.step_ring
        self.step_log: deque[StepNote] = deque(maxlen=None if ring is None else ring.capacity)
        self.noted = 0
        self.facts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread = self._began = 0
        self._pending = 0
        self._slot = -1
        self._host_expected = 0
        self._device_expected: Tensor | None = None
        self._wanted: threading.Event | None = None
        self._snapshot: HostCopy | None = None
        self._cuda = counters.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    # -- what subclasses say

    def _settle(self) -> None:
        """Close a step that only the next one would end; holds the lock."""

    def _abort(self) -> None:
        """Give the running step up: nothing of it is counted; holds the lock."""
        raise NotImplementedError

    # -- what subclasses use, under the lock

    def _follow_stream(self) -> None:
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.counters.device)

    def _note(self, when: float, requests: int) -> None:
        """Count a finished step, and remember what only the host knows of it."""
        if self.counters.step_ring is not None:
            self.step_log.append(StepNote(when, requests))
            self.noted += 1
        self._pending += 1

    def _release(self) -> None:
        """The step is over: the thread is free, and a waiting reader is served."""
        self._thread = 0
        if self._wanted is not None:
            self._snapshot = self._read()
            self._wanted.set()
            self._wanted = None

    def _fold(self) -> None:
        if not self._pending:
            return
        expected: Tensor | int = self._host_expected
        if self._device_expected is not None:
            expected = self._device_expected + expected
        self.counters.fold_pending(self._pending, self._slot, expected)
        self._pending = self._host_expected = 0
        self._device_expected = None

    # -- called by the recorder, from other threads

    def switch(self, on: bool) -> None:
        """Turn counting on or off; a running step is finished as it was begun."""
        with self._lock:
            self.enabled = on
            self.counters.on.fill_(int(on))
            if not self._thread:
                self.counters.step_on.fill_(int(on))

    def set_base(self, base: int) -> None:
        """Count the steps that begin from now on into the slots from ``base`` on."""
        with self._lock:
            self.base = base
            self.counters.base.fill_(base)

    def snapshot(self, timeout: float, *, force: bool = False) -> Snapshot | None:
        """Copy all sums to the host, between two steps.

        Args:
            timeout: seconds to wait for the running step to end.
            force: give a step up that runs on for longer, instead of returning None.
        """
        copied = self._copy(timeout, force)
        # Not under the lock: the engine must not wait for the device because we do.
        return None if copied is None else copied.wait()

    def _copy(self, timeout: float, force: bool) -> HostCopy | None:
        with self._lock:
            self._settle()
            if not self._thread:
                return self._read()
            own = self._thread == threading.get_ident()
            wanted = self._wanted = threading.Event()
        if not own:  # a thread that waits for its own step waits for ever
            wanted.wait(timeout)
        with self._lock:
            self._wanted = None
            copied, self._snapshot = self._snapshot, None
            if copied is None and force:
                if self._thread:
                    self._abort()
                copied = self._read()
            return copied

    def clear(self, base: int) -> None:
        """Empty the slots of a tag that is over, so that another tag can have them."""
        slots = slice(base, base + len(PHASES))
        counters = self.counters
        with self._lock:
            sums = [counters.totals, counters.imbalance_max, counters.expected]
            if counters.gate_totals is not None:
                sums.append(counters.gate_totals)
            with self._engine_stream():
                for tensor in sums:
                    tensor[slots].zero_()

    def _read(self) -> HostCopy:
        with self._engine_stream():
            self._fold()
            notes = tuple(self.step_log)
            self.step_log.clear()
            return HostCopy(self.counters, notes, self.noted, tuple(self.cost_ns))

    def _engine_stream(self) -> AbstractContextManager[Any]:
        """Queue device work behind the steps, on whatever thread this is."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
