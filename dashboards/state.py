"""ViewState: what the URL's query says, checked against what the recording holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from routeprof.profile import Profile
from routeprof.tables import tag_name

ALL = "all"

MEASURES = {"load": "Load / mean", "share": "Share", "mass": "Gate mass"}
ORDERS = {"index": "By index", "load": "By load"}
_CHOICES: dict[str, Mapping[str, str]] = {"measure": MEASURES, "order": ORDERS}
USUAL_FACTOR = 1.25
_LONGEST = 2000
_SHOWN = 60


@dataclass(frozen=True)
class ViewState:
    """What is selected; None where the view chooses.

    Attributes:
        phase, tag: what the numbers are of; None for all.
        layer: index of the layer to look at.
        measure: what the heatmap shows, a key of MEASURES.
        order: how experts are sorted, a key of ORDERS.
        factor: capacity factor, one of those recorded.
    """

    phase: str | None = None
    tag: str | None = None
    layer: int | None = None
    measure: str = "load"
    order: str = "index"
    factor: float | None = None

    def query(self, **changes: Any) -> str:
        """The state as a query with its question mark; what is usual is left out."""
        state = replace(self, **changes)
        usual = ViewState()
        pairs = {
            item.name: _text(getattr(state, item.name))
            for item in fields(ViewState)
            if getattr(state, item.name) != getattr(usual, item.name)
        }
        return f"?{urlencode(pairs)}" if pairs else ""


def _text(value: object) -> str:
    if value is None:
        return ALL
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_query(search: str | None, profile: Profile | None) -> tuple[ViewState, list[str]]:
    """The state that a query asks for, and a line for each part that is ignored."""
    text = (search or "").removeprefix("?")
    if len(text) > _LONGEST:
        return ViewState(), ["The address is too long and was ignored."]
    state, ignored = ViewState(), []
    for name, value in parse_qsl(text, keep_blank_values=True):
        changed = _with(state, name, value, profile)
        if changed is None:
            ignored.append(f"Ignored {_short(name)}={_short(value)}: {_remedy(name, profile)}.")
        else:
            state = changed
    return state, ignored


def usual_factor(profile: Profile) -> float | None:
    """The capacity factor that is shown unless another one is asked for."""
    return min(profile.info.capacity_factors, key=lambda f: abs(f - USUAL_FACTOR), default=None)


def control_value(name: str, state: ViewState, profile: Profile | None) -> Any:
    """A part of the state as its control holds it; the slider counts the recorded factors."""
    if name != "factor":
        return _text(getattr(state, name))
    if profile is None:
        return 0
    factor = state.factor if state.factor is not None else usual_factor(profile)
    return sorted(profile.info.capacity_factors).index(factor) if factor is not None else 0


def with_controls(
    state: ViewState, values: Mapping[str, Any], profile: Profile | None
) -> ViewState:
    """The state after the reader used a control; an impossible value changes nothing."""
    for name, value in values.items():
        if value == control_value(name, state, profile):
            continue
        text = str(value)
        if name == "factor" and profile is not None:
            text = _text(sorted(profile.info.capacity_factors)[int(value)])
        state = _with(state, name, text, profile) or state
    return state


def _with(state: ViewState, name: str, value: str, profile: Profile | None) -> ViewState | None:
    if name in ("phase", "tag", "layer", "factor") and value == ALL:
        return _changed(state, name, None)
    if name in _CHOICES:
        return _changed(state, name, value) if value in _CHOICES[name] else None
    for possible in _possible(name, profile):
        if _text(possible) == value:
            return _changed(state, name, possible)
    return None


def _changed(state: ViewState, name: str, value: Any) -> ViewState:
    changes: dict[str, Any] = {name: value}
    return replace(state, **changes)


def _possible(name: str, profile: Profile | None) -> Iterator[Any]:
    if profile is None:
        return
    if name == "phase":
        yield from profile.phases
    elif name == "tag":
        yield from (tag_name(tag) for tag in profile.tags)
    elif name == "layer":
        yield from (layer.index for layer in profile.info.layers if layer.kind == "moe")
    elif name == "factor":
        yield from profile.info.capacity_factors


def _remedy(name: str, profile: Profile | None) -> str:
    known = list(_CHOICES.get(name, ())) or [_text(item) for item in _possible(name, profile)]
    if not known:
        return "it says nothing about this recording"
    listed = ", ".join(_short(item) for item in known[:8])
    return f"there are {listed}{' …' if len(known) > 8 else ''}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
