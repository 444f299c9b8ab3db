"""StepCapture: follows one module's forward passes and hands its layers' routing to counters."""

from __future__ import annotations

import threading
from time import perf_counter_ns

import torch
from torch import Tensor

from routeprof.capture import clock
from routeprof.capture.base import Capture
from routeprof.capture.counters import MAX_PENDING_STEPS, RoutingCounters
from routeprof.capture.stash import STASH_ROWS
from routeprof.topology import PHASES


class StepCapture(Capture):
    """Steps of one group of layers.

    Hooks call ``begin``, then ``ids`` and ``logits`` for each layer, then ``end``; nothing here
    synchronises with the device. A step runs on one thread; passes that other threads run at the
    same time are not counted, and reported as missed.
    """

    def __init__(self, counters: RoutingCounters) -> None:
        super().__init__(counters)
        self.traced = False
        self._missing: set[int] = set()
        self._implicit = False
        self._counted: set[int] = set()
        self._gated: set[int] = set()
        self._valid: Tensor | None = None
        self._rows = self._batch = 0
        self._block: slice | None = None
        self._direct = False
        self._token_mark: Tensor | None = None
        self._stashing = True

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
            # Switched on half-way, the rest of this pass would look like a step of its own.
            self._missing.add(threading.get_ident())
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
        small = self._stashing and rows <= STASH_ROWS
        full = self._pending == MAX_PENDING_STEPS or (
            small and self.counters.stash.used + rows > STASH_ROWS
        )
        # A pass that counts directly gets gate sums of its own, to be able to forget them.
        if full or slot != self._slot or not small or self._direct or self.traced:
            self._fold()
        self._slot, self._rows, self._batch, self._valid = slot, rows, batch, valid
        self._block = None
        self._follow_stream()
        if small:
            self._block = self.counters.stash.open_step(self._pending, rows, valid)
        self._begin_rows(batch, length, valid, fresh, rewound)

    def _begin_rows(
        self, batch: int, length: int, valid: Tensor | None, fresh: bool, rewound: int
    ) -> None:
        """Note which request each row belongs to (level tokens)."""
        ring = self.counters.token_ring
        if ring is not None:
            self._token_mark = ring.mark(batch)
            on = self.counters.step_on
            ring.begin_step(batch, length, valid, fresh=fresh, on=on, rewound=rewound)

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
        self._note(clock.now(), self._batch)
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
        self._implicit = False
        self._counted.clear()
        self._gated.clear()
        self._valid = self._block = self._token_mark = None
        self._release()

    def _settle(self) -> None:
        if self._implicit:
            self._close()

    def _fold(self) -> None:
        super()._fold()
        self._direct = False

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
