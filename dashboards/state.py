"""ViewState: what the URL's query says, checked against what the recording holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from routeprof.errors import UsageError
from routeprof.plan.known import known_names
from routeprof.plan.precision import FORMATS
from routeprof.profile import Profile
from routeprof.tables import tag_name
from routeprof.timerange import RANGE_TEXT, parse_range, range_text
from routeprof.whatif.hardware import HARDWARE

ALL = "all"

MEASURES = {"load": "Load / mean", "share": "Share", "mass": "Gate mass"}
ORDERS = {"index": "By index", "load": "By load", "rank": "Each layer by load"}
PLACEMENTS = {"contiguous": "In order", "striped": "Striped", "recorded": "As recorded"}
GPUS = {name: name.upper() for name in HARDWARE}
GAINS = {"no": "Not computed", "yes": "Computed"}
NOISES = {"quick": "Where quick", "yes": "Computed"}
MODELS = {name: name for name in known_names()}
DTYPES = {name: name.upper() for name in FORMATS}
USUAL_FACTOR = 1.25
MOST_RANKS = 1024
MOST_REDUNDANT = 64
MOST_BATCH = 1024
MOST_MEMORY = 4096
MOST_LENGTH = 100_000_000
_LONGEST = 2000
_SHOWN = 60


@dataclass(frozen=True)
class ViewState:
    """What is selected; None where the view chooses.

    Attributes:
        run: name of the recording, where several are open.
        phase, tag: what the numbers are of; None for all.
        between: windows that end in this range, in seconds since the first one's start; its end
            is infinite where it has none.
        layer: index of the layer to look at.
        expert: the expert of that layer to look at.
        measure: what the heatmap shows, a key of MEASURES.
        order: how experts are sorted, a key of ORDERS: ``load`` by that of all layers together,
            so that a column stays an expert, ``rank`` each layer for itself.
        factor: capacity factor, one of those recorded.
        ranks: number of expert-parallel ranks to spread the experts over, or of GPUs to lay the
            model out on.
        placement: how they are spread, a key of PLACEMENTS.
        redundant: slots for replicas on each rank, for placements made anew; None for no such.
        nodes: that the GPUs stand in.
        gpu: what they are, a key of GPUS.
        batch: requests in a batch, for batches composed anew; None for no such. Sequences at once,
            for a memory plan; None for one.
        gains: whether to judge rules and remedies that take long, a key of GAINS.
        model: what a memory plan is of, a key of MODELS; None for the recorded one, where known.
        memory: GiB of each GPU.
        dtype: of weights, a key of DTYPES.
        length: tokens of a sequence, prompt and answer.
        against: name of the recording to compare with.
        noise: whether to find the noise of what both differ in, a key of NOISES.
    """

    run: str | None = None
    phase: str | None = None
    tag: str | None = None
    between: tuple[float, float] | None = None
    layer: int | None = None
    expert: int | None = None
    measure: str = "load"
    order: str = "index"
    factor: float | None = None
    ranks: int | None = None
    placement: str = "contiguous"
    redundant: int | None = None
    nodes: int = 1
    gpu: str = "h100"
    batch: int | None = None
    gains: str = "no"
    model: str | None = None
    memory: int = 80
    dtype: str = "bf16"
    length: int = 8192
    against: str | None = None
    noise: str = "quick"

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

    @property
    def selection(self) -> ViewState:
        """What the numbers are of, without how they are shown."""
        return ViewState(self.run, self.phase, self.tag, self.between)


def _text(value: object) -> str:
    if value is None:
        return ALL
    if isinstance(value, tuple):
        return range_text(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def parse_query(search: str | None, profile: Profile | None) -> tuple[ViewState, list[str]]:
    """The state that a query asks for, and a line for each part that is ignored."""
    text = (search or "").removeprefix("?")
    if len(text) > _LONGEST:
        return ViewState(), ["The address is too long and was ignored."]
    state, ignored = ViewState(), []
    # In the order of the fields: the layer comes before the expert that is one of its own.
    pairs = sorted(parse_qsl(text, keep_blank_values=True), key=lambda pair: _place(pair[0]))
    for name, value in pairs:
        changed = _with(state, name, value, profile)
        if changed is None:
            ignored.append(f"Ignored {_short(name)}={_short(value)}: {_remedy(name, profile)}.")
        else:
            state = changed
    return state, ignored


def _place(name: str) -> int:
    return list(_USUAL).index(name) if name in _USUAL else len(_USUAL)


def usual_factor(profile: Profile) -> float | None:
    """The capacity factor that is shown unless another one is asked for."""
    return min(profile.info.capacity_factors, key=lambda f: abs(f - USUAL_FACTOR), default=None)


# -- controls


def control_value(name: str, state: ViewState, profile: Profile | None) -> Any:
    """A part of the state as its control holds it.

    The slider of factors counts those recorded; that of time holds a range also for all of it.
    """
    if name == "between":
        return _on_slider(state.between or (0.0, math.inf), profile)
    if name != "factor":
        return _text(getattr(state, name))
    if profile is None:
        return 0
    factor = state.factor if state.factor is not None else usual_factor(profile)
    return sorted(profile.info.capacity_factors).index(factor) if factor is not None else 0


def reaching(value: Any, end: Any) -> list[float] | None:
    """A range of the slider; None for all of what it could reach when it was drawn.

    A recording that grows is longer by now, and all of then would be a part of it: a range up to
    the slider's end has none.
    """
    low, high = float(value[0]), float(value[1])
    if high < float(end):
        return [low, high]
    return None if low <= 0 else [low, math.inf]


def _on_slider(between: Sequence[float], profile: Profile | None) -> list[float]:
    """A range as the slider can show it, which has an end."""
    low, high = between
    return [low, min(high, max(low, time_stops(profile)[0]))]


def time_stops(profile: Profile | None) -> tuple[float, float]:
    """Where the slider of time ends, and the distance of its stops, in seconds.

    A stop is a window, or as many as a slider has room for; the end is one of the stops.
    """
    longest = duration(profile)
    if profile is None or not longest:
        return 0.0, 1.0
    step = round(max(profile.info.window_seconds, longest / 1000), 3)
    return round(step * math.ceil(round(longest / step, 3)), 3), step


def duration(profile: Profile | None) -> float:
    """Seconds from the first window's start to the last one's end, up to the next millisecond."""
    windows = profile.totals.windows if profile is not None else None
    if windows is None or not len(windows.end):
        return 0.0
    return math.ceil(1e3 * float(windows.end.max() - windows.start.min()) - 0.05) / 1e3


def with_controls(
    state: ViewState, values: Mapping[str, Any], profile: Profile | None
) -> ViewState:
    """The state after the reader used a control; an impossible value changes nothing."""
    for name, value in values.items():
        shown = _on_slider(value, profile) if name == "between" and value else value
        if shown != control_value(name, state, profile):
            text = _control_text(name, value, profile)
            state = _with(state, name, text, profile) or state
    return state


def _control_text(name: str, value: Any, profile: Profile | None) -> str:
    if name == "factor" and profile is not None:
        return _text(sorted(profile.info.capacity_factors)[int(value)])
    if name == "between":
        return _text(None if value is None else tuple(float(item) for item in value))
    return str(value)


# -- checking


def _with(state: ViewState, name: str, value: str, profile: Profile | None) -> ViewState | None:
    if name not in _USUAL:
        return None
    if value == ALL and _USUAL[name] is None:
        return _changed(state, name, None)
    if name in _CHECKS:
        found = _CHECKS[name](value)
        return None if found is None else _changed(state, name, found)
    for possible in _possible(name, profile):
        if _text(possible) == value:
            return _changed(state, name, possible)
    return None


def _changed(state: ViewState, name: str, value: Any) -> ViewState:
    changes: dict[str, Any] = {name: value}
    if name == "layer" and value != state.layer:
        changes["expert"] = None  # another layer's expert of that number is another expert
    return replace(state, **changes)


def _range(text: str) -> tuple[float, float] | None:
    try:
        return parse_range(text)
    except UsageError:
        return None


def _number(low: int, high: int) -> Callable[[str], int | None]:
    def number(text: str) -> int | None:
        known = text.isascii() and text.isdigit() and len(text) <= 9
        return int(text) if known and low <= int(text) <= high else None

    return number


def _one_of(choices: Mapping[str, str]) -> Callable[[str], str | None]:
    return lambda text: text if text in choices else None


def _name(text: str) -> str | None:
    return text if text and len(text) <= 300 else None


_USUAL = {item.name: item.default for item in fields(ViewState)}
_CHECKS: dict[str, Callable[[str], Any]] = {
    "run": _name,
    "against": _name,
    "between": _range,
    "ranks": _number(1, MOST_RANKS),
    "measure": _one_of(MEASURES),
    "order": _one_of(ORDERS),
    "placement": _one_of(PLACEMENTS),
    "redundant": _number(0, MOST_REDUNDANT),
    "nodes": _number(1, MOST_RANKS),
    "gpu": _one_of(GPUS),
    "batch": _number(1, MOST_BATCH),
    "gains": _one_of(GAINS),
    "noise": _one_of(NOISES),
    "model": _one_of(MODELS),
    "memory": _number(1, MOST_MEMORY),
    "dtype": _one_of(DTYPES),
    "length": _number(1, MOST_LENGTH),
}
_CHOICES = {
    "measure": MEASURES,
    "order": ORDERS,
    "placement": PLACEMENTS,
    "gpu": GPUS,
    "gains": GAINS,
    "noise": NOISES,
    "model": MODELS,
    "dtype": DTYPES,
}
_REMEDIES = {
    "between": f"a range is {RANGE_TEXT}",
    "ranks": f"a number of ranks is from 1 to {MOST_RANKS}",
    "redundant": f"redundant slots of a rank are from 0 to {MOST_REDUNDANT}",
    "nodes": f"a number of nodes is from 1 to {MOST_RANKS}",
    "batch": f"a batch has from 1 to {MOST_BATCH} requests",
    "memory": f"a GPU has from 1 to {MOST_MEMORY} GiB",
    "length": f"a sequence has from 1 to {MOST_LENGTH} tokens",
    "run": "a recording has a name of at most 300 characters",
    "against": "a recording has a name of at most 300 characters",
}


def _possible(name: str, profile: Profile | None) -> list[Any]:
    if profile is None:
        return []
    layers = [layer for layer in profile.info.layers if layer.kind == "moe"]
    if name == "phase":
        return list(profile.phases)
    if name == "tag":
        return [tag_name(tag) for tag in profile.tags]
    if name == "layer":
        return [layer.index for layer in layers]
    if name == "expert":
        return list(range(max((layer.experts for layer in layers), default=0)))
    return list(profile.info.capacity_factors)


def _remedy(name: str, profile: Profile | None) -> str:
    if name in _REMEDIES:
        return _REMEDIES[name]
    known = list(_CHOICES.get(name, ()))
    if not known and name in _USUAL:
        known = [_text(item) for item in _possible(name, profile)]
    if not known:
        return "it says nothing about this recording"
    listed = ", ".join(_short(item) for item in known[:8])
    return f"there are {listed}{' …' if len(known) > 8 else ''}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
