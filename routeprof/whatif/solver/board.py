"""One layer while it is searched: which expert is in which slot, and how long each GPU takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.cluster import Cluster

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Task:
    """What one layer's placement is searched for.

    Attributes:
        rows: float64 ``[rows, experts]``, loads whose slowest GPUs' times are added up: steps, or
            typical steps with their weight multiplied in, or one row of sums.
        cluster: where to place; its nodes bind experts, so one node where groups are not kept.
        today: experts in the slots now, ``[slots]``, and ``moves`` how many may change their GPU;
            None for no bound.
        together: ``[experts, experts]``, symmetric with a diagonal of 0: what each pair that meets
            on a GPU is worth, in the unit of rows; None where traffic is not looked at.
    """

    rows: FloatArray
    cluster: Cluster
    today: IntArray | None = None
    moves: int = 0
    together: FloatArray | None = None


class Board:
    """A placement of one layer that can be changed slot by slot.

    Attributes:
        expert: the expert in every slot, ``[slots]``.
        count: replicas of every expert, ``[experts]``.
        held: replicas of every expert on every GPU, ``[gpus, experts]``.
        item: load of every slot, ``[rows, slots]``.
        time: of every GPU, load by speed, ``[rows, gpus]``.
        home: the node of every expert, ``[experts]``.
        changes: swaps so far.
        fewest, most: replicas of one expert that a GPU holds, ``[gpus]``: 0 and 1 unless it has
            more slots than there are experts for it.
    """

    def __init__(self, task: Task, expert: IntArray) -> None:
        self.task = task
        self.cluster = task.cluster
        experts = task.rows.shape[1] // task.cluster.nodes
        self.fewest = self.cluster.room // experts
        self.most = -(-self.cluster.room // experts)
        self.crowded = bool(self.fewest.any())
        self.held_today = None if task.today is None else self._held(task.today)
        self.home = np.empty(task.rows.shape[1], dtype=np.int64)
        self.home[expert] = task.cluster.node_of_slot
        self.expert = expert.copy()
        self.changes = 0
        self.refresh()

    def refresh(self) -> None:
        """Count everything anew from ``expert``."""
        self.count = np.bincount(self.expert, minlength=self.task.rows.shape[1])
        self.held = self._held(self.expert)
        self.item = (self.task.rows / self.count)[:, self.expert]
        load = np.add.reduceat(self.item, self.cluster.first_slot, axis=1)
        self.time = load / self.cluster.pace

    def restore(self, expert: IntArray) -> None:
        """Go back to an earlier placement."""
        self.expert[:] = expert
        self.refresh()

    def swap(self, one: npt.ArrayLike, other: npt.ArrayLike) -> None:
        """Exchange what is in two slots, or in as many pairs of slots; replica numbers stay."""
        first, second = np.atleast_1d(one), np.atleast_1d(other)
        ours, theirs = self.cluster.gpu_of_slot[first], self.cluster.gpu_of_slot[second]
        for moving, old, new in ((first, ours, theirs), (second, theirs, ours)):
            np.add.at(self.held, (old, self.expert[moving]), -1)
            np.add.at(self.held, (new, self.expert[moving]), 1)
        self.changes += 1
        both, turned = np.concatenate((first, second)), np.concatenate((second, first))
        self.expert[both] = self.expert[turned]
        self.item[:, both] = self.item[:, turned]
        for gpu in (ours[0], theirs[0]):
            start = self.cluster.first_slot[gpu]
            load = self.item[:, start : start + self.cluster.room[gpu]].sum(axis=1)
            self.time[:, gpu] = load / self.cluster.pace[gpu]

    def put(self, slot: int, expert: int) -> None:
        """Another expert in a slot; the load of the others changes with the replica numbers."""
        self.expert[slot] = expert
        self.refresh()

    def slots_of(self, gpu: int) -> IntArray:
        start = self.cluster.first_slot[gpu]
        return np.arange(start, start + self.cluster.room[gpu])

    @property
    def score(self) -> float:
        """Time of the slowest GPU, added up over the rows, less what traffic saves."""
        slowest = float(self.time.max(axis=1).sum())
        return slowest if self.task.together is None else slowest - self.saved()

    def saved(self) -> float:
        """Σ over pairs of ``together`` · the share of their tokens that meet on a GPU."""
        assert self.task.together is not None
        presence = self.held / self.count
        return float(np.einsum("ge,ef,gf->", presence, self.task.together, presence)) / 2

    @property
    def moved(self) -> int:
        """Experts on GPUs that do not hold them today."""
        if self.held_today is None:
            return 0
        return int(np.maximum(self.held - self.held_today, 0).sum())

    def _held(self, expert: IntArray) -> IntArray:
        held = np.zeros((self.cluster.gpus, self.task.rows.shape[1]), dtype=np.int64)
        np.add.at(held, (self.cluster.gpu_of_slot, expert), 1)
        return held
