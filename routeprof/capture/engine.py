"""EngineCapture: steps of a serving engine, whose layers count inside its own graphs."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routeprof.capture import operators
from routeprof.capture.counters import RoutingCounters, real_rows
from routeprof.capture.steps import StepCapture


class EngineCapture(StepCapture):
    """Steps that the host opens and closes around the engine's forward pass.

    The layers' taps may be compiled or captured long before. On a CUDA device they read there
    whether a step is open and how many rows of it are real. Outside a step (warm-up, profiling,
    dummy and capture runs) they count nothing.

    Args:
        counters: the buffers.
        number: by which compiled graphs know this capture; unique in the process.
        expects: False for a rank that sees a part of rows which another rank expects whole.
        waits: whether the device may be waited for while a pass runs; only the CPU may.
    """

    def __init__(
        self,
        counters: RoutingCounters,
        number: int = 0,
        *,
        expects: bool = True,
        waits: bool | None = None,
    ) -> None:
        super().__init__(counters)
        self.number, self.expects = number, expects
        self._real, self._passing = 0, False
        # Replayed graphs tell the host nothing: but for the CPU, they read on the device whether
        # a step is open (counters.step_on) and how many rows are real.
        self._on_device = not (counters.device.type == "cpu" if waits is None else waits)
        self.rows = torch.zeros((), dtype=torch.int64, device=counters.device)
        self.door = torch.zeros(1, dtype=torch.int64, device=counters.device)
        if self._on_device:
            self.traced, self._stashing = True, False
            counters.step_on.zero_()
        operators.register(self, number)

    # -- called by the layers' taps

    def count(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None = None,
        weights: Tensor | None = None,
        offset: int = 0,
    ) -> None:
        """Count one layer call; ids and weights [tokens, k], logits [tokens, experts].

        Args:
            offset: row of ``ids`` where this rank's rows begin; negative where the layer sees
                only a later part of them.
        """
        operators.count_layer(self.door, ids, logits, weights, self.number, position, offset)

    def take(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        offset: int,
    ) -> None:
        """What the operator does; see ``count``."""
        start, before = perf_counter_ns(), self.cost_ns[position]
        try:
            if self._on_device:
                self._count_on_device(position, ids, logits, weights, offset)
            elif self._passing:
                self._count_on_host(position, ids, logits, weights, offset)
        except Exception as error:
            self.failures.add(position, error)
        # What the capture measured of itself meanwhile is part of it.
        self.cost_ns[position] = before + perf_counter_ns() - start

    def _count_on_host(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        offset: int,
    ) -> None:
        """On the CPU the operator runs in every pass, and padding rows need not be looked at."""
        first = max(offset, 0)
        last = max(offset + self._real, first)
        if first or last < ids.shape[0]:
            ids = ids[first:last]
            weights = None if weights is None else weights[first:last]
            logits = None if logits is None else logits[first:last]
        self._take_ids(position, ids, weights)
        if logits is not None and self.counters.gate_totals is not None:
            self._take_logits(position, logits)

    def _count_on_device(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        offset: int,
    ) -> None:
        """Elsewhere nothing may wait for the scalars: shapes are fixed, and rows are masked."""
        counters = self.counters
        counters.count_call(position, ids, logits, weights, self.rows, offset)
        if counters.token_ring is not None:
            valid = real_rows(ids.shape[0], self.rows, offset)
            counters.token_ring.write(position, ids, valid, counters.step_on)

    # -- called around the engine's forward pass

    def begin_pass(self, rows: int, phase: str, requests: int = 0) -> None:
        """Open a step.

        Args:
            rows: real rows of the pass, padding left out.
            phase: one of ``topology.PHASES``.
            requests: how many requests the pass serves.
        """
        if not self.enabled:
            return
        self._real = rows
        if self._on_device:
            self.rows.fill_(rows)
        self.begin(1, rows, phase, None)
        self._batch = requests
        self._passing = bool(self._thread)

    def note_rows(self, request: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Say what each real row of the open step belongs to, both [rows] (level tokens)."""
        ring = self.counters.token_ring
        if self._passing and ring is not None:
            ring.begin_known_step(request, position)

    def end_pass(self, *, failed: bool = False) -> None:
        """Close the step. A pass that failed counts for nothing."""
        if not self._passing:
            return
        self._passing = False
        self.end(failed=failed)
        if self._on_device:
            self.counters.step_on.zero_()

    def _close(self) -> None:
        super()._close()
        if not self.expects:
            self._host_expected -= self._rows

    def switch(self, on: bool) -> None:
        """Turn counting on or off; a running step is finished as it was begun."""
        with self._lock:
            self.enabled = on
            self.counters.on.fill_(int(on))

    def _begin_rows(
        self, batch: int, length: int, valid: Tensor | None, fresh: bool, rewound: int
    ) -> None:
        # Who the rows are is said later, by ``note_rows``, or by nobody.
        if self.counters.token_ring is not None:
            self._token_mark = self.counters.token_ring.mark(0)
