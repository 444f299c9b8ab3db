"""What a summary says: figures, rows and their texts, for the terminal, HTML and JSON alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from routeprof.diagnose import layer_list
from routeprof.profile import State
from routeprof.tables import tag_name

if TYPE_CHECKING:
    from routeprof.profile import Profile

NONE = "–"
DROPS = "layers {} really drop: they count as invalid, and overflow is of what was kept"
OVERFLOW_SHOWN = (1.0, 1.25)
UNITS = {"B": 0, "KiB": 1, "MiB": 1, "GiB": 1, "TiB": 2}
"""Units of bytes, and the decimals that are shown with each."""
NOT_CAPTURED: tuple[State, ...] = ("silent", "unsupported", "idle")


# -- values as text


def plain(value: object) -> str:
    """Text without characters that could steer a terminal or turn the line around."""
    return "".join(char if char.isprintable() else "�" for char in str(value))


def whole(value: Any) -> str:
    """A count, with thousands separators."""
    return NONE if pd.isna(value) else f"{int(value):,}"


def identity(value: Any) -> str:
    """The number of a layer or an expert."""
    return NONE if pd.isna(value) else str(int(value))


def ratio(value: Any) -> str:
    """A ratio; ∞ where the divisor was 0."""
    if pd.isna(value):
        return NONE
    return "∞" if math.isinf(value) else f"{value:,.2f}"


def share(value: Any) -> str:
    """A share in per cent."""
    return NONE if pd.isna(value) else f"{value:.1%}"


def coverage(value: Any) -> str:
    """Coverage in per cent; 100.00% only where nothing is missing."""
    if pd.isna(value) or value == 1:
        return NONE if pd.isna(value) else "100%"
    return f"{min(value, 0.9999) if value < 1 else max(value, 1.0001):.2%}"


def size(value: Any) -> str:
    """Bytes, in the unit that leaves few digits."""
    if pd.isna(value):
        return NONE
    power = min(max(int(value).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    unit, decimals = list(UNITS.items())[power]
    return f"{value / 1024**power:,.{decimals}f} {unit}"


def selection_text(profile: Profile) -> str:
    """Phase and tag that are selected."""
    phase = f"phase {profile.phase}" if profile.phase else "all phases"
    return f"{phase}, {f'tag {plain(profile.tag)}' if profile.tag else 'all tags'}"


def duration(seconds: float) -> str:
    """Seconds, in the units that people use."""
    if math.isnan(seconds):
        return NONE
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


# -- what the summary says, shared with the HTML report


@dataclass(frozen=True)
class Column:
    """One column of the table of layers.

    Attributes:
        name: column of ``layer_rows``.
        heading: two short lines, the second of which names the ratio.
        rank: the columns with the lowest stay when the terminal is narrow.
        meaning: its definition.
    """

    name: str
    heading: tuple[str, str]
    show: Callable[[Any], str]
    rank: int
    meaning: str


COLUMNS = (
    Column("layer", ("", "layer"), identity, 0, "index of the layer in the model"),
    Column("tokens", ("", "tokens"), whole, 1, "tokens that the layer routed"),
    Column(
        "imbalance_ratio",
        ("imbalance", "max/mean"),
        ratio,
        0,
        "load of the hottest expert ÷ mean load over the recording; 1 is perfect",
    ),
    Column(
        "step_imbalance_p95",
        ("step p95", "max/mean"),
        ratio,
        3,
        "the same ratio within single steps: 95% of the tokens were in steps at or below it",
    ),
    Column(
        "hot_cold_ratio",
        ("hot/cold", "max/min"),
        ratio,
        6,
        "load of the hottest expert ÷ load of the coldest; ∞ where one got none",
    ),
    Column("dead_experts", ("dead", "experts"), whole, 5, "experts that got no token"),
    Column("top2_share", ("top-2", "share"), share, 7, "share of the two hottest experts"),
    Column("hottest_expert", ("hottest", "expert"), identity, 2, "number of the hottest expert"),
    Column(
        "entropy_normalized",
        ("entropy", "÷ ln E"),
        ratio,
        10,
        "entropy of the load ÷ ln of the number of experts; 1 is perfect",
    ),
    Column(
        "would_overflow_1",
        ("would over-", "flow at 1.0"),
        share,
        4,
        "assignments above a capacity of 1.0 × the mean in their step",
    ),
    Column(
        "would_overflow_1.25",
        ("would over-", "flow at 1.25"),
        share,
        9,
        "assignments above a capacity of 1.25 × the mean in their step",
    ),
    Column(
        "coverage",
        ("", "coverage"),
        coverage,
        8,
        "captured assignments ÷ assignments that the engine made",
    ),
)


def layer_rows(profile: Profile) -> pd.DataFrame:
    """The table of layers with the state of each, and what would overflow."""
    table = profile.layers()
    states = {
        layer.index: state for layer, state in zip(profile.info.layers, profile.states, strict=True)
    }
    table["state"] = [states[index] for index in table["layer"]]
    factors = [factor for factor in OVERFLOW_SHOWN if factor in profile.info.capacity_factors]
    overflow = profile.overflow(factors)
    for factor in factors:
        mine = overflow[overflow["capacity_factor"] == factor].set_index("layer")
        table[f"would_overflow_{factor:g}"] = table["layer"].map(mine["overflow_rate"])
    return table


def worst_first(rows: pd.DataFrame) -> pd.DataFrame:
    """The captured layers, the most imbalanced first."""
    captured = rows[rows["state"] == "captured"]
    return captured.sort_values("imbalance_ratio", ascending=False, kind="stable")


def shown_columns(rows: pd.DataFrame) -> list[Column]:
    """The columns for which the recording has numbers."""
    return [column for column in COLUMNS if column.name in rows.columns]


def not_captured(profile: Profile) -> list[str]:
    """One line for each state other than captured, with the layers in it."""
    return [
        f"not captured ({state}): {'layers' if len(layers) > 1 else 'layer'} {layer_list(layers)}"
        for state in NOT_CAPTURED
        if (layers := profile.in_state(state))
    ]


def group_rows(profile: Profile, kind: str) -> list[dict[str, Any]]:
    """For each phase or each tag: steps, tokens, median and worst imbalance over the layers."""
    names = profile.phases if kind == "phase" else tuple(tag_name(tag) for tag in profile.tags)
    if kind == "tag" and set(profile.tags) <= {None}:
        return []
    rows = []
    for name in names:
        part = profile.select(phase=name) if kind == "phase" else profile.select(tag=name)
        table = part.layers()
        ratios = table.set_index("layer")["imbalance_ratio"].dropna()
        rows.append(
            {
                kind: name,
                "steps": _largest(table["steps"]),
                "tokens": _largest(table["tokens"]),
                "imbalance_ratio_median": float(ratios.median()),
                "imbalance_ratio_worst": float(ratios.max()),
                "worst_layer": ratios.idxmax() if len(ratios) else None,
            }
        )
    return rows


def _largest(values: pd.Series[Any]) -> int | None:
    """Layers see the same steps and tokens, unless some saw only a part."""
    return None if values.isna().all() else int(values.max())


def own_cost(profile: Profile) -> tuple[float, float]:
    """Seconds that recording took in the engine's thread, and seconds of the steps measured."""
    ranks = profile.files.ranks if profile.files else ()
    states = [rank.state for rank in ranks if rank.state is not None]
    if not states:
        return math.nan, math.nan
    return sum(state.cost_seconds for state in states), sum(state.busy_seconds for state in states)


