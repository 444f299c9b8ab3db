"""Rule: a model that mixes layers whose cache grows with layers that keep a fixed state.

Which layers are which is the configuration's, that of the recording or one that is named. It is
judged only where the layers that route by it are those that were recorded.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

from routeprof.diagnose.finding import Finding, layer_list
from routeprof.diagnose.held import Roles, Room, roles
from routeprof.diagnose.question import Question
from routeprof.diagnose.routing import small_gemms
from routeprof.errors import UsageError
from routeprof.plan.cache import Kept, cache_bytes, kept
from routeprof.plan.config import READERS, family_of, shape_of
from routeprof.plan.precision import Precision, precision
from routeprof.plan.recorded import own_config, places
from routeprof.report.summary import size

if TYPE_CHECKING:
    from routeprof.plan.shape import Shape
    from routeprof.profile import Profile

MOST_RUNS = 8
"""Ranges of layers that a line still lists."""

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
UNTOLD = (
    "the recording does not have its model's configuration: pass --model with a config.json, a "
    "model's directory or a known name, or record anew"
)


def hybrid(question: Question) -> list[Finding] | str:
    """Layers with a fixed state beside those with keys and values, or instead of them."""
    profile = question.profile
    told = question.model or own_config(profile)
    if told is None:
        return UNTOLD
    try:
        shape = _shape(*told)
    except UsageError as error:
        return str(error)
    found, at = roles(shape), places(profile, shape.moes)
    if at is None:
        return (
            [_other(profile, found, told[1])] if found.state else _differ(profile, found, told[1])
        )
    return [_finding(question, shape, found, at)] if found.state else []


def _shape(values: dict[str, object], name: str) -> Shape:
    """As `shape_of`, which says what to do where the family is another."""
    family = family_of(values, name)
    if family not in READERS:
        raise UsageError(
            f"{name} is of {family!r:.60}, which is read with transformers alone: see the memory "
            "plan (routeprof plan)"
        )
    return shape_of(values, name)


# -- a configuration that is not of the recorded layers


def _other(profile: Profile, found: Roles, name: str) -> Finding:
    return Finding(
        "hybrid",
        "warning",
        f"{_differ(profile, found, name)}: which of the recorded layers hold what is not known",
        "pass --model with the configuration of the recorded model",
    )


def _differ(profile: Profile, found: Roles, name: str) -> str:
    recorded = layer_list(layer.index for layer in profile.info.layers if layer.kind == "moe")
    routes = f"layers {layer_list(found.routes)} route" if found.routes else "none routes"
    return f"MoE layers {recorded} were recorded, and by {name} {routes}, or with other experts"


# -- a hybrid


def _finding(question: Question, shape: Shape, found: Roles, at: dict[int, int]) -> Finding:
    types = precision(DTYPES.get(question.profile.info.model.dtype, "bf16"))
    holds = kept(shape)
    thousand = cache_bytes(holds, 1000, types)
    evidence = (
        f"{_layers(found)}; of a sequence, 1,000 tokens take {size(thousand.kv)} of keys and "
        f"values ({types.cache}), and the state {size(thousand.state)} whatever the length "
        f"({_state_types(holds, types)})"
    )
    room = Room(found, holds, types)
    return Finding(
        "hybrid",
        "info",
        evidence,
        _suggestion(question, found),
        tuple(sorted(at[one] for one in found.both)),
        figures={
            "layers": found.count,
            "routing_layers": layer_list(found.routes),
            "kv_layers": layer_list(found.kv),
            "state_layers": layer_list(found.state),
            "routing_state_layers": layer_list(found.both),
            "kv_bytes_per_1000_tokens": thousand.kv,
            "state_bytes": thousand.state,
            **room.figures,
        },
        gain=room.text,
    )


def _layers(found: Roles) -> str:
    all_layers, routes = f"{found.count} layers", len(found.routes)
    if routes == found.count:
        parts = [f"all {all_layers} route"]
    else:
        does = "routes" if routes == 1 else "route"
        parts = [f"{routes} of {all_layers} {does} ({where(found.routes)})"]
    parts += [
        _some(found.kv, found, "hold keys and values", "holds keys and values"),
        _some(found.state, found, "hold a fixed state", "holds a fixed state"),
    ]
    if found.both == found.state:
        parts.append("those with a state all route")
    elif found.both == found.routes:
        parts.append("those that route all hold a state")
    else:
        parts.append(_some(found.both, found, "route and hold a state", "routes and holds a state"))
    return ", ".join(parts)


def _some(layers: Collection[int], found: Roles, many: str, one: str) -> str:
    """So many of the layers do something, and which."""
    if not layers:
        return f"none {one}"
    if len(layers) == found.count:
        return f"all {many}"
    return f"{len(layers)} {one if len(layers) == 1 else many} ({where(layers)})"


def where(layers: Collection[int]) -> str:
    """Which layers, in few words; ``figures`` has all of them.

    >>> where(range(1, 32, 2)), where([0, 1, 2, 5, 6])
    ('1 to 31 in steps of 2', '0–2, 5–6')
    """
    order = sorted(layers)
    steps = {after - before for before, after in pairwise(order)}
    if len(order) > 4 and len(steps) == 1 and steps != {1}:
        return f"{order[0]} to {order[-1]} in steps of {steps.pop()}"
    runs = layer_list(order).split(", ")
    return ", ".join(runs if len(runs) <= MOST_RUNS else [*runs[: MOST_RUNS - 2], "…", runs[-1]])


def _state_types(holds: Collection[Kept], types: Precision) -> str:
    """Data types of what the state is made of."""
    kinds = {one.kind for one in holds}
    told = [types.state] if "recurrent" in kinds else []
    return " and ".join(dict.fromkeys([*told, *([types.small] if "plain" in kinds else [])]))


def _suggestion(question: Question, found: Roles) -> str:
    grows = "the cache does not grow with the length"
    if found.kv:
        grows = f"the cache grows in {len(found.kv)} of {found.count} layers only"
    small = any(small_gemms(question.profile, question.limits))
    use = ", and use the room for the larger batch that the small GEMMs of decode ask for"
    return f"{grows}: size the batch by it (routeprof plan){use if small else ''}"
