"""How long a MoE layer takes at best: a roofline of its experts and its exchanges.

Times are lower limits from peak rates: what is left out, and what kernels do not reach, comes on
top. They are made to compare layouts with each other, not to predict a server's latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.metrics.ranks import sums_of_ranks
from routeprof.whatif.hardware import Hardware
from routeprof.whatif.layout import Layout
from routeprof.whatif.traffic import Flows

MATRICES = 3
"""Of a gated expert: gate, up and down."""


@dataclass(frozen=True)
class Sizes:
    """What has to be computed and sent.

    Attributes:
        hidden: width of a token.
        width: inner width of an expert (``moe_intermediate_size``).
        weight: bytes of a weight.
        dispatch, combine: bytes of a token's number on the way there and back.
    """

    hidden: int
    width: int
    weight: float
    dispatch: float
    combine: float

    @property
    def expert(self) -> int:
        """Weights of one expert."""
        return MATRICES * self.hidden * self.width


def expert_seconds(
    loads: IntArray | FloatArray, gpu_of_slot: IntArray, layout: Layout, sizes: Sizes, gpu: Hardware
) -> FloatArray:
    """Time of the slowest rank's expert GEMMs, ``[steps]``.

    Each expert with tokens takes what its arithmetic or reading its weights takes, whichever is
    longer (roofline); the experts of a rank run one after another.

    Args:
        loads: assignments of each slot, ``[steps, slots]``.
        gpu_of_slot: expert-parallel rank of each slot, ascending, ``[slots]``.
    """
    part = sizes.expert / layout.etp
    compute = loads * (2 * part / gpu.flops_of(sizes.weight))
    reading = np.where(loads > 0, part * sizes.weight / gpu.memory, 0.0)
    ranks = sums_of_ranks(np.maximum(compute, reading), gpu_of_slot, layout.ep)
    return np.asarray(ranks.max(axis=1))


def exchange_seconds(moved: Flows, bytes_each: float, gpu: Hardware) -> FloatArray:
    """Time of an all-to-all exchange, ``[steps]``: that of the busiest link of any GPU.

    Args:
        bytes_each: of a token.
    """
    inside = np.maximum(moved.sent_inside, moved.received_inside) * (bytes_each / gpu.inside)
    between = np.maximum(moved.sent_between, moved.received_between) * (bytes_each / gpu.between)
    slowest = np.maximum(inside, between).max(axis=1)
    return np.asarray(slowest + np.where(slowest > 0, gpu.latency, 0.0))


@dataclass(frozen=True)
class Reduction:
    """An all-reduce among neighbouring GPUs: what each sends, in numbers of tokens for each token.

    It reduces and scatters inside each node, all-reduces between nodes, and gathers inside each
    node again; in rings, which send 2 (n − 1) ÷ n of the whole from each of n GPUs. Groups that
    begin or end inside a node use the links between nodes throughout.
    """

    inside: float
    between: float


def reduction(layout: Layout, gpus: int) -> Reduction:
    """All-reduce among each ``gpus`` neighbours."""
    if layout.per_node % gpus and gpus % layout.per_node:
        return Reduction(0.0, 2 * (gpus - 1) / gpus)
    here = min(gpus, layout.per_node)
    nodes = gpus // here
    return Reduction(2 * (here - 1) / here, 2 * (nodes - 1) / nodes / here)


def reduction_seconds(
    one: Reduction, tokens: FloatArray | IntArray, bytes_each: float, gpu: Hardware
) -> FloatArray:
    """Time of an all-reduce, ``[steps]``; its stages follow one another.

    Args:
        tokens: of each group, ``[steps]``.
    """
    seconds = one.inside / gpu.inside + one.between / gpu.between
    busy = np.asarray(tokens) * (bytes_each * seconds)
    return np.asarray(busy + np.where(busy > 0, gpu.latency, 0.0))
