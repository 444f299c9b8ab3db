"""What the reader chooses with: phase and tag in the header, the rest on the views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from routeprof.dashboards.state import ALL, MEASURES, ORDERS, ViewState, control_value
from routeprof.profile import Profile
from routeprof.tables import tag_name


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


def select_control(name: str, label: str, data: list[dict[str, str]], width: int) -> Any:
    """A control of the header."""
    return dmc.Select(
        id={"control": name},
        data=data,
        value=ALL,
        allowDeselect=False,
        checkIconPosition="right",
        size="xs",
        w=width,
        maxDropdownHeight=360,
        comboboxProps={"width": "max-content", "position": "bottom-start"},
        **{"aria-label": label},
    )


def control(name: str, state: ViewState, profile: Profile | None) -> Any:
    """A view's own control, with the value that the address asks for."""
    if name in ("measure", "order"):
        choices = MEASURES if name == "measure" else ORDERS
        return dmc.SegmentedControl(
            id={"control": name},
            data=[{"value": key, "label": label} for key, label in choices.items()],
            value=control_value(name, state, profile),
            size="xs",
        )
    if name == "layer":
        return _layer_select(state, profile)
    return _factor_slider(state, profile)


def _layer_select(state: ViewState, profile: Profile | None) -> Any:
    layers = profile.info.layers if profile else ()
    own = [
        {"value": str(layer.index), "label": f"Layer {layer.index}"}
        for layer in layers
        if layer.kind == "moe"
    ]
    return dmc.Select(
        id={"control": "layer"},
        data=[{"value": ALL, "label": "Worst layer"}, *own],
        value=control_value("layer", state, profile),
        searchable=True,
        allowDeselect=False,
        size="xs",
        w=160,
        **{"aria-label": "Layer"},
    )


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
