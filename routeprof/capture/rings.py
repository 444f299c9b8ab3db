"""Device rings for what is kept per step and per token until the drain thread fetches it.

A ring never stops the engine: a writer that laps the reader overwrites, and the reader sees from
the cursor how much it lost. Sums are kept elsewhere and stay exact.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routeprof.capture.layout import Layout

INVALID, MASKED = -1, -2
"""Stored in place of an id: not an expert's number; not a real row."""


class StepRing:
    """Step rows of the last ``capacity`` steps: int32 [capacity, layers, width]."""

    def __init__(self, layout: Layout, device: torch.device, capacity: int) -> None:
        shape = (capacity, len(layout.layers), layout.step_width)
        self.capacity = capacity
        self.rows = torch.zeros(shape, dtype=torch.int32, device=device)
        self.slots = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)

    def write(self, rows: Tensor, slots: Tensor, advance: Tensor | int) -> None:
        """Append step rows [steps, layers, width] with their slots [steps]."""
        places = torch.arange(rows.shape[0], device=rows.device) + self.cursor
        places = places % self.capacity
        self.rows.index_copy_(0, places, rows.to(torch.int32))
        self.slots.index_copy_(0, places, slots)
        self.cursor += advance


class TokenRing:
    """Expert ids of the last ``capacity`` rows of every layer, in the order in which they ran.

    Attributes:
        ids: int16 [layers, capacity, k]; steps: int64 [layers, capacity]; cursor: int64 [layers].
        row_request, row_position, row_step: int64 [capacity], what the rows of a step belong to;
            request is MASKED for padding. row_cursor: 0-dim.
        reached: int64 [layers + 1], how far the cursors had come when a failed pass was
            forgotten: it has overwritten as much all the same.
        step: 0-dim int64, number of the running step.
    """

    def __init__(
        self, layout: Layout, device: torch.device, capacity: int, max_batch: int = 4096
    ) -> None:
        count = len(layout.layers)
        self.layout, self.capacity, self.max_batch = layout, capacity, max_batch

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids = zeros(count, capacity, layout.top_k, dtype=torch.int16)
        self.steps = zeros(count, capacity)
        self.cursor = zeros(count)
        self.row_request, self.row_position = zeros(capacity), zeros(capacity)
        self.row_step, self.row_cursor = zeros(capacity), zeros()
        self.step, self.request_base, self.requests = zeros(), zeros(), zeros()
        self.lengths = zeros(max_batch)
        self.reached = zeros(count + 1)

    def _places(self, cursor: Tensor, rows: int) -> tuple[Tensor, int]:
        """Ring places of the last rows that fit, and how many they are."""
        kept = min(rows, self.capacity)
        first = cursor + (rows - kept)
        return (torch.arange(kept, device=cursor.device) + first) % self.capacity, kept

    def begin_step(
        self,
        batch: int,
        length: int,
        valid: Tensor | None,
        *,
        fresh: bool,
        on: Tensor,
        rewound: int = 0,
    ) -> None:
        """Note request and position of each row [batch * length].

        Args:
            fresh: the rows begin new requests, numbered on from the last ones.
            rewound: rows by which every sequence was cut back since its last step.
        """
        rows = batch * length
        if not rows:
            return
        real = torch.ones(rows, dtype=torch.int64, device=on.device) if valid is None else valid
        if fresh:
            self.request_base.copy_(torch.where(on > 0, self.requests, self.request_base))
            self.requests.add_(batch * on)
        ahead = real.reshape(batch, length).cumsum(1)
        known = batch <= self.max_batch
        start = torch.zeros_like(ahead[:, 0])
        if known and not fresh:
            start = (self.lengths[:batch] - rewound).clamp(min=0)
        position = (start[:, None] + ahead - 1).reshape(-1)
        if known:
            self.lengths[:batch] = torch.where(on > 0, start + ahead[:, -1], self.lengths[:batch])
        request = torch.arange(batch, device=on.device).repeat_interleave(length, output_size=rows)
        request = torch.where(real > 0, request + self.request_base, MASKED)
        places, kept = self._places(self.row_cursor, rows)
        self.row_request.index_copy_(0, places, request[rows - kept :])
        self.row_position.index_copy_(0, places, position[rows - kept :])
        self.row_step.index_copy_(0, places, self.step.expand(kept))
        self.row_cursor += rows * on

    def begin_known_step(self, request: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Note request and position of each row [rows], where the host knows them."""
        rows = len(request)
        places, kept = self._places(self.row_cursor, rows)
        for target, column in ((self.row_request, request), (self.row_position, position)):
            values = torch.from_numpy(column[rows - kept :])
            target.index_copy_(0, places, values.to(target.device, non_blocking=True))
        self.row_step.index_copy_(0, places, self.step.expand(kept))
        self.row_cursor += rows

    def write(self, position: int, ids: Tensor, valid: Tensor | None, on: Tensor) -> None:
        """Append one layer call; ids [tokens, k]."""
        tokens, top_k = ids.shape
        experts = self.layout.layers[position].experts
        stored = torch.where((ids < 0) | (ids >= experts), INVALID, ids.long())
        if valid is not None:
            stored = torch.where(valid[:, None] > 0, stored, MASKED)
        places, kept = self._places(self.cursor[position], tokens)
        stored = stored[tokens - kept :].to(torch.int16)
        self.ids[position][:, :top_k].index_copy_(0, places, stored)
        self.steps[position].index_copy_(0, places, self.step.expand(kept))
        self.cursor[position] += tokens * on

    def end_step(self, on: Tensor) -> None:
        """Number the next step."""
        self.step += on

    def mark(self, batch: int) -> Tensor:
        """Where the ring stands before a step of so many requests, for ``rewind``."""
        scalars = torch.stack([self.row_cursor, self.request_base, self.requests])
        return torch.cat([self.cursor, scalars, self.lengths[:batch]])

    def rewind(self, mark: Tensor) -> None:
        """Forget what was written since the ring stood at ``mark``."""
        layers = len(self.cursor)
        now = torch.cat([self.cursor, self.row_cursor[None]])
        self.reached.copy_(torch.maximum(self.reached, now))
        self.cursor.copy_(mark[:layers])
        for place, scalar in enumerate((self.row_cursor, self.request_base, self.requests)):
            scalar.copy_(mark[layers + place])
        lengths = mark[layers + 3 :]
        self.lengths[: len(lengths)].copy_(lengths)
