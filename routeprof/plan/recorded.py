"""Which known model a recording is of, by what it says of the model's shape."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from routeprof.placements import placed
from routeprof.plan.known import known_facts, known_names
from routeprof.plan.model import Model, load_model
from routeprof.tables import moe_layers

if TYPE_CHECKING:
    from routeprof.profile import Profile


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
