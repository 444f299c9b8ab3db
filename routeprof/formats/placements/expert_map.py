"""A placement of experts in slots, of all MoE layers of a model: what every file says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray, require_positive, require_shape


@dataclass(frozen=True)
class Deployment:
    """The model and the GPUs that a placement is for.

    Attributes:
        layers: numbers in the model of its MoE layers, ascending.
        experts: of every MoE layer; shared and zero experts have no place.
        gpus: of the expert-parallel group.
        model_layers: layers of the model, dense ones too.
    """

    layers: tuple[int, ...]
    experts: int
    gpus: int
    model_layers: int

    def __post_init__(self) -> None:
        require_positive(layers=len(self.layers), experts=self.experts, gpus=self.gpus)
        if sorted(set(self.layers)) != list(self.layers) or self.layers[0] < 0:
            raise UsageError("layers are not in order: pass their numbers in the model, ascending")
        if self.model_layers <= self.layers[-1]:
            raise UsageError(
                f"layer {self.layers[-1]} of a model of {self.model_layers} layers: pass the "
                f"number of all its layers"
            )


@dataclass(frozen=True)
class ExpertMap:
    """The expert in every slot of every MoE layer.

    Slots are dealt to GPUs in order, as many to each.

    Attributes:
        deployment: what it is for.
        slots: int64 ``[layers, slots]``, an engine's ``physical_to_logical_map``.

    Raises:
        UsageError: an expert without a slot, a slot that names no expert, or slots that the GPUs
            do not divide.
    """

    deployment: Deployment
    slots: IntArray

    def __post_init__(self) -> None:
        layers, slots = len(self.deployment.layers), self.slots.shape[-1]
        require_shape("slots", self.slots.shape, (layers, slots), "layers", (layers,))
        if not slots or slots % self.deployment.gpus:
            raise UsageError(
                f"{slots} slots on {self.deployment.gpus} GPUs: engines want as many on each"
            )
        outside = (self.slots < 0) | (self.slots >= self.deployment.experts)
        if outside.any():
            layer, slot = np.argwhere(outside)[0]
            raise UsageError(
                f"layer {self.deployment.layers[layer]} has expert {self.slots[layer, slot]} in "
                f"slot {slot}: the model has experts 0 to {self.deployment.experts - 1}"
            )
        if not self.replicas.all():
            layer, expert = np.argwhere(self.replicas == 0)[0]
            raise UsageError(
                f"expert {expert} of layer {self.deployment.layers[layer]} has no slot: every "
                f"expert needs one"
            )

    @property
    def replicas(self) -> IntArray:
        """Slots of every expert, int64 ``[layers, experts]``: EPLB's ``logcnt``."""
        experts = self.deployment.experts
        return np.stack([np.bincount(row, minlength=experts) for row in self.slots])

    @property
    def slots_of_experts(self) -> IntArray:
        """Slots that hold each expert, ascending, -1 where there are no more: EPLB's ``log2phy``.

        Returns:
            int64 ``[layers, experts, most replicas of any expert]``.
        """
        replicas = self.replicas
        found = np.full((*replicas.shape, replicas.max()), -1, dtype=np.int64)
        order = np.argsort(self.slots, axis=1, kind="stable")
        experts = np.take_along_axis(self.slots, order, axis=1)
        before = np.cumsum(replicas, axis=1) - replicas
        number = np.arange(order.shape[1]) - np.take_along_axis(before, experts, axis=1)
        found[np.arange(len(order))[:, np.newaxis], experts, number] = order
        return found

    @property
    def by_gpu(self) -> IntArray:
        """The slots of every GPU, int64 ``[layers, gpus, slots of one]``."""
        return self.slots.reshape(len(self.slots), self.deployment.gpus, -1)

    @property
    def of_all_layers(self) -> IntArray:
        """A row for every layer of the model, dense ones in order, ``[model_layers, slots]``."""
        row = in_order(self.deployment.experts, self.slots.shape[1])
        rows = np.tile(row, (self.deployment.model_layers, 1))
        rows[list(self.deployment.layers)] = self.slots
        return rows

    def repeated(self) -> tuple[int, int, int] | None:
        """A layer's number, a GPU and an expert that is on it twice; None where there is none."""
        held = np.sort(self.by_gpu, axis=2)
        twice = np.argwhere(held[:, :, 1:] == held[:, :, :-1])
        if not len(twice):
            return None
        layer, gpu, place = twice[0]
        return self.deployment.layers[layer], int(gpu), int(held[layer, gpu, place])


def in_order(experts: int, slots: int) -> IntArray:
    """What engines start with: expert i in slot i, and from the first on again, ``[slots]``."""
    return np.arange(slots, dtype=np.int64) % experts
