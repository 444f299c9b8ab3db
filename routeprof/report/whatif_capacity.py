"""``routeprof whatif capacity`` as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType
from rich.table import Table

from routeprof.diagnose import layer_list
from routeprof.report.summary import NONE, json_data, selection_text, size
from routeprof.report.text import plain_table
from routeprof.tables import ALL
from routeprof.whatif.advice import Recommendation, recommend
from routeprof.whatif.capacity import FactorNeeded, curve, smallest_factor, smallest_factors, worst
from routeprof.whatif.evidence import token_ranks

if TYPE_CHECKING:
    from routeprof.profile import Profile
    from routeprof.whatif.capacity_rules import CapacityRule

BOUNDED = "bounded: between its recorded neighbours; level='steps' is exact for any factor and rule"
GOALS = {"latency": "latency-bound serving", "quality": "quality-bound scoring"}


def capacity_json(
    profile: Profile,
    factors: Sequence[str] | None,
    rule: CapacityRule,
    target: float,
    *,
    layers: bool,
) -> dict[str, Any]:
    """Rows of ``capacity.curve``, the smallest factors and the recommendations, for JSON."""
    table = curve(profile, factors, rule)
    of_all = table["layer"] == ALL
    data = {
        "level": profile.info.level,
        "phase": profile.phase or ALL,
        "tag": profile.tag or ALL,
        "rule": rule.name,
        "min_capacity": rule.minimum,
        "ranks": token_ranks(profile),
        "rows": table[of_all].to_dict("records"),
        **({"layers": table[~of_all].to_dict("records")} if layers else {}),
        "smallest_factor": {
            "all_layers": _needed_row(smallest_factor(profile, target, rule)),
            "worst_layer": _needed_row(worst(smallest_factors(profile, target, rule))),
        },
        "recommendation": {
            one.goal: {
                "phase": one.phase,
                "capacity_factor": one.factor,
                **_needed_row(one.needed),
                "overflow_rate_upper": one.overflow_rate,
                "padding_rate_upper": one.padding_rate,
            }
            for one in recommend(profile, target, rule)
        },
    }
    plain_data: dict[str, Any] = json_data(data)
    return plain_data


def print_capacity(
    profile: Profile,
    factors: Sequence[str] | None,
    rule: CapacityRule,
    target: float,
    console: Console,
    *,
    layers: bool,
) -> None:
    """The same as text."""
    table = curve(profile, factors, rule)
    # All of it before the first line: what is refused shall not follow half an answer.
    for part in list(_capacity_parts(profile, table, rule, target, layers)):
        console.print(part, highlight=False)


def _needed_row(needed: FactorNeeded) -> dict[str, Any]:
    return {
        "target": needed.target,
        "layer": ALL if needed.layer is None else needed.layer,
        "certainty": needed.certainty,
        "factor_lower": needed.lower,
        "factor_upper": needed.upper,
    }


def _capacity_parts(
    profile: Profile, table: pd.DataFrame, rule: CapacityRule, target: float, layers: bool
) -> Iterator[RenderableType]:
    yield f"capacity of an expert in a step: {_formula(rule)}"
    yield f"{selection_text(profile)}; level {profile.info.level}\n"
    shown = table if layers else table[table["layer"] == ALL]
    yield _capacity_table(shown, layers)
    yield ""
    if (shown["certainty"] == "bounded").any():
        yield BOUNDED
    dropping = [layer.index for layer in profile.info.layers if layer.drops]
    if dropping:
        yield f"{layer_list(dropping)}: the model drops by itself; what it dropped has no expert"
    ranks = token_ranks(profile)
    if ranks > 1:
        yield f"each of {ranks} ranks has slots of its own, for its own tokens"
    together = smallest_factor(profile, target, rule)
    hardest = worst(smallest_factors(profile, target, rule))
    for name, one in (("all layers together", together), ("every layer", hardest)):
        which = "" if one.layer is None else f" (layer {one.layer} needs it)"
        yield f"overflow of at most {target:.6g}, {name}: factor {_factor(one)}{which}"
    for advice in recommend(profile, target, rule):
        yield _advice(advice)


def _formula(rule: CapacityRule) -> str:
    text = f"{rule.rounding}(factor · tokens · top_k ÷ experts)"
    return f"max({rule.minimum}, {text})" if rule.minimum else text


def _capacity_table(rows: pd.DataFrame, layers: bool) -> Table:
    table = plain_table()
    verb = "overflows" if rows["happened"].all() else "would overflow"
    headings = ["factor", verb, "padding", "slots/step", "buffer", "certainty"]
    for heading in (["layer"] if layers else []) + headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows.to_dict("records"):
        table.add_row(
            *([str(row["layer"])] if layers else []),
            f"{row['capacity_factor']:g}",
            _range(row["overflow_rate_lower"], row["overflow_rate_upper"], _percent),
            _range(row["padding_rate_lower"], row["padding_rate_upper"], _percent),
            NONE if pd.isna(row["slots_per_step"]) else f"{row['slots_per_step']:,.1f}",
            _range(row["buffer_bytes_lower"], row["buffer_bytes_upper"], size),
            row["certainty"],
        )
    return table


def _range(low: float, high: float, show: Any) -> str:
    return str(show(low)) if low == high or pd.isna(low) else f"{show(low)} to {show(high)}"


def _percent(value: float) -> str:
    return NONE if np.isnan(value) else f"{value:.2%}"


def _factor(needed: FactorNeeded) -> str:
    if needed.certainty == "exact":
        return f"{needed.upper:g}"
    return f"above {needed.lower:g}, at most {needed.upper:g}"


def _advice(one: Recommendation) -> str:
    phase = "" if one.phase == ALL else f" ({one.phase})"
    return (
        f"{GOALS[one.goal]}{phase}: factor {one.factor:g}, overflow at most "
        f"{_percent(one.overflow_rate)}, padding at most {_percent(one.padding_rate)}"
    )
