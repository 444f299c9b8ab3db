"""Bringing the device sums to the host without making the engine wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routeprof.capture import clock
from routeprof.capture.counters import RoutingCounters
from routeprof.capture.rings import StepRing, TokenRing

CONSISTENT_TRIES = 100


@dataclass(frozen=True)
class StepNote:
    """What only the host knows of a step: when it ended and how many requests it held."""

    time: float
    requests: int


@dataclass(frozen=True)
class Snapshot:
    """Sums since the recording began, for the slots that were ever used.

    Attributes:
        time: seconds since the epoch.
        slots: int64 [used].
        totals: int64 [used, layers, int_width]; gate: float64 [used, layers, gate_width].
        imbalance_max: float64 [used, layers]; expected: int64 [used, 2].
        steps: notes of the newest steps that the host saw end since the last snapshot;
            ``noted`` counts all that it ever saw.
        cost_ns: own time per layer, then of whole steps.
    """

    time: float
    slots: NDArray[np.int64]
    totals: NDArray[np.int64]
    gate: NDArray[np.float64] | None
    imbalance_max: NDArray[np.float64]
    expected: NDArray[np.int64]
    steps: tuple[StepNote, ...] = ()
    noted: int = 0
    cost_ns: tuple[int, ...] = ()


class HostCopy:
    """A snapshot under way: begun on the engine's thread, finished on the drain thread.

    On a CUDA device the copy is queued on the engine's stream, into pinned memory, and ``wait``
    blocks the drain thread only. On the CPU it is made at once.
    """

    def __init__(
        self,
        counters: RoutingCounters,
        steps: tuple[StepNote, ...],
        noted: int,
        cost_ns: tuple[int, ...],
    ) -> None:
        self._time, self._steps, self._noted, self._cost = clock.now(), steps, noted, cost_ns
        self._event: torch.cuda.Event | None = None
        sums = [counters.expected, counters.totals, counters.imbalance_max]
        if counters.gate_totals is not None:
            sums.append(counters.gate_totals)
        if counters.device.type == "cuda":
            self._copies = [_queue(tensor) for tensor in sums]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(counters.device))
        else:
            self._copies = _consistent(counters, sums)

    def wait(self) -> Snapshot:
        """The snapshot; blocks until the device has copied it."""
        if self._event is not None:
            self._event.synchronize()
        expected, totals, imbalance_max, *gate = (copy.numpy() for copy in self._copies)
        slots = np.flatnonzero(expected[:, 1])
        return Snapshot(
            time=self._time,
            slots=slots,
            totals=totals[slots],
            gate=gate[0][slots] if gate else None,
            imbalance_max=imbalance_max[slots],
            expected=expected[slots],
            steps=self._steps,
            noted=self._noted,
            cost_ns=self._cost,
        )


def _queue(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _consistent(counters: RoutingCounters, sums: list[Tensor]) -> list[Tensor]:
    """Copies that no step inside a compiled graph has changed meanwhile.

    Such steps run without the host's knowledge, so there is no lock to take; they count their
    folds before and after instead. Under unbroken load the last try is used: its windows may
    split a step, its sums over windows are exact.
    """
    folds = counters.folds.numpy()
    copies: list[Tensor] = []
    for _ in range(CONSISTENT_TRIES):
        finished = int(folds[1])
        copies = [tensor.detach().clone() for tensor in sums]
        if int(folds[0]) == finished:
            break
    return copies


# -- rings


@dataclass(frozen=True)
class StepDetail:
    """Step rows fetched from a StepRing.

    Attributes:
        first: number of the first step; rows: int32 [steps, layers, width]; slots: int64 [steps].
        lost: steps that were overwritten before they could be fetched.
    """

    first: int
    rows: NDArray[np.int32]
    slots: NDArray[np.int64]
    lost: int


@dataclass(frozen=True)
class TokenDetail:
    """Rows fetched from a TokenRing.

    Attributes:
        ids: per layer, int16 [rows, k]; steps: per layer, int64 [rows]; lost: per layer, rows.
        row_step, row_request, row_position: int64 [rows]; rows_lost: rows of these.
    """

    ids: list[NDArray[np.integer]]
    steps: list[NDArray[np.integer]]
    lost: list[int]
    row_step: NDArray[np.integer]
    row_request: NDArray[np.integer]
    row_position: NDArray[np.integer]
    rows_lost: int


def fetch_steps(ring: StepRing, start: int, stop: int | None = None) -> StepDetail:
    """Steps from number ``start`` up to ``stop``, or the newest. Runs beside the engine."""
    end = int(ring.cursor)
    first = max(start, end - ring.capacity)
    last = end if stop is None else max(first, min(stop, end))
    places = torch.arange(first, last, device=ring.cursor.device) % ring.capacity
    rows, slots = ring.rows[places].cpu().numpy(), ring.slots[places].cpu().numpy()
    lapped = min(max(0, int(ring.cursor) - ring.capacity - first), len(rows))
    return StepDetail(first + lapped, rows[lapped:], slots[lapped:], first - start + lapped)


def fetch_tokens(ring: TokenRing, starts: list[int], row_start: int) -> TokenDetail:
    """Rows of finished steps: of every layer from ``starts`` on, of the steps from ``row_start``.

    Runs beside the engine. Rows of the running step stay for the next time: its pass may fail.
    """
    finished = int(ring.step)
    ids, steps, lost = [], [], []
    for position, layer in enumerate(ring.layout.layers):
        (layer_ids, layer_steps), missing = _fetch(
            ring,
            (ring.cursor[position], ring.reached[position]),
            starts[position],
            (ring.ids[position][:, : layer.choices], ring.steps[position]),
        )
        done = int(np.searchsorted(layer_steps, finished))
        ids.append(layer_ids[:done])
        steps.append(layer_steps[:done])
        lost.append(missing)
    columns = (ring.row_step, ring.row_request, ring.row_position)
    cursors = (ring.row_cursor, ring.reached[-1])
    (row_step, request, place), rows_lost = _fetch(ring, cursors, row_start, columns)
    done = int(np.searchsorted(row_step, finished))
    return TokenDetail(ids, steps, lost, row_step[:done], request[:done], place[:done], rows_lost)


def _fetch(
    ring: TokenRing,
    cursors: tuple[Tensor, Tensor],
    start: int,
    columns: tuple[Tensor, ...],
) -> tuple[list[NDArray[np.integer]], int]:
    """Columns from ``start`` to the cursor, and how many rows were overwritten before.

    Args:
        cursors: where the next row goes, and how far rows were ever written.
    """

    def oldest() -> int:
        return max(int(cursor) for cursor in cursors) - ring.capacity

    end = int(cursors[0])
    first = min(max(start, oldest()), end)
    places = torch.arange(first, end, device=cursors[0].device) % ring.capacity
    fetched = [column[places].cpu().numpy() for column in columns]
    lapped = min(max(0, oldest() - first), len(places))
    return [column[lapped:] for column in fetched], first - start + lapped
