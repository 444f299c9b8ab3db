"""What the reader chooses with: phase and tag in the header, the rest on the views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from routeprof.dashboards import formats
from routeprof.dashboards.live.library import Opened
from routeprof.dashboards.state import (
    ALL,
    DTYPES,
    GAINS,
    GPUS,
    MEASURES,
    MODELS,
    MOST_RANKS,
    NOISES,
    ORDERS,
    PLACEMENTS,
    ViewState,
    control_value,
    duration,
    time_stops,
)
from routeprof.placements import recorded
from routeprof.profile import Profile
from routeprof.rank_loads import usual_ranks
from routeprof.tables import tag_name

MOST_GPUS, MOST_NODES, MOST_SEQUENCES = 64, 8, 1024
"""Offered for layouts and plans."""

MEMORIES = (24, 40, 48, 80, 96, 140, 180, 192, 256, 288)
"""GiB of common GPUs, such as H100 (80), H200 (140), B200 (180) and MI300X (192)."""

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a sequence."""


def phase_options(profile: Profile | None) -> list[dict[str, str]]:
    """Choices of the phase control."""
    phases = profile.phases if profile else ()
    return _options("All phases", phases)


def tag_options(profile: Profile | None) -> list[dict[str, str]]:
    """Choices of the tag control."""
    tags = profile.tags if profile else ()
    return _options("All tags", [tag_name(tag) for tag in tags])


def _options(everything: str, values: Sequence[str]) -> list[dict[str, str]]:
    own = [{"value": value, "label": value} for value in values]
    return [{"value": ALL, "label": everything}, *own]


def select_control(
    name: str, label: str, data: list[dict[str, str]], state: ViewState, width: int
) -> Any:
    """A control of the header."""
    return dmc.Select(
        id={"control": name},
        data=data,
        value=control_value(name, state, None),
        allowDeselect=False,
        checkIconPosition="right",
        size="xs",
        w=width,
        maxDropdownHeight=360,
        comboboxProps={"width": "max-content", "position": "bottom-start"},
        **{"aria-label": label},
    )


def control(name: str, opened: Opened, names: Sequence[str], beside: Sequence[str] = ()) -> Any:
    """A view's own control, with the value that the address asks for.

    Args:
        names: the recordings that there are.
        beside: all controls of the view.
    """
    state, profile = opened.state, opened.reading.profile
    if name in _CHOICES:
        return _choice(name, state, profile)
    if name == "factor":
        return _factor_slider(state, profile)
    if name == "against":
        others = [item for item in names if item != opened.name]
        return _select(name, "Compare with", others, state, "First other")
    if name == "expert":
        layers = profile.info.layers if profile else ()
        experts = range(max((layer.experts for layer in layers), default=0))
        return _select(name, "Expert", [str(item) for item in experts], state, "Hottest")
    if name == "ranks":
        usual = _usual_ranks(profile)
        if "gains" in beside:  # rules take no number for an example
            usual = usual if "recorded" in usual else "Not recorded"
            return _select(name, "GPUs", _counts(MOST_GPUS, state.ranks), state, usual)
        if "nodes" in beside:
            choices = _counts(MOST_GPUS, state.ranks, least=2)
            return _select(name, "GPUs", choices, state, usual)
        return _select(name, "Expert-parallel ranks", _rank_choices(profile, state), state, usual)
    if name == "redundant":
        return _select(name, "Replicas of experts", _redundant(state), state, "Not computed")
    if name == "batch" and "memory" in beside:
        choices = _counts(MOST_SEQUENCES, state.batch, least=2)
        return _select(name, "Sequences at once", choices, state, "1")
    if name == "batch":
        return _select(name, "Batch size", _batches(state), state, "Not computed")
    if name == "nodes":
        return _select(name, "Nodes", _counts(MOST_NODES, state.nodes), state)
    if name == "model":
        return _select(name, "Model", MODELS, state, "As recorded")
    if name == "memory":
        return _select(name, "GPU memory", _labelled(MEMORIES, state.memory, "GiB"), state)
    if name == "length":
        return _select(name, "Length", _labelled(LENGTHS, state.length, "tokens"), state)
    if name in _LISTS:
        return _select(name, *_LISTS[name], state)
    layers = profile.info.layers if profile else ()
    indices = [str(layer.index) for layer in layers if layer.kind == "moe"]
    return _select(name, "Layer", indices, state, "Worst")


_CHOICES: dict[str, Mapping[str, str]] = {
    "measure": MEASURES,
    "order": ORDERS,
    "placement": PLACEMENTS,
}


_LISTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "gpu": ("GPU", GPUS),
    "gains": ("Rules and gains", GAINS),
    "noise": ("Noise", NOISES),
    "dtype": ("Type of weights", DTYPES),
}