def selection(profile: Profile) -> list[str]:
    """What of the recording the profile is about; nothing for all of it."""
    chosen = [f"{k} {v}" for k, v in (("phase", profile.phase), ("tag", profile.tag)) if v]
    if profile.between is not None:
        first, last = profile.between
        end = f"to {_moment(last)}" if last < math.inf else "on"
        chosen.append(f"from {_moment(first)} {end}")
    return chosen


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def key_figures(profile: Profile, rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Name, value and definition of what describes the recording as a whole."""
    model, info = profile.info.model, profile.info
    ranks = len(profile.files.ranks) if profile.files else 1
    runs = profile.files.runs if profile.files else 1
    tags = [tag_name(tag) for tag in profile.tags] if set(profile.tags) - {None} else []
    figures = [
        ("model", _joined(" ", model.name, model.model_type and f"({model.model_type})"), ""),
        ("engine", _joined(" ", model.engine, model.engine_version), ""),
        ("device", _joined(", ", model.device, model.dtype), ""),
        ("recorded", duration(profile.seconds), "from the first window's start to the last's end"),
        (
            "level",
            _joined(
                ", ", info.level, ranks > 1 and f"{ranks} ranks", runs > 1 and f"{runs} recordings"
            ),
            "detail recorded",
        ),
        ("selected", ", ".join(selection(profile)), "the numbers are of this part only"),
        ("steps", whole(_largest(rows["steps"])), "forward passes of the model"),
        ("tokens", whole(_largest(rows["tokens"])), "tokens of the layer that saw the most"),
        ("layers", _layers_line(profile), "MoE layers by state"),
        ("phases", _joined(", ", *profile.phases), ""),
        ("tags", _joined(", ", *tags), "labels given while recording"),
        ("imbalance_ratio", _imbalance_line(rows), "max ÷ mean load of a layer; 1 is perfect"),
        ("coverage", coverage(profile.coverage), "captured ÷ made assignments"),
        ("own cost", _cost_line(profile), "time that recording took, of the time of all steps"),
    ]
    return [(name, plain(value), meaning) for name, value, meaning in figures if value]


def _joined(separator: str, *parts: str | bool) -> str:
    return separator.join(str(part) for part in parts if part) or NONE


def _imbalance_line(rows: pd.DataFrame) -> str:
    ratios = worst_first(rows).set_index("layer")["imbalance_ratio"].dropna()
    if not len(ratios):
        return NONE
    return f"{ratio(ratios.max())} in layer {ratios.idxmax()}, median {ratio(ratios.median())}"


def _cost_line(profile: Profile) -> str:
    cost, busy = own_cost(profile)
    return f"{share(cost / busy)}, {cost:.2f} s of {busy:.2f} s" if busy > 0 else NONE


def _layers_line(profile: Profile) -> str:
    states = [state for state in profile.states if state != "dense"]
    others = [f"{states.count(state)} {state}" for state in NOT_CAPTURED if state in states]
    return ", ".join([f"{states.count('captured')} of {len(states)} captured", *others])


# -- as data


def summary_json(profile: Profile, now: float | None = None) -> dict[str, Any]:
    """The summary as plain data for ``json.dumps``.

    No value is null; so is infinity, which only two can be: ``hot_cold_ratio``, where
    ``dead_experts`` is above 0, and the end of ``between``.
    """
    rows, (cost, busy) = layer_rows(profile), own_cost(profile)
    summary = {
        "model": profile.info.model.name,
        "engine": _joined(" ", profile.info.model.engine, profile.info.model.engine_version),
        "device": profile.info.model.device,
        "level": profile.info.level,
        "phase": profile.phase,
        "tag": profile.tag,
        "between": profile.between,
        "coverage": profile.coverage,
        "seconds": profile.seconds,
        "steps": _largest(rows["steps"]),
        "tokens": _largest(rows["tokens"]),
        "cost": {"cost_seconds": cost, "busy_seconds": busy},
        "layers": rows.to_dict("records"),
        "phases": group_rows(profile, "phase"),
        "tags": group_rows(profile, "tag"),
        "ranks": profile.ranks().to_dict("records"),
        "findings": [asdict(finding) for finding in profile.findings(now)],
    }
    data: dict[str, Any] = json_data(summary)
    return data


def json_data(value: Any) -> Any:
    """The value in types that JSON has."""
    if isinstance(value, dict):
        return {name: json_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_data(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value
