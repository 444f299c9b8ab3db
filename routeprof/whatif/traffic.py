"""Where tokens travel when experts stand on several GPUs: dispatch, counted token by token.

A token goes once to each GPU that holds an expert it chose, as DeepEP's kernels send it, and never
to the GPU that it is on already. Combine is the same way back.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray, id_array, int_array, require_shape
from routeprof.whatif.layout import Layout

MOST_SENDS = 4_000_000
"""That are held in memory at a time."""


@dataclass(frozen=True)
class Sends:
    """Tokens on their way, one entry for each time that a token crosses from GPU to GPU.

    Attributes:
        step: number of the step, ``[sends]``.
        source, target: GPUs, ``[sends]``.
    """

    step: IntArray
    source: IntArray
    target: IntArray


def executed_slots(ids: npt.ArrayLike, step: npt.ArrayLike, slots: npt.ArrayLike) -> IntArray:
    """The slot that serves each assignment; replicas of an expert take turns within a step.

    Args:
        ids: expert ids ``[tokens, k]``.
        step: of each token, ``[tokens]``.
        slots: expert in every slot, ``[slots]``.

    Returns:
        int64 ``[tokens, k]``; -1 where an id names no expert that has a slot: invalid ids, and zero
        experts, which do no work.

    Raises:
        UsageError: shapes that do not fit.

    >>> executed_slots([[0], [0], [1]], step=[0, 0, 0], slots=[0, 1, 0]).tolist()
    [[0], [2], [1]]
    """
    placed = int_array(slots, "slots", minimum_axes=1)
    chosen = id_array(ids, "ids", int(placed.max()) + 1)
    steps = _per_token(step, "step", chosen)
    replicas = np.bincount(placed)
    by_expert = np.argsort(placed, kind="stable")
    first = np.cumsum(replicas) - replicas
    turn = _turns(chosen, steps, len(replicas)) % np.maximum(replicas[chosen], 1)
    there = (chosen >= 0) & (replicas[chosen] > 0)
    place = np.where(there, first[chosen] + turn, 0)
    return np.where(there, by_expert[place], -1)


def slot_loads(slot: IntArray, step: IntArray, slots: int, steps: int) -> IntArray:
    """Assignments that each slot serves in each step, ``[steps, slots]``.

    Args:
        slot: of `executed_slots`, ``[tokens, k]``.
        step: of each token, ``[tokens]``, below ``steps``.
    """
    cells = (step[:, np.newaxis] * slots + slot)[slot >= 0]
    return np.bincount(cells, minlength=steps * slots).reshape(steps, slots)


def reached(rank: IntArray) -> tuple[IntArray, IntArray]:
    """Each rank that a token reaches, once.

    Args:
        rank: of each assignment, ``[tokens, k]``; -1 for none.

    Returns:
        Tokens' rows and ranks, ``[pairs]`` each.
    """
    return _distinct(rank)


def homes(layout: Layout, step: npt.ArrayLike, request: npt.ArrayLike) -> IntArray:
    """The GPU that each token is on before dispatch, ``[tokens]``.

    Requests are dealt to the data-parallel replicas in turn; those of unknown request go by their
    row. A replica deals its tokens of a step to its GPUs in turn.

    Args:
        step, request: of each token, ``[tokens]``; requests are numbers, -1 where unknown.

    Raises:
        UsageError: shapes that do not fit.
    """
    steps = int_array(step, "step")
    requests = np.asarray(request, dtype=np.int64)
    require_shape("request", requests.shape, steps.shape, "step", steps.shape)
    rows = _running(steps)
    replica = np.where(requests >= 0, requests, rows) % layout.dp
    return np.asarray(replica * layout.tp + _running(steps * layout.dp + replica) % layout.tp)


def dispatch(
    layout: Layout,
    rank: npt.ArrayLike,
    home: npt.ArrayLike,
    step: npt.ArrayLike,
    *,
    relay: bool = False,
) -> Sends:
    """Every send of a layer's dispatch.

    Args:
        rank: expert-parallel rank of each assignment, ``[tokens, k]``; -1 for none. All GPUs of a
            rank get the token, as each holds a part of every expert.
        home, step: of each token, ``[tokens]``.
        relay: between nodes a token goes once to each node, to the GPU with the same number there,
            which passes it on, as DeepEP's kernels for large batches do.

    Raises:
        UsageError: shapes that do not fit, or a GPU that there is not.
    """
    ranks = np.asarray(rank, dtype=np.int64)
    start, steps = (_per_token(own, name, ranks) for own, name in ((home, "home"), (step, "step")))
    if start.max(initial=0) >= layout.gpus or ranks.max(initial=0) >= layout.ep:
        raise UsageError(
            f"GPU {start.max(initial=0)} or rank {ranks.max(initial=0)} is not in {layout}: pass "
            f"the same layout to homes and dispatch"
        )
    row, reach = _distinct(ranks)
    target = (reach[:, np.newaxis] * layout.etp + np.arange(layout.etp)).ravel()
    row = np.repeat(row, layout.etp)
    source = start[row]
    if relay:
        row, source, target = _relayed(layout, start, row, target)
    moves = source != target
    return Sends(steps[row[moves]], source[moves], target[moves])


@dataclass(frozen=True)
class Flows:
    """Tokens that GPUs send and receive in a node and between nodes, ``[steps, gpus]`` each."""

    sent_inside: IntArray
    sent_between: IntArray
    received_inside: IntArray
    received_between: IntArray


def flows(layout: Layout, sends: Sends, steps: int) -> Flows:
    """What every GPU sends and receives in every step."""
    between = layout.node_of(sends.source) != layout.node_of(sends.target)

    def by_gpu(gpu: IntArray, mine: npt.NDArray[np.bool_]) -> IntArray:
        cells = (sends.step * layout.gpus + gpu)[mine]
        counted = np.bincount(cells, minlength=steps * layout.gpus)
        return counted.reshape(steps, layout.gpus)

    return Flows(
        by_gpu(sends.source, ~between),
        by_gpu(sends.source, between),
        by_gpu(sends.target, ~between),
        by_gpu(sends.target, between),
    )


def dispatch_flows(
    layout: Layout, rank: IntArray, home: IntArray, step: IntArray, steps: int, *, relay: bool
) -> Flows:
    """`flows` of `dispatch`, in memory for some of the tokens at a time."""
    rows = max(1, MOST_SENDS // (min(rank.shape[1], layout.ep) * layout.etp))
    parts = [slice(first, first + rows) for first in range(0, len(rank), rows)] or [slice(0)]
    moved = [
        flows(layout, dispatch(layout, rank[part], home[part], step[part], relay=relay), steps)
        for part in parts
    ]
    return Flows(*(sum(values[1:], values[0]) for values in zip(*map(astuple, moved), strict=True)))


def traffic_matrix(layout: Layout, sends: Sends) -> IntArray:
    """Tokens sent from each GPU to each other, all steps together, ``[gpus, gpus]``."""
    cells = sends.source * layout.gpus + sends.target
    counted = np.bincount(cells, minlength=layout.gpus**2)
    return counted.reshape(layout.gpus, layout.gpus)


# -- helpers


def _per_token(values: npt.ArrayLike, name: str, ids: IntArray) -> IntArray:
    array = int_array(values, name)
    require_shape(name, array.shape, ids.shape[:1], "ids", ids.shape)
    return array


def _running(keys: IntArray) -> IntArray:
    """How many equal keys come before each, same shape."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    first = np.repeat(starts, np.diff(starts, append=len(keys)))
    running = np.empty(len(keys), dtype=np.int64)
    running[order] = np.arange(len(keys)) - first
    return running


def _turns(ids: IntArray, step: IntArray, experts: int) -> IntArray:
    """Assignments to the same expert that come before each in its step, ``[tokens, k]``."""
    keys = (step[:, np.newaxis] * (experts + 1) + ids + 1).ravel()
    return _running(keys).reshape(ids.shape)


def _distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """Rows and values of ``[rows, n]``, each value of a row once; without the negative ones."""
    ordered = np.sort(values, axis=1)
    new = ordered >= 0
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    row, column = np.nonzero(new)
    return row, ordered[row, column]


def _relayed(
    layout: Layout, start: IntArray, row: IntArray, target: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Sends with one stop at each other node."""
    home, node = start[row], layout.node_of(target)
    away = layout.node_of(home) != node
    stop = np.where(away, node * layout.per_node + home % layout.per_node, home)
    visit = np.unique(row[away] * layout.nodes + node[away])
    visitor, visited = np.divmod(visit, layout.nodes)
    first_stop = visited * layout.per_node + start[visitor] % layout.per_node
    return (
        np.concatenate((visitor, row)),
        np.concatenate((start[visitor], stop)),
        np.concatenate((first_stop, target)),
    )
