"""Which model a recording is of: by its own configuration, or by what it says of the shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from routeprof.placements import placed
from routeprof.plan.known import known_facts, known_names
from routeprof.plan.model import Model, load_model, model_of
from routeprof.plan.shape import Moe
from routeprof.tables import moe_layers
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

OWN = "the recording's configuration"
UNNAMED = "the recorded model"


def own_config(profile: Profile) -> tuple[dict[str, Any], str] | None:
    """As ``read_config``, of what the recording itself says; None where it does not."""
    config = profile.info.model.config
    return None if config is None else (config, OWN)


def own_model(profile: Profile) -> Model | None:
    """The model by the recording's own configuration; None where it has none.

    Raises:
        UsageError: the configuration says too little.
        MissingExtraError: the family is not known and transformers is not installed.
    """
    told = own_config(profile)
    if told is None:
        return None
    return replace(model_of(*told), name=profile.info.model.name or UNNAMED)


def places(profile: Profile, moes: Iterable[tuple[int, Moe]]) -> dict[int, int] | None:
    """For each MoE layer of a model, the recording's index of it.

    Experts and top-k of every layer must agree, and its number, unless the recording numbers its
    MoE layers anew, as it does where their numbers in the model are not unique.

    Returns:
        None where the recording has other MoE layers than the model.
    """
    recorded = [layer for _, layer in moe_layers(profile)]
    wanted = [(at, moe.experts, moe.top_k) for at, moe in moes]
    found = [(layer.index, placed(layer), layer.top_k) for layer in recorded]
    first = 0 if all(map(_has_own_number, recorded)) else 1
    if [one[first:] for one in found] != [one[first:] for one in wanted]:
        return None
    return {at: layer.index for (at, *_), layer in zip(wanted, recorded, strict=True)}


def _has_own_number(layer: Layer) -> bool:
    return [part for part in layer.name.split(".") if part.isdigit()] == [str(layer.index)]


@cache
def known_model(name: str) -> Model:
    """A known model; as ``load_model``, read once."""
    return load_model(name)


def recorded_model(profile: Profile) -> str | None:
    """Short name of the known model that a recording is of; None where there is no such.

    Family, hidden size, and experts and top-k of every MoE layer must agree, and the width of an
    expert where it was recorded. A name alone says too little: cut-down models keep theirs. Of
    several that agree it is the one of that name, else the first, which has the same shape.
    """
    if not moe_layers(profile):
        return None
    agreeing = [name for name in known_names() if agrees(profile, name)]
    called = profile.info.model.name.lower().rstrip("/").rsplit("/", 1)[-1]
    same = [name for name in agreeing if called in (name, _full_name(name))]
    return next(iter([*same, *agreeing]), None)


def agrees(profile: Profile, name: str) -> bool:
    """Whether a recording can be of a known model, see ``recorded_model``."""
    facts, info = known_facts(name), profile.info.model
    if facts is None or info.hidden_size is None:
        return False
    model = known_model(name)
    if info.model_type not in (facts["config"]["model_type"], model.family):
        return False
    layers = [layer for _, layer in moe_layers(profile)]
    moes = [moe for _, moe in model.moes]
    return (
        info.hidden_size == model.hidden
        and [placed(layer) for layer in layers] == [moe.experts for moe in moes]
        and [layer.top_k for layer in layers] == [moe.top_k for moe in moes]
        and info.expert_width in (None, *{moe.width for moe in moes})
    )


def _full_name(name: str) -> str:
    facts = known_facts(name)
    return "" if facts is None else str(facts["name"]).lower().rsplit("/", 1)[-1]
