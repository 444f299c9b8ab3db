"""What a layout makes of the steps of one layer, added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Literal, get_args

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.metrics.gemm import TILE_TOKENS
from routeprof.metrics.ranks import contiguous, rank_of_slot, sums_of_ranks
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.cost import (
    Sizes,
    exchange_seconds,
    expert_seconds,
    reduction,
    reduction_seconds,
)
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.hardware import Hardware
from routeprof.whatif.layer_runs import LayerRun
from routeprof.whatif.layout import Layout
from routeprof.whatif.placement import place
from routeprof.whatif.traffic import dispatch_flows, executed_slots, homes, reached, slot_loads

Placing = Literal["contiguous", "eplb", "routeprof"]
PLACINGS: tuple[Placing, ...] = get_args(Placing)


@dataclass(frozen=True)
class Setting:
    """What all layouts have in common.

    Attributes:
        placing: experts in order, or placed by EPLB or by `place` on the first half of the steps;
            predictions are then of the second half.
        redundant: slots for replicas; rounded up to what the ranks of a layout share evenly.
        relay: see `traffic.dispatch`.
    """

    sizes: Sizes
    gpu: Hardware
    placing: Placing = "contiguous"
    redundant: int = 0
    relay: bool = False

    def __post_init__(self) -> None:
        if self.placing not in PLACINGS:
            raise UsageError(f"placement {self.placing!r} is not one of {', '.join(PLACINGS)}")
        if self.redundant < 0 or (self.redundant and self.placing == "contiguous"):
            raise UsageError(
                f"{self.redundant} redundant slots: pass 0, or placement eplb or routeprof"
            )


@dataclass(frozen=True)
class Sums:
    """Sums over the steps of a layer, or of several; NaN where the recording cannot say.

    Attributes:
        slowest, mean: loads of the slowest and the mean rank.
        gemms: (expert, step) pairs with tokens; small: of these, with fewer than 16.
        ranks, nodes: (token, rank) and (token, node) pairs that meet.
        dispatch_inside … combine_between: bytes.
        attention … combine: seconds.
        slots: on the fullest rank.
    """

    slowest: float
    mean: float
    assignments: float
    gemms: float
    small: float
    tokens: float
    ranks: float
    nodes: float
    dispatch_inside: float
    dispatch_between: float
    combine_inside: float
    combine_between: float
    attention: float
    dispatch: float
    experts: float
    combine: float
    slots: float

    @classmethod
    def nothing(cls) -> Sums:
        return cls(*[0.0] * len(fields(cls)))

    def plus(self, other: Sums) -> Sums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(one + more for one, more in pairs))


def sums_of_layer(
    run: LayerRun, fit: LayerRun | None, layouts: Sequence[Layout], setting: Setting
) -> Iterator[tuple[Layout, Sums]]:
    """What each layout makes of a layer's steps.

    Args:
        fit: the steps to place experts by; None for experts in order.
    """
    served: dict[int, _Served] = {}
    for layout in layouts:
        if layout.ep not in served:
            served[layout.ep] = _served(run, _slots(run, fit, layout.ep, setting), layout.ep)
        yield layout, _sums(run, served[layout.ep], layout, setting)


# -- where assignments are served


@dataclass(frozen=True)
class _Served:
    """A layer's assignments with its experts on so many ranks.

    Attributes:
        rank_of_slot: ascending, ``[slots]``.
        loads: ``[steps, slots]``.
        ranks: of each assignment ``[tokens, k]``, -1 for none; None where tokens are not known.
    """

    rank_of_slot: IntArray
    loads: FloatArray
    ranks: IntArray | None


def _slots(run: LayerRun, fit: LayerRun | None, ep: int, setting: Setting) -> IntArray:
    """The expert in every slot, ``[slots]``."""
    if fit is None or ep == 1:
        return contiguous(run.experts, ep)
    slots = -(-(run.experts + setting.redundant) // ep) * ep
    loads = fit.counts[:, np.newaxis, :]
    if setting.placing == "eplb":
        return np.asarray(rebalance_experts(loads.sum(axis=0), slots, 1, 1, ep)[0][0])
    return np.asarray(place(loads, Cluster.even(ep, slots)).slots[0])


def _served(run: LayerRun, slots: IntArray, ep: int) -> _Served:
    rank = rank_of_slot(len(slots), ep)
    if run.ids is None or run.step is None:
        share = run.counts / np.bincount(slots, minlength=run.experts)
        return _Served(rank, share[:, slots], None)
    executed = executed_slots(run.ids, run.step, slots)
    loads = slot_loads(executed, run.step, len(slots), run.steps).astype(np.float64)
    return _Served(rank, loads, np.where(executed >= 0, rank[executed], -1))


# -- what that makes


@dataclass(frozen=True)
class _Way:
    """Bytes to GPUs of the same node and of others, and seconds; all steps together."""

    inside: float
    between: float
    seconds: float


_UNKNOWN, _NOTHING = _Way(nan, nan, nan), _Way(0.0, 0.0, 0.0)


def _sums(run: LayerRun, served: _Served, layout: Layout, setting: Setting) -> Sums:
    loads = sums_of_ranks(served.loads, served.rank_of_slot, layout.ep)
    busy = served.loads > 0
    home = _homes(run, layout)
    there, back = _ways(run, served, home, layout, setting)
    ranks, nodes = _fan_out(served, layout)
    sizes, gpu = setting.sizes, setting.gpu
    experts = expert_seconds(served.loads, served.rank_of_slot, layout, sizes, gpu)
    attention = reduction_seconds(
        reduction(layout, layout.tp),
        _largest_replica(run, home, layout),
        sizes.hidden * sizes.combine,
        gpu,
    )
    return Sums(
        slowest=float(loads.max(axis=1).sum()),
        mean=float(loads.mean(axis=1).sum()),
        assignments=float(loads.sum()),
        gemms=float(busy.sum()),
        small=float((busy & (served.loads < TILE_TOKENS)).sum()),
        tokens=float(run.tokens.sum()),
        ranks=ranks,
        nodes=nodes,
        dispatch_inside=there.inside,
        dispatch_between=there.between,
        combine_inside=back.inside,
        combine_between=back.between,
        attention=float(attention.sum()),
        dispatch=there.seconds,
        experts=float(experts.sum()),
        combine=back.seconds,
        slots=float(np.bincount(served.rank_of_slot).max()),
    )


def _homes(run: LayerRun, layout: Layout) -> IntArray | None:
    if run.step is None or run.request is None or layout.is_replicated:
        return None
    return homes(layout, run.step, run.request)


def _largest_replica(run: LayerRun, home: IntArray | None, layout: Layout) -> IntArray:
    """Tokens of the fullest attention replica, ``[steps]``; shared evenly where not known."""
    if home is None or run.step is None:
        return np.asarray(-(-run.tokens // layout.dp))
    cells = run.step * layout.dp + home // layout.tp
    tokens = np.bincount(cells, minlength=run.steps * layout.dp)
    return np.asarray(tokens.reshape(run.steps, layout.dp).max(axis=1, initial=0))


def _ways(
    run: LayerRun, served: _Served, home: IntArray | None, layout: Layout, setting: Setting
) -> tuple[_Way, _Way]:
    """Dispatch and combine."""
    sizes, gpu = setting.sizes, setting.gpu
    there, back = sizes.hidden * sizes.dispatch, sizes.hidden * sizes.combine
    if layout.is_replicated:
        return _NOTHING, _reduced(run, layout, back, gpu)
    if home is None or served.ranks is None or run.step is None:
        return _UNKNOWN, _UNKNOWN
    moved = dispatch_flows(layout, served.ranks, home, run.step, run.steps, relay=setting.relay)
    inside, between = float(moved.sent_inside.sum()), float(moved.sent_between.sum())
    ways = [
        _Way(inside * size, between * size, float(exchange_seconds(moved, size, gpu).sum()))
        for size in (there, back)
    ]
    return ways[0], ways[1]


def _reduced(run: LayerRun, layout: Layout, bytes_each: float, gpu: Hardware) -> _Way:
    """Every GPU holds a part of every token's sum: one all-reduce of all."""
    one = reduction(layout, layout.gpus)
    size = float(run.tokens.sum()) * bytes_each * layout.gpus
    seconds = reduction_seconds(one, run.tokens, bytes_each, gpu)
    return _Way(one.inside * size, one.between * size, float(seconds.sum()))


def _fan_out(served: _Served, layout: Layout) -> tuple[float, float]:
    """(token, rank) and (token, node) pairs that meet."""
    if served.ranks is None:
        return nan, nan
    row, rank = reached(served.ranks)
    meets = np.zeros((layout.ep, len(served.ranks)), dtype=bool)
    meets[rank, row] = True
    gpus = np.arange(layout.gpus)
    on_node = np.zeros((layout.nodes, layout.ep), dtype=bool)
    on_node[layout.node_of(gpus), gpus // layout.etp] = True
    return float(len(row)), float(sum(meets[there].any(axis=0).sum() for there in on_node))