def _choice(name: str, state: ViewState, profile: Profile | None) -> Any:
    said = profile is not None and recorded(profile) is not None
    return dmc.SegmentedControl(
        id={"control": name},
        data=[
            {"value": key, "label": label}
            for key, label in _CHOICES[name].items()
            if key != "recorded" or said or state.placement == key
        ],
        value=control_value(name, state, None),
        size="xs",
    )


def _select(
    name: str,
    label: str,
    choices: Sequence[str] | Mapping[str, str],
    state: ViewState,
    usual: str | None = None,
) -> Any:
    """A list to choose from.

    Args:
        choices: values, or their labels by value.
        usual: label of what the view chooses; None where it is one of the choices.
    """
    labels = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    if usual is not None:
        labels = {ALL: usual, **labels}
    return dmc.Select(
        id={"control": name},
        label=label,
        data=[{"value": value, "label": text} for value, text in labels.items()],
        value=control_value(name, state, None),
        searchable=True,
        allowDeselect=False,
        limit=200,
        size="xs",
        className="select",
    )


def _usual_ranks(profile: Profile | None) -> str:
    if profile is None:
        return "As recorded"
    number, said = usual_ranks(profile)
    return f"{number}, as recorded" if said else f"{number}, for example"


def _counts(most: int, chosen: int | None, least: int = 1) -> list[str]:
    """Powers of two, and what is chosen."""
    numbers = {2**power for power in range(most.bit_length()) if least <= 2**power <= most}
    return [str(number) for number in sorted(numbers | ({chosen} if chosen else set()))]


def _labelled(numbers: Sequence[int], chosen: int, unit: str) -> dict[str, str]:
    """These numbers and what is chosen, with their unit."""
    return {str(number): f"{number:,} {unit}" for number in sorted({*numbers, chosen})}


def _redundant(state: ViewState) -> dict[str, str]:
    """Redundant slots of each rank to choose from."""
    numbers = sorted({0, 1, 2, 4} | ({state.redundant} if state.redundant else set()))
    return {str(number): f"{number} a rank" if number else "None, moved only" for number in numbers}


def _batches(state: ViewState) -> list[str]:
    """Requests in a batch to choose from."""
    numbers = sorted({4, 8, 16, 32} | ({state.batch} if state.batch else set()))
    return [str(number) for number in numbers]


def _rank_choices(profile: Profile | None, state: ViewState) -> list[str]:
    """Numbers of ranks that the experts of some layer can be spread over evenly, or the chosen."""
    experts = {layer.experts for layer in profile.info.layers} - {0} if profile else set()
    numbers = range(2, min(max(experts, default=0), MOST_RANKS) + 1)
    even = {number for number in numbers if any(count % number == 0 for count in experts)}
    chosen = set() if state.ranks is None else {state.ranks}
    return [str(number) for number in sorted(even | chosen)]


def _factor_slider(state: ViewState, profile: Profile | None) -> Any:
    """Stops are the recorded factors, evenly spaced: they crowd near 1."""
    factors = sorted(profile.info.capacity_factors) if profile else []
    slider = dmc.Slider(
        id={"control": "factor"},
        min=0,
        max=max(len(factors) - 1, 1),
        step=1,
        value=control_value("factor", state, profile),
        marks=[{"value": place, "label": f"{factor:g}"} for place, factor in enumerate(factors)],
        label=None,
        thumbLabel="Capacity factor",
        disabled=len(factors) < 2,
        w="100%",
    )
    return html.Div(
        [html.Span("Capacity factor", className="control-name"), slider], className="factor"
    )


def scrubber(profile: Profile, state: ViewState) -> list[Any]:
    """A slider for the range of time that the numbers are of."""
    if not duration(profile):
        return []
    return [html.Span("Time", className="control-name"), _time_slider(profile, state)]


def chosen_time(profile: Profile, state: ViewState, *, shown: bool) -> list[Any]:
    """That range in words, and a way back to all of the time.

    Args:
        shown: whether the view has the slider; a range that is set is always named.
    """
    longest = duration(profile)
    if not longest or (state.between is None and not shown):
        return []
    if state.between is None:
        return [html.Span(f"all {formats.seconds(longest)}", className="range-text")]
    clear = html.Button(
        [formats.time_range(*state.between), html.Span("×", className="cross")],
        id={"clear": "between"},
        className="button chip",
        type="button",
        title="Show all of the time again",
    )
    return [clear] if shown else [html.Span("Time", className="control-name"), clear]


def _time_slider(profile: Profile, state: ViewState) -> Any:
    end, step = time_stops(profile)
    return dmc.RangeSlider(
        id={"control": "between"},
        min=0,
        max=end,
        step=step,
        minRange=step,
        value=control_value("between", state, profile),
        updatemode="mouseup",
        label=None,
        thumbFromLabel="From, seconds",
        thumbToLabel="To, seconds",
        size="sm",
        className="time-slider",
    )
