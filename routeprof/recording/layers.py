"""The layers of several ranks or recordings as one list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeprof.errors import MismatchError
from routeprof.recording.schema import RecordingInfo
from routeprof.topology import Layer


@dataclass(frozen=True)
class LayerSource:
    """Who says what there is to capture.

    Attributes:
        name: how messages call it, such as ``rank 1``.
        passes: for each layer, the module whose forward pass is its step.
    """

    name: str
    layers: tuple[Layer, ...]
    passes: tuple[str, ...]

    def pairs(self) -> list[tuple[Layer, str]]:
        """Each layer with its pass."""
        missing = ("",) * (len(self.layers) - len(self.passes))
        return list(zip(self.layers, self.passes + missing, strict=False))

    def by_index(self) -> dict[int, str]:
        """Pass of each layer, by the layer's index."""
        return {layer.index: name for layer, name in self.pairs()}


def union(sources: Iterable[LayerSource]) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """All layers with their passes; those of the first source in its order if it names them all.

    A layer that one source could not hook and another could is the hooked one.

    Raises:
        MismatchError: two sources have different layers under the same index.
    """
    first, *others = sources
    layers = {layer.index: layer for layer in first.layers}
    passes, holders = first.by_index(), dict.fromkeys(layers, first.name)
    for source in others:
        for layer, name in source.pairs():
            index = layer.index
            known = layers.get(index)
            if known is None or (known.unsupported and not layer.unsupported):
                layers[index], passes[index], holders[index] = layer, name, source.name
            elif not layer.unsupported:
                layers[index] = _both(known, layer, holders[index], source.name)
    if len(layers) == len(first.layers):
        indices = [layer.index for layer in first.layers]
    else:
        indices = sorted(layers)
    return tuple(layers[index] for index in indices), tuple(passes[index] for index in indices)


def _both(one: Layer, other: Layer, holder: str, source: str) -> Layer:
    """One layer as two sources see it; what holds for the numbers of either holds for the sum."""
    if (one.kind, one.experts, one.top_k) != (other.kind, other.experts, other.top_k):
        raise MismatchError(
            f"layer {one.index} is {_size(one)} in {holder} and {_size(other)} in {source}: "
            "these are different models; load them apart"
        )
    return replace(
        one,
        drops=one.drops or other.drops,
        executed=one.executed and other.executed,
        sees_all_tokens=one.sees_all_tokens and other.sees_all_tokens,
    )


def _size(layer: Layer) -> str:
    if layer.kind == "dense":
        return "dense"
    return f"of {layer.experts} experts, top-{'unknown' if layer.top_k is None else layer.top_k},"


def layer_places(layers: pa.Array, info: RecordingInfo) -> NDArray[np.int64]:
    """Positions in ``info.layers`` of layers by their index, which must occur there."""
    indices = np.array([layer.index for layer in info.layers], dtype=np.int64)
    order = np.argsort(indices)
    own = layers.to_numpy(zero_copy_only=False)
    return np.asarray(order[np.searchsorted(indices[order], own)], dtype=np.int64)
