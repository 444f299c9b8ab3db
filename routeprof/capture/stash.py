"""The stash: rows that eager hooks copy, to be counted for all layers at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from routeprof.capture import kernels
from routeprof.capture.layout import Layout
from routeprof.topology import Layer

STASH_ROWS = 256


class Stash:
    """Ids, weights and logits of a few hundred rows, for every layer of one pass.

    Launching a dozen small operators per layer costs more than a small layer itself. In eager
    decode a hook therefore only copies what it sees; one batched pass counts it later.

    Attributes:
        ids: int64 [layers, rows, k]; weights: float32 alike; logits: float32 [layers, rows,
            experts].
        valid, step: int64 [rows], whether the row is real and which pending step it belongs to.
        used: rows filled so far.
    """

    def __init__(self, layout: Layout, device: torch.device, *, gate: bool) -> None:
        self.layout, self.gate = layout, gate
        count = len(layout.layers)
        shape = (count, STASH_ROWS, layout.top_k)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.valid = torch.zeros(STASH_ROWS, dtype=torch.int64, device=device)
        self.step = torch.zeros(STASH_ROWS, dtype=torch.int64, device=device)
        self._experts = torch.tensor([layer.experts for layer in layout.layers], device=device)
        top_k = torch.tensor([layer.choices for layer in layout.layers], device=device)
        choices = torch.arange(layout.top_k, device=device)
        self._chosen = (choices[None, :] < top_k[:, None]).long()
        self._offset = torch.arange(count, device=device) * layout.step_width
        if gate:
            self.weights = torch.zeros(shape, dtype=torch.float32, device=device)
            shape = (count, STASH_ROWS, layout.experts)
            self.logits = torch.zeros(shape, dtype=torch.float32, device=device)
            self._runs = tuple(_gate_runs(layout.layers))
        self.reset()

    def reset(self) -> None:
        """Empty the stash."""
        self.used = 0
        self.called: list[list[int]] = []
        """Of each pending step, 1 for every layer whose ids are in the stash."""
        self.gated: list[list[int]] = []
        """Likewise for its logits."""

    def open_step(self, step: int, rows: int, valid: Tensor | None) -> slice:
        """Reserve rows for a step; the caller has made sure that they fit."""
        block = slice(self.used, self.used + rows)
        if valid is None:
            self.valid[block].fill_(1)
        else:
            self.valid[block].copy_(valid)
        self.step[block].fill_(step)
        self.used = block.stop
        self._open_flags(step)
        # One call for all layers costs less than an index expression in each of them.
        self._ids = self.ids[:, block].unbind()
        if self.gate:
            self._weights = self.weights[:, block].unbind()
            self._logits = self.logits[:, block].unbind()
        return block

    def _open_flags(self, step: int) -> None:
        while len(self.called) <= step:
            self.called.append([0] * len(self.layout.layers))
            self.gated.append([0] * len(self.layout.layers))

    def drop_step(self, step: int, block: slice) -> None:
        """Forget the rows of the step that was opened last."""
        self.used = block.start
        del self.called[step:], self.gated[step:]

    def put_ids(self, step: int, position: int, ids: Tensor, weights: Tensor | None) -> None:
        """Copy one layer's ids [rows, k] and combine weights for the step opened last."""
        top_k = ids.shape[1]
        _fitting(self._ids[position], top_k).copy_(ids)
        self.called[step][position] = 1
        if not self.gate:
            return
        target = _fitting(self._weights[position], top_k)
        if weights is None:
            target.fill_(torch.nan)
        else:
            target.copy_(weights)

    def put_logits(self, step: int, position: int, logits: Tensor) -> None:
        """Copy one layer's router output [rows, experts] for the step opened last."""
        _fitting(self._logits[position], logits.shape[1]).copy_(logits)
        self.gated[step][position] = 1

    def drain_into(self, pending: Tensor, gate_pending: Tensor | None) -> None:
        """Count all rows, then empty the stash.

        Args:
            pending: int64 [steps, layers, width], step rows; added to.
            gate_pending: float64 [layers, gate_width]; added to.
        """
        if not self.called:  # a step without rows has flags all the same
            return
        step = self.step[: self.used]
        column = self._columns()
        counted = self._flags(self.called)[:, step] * self.valid[: self.used]
        self._count(pending, column, counted)
        if gate_pending is not None:
            self._add_weights(gate_pending, column, counted)
            gated = self._flags(self.gated)[:, step] * self.valid[: self.used]
            self._add_gate(gate_pending, gated > 0)
        self.reset()

    def _flags(self, flags: list[list[int]]) -> Tensor:
        """int64 [layers, steps] on the device."""
        return torch.tensor(flags).to(self.ids.device, non_blocking=True).T

    def _columns(self) -> Tensor:
        """Column of each assignment in its step row, int64 [layers, rows, k]."""
        ids = self.ids[:, : self.used].clamp(min=-1)
        return torch.minimum(ids, self._experts[:, None, None]).add_(1)

    def _count(self, pending: Tensor, column: Tensor, counted: Tensor) -> None:
        flat = pending.view(-1)
        row = (self.step[: self.used] * pending.stride(0))[None] + self._offset[:, None]
        source = counted[..., None] * self._chosen[:, None]
        flat.scatter_add_(0, (row[..., None] + column).reshape(-1), source.reshape(-1))
        tokens = row + self.layout.tokens_column
        flat.scatter_add_(0, tokens.reshape(-1), counted.reshape(-1))
        called = self._flags(self.called).T
        pending[: len(called), :, self.layout.calls_column] += called

    def _add_weights(self, gate_pending: Tensor, column: Tensor, counted: Tensor) -> None:
        experts, layers = self.layout.experts, len(self.layout.layers)
        keep = (counted[..., None] * self._chosen[:, None]) > 0
        weights = torch.where(keep, self.weights[:, : self.used], 0.0)
        sums = torch.zeros(layers, experts + 2, dtype=torch.float32, device=weights.device)
        sums.scatter_add_(1, column.reshape(layers, -1), weights.reshape(layers, -1))
        gate_pending[:, self.layout.gate_sections["weight"]] += sums[:, 1 : experts + 1]

    def _add_gate(self, gate_pending: Tensor, keep: Tensor) -> None:
        sections = self.layout.gate_sections
        for first, last, layer in self._runs:
            logits = self.logits[first:last, : self.used, : layer.experts]
            mass, scalars = kernels.gate_statistics(
                logits, keep[first:last], layer.router, layer.choices, layer.gate == "probabilities"
            )
            block = gate_pending[first:last]
            block[:, sections["mass"]][:, : layer.experts] += mass
            block[:, sections["scalars"]] += scalars


def _fitting(buffer: Tensor, width: int) -> Tensor:
    """The buffer [rows, widest], cut to a layer's own width."""
    return buffer if buffer.shape[1] == width else buffer[:, :width]


def _gate_runs(layers: tuple[Layer, ...]) -> Iterator[tuple[int, int, Layer]]:
    """Consecutive layers whose gates can be computed together: first, last + 1, one of them."""

    def key(layer: Layer) -> tuple[object, ...]:
        return (layer.router, layer.gate, layer.choices, layer.experts)

    position = 0
    for _, group in groupby(layers, key):
        members = list(group)
        if members[0].gate != "none":
            yield position, position + len(members), members[0]
        position += len(members)
