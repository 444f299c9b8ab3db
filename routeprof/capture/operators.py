"""The layer tap as a torch operator: what stays in compiled graphs and CUDA graphs.

A Python function that a compiler traces runs once and never again. An operator that says it
writes something is kept, and runs in every pass; what it launches while a CUDA graph is being
captured is launched again by every replay.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

COUNT_LAYER = (
    "count_layer(Tensor(a!) door, Tensor ids, Tensor? logits, Tensor? weights, "
    "int capture, int position, int offset) -> ()"
)


class Taker(Protocol):
    """What stands behind the operator."""

    def take(
        self,
        position: int,
        ids: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        offset: int,
    ) -> None:
        """Count one layer call; see ``EngineCapture.take``."""


_takers: WeakValueDictionary[int, Taker] = WeakValueDictionary()
_library = torch.library.Library("routeprof", "DEF")  # type: ignore[no-untyped-call]
_library.define(COUNT_LAYER)  # type: ignore[no-untyped-call]


def register(taker: Taker, number: int) -> None:
    """Put a taker behind the operator. Graphs know it by its number, also from a compile cache
    of an earlier process: number them in an order that does not change."""
    _takers[number] = taker


def _count_layer(
    door: Tensor,
    ids: Tensor,
    logits: Tensor | None,
    weights: Tensor | None,
    capture: int,
    position: int,
    offset: int,
) -> None:
    # The door is what the compiler believes to be written, so that it keeps the call. It must be
    # no buffer that really is: a compiler may hand in a copy, and copy that back afterwards.
    del door
    taker = _takers.get(capture)
    if taker is not None:
        taker.take(position, ids, logits, weights, offset)


def _nothing(*args: object) -> None:
    """What tracing sees: shapes do not depend on it, and nothing is returned."""


for _key in ("CPU", "CUDA", "XPU"):
    _library.impl("count_layer", _count_layer, _key)  # type: ignore[no-untyped-call]
_library.impl("count_layer", _nothing, "Meta")  # type: ignore[no-untyped-call]
count_layer = torch.ops.routeprof.count_layer
