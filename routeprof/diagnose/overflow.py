"""Rule: more overflow than is accepted, at the capacity that the engine has."""

from __future__ import annotations

import numpy as np

from routeprof.diagnose.finding import Finding, layer_count
from routeprof.diagnose.question import Question
from routeprof.errors import LevelRequiredError
from routeprof.metrics._arrays import ratio
from routeprof.tables import column


def overflow(question: Question) -> list[Finding] | str:
    """What the model dropped, where it drops; else what the configured capacity would."""
    if any(layer.drops for layer in question.profile.info.layers):
        return _dropped(question)
    if not question.limits.capacity_factor:
        return "no capacity is configured: pass --capacity-factor if the engine has one"
    return _would_overflow(question)


def _dropped(question: Question) -> list[Finding]:
    table, limits = question.profile.layers(), question.limits
    drops = [layer.index for layer in question.profile.info.layers if layer.drops]
    table = table[table["layer"].isin(drops)].reset_index(drop=True)
    lost, kept = (np.nan_to_num(column(table, name)) for name in ("invalid", "assignments"))
    rates = ratio(lost, lost + kept)
    high = np.flatnonzero(rates > limits.max_overflow)
    if not len(high):
        return []
    worst = high[np.argmax(rates[high])]
    return [
        Finding(
            "overflow",
            "warning",
            f"the model dropped {rates[worst]:.2%} of the assignments of layer "
            f"{table['layer'][worst]}; above {limits.max_overflow:.2%} in {layer_count(len(high))}",
            "raise the capacity factor, or even out the load; dropped tokens skip their experts",
            tuple(int(table["layer"][place]) for place in high),
            figures={"overflow_rate": float(rates[worst]), "happened": "yes"},
        )
    ]


def _would_overflow(question: Question) -> list[Finding] | str:
    from routeprof.whatif.capacity import curve

    limits, factor = question.limits, question.limits.capacity_factor
    try:
        table = curve(question.profile, [factor])
    except LevelRequiredError as error:
        return str(error)
    table = table[table["layer"] != "all"]
    high = table[table["overflow_rate_lower"] > limits.max_overflow]
    if not len(high):
        most = float(table["overflow_rate_upper"].max())
        if most <= limits.max_overflow:
            return []
        return f"at {factor:g} it lies between 0 and {most:.2%}: record level steps, or that factor"
    worst = high.sort_values("overflow_rate_lower").iloc[-1]
    least = "" if worst["certainty"] == "exact" else "at least "
    return [
        Finding(
            "overflow",
            "warning",
            f"a capacity factor of {factor:g} would drop {least}"
            f"{worst['overflow_rate_lower']:.2%} of the assignments of layer {worst['layer']}; "
            f"above {limits.max_overflow:.2%} in {layer_count(len(high))}",
            "raise the capacity factor (routeprof whatif capacity), or even out the load",
            tuple(int(index) for index in high["layer"]),
            figures={
                "overflow_rate": float(worst["overflow_rate_lower"]),
                "capacity_factor": factor,
                "happened": "no",
            },
        )
    ]


def overflow_gain(question: Question) -> str:
    """The factor that the accepted overflow needs, and what it costs."""
    from routeprof.whatif.capacity import curve, smallest_factors, worst

    if any(layer.drops for layer in question.profile.info.layers):
        return ""
    needed = worst(smallest_factors(question.profile, question.limits.max_overflow))
    row = curve(question.profile, [needed.upper]).iloc[0]
    bound = "" if needed.certainty == "exact" else " or less"
    return (
        f"a factor of {needed.upper:g}{bound} keeps every layer at "
        f"{question.limits.max_overflow:.2%}, with {row['padding_rate_upper']:.0%} of the slots "
        "empty"
    )
