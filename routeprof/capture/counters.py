"""RoutingCounters: preallocated device buffers and the in-place operations on them."""

from __future__ import annotations

import torch
from torch import Tensor

from routeprof.capture import kernels
from routeprof.capture.layout import Layout
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.stash import Stash
from routeprof.topology import PHASES

MAX_PENDING_STEPS = 64


class RoutingCounters:
    """Buffers for one group of layers that run in the same forward pass.

    Two ways lead into the same sums. *Direct* operations touch fixed buffers only, so that
    torch.compile and CUDA graphs keep them; the *stash* serves small eager steps. Sums only
    grow: a window is the difference of two snapshots, so reading never stops the engine.

    Attributes:
        totals: int64 [slots, layers, int_width].
        gate_totals: float64 [slots, layers, gate_width]; None without gate outputs.
        imbalance_max: float64 [slots, layers], largest max / mean of any step so far.
        expected: int64 [slots, 2], tokens that the engine put through, and steps.
        step_row: int64 [layers, width], what the direct path counted in the running step.
        pending: int64 [steps, layers, width], finished eager steps that are not folded yet.
        folds: int64 [2], folds begun and finished inside graphs.
        on: 0-dim int64 switch; ``step_on`` is its value for the running step.
        base: 0-dim int64, first slot of the current tag, read inside graphs.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        gate: bool = True,
        step_ring: StepRing | None = None,
        token_ring: TokenRing | None = None,
    ) -> None:
        self.layout, self.device = layout, device
        self.step_ring, self.token_ring = step_ring, token_ring
        self.constants = kernels.StepConstants(layout, device)
        self.stash = Stash(layout, device, gate=gate)
        count = len(layout.layers)
        self.totals = self._zeros(layout.slots, count, layout.int_width)
        self.imbalance_max = self._zeros(layout.slots, count, dtype=torch.float64)
        self.expected = self._zeros(layout.slots, 2)
        self.pending = self._zeros(MAX_PENDING_STEPS, count, layout.step_width)
        self.step_row = self._zeros(count, layout.step_width)
        self.folds = self._zeros(2)
        self.on, self.step_on = self._zeros().fill_(1), self._zeros().fill_(1)
        self.base, self.slot = self._zeros(), self._zeros(MAX_PENDING_STEPS)
        self.step_expected = self._zeros(1, 2)
        self.gate_totals: Tensor | None = None
        self.gate_pending: Tensor | None = None
        if gate:
            shape = (count, layout.gate_width)
            self.gate_totals = self._zeros(layout.slots, *shape, dtype=torch.float64)
            self.gate_pending = self._zeros(*shape, dtype=torch.float64)
        self._keep_addresses()

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _keep_addresses(self) -> None:
        """Tell the compiler that the buffers never move, so that CUDA graphs may write them."""
        if self.device.type != "cuda":
            return
        for value in vars(self).values():
            if isinstance(value, Tensor):
                torch._dynamo.mark_static_address(value)

    def move(self, device: torch.device) -> None:
        """Follow a model that was moved after the hooks were attached, between two steps."""
        self.device = device
        for owner in (self, self.constants, self.stash, self.step_ring, self.token_ring):
            for name, value in vars(owner).items() if owner is not None else ():
                if isinstance(value, Tensor):
                    setattr(owner, name, value.to(device))
        self._keep_addresses()

    # -- one layer call, graph-safe

    def count(self, position: int, ids: Tensor, valid: Tensor | None) -> None:
        """Count one layer call; ids [tokens, k], valid int64 [tokens] or None for all."""
        tokens, top_k = ids.shape
        row = self.step_row[position]
        source = self.step_on
        if valid is not None:
            source = (valid * source)[:, None].expand(tokens, top_k).reshape(-1)
        kernels.count_ids(row, ids, source, self.layout.layers[position].experts)
        real = tokens if valid is None else valid.sum()
        # Not +=, which would write the element back a second time.
        row[self.layout.tokens_column].add_(real * self.step_on)
        row[self.layout.calls_column].add_(self.step_on)

    def add_gate(self, position: int, logits: Tensor, valid: Tensor | None) -> None:
        """Add the router output of one layer call; logits [tokens, experts]."""
        if self.gate_pending is None:
            return
        layer, sections = self.layout.layers[position], self.layout.gate_sections
        keep = None if valid is None else valid > 0
        mass, scalars = kernels.gate_statistics(
            logits, keep, layer.router, layer.choices, layer.gate == "probabilities"
        )
        row = self.gate_pending[position]
        row[sections["mass"]][: layer.experts] += torch.where(self.step_on > 0, mass, 0.0)
        row[sections["scalars"]] += torch.where(self.step_on > 0, scalars, 0.0)

    def add_weights(
        self, position: int, weights: Tensor | None, ids: Tensor, valid: Tensor | None
    ) -> None:
        """Add the combine weights of one layer call; weights and ids [tokens, k]."""
        if self.gate_pending is None:
            return
        experts = self.layout.layers[position].experts
        row = self.gate_pending[position][self.layout.gate_sections["weight"]][:experts]
        if weights is None:
            row += torch.nan
            return
        keep = None if valid is None else valid > 0
        row += torch.where(self.step_on > 0, kernels.weight_sums(weights, ids, keep, experts), 0.0)

    def count_call(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        rows: Tensor,
        offset: int,
    ) -> None:
        """Count one layer call with all its gate outputs, rows from ``offset`` on being real.

        Args:
            rows: 0-dim int64, how many rows are real.
        """
        layer = self.layout.layers[position]
        if kernels.fused_for(ids):
            from routeprof.capture import fused

            fused.count_layer(
                self.step_row[position],
                None if self.gate_pending is None else self.gate_pending[position],
                ids,
                logits,
                weights,
                self.step_on,
                rows,
                None,
                offset,
                layer.experts,
                layer.choices,
                kernels.scoring(layer),
            )
            return
        valid = real_rows(ids.shape[0], rows, offset)
        self.count(position, ids, valid)
        if logits is not None and layer.gate != "none":
            self.add_gate(position, logits, valid)
        self.add_weights(position, weights, ids, valid)

    # -- a step inside a graph

    def begin_traced(self, phase: str, rows: int, valid: Tensor | None) -> None:
        """Open a step; whatever may change between replays is read on the device."""
        self.step_on.copy_(self.on)
        self.slot[:1].copy_((self.base + PHASES.index(phase)).reshape(1))
        real = self.step_on * (rows if valid is None else valid.sum())
        self.step_expected.copy_(torch.stack([real, self.step_on])[None])

    def end_traced(self) -> None:
        """Close a step."""
        self.folds[0] += 1
        self._fold(self.step_row[None], self.slot[:1], self.step_on)
        self.expected.index_add_(0, self.slot[:1], self.step_expected)
        self.step_row.zero_()
        self.folds[1] += 1

    # -- steps that the host follows

    def collect_step_row(self, step: int) -> None:
        """Move what the direct path counted into ``pending[step]``."""
        self.pending[step].add_(self.step_row)
        self.step_row.zero_()

    def drop_step_row(self) -> None:
        """Forget what the direct path counted: the pass failed, nothing of it was served."""
        self.step_row.zero_()

    def fold_pending(self, steps: int, slot: int, expected: Tensor | int) -> None:
        """Add the first ``steps`` pending steps, all of one slot, to the totals.

        Args:
            expected: tokens that the engine put through in these steps.
        """
        pending = self.pending[:steps]
        self.stash.drain_into(self.pending, self.gate_pending)
        self._fold(pending, self.slot[:steps].fill_(slot), steps)
        pending.zero_()
        self.expected[slot, 0] += expected
        self.expected[slot, 1] += steps

    def _fold(self, rows: Tensor, slots: Tensor, steps: Tensor | int) -> None:
        """Add step rows [steps, layers, width] to the totals of their slot; slots [steps] agree."""
        if kernels.fused_for(rows):
            from routeprof.capture import fused

            fused.fold_steps(
                self.totals, self.imbalance_max, rows, slots, self.layout, self.constants
            )
        else:
            self._fold_sums(rows, slots[:1])
        if self.gate_totals is not None and self.gate_pending is not None:
            self.gate_totals.index_add_(0, slots[:1], self.gate_pending[None])
            self.gate_pending.zero_()
        if self.step_ring is not None:
            self.step_ring.write(rows, slots, steps)

    def _fold_sums(self, rows: Tensor, slot: Tensor) -> None:
        """Add step rows to the totals of a slot [1], with torch operators."""
        statistics, ratio = kernels.step_statistics(rows, self.layout, self.constants)
        self.totals.index_add_(0, slot, statistics[None])
        self.imbalance_max.scatter_reduce_(
            0, slot[:, None].expand(1, len(ratio)), ratio[None], "amax"
        )


def real_rows(tokens: int, rows: Tensor, offset: int) -> Tensor:
    """int64 [tokens], 1 for the ``rows`` rows that begin at ``offset``."""
    place = torch.arange(tokens, device=rows.device) - offset
    return ((place >= 0) & (place < rows)).long()
