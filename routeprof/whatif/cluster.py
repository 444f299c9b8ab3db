"""The GPUs that experts are placed on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray, require_positive


@dataclass(frozen=True)
class Cluster:
    """GPUs, the slots that each has for experts of one layer, and the nodes they stand in.

    Slots are numbered GPU by GPU; GPUs are dealt to nodes in order, as many to each.

    Attributes:
        capacity: slots of each GPU.
        speed: of each GPU, in any unit: half the speed takes twice the time for the same load.
        nodes: number of nodes.
    """

    capacity: tuple[int, ...]
    speed: tuple[float, ...]
    nodes: int = 1

    def __post_init__(self) -> None:
        require_positive(gpus=len(self.capacity), nodes=self.nodes)
        if len(self.speed) != len(self.capacity):
            raise UsageError(
                f"{len(self.speed)} speeds for {len(self.capacity)} GPUs: pass one for each GPU"
            )
        if min(self.capacity) < 1:
            raise UsageError("a GPU has no slot: leave it out, or give it 1 slot or more")
        if not all(0 < speed < float("inf") for speed in self.speed):
            raise UsageError("a GPU's speed is not positive: pass numbers above 0")
        if len(self.capacity) % self.nodes:
            raise UsageError(
                f"{len(self.capacity)} GPUs on {self.nodes} nodes: pass a number of nodes that "
                f"divides the GPUs"
            )

    @classmethod
    def even(cls, gpus: int, slots: int, nodes: int = 1) -> Cluster:
        """Equal GPUs that share the slots, as EPLB supposes.

        Raises:
            UsageError: the GPUs do not divide the slots, or the nodes the GPUs.
        """
        require_positive(gpus=gpus, slots=slots)
        if slots % gpus:
            raise UsageError(
                f"{slots} slots on {gpus} equal GPUs: pass a multiple of {gpus} slots, or the "
                f"capacity of each GPU"
            )
        return cls((slots // gpus,) * gpus, (1.0,) * gpus, nodes)

    @property
    def gpus(self) -> int:
        return len(self.capacity)

    @property
    def slots(self) -> int:
        return sum(self.capacity)

    @property
    def is_even(self) -> bool:
        """All GPUs alike, which is what EPLB can place on."""
        return len(set(self.capacity)) == 1 and len(set(self.speed)) == 1

    @cached_property
    def room(self) -> IntArray:
        """Slots of every GPU, ``[gpus]``."""
        return np.array(self.capacity, dtype=np.int64)

    @cached_property
    def pace(self) -> FloatArray:
        """Speed of every GPU, ``[gpus]``."""
        return np.array(self.speed, dtype=np.float64)

    @cached_property
    def first_slot(self) -> IntArray:
        """The first slot of every GPU, ``[gpus]``."""
        return np.cumsum(self.room) - self.room

    @cached_property
    def gpu_of_slot(self) -> IntArray:
        """``[slots]``."""
        return np.repeat(np.arange(self.gpus), self.room)

    @cached_property
    def node_of_gpu(self) -> IntArray:
        """``[gpus]``."""
        return np.arange(self.gpus) // (self.gpus // self.nodes)

    @cached_property
    def node_of_slot(self) -> IntArray:
        """``[slots]``."""
        return np.asarray(self.node_of_gpu[self.gpu_of_slot])

    def as_one_node(self) -> Cluster:
        """The same GPUs where no expert is bound to a node."""
        return Cluster(self.capacity, self.speed)
