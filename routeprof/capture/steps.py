"""StepCapture: follows one module's forward passes and hands its layers' routing to counters."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns, time
from typing import Any

import torch
from torch import Tensor

from routeprof.capture.counters import MAX_PENDING_STEPS, RoutingCounters
from routeprof.capture.snapshot import HostCopy, Snapshot, StepNote
from routeprof.capture.stash import STASH_ROWS
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


class StepCapture:
    """Steps of one group of layers.

    Hooks call ``begin``, then ``ids`` and ``logits`` for each layer, then ``end``; nothing here
    synchronises with the device. A step runs on one thread; passes that other threads run at the
    same time are not counted, and reported as missed.

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
        self.traced = False
        self._lock = threading.Lock()
        self._thread = self._began = 0
        self._missing: set[int] = set()
        self._implicit = False
        self._counted: set[int] = set()
        self._gated: set[int] = set()
        self._valid: Tensor | None = None
        self._rows = self._batch = 0
        self._block: slice | None = None
        self._pending = 0
        self._slot = -1
        self._host_expected = 0
        self._device_expected: Tensor | None = None
        self._direct = False
        self._token_mark: Tensor | None = None
        self._wanted: threading.Event | None = None
        self._snapshot: HostCopy | None = None
        self._cuda = counters.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    # -- called by hooks

    def begin(
        self,
        batch: int,
        length: int,
        phase: str,
        valid: Tensor | None,
        *,
        fresh: bool = False,
        rewound: int = 0,
    ) -> None:
        """Open a step.

        Args:
            batch, length: the pass sees batch · length rows, batch-major.
            phase: one of ``topology.PHASES``.
            valid: int64 [batch * length], 0 for padding rows; None where all are real.
            fresh: the rows begin new requests (level tokens).
            rewound: rows by which every sequence was cut back since its last step.
        """
        if torch.compiler.is_compiling():
            self._begin_traced(batch, length, phase, valid, fresh)
            return
        if self.traced:
            self.counters.step_on.copy_(self.counters.on)
        if not self.enabled:
            return
        start = perf_counter_ns()
        try:
            if not self._claim(batch * length, start):
                return
            self._open(batch, length, phase, valid, fresh, rewound)
        except Exception as error:
            self.failures.add(-1, error)
            self._thread = 0
        self.cost_ns[-1] += perf_counter_ns() - start

    def follow(self, device: torch.device) -> None:
        """Move the counters to where the model is now, unless they are there."""
        if device == self.counters.device or self._thread:
            return
        with self._lock:
            self._fold()
            self.counters.move(device)

    def _claim(self, rows: int, now: int) -> bool:
        """Make this thread the one whose pass is followed, unless another's is."""
        me = threading.get_ident()
        with self._lock:
            if self._implicit:
                self._close()
            elif self._thread == me:
                self._abort()
            elif self._thread:
                self.missed += 1
                self.missed_tokens += rows
                self._missing.add(me)
                return False
            self._missing.discard(me)
            self._thread, self._began = me, now
            return True

    def ids(self, position: int, ids: Tensor, weights: Tensor | None) -> None:
        """Note the experts that one layer call really runs; ids and weights [tokens, k]."""
        if torch.compiler.is_compiling():
            self._direct_ids(position, ids, weights, self._valid_for(ids))
            self.traced = True
            return
        if self._thread == threading.get_ident() and not self._implicit:
            self._take_ids(position, ids, weights)
            return
        with self._lock:
            if self._joins(position, ids.shape[0], self._counted):
                self._take_ids(position, ids, weights)

    def _take_ids(self, position: int, ids: Tensor, weights: Tensor | None) -> None:
        counters, block, step = self.counters, self._block, self._pending
        stash = counters.stash
        if (
            block is not None
            and ids.shape == (self._rows, self.layers[position].top_k)
            and not stash.called[step][position]
        ):
            stash.put_ids(step, position, ids, None if weights is None else weights.detach())
            if counters.token_ring is not None:
                counters.token_ring.write(position, ids, self._valid, counters.step_on)
            return
        self._direct_ids(position, ids, weights, self._valid_for(ids))
        self._direct = True

    def logits(self, position: int, logits: Tensor) -> None:
        """Note the router's output of one layer call, [tokens, experts]."""
        if torch.compiler.is_compiling():
            self.counters.add_gate(position, logits.detach(), self._valid_for(logits))
            return
        if self._thread == threading.get_ident() and not self._implicit:
            self._take_logits(position, logits.detach())
            return
        with self._lock:
            if self._joins(position, logits.shape[0], self._gated):
                self._take_logits(position, logits.detach())

    def _take_logits(self, position: int, logits: Tensor) -> None:
        counters, block, step = self.counters, self._block, self._pending
        if (
            block is not None
            and logits.shape[0] == self._rows
            and not counters.stash.gated[step][position]
        ):
            counters.stash.put_logits(step, position, logits)
            return
        counters.add_gate(position, logits, self._valid_for(logits))
        self._direct = True

    def end(self, *, failed: bool = False) -> None:
        """Close the step. A pass that failed was not served: nothing of it is counted."""
        if torch.compiler.is_compiling():
            self._end_traced()
            return
        if self._thread != threading.get_ident():
            self._missing.discard(threading.get_ident())
            return
        start = perf_counter_ns()
        self.busy_ns += start - self._began
        with self._lock:
            try:
                if failed:
                    self._abort()
                else:
                    self._close()
            except Exception as error:
                self.failures.add(-1, error)
                self._thread = 0
        self.cost_ns[-1] += perf_counter_ns() - start

    # -- inside a traced graph

    def _begin_traced(
        self, batch: int, length: int, phase: str, valid: Tensor | None, fresh: bool
    ) -> None:
        counters = self.counters
        counters.begin_traced(phase, batch * length, valid)
        self._valid = valid
        if counters.token_ring is not None:
            counters.token_ring.begin_step(batch, length, valid, fresh=fresh, on=counters.step_on)

    def _end_traced(self) -> None:
        self.counters.end_traced()
        if self.counters.token_ring is not None:
            self.counters.token_ring.end_step(self.counters.step_on)
        self._valid = None

    # -- steps that the host follows

    def _joins(self, position: int, rows: int, seen: set[int]) -> bool:
        """Whether a layer call outside its module's forward pass is counted; holds the lock.

        Such calls make steps of their own. A step ends where a layer comes again: ``seen`` are
        the layers whose ids, or logits, it holds. Calls of a pass that is missed stay missed.
        """
        me = threading.get_ident()
        if not self.enabled or me in self._missing:
            return False
        if self._implicit and position in seen:
            self._close()
        if not self._thread:
            self._open(1, rows, "unknown", None, fresh=True)
            self._thread, self._implicit = me, True
        if self._implicit:
            seen.add(position)
        return self._implicit

    def _open(
        self,
        batch: int,
        length: int,
        phase: str,
        valid: Tensor | None,
        fresh: bool,
        rewound: int = 0,
    ) -> None:
        slot = self.base + PHASES.index(phase)
        rows = batch * length
        small = rows <= STASH_ROWS
        full = self._pending == MAX_PENDING_STEPS or (
            small and self.counters.stash.used + rows > STASH_ROWS
        )
        # A pass that counts directly gets gate sums of its own, to be able to forget them.
        if full or slot != self._slot or not small or self._direct or self.traced:
            self._fold()
        self._slot, self._rows, self._batch, self._valid = slot, rows, batch, valid
        self._block = None
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.counters.device)
        if small:
            self._block = self.counters.stash.open_step(self._pending, rows, valid)
        ring = self.counters.token_ring
        if ring is not None:
            self._token_mark = ring.mark(batch)
            ring.begin_step(
                batch, length, valid, fresh=fresh, on=self.counters.step_on, rewound=rewound
            )

    def _close(self) -> None:
        counters = self.counters
        if self._direct or self.traced:
            counters.collect_step_row(self._pending)
        if self._valid is None:
            self._host_expected += self._rows
        else:
            real = self._valid.sum()
            seen = self._device_expected
            self._device_expected = real if seen is None else seen + real
        if counters.token_ring is not None:
            counters.token_ring.end_step(counters.step_on)
        if counters.step_ring is not None:
            self.step_log.append(StepNote(time(), self._batch))
            self.noted += 1
        self._pending += 1
        self._finish()

    def _abort(self) -> None:
        self.aborted += 1
        counters = self.counters
        if self._block is not None:
            counters.stash.drop_step(self._pending, self._block)
        if self._direct or self.traced:
            counters.drop_step_row()
            if counters.gate_pending is not None:
                counters.gate_pending.zero_()
        if counters.token_ring is not None and self._token_mark is not None:
            counters.token_ring.rewind(self._token_mark)
        self._finish()

    def _finish(self) -> None:
        self._thread, self._implicit = 0, False
        self._counted.clear()
        self._gated.clear()
        self._valid = self._block = self._token_mark = None
        if self._wanted is not None:
            self._snapshot = self._read()
            self._wanted.set()
            self._wanted = None

    def _direct_ids(
        self, position: int, ids: Tensor, weights: Tensor | None, valid: Tensor | None
    ) -> None:
        counters = self.counters
        counters.count(position, ids, valid)
        counters.add_weights(position, None if weights is None else weights.detach(), ids, valid)
        if counters.token_ring is not None:
            counters.token_ring.write(position, ids, valid, counters.step_on)

    def _valid_for(self, rows: Tensor) -> Tensor | None:
        """The row mask, where the layer sees the rows of the pass and not a choice of its own."""
        valid = self._valid
        return valid if valid is not None and rows.shape[0] == valid.shape[0] else None

    def _fold(self) -> None:
        if not self._pending:
            return
        expected: Tensor | int = self._host_expected
        if self._device_expected is not None:
            expected = self._device_expected + expected
        self.counters.fold_pending(self._pending, self._slot, expected)
        self._pending = self._host_expected = 0
        self._device_expected = None
        self._direct = False

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
            if self._implicit:
                self._close()
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
