"""The memory plan of the recorded model, or of a chosen one; and why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.controls import MOST_GPUS
from routeprof.dashboards.panels.command_line import SOURCE, sentence, written
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from routeprof.errors import RouteprofError, UsageError
from routeprof.plan.config import READERS, family_of
from routeprof.plan.hotness import Measured, measured
from routeprof.plan.memory import GIB, Plan, Setting, Split, plan
from routeprof.plan.model import Model
from routeprof.plan.parameters import Part
from routeprof.plan.precision import precision
from routeprof.plan.recorded import (
    agrees,
    known_model,
    own_config,
    own_model,
    places,
    recorded_model,
)
from routeprof.profile import Profile
from routeprof.rank_loads import usual_ranks
from routeprof.report.plan_page import fits_text

UNKNOWN = (
    "The recorded model is not one of the known ones: choose “Model” in the dashboard, or pass the "
    "model's config.json to routeprof plan."
)
BUILT = (
    "The recorded model is of {!r:.60}, which a page does not build: use the command below, which "
    "does with transformers, or choose “Model” in the dashboard."
)

WEIGHTS: dict[Part, str] = {
    "attention": "attention_gib",
    "state": "state_weights_gib",
    "shared_experts": "shared_gib",
    "routed_experts": "routed_gib",
    "embeddings": "embeddings_gib",
    "other": "other_gib",
}
"""Columns of the parts of the weights."""

COLUMNS = [
    *"layout_attention layout_experts fits sequences weights_gib".split(),
    *WEIGHTS.values(),
    *"kv_gib state_gib held_back_gib cache_room_gib activations_gib buffers_gib".split(),
    *"spans_nodes obstacle".split(),
]


@dataclass(frozen=True)
class Planned:
    """A plan.

    Attributes:
        name: of the known model that it is of; empty where the recording's own configuration is.
        own: it is the recorded model.
        uneven: why its experts are taken to be loaded evenly; empty where they are measured.
    """

    made: Plan
    name: str
    own: bool
    uneven: str

    @property
    def best(self) -> Split | None:
        """The layout that holds the most; None where none is known to fit."""
        return next((row for row in self.made.splits if row.fits), None)

    @property
    def table(self) -> pd.DataFrame:
        """One row a layout, those first that hold the most; without columns of nothing."""
        table = pd.DataFrame([_row(row) for row in self.made.splits], columns=COLUMNS)
        unused = [WEIGHTS[part] for part, size in self.made.weights.items() if not size]
        if self.made.cache is not None and not self.made.cache.state:
            unused.append("state_gib")
        if not self.made.model.moes:
            unused += ["layout_experts", "buffers_gib"]
        return table.drop(columns=unused)


def planned(context: Context) -> Planned | str:
    """The plan of what is chosen, or one line that says why there is none."""
    gpus = gpus_of(context)
    if gpus > MOST_GPUS:
        return f"A page looks at {MOST_GPUS} GPUs at most: choose fewer, or use the command below."
    state = context.state
    asked = (gpus, state.nodes, state.model, state.memory, state.dtype, state.length, state.batch)
    return context.once(("plan", *asked), lambda: _planned(context, gpus))


def gpus_of(context: Context) -> int:
    """As chosen, else as recorded, else eight."""
    return context.state.ranks or usual_ranks(context.whole)[0]


def _planned(context: Context, gpus: int) -> Planned | str:
    state, profile = context.state, context.all_time
    name = state.model or ""
    try:
        if not name and _is_configured(context.whole):
            found, own = own_model(context.whole), True
        else:
            name = name or recorded_model(context.whole) or ""
            found, own = (known_model(name), agrees(context.whole, name)) if name else (None, False)
        if found is None:
            return _no_model(context.whole)
        loads = _loads(profile, found, name) if own else OTHER
        known = None if isinstance(loads, str) else loads
        made = plan(found, setting(state), gpus=gpus, nodes=state.nodes, measured=known)
    except RouteprofError as error:
        return sentence(error)
    uneven = "" if known else str(loads) if found.moes else "A dense model: nothing is routed."
    return Planned(made, name, own, uneven)


def _is_configured(profile: Profile) -> bool:
    """Whether the recording's own configuration can be planned without building the model."""
    told = own_config(profile)
    return told is not None and family_of(*told) in READERS


def _no_model(profile: Profile) -> str:
    told = own_config(profile)
    return UNKNOWN if told is None else BUILT.format(family_of(*told))


OTHER = (
    "Experts are taken to be loaded evenly, as the recording is of another model than the planned "
    "one."
)
PARTIAL = (
    "Experts are taken to be loaded evenly, as not every MoE layer was counted in what is selected."
)
DIFFER = (
    "Experts are taken to be loaded evenly, as the recorded MoE layers are not those of the "
    "recording's own configuration."
)


def _loads(profile: Profile, model: Model, name: str) -> Measured | str:
    """Loads of the experts, or why they are not used."""
    if not name and places(profile, model.moes) is None:
        return DIFFER
    try:
        found = measured(profile, model)
    except UsageError:  # nothing was counted
        return PARTIAL
    # A layer that was not counted would be taken for an even one.
    return found if all(counts.any() for counts in found.counts) else PARTIAL


def setting(state: ViewState) -> Setting:
    """What is planned for."""
    return Setting(
        memory=state.memory * GIB,
        length=state.length,
        batch=state.batch or 1,
        precision=precision(state.dtype),
    )


def plan_line(context: Context, found: Planned | str) -> str:
    """``routeprof plan`` for what is shown."""
    state = context.state
    loads = isinstance(found, Planned) and not found.uneven
    name = found.name if isinstance(found, Planned) else state.model
    if not name and own_config(context.whole) is not None:
        # Without its loads the command does not have the recording's configuration, either.
        loads = loads or isinstance(found, str)
        name = "" if loads else "CONFIG_JSON"
    else:
        name = name or recorded_model(context.whole) or "CONFIG_JSON"
    return written(
        f"routeprof plan {name}".strip(),
        {
            "gpus": gpus_of(context),
            "nodes": state.nodes if state.nodes > 1 else None,
            "gpu-memory": f"{state.memory}GiB",
            "dtype": state.dtype,
            "length": state.length,
            "batch": state.batch,
            "recording": SOURCE if loads else None,
            "phase": state.phase if loads else None,
            "tag": state.tag if loads else None,
        },
    )


def _row(one: Split) -> tuple[object, ...]:
    attention, experts = str(one.layout).split(", ")
    return (
        attention,
        experts,
        "–" if one.fits is None else fits_text(one),
        float("nan") if one.sequences is None else one.sequences,
        _gib(one.weights_bytes),
        *(_gib(one.weights[part]) for part in WEIGHTS),
        _gib(one.kv),
        _gib(one.state),
        _gib(one.held_back),
        _gib(one.free),
        _gib(one.activations),
        _gib(one.dispatch + one.combine),
        "yes" if one.spans_nodes else "no",
        one.why or None,
    )


def _gib(size: float) -> float:
    return size / GIB


def sequences_text(number: int | None) -> str:
    """How many sequences; a dash where it is not known."""
    return formats.NOTHING if number is None or isnan(number) else f"{number:,}"
