"""How a number of GPUs can share attention and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray, require_positive


@dataclass(frozen=True)
class Layout:
    """A split of the same GPUs twice: once for attention, once for the experts.

    GPUs are numbered node by node. Neighbours share an attention replica, and an expert.

    Attributes:
        tp: GPUs that share the attention of one data-parallel replica.
        dp: data-parallel replicas, each with its own tokens; tp · dp GPUs.
        ep: expert-parallel ranks, each with its own experts.
        etp: GPUs that each hold a part of every expert of a rank; ep · etp GPUs.
        nodes: that the GPUs stand in, as many in each.
    """

    tp: int
    dp: int
    ep: int
    etp: int
    nodes: int = 1

    def __post_init__(self) -> None:
        require_positive(tp=self.tp, dp=self.dp, ep=self.ep, etp=self.etp, nodes=self.nodes)
        if self.tp * self.dp != self.ep * self.etp:
            raise UsageError(
                f"attention on {self.tp} x {self.dp} GPUs, experts on {self.ep} x {self.etp}: "
                f"pass products that agree"
            )
        if self.gpus % self.nodes:
            raise UsageError(
                f"{self.gpus} GPUs on {self.nodes} nodes: pass a number of nodes that divides "
                f"the GPUs"
            )

    def __str__(self) -> str:
        attention = f"TP {self.tp}" + (f" x DP {self.dp}" if self.dp > 1 else "")
        experts = f"EP {self.ep}" + (f" x TP {self.etp}" if self.etp > 1 else "")
        return f"{attention}, {experts}"

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def is_replicated(self) -> bool:
        """After attention every GPU holds all tokens: there is nothing to dispatch."""
        return self.dp == 1

    def node_of(self, gpu: IntArray) -> IntArray:
        """The node of each GPU, same shape."""
        return np.asarray(gpu // self.per_node)


def layouts(gpus: int, experts: int, nodes: int = 1) -> Iterator[Layout]:
    """Every split of the GPUs that gives each expert-parallel rank an expert, and 1 rank too.

    Raises:
        UsageError: numbers below 1, or nodes that do not divide the GPUs.
    """
    require_positive(gpus=gpus, experts=experts, nodes=nodes)
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    for ep in divisors:
        for dp in divisors:
            if ep <= experts:
                yield Layout(gpus // dp, dp, ep, gpus // ep, nodes)
