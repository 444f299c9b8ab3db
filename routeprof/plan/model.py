"""A model as the plan needs it, whether its family is known or transformers had to build it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from routeprof.plan.cache import Kept, kept
from routeprof.plan.config import READERS, family_of, read_config, shape_of, text_part
from routeprof.plan.parameters import Weight, active, weights
from routeprof.plan.shape import Moe, Shape


@dataclass(frozen=True)
class Model:
    """What a plan is made of.

    Attributes:
        name: as the user called it.
        family: transformers' model type.
        moes: index and experts of each MoE layer.
        kept: what is kept of a sequence; None where that is not known.
        shape: layer by layer, where the family is known.
        config: text of the config.json that transformers builds it from, where it is not.
        notes: what the plan leaves out or could not tell.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    weights: tuple[Weight, ...]
    kept: tuple[Kept, ...] | None
    moes: tuple[tuple[int, Moe], ...]
    shape: Shape | None = None
    config: str = ""
    notes: tuple[str, ...] = ()

    @property
    def experts(self) -> int:
        """Routed experts of the layer that has the fewest; 1 for a dense model."""
        return min((moe.experts for _, moe in self.moes), default=1)

    @property
    def active(self) -> int | None:
        """Numbers that one token meets; None where a layer's experts were not told apart."""
        routed = {weight.layer for weight in self.weights if weight.experts}
        return active(self.weights) if all(at in routed for at, _ in self.moes) else None


def load_model(source: str) -> Model:
    """The model of a config.json, of a directory that holds one, or of a known name.

    Raises:
        UsageError: there is none, or it says too little.
        MissingExtraError: the family is not known and transformers is not installed.
    """
    config, where = read_config(source)
    return model_of(config, where)


def model_of(config: Mapping[str, Any], name: str = "config.json") -> Model:
    """The model of a config.json's values; raises as ``load_model``."""
    if family_of(config, name) not in READERS:
        from routeprof.plan.meta import model_on_meta

        return model_on_meta(text_part(config)[0], name)
    return model_of_shape(shape_of(config, name), name)


def model_of_shape(shape: Shape, name: str) -> Model:
    """The model of a known shape."""
    return Model(
        name=name,
        family=shape.family,
        hidden=shape.hidden,
        vocab=shape.vocab,
        weights=weights(shape),
        kept=kept(shape),
        moes=shape.moes,
        shape=shape,
        notes=shape.notes,
    )
