"""``routeprof plan`` as plain data."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from routeprof.plan.parameters import by_part, total

if TYPE_CHECKING:
    from routeprof.plan.memory import Plan, Split


def plan_json(made: Plan) -> dict[str, Any]:
    """The whole plan; bytes are of the fullest GPU unless a name says that they are of all."""
    model = made.model
    return {
        "model": model.name,
        "family": model.family,
        "parameters": total(model.weights),
        "active_parameters": model.active,
        "parameters_by_part": by_part(model.weights),
        "weights_bytes": _number(made.weights_bytes),
        "weights_bytes_by_part": {part: _number(size) for part, size in made.weights.items()},
        "cache_bytes_per_sequence": None
        if made.cache is None
        else {"kv": _number(made.cache.kv), "state": _number(made.cache.state)},
        "gpus": made.gpus,
        "nodes": made.nodes,
        "setting": _setting(made),
        "fits": _fits(made),
        "splits": [split_row(row) for row in made.splits],
        **_measured(made),
        "notes": list(model.notes),
    }


def _fits(made: Plan) -> bool | None:
    """Whether a layout fits; None where none is known to and of one it is not known."""
    answers = {row.fits for row in made.splits}
    return True if True in answers else None if None in answers else False


def split_row(row: Split) -> dict[str, Any]:
    """One layout as one flat row."""
    layout = row.layout
    return {
        "tp": layout.tp,
        "dp": layout.dp,
        "ep": layout.ep,
        "etp": layout.etp,
        "fits": row.fits,
        "why": row.why,
        "spans_nodes": row.spans_nodes,
        "weights_bytes": _number(row.weights_bytes),
        **{f"weights_{part}_bytes": _number(size) for part, size in row.weights.items()},
        "kv_bytes": _number(row.kv),
        "fixed_state_bytes": _number(row.state),
        "activation_bytes": _number(row.activations),
        "dispatch_bytes": _number(row.dispatch),
        "combine_bytes": _number(row.combine),
        "held_back_bytes": _number(row.held_back),
        "free_for_cache_bytes": _number(row.free),
        "max_sequences": row.sequences,
    }


def _number(value: float) -> int | None:
    """Whole bytes, or None where they are not known."""
    return round(value) if isfinite(value) else None


def _setting(made: Plan) -> dict[str, Any]:
    setting = asdict(made.setting)
    return {name: value for name, value in setting.items() if value != ""} | {
        "precision": {key: value for key, value in setting["precision"].items() if value != ""}
    }


def _measured(made: Plan) -> dict[str, Any]:
    if made.measured is None:
        return {"loads": "even"}
    most = max(row.layout.ep for row in made.splits)
    return {
        "loads": "measured",
        "fullest_rank_over_mean": max(made.measured.fullest(most), default=1.0),
        "fullest_rank_of": most,
        "hottest_experts": [asdict(one) for one in made.measured.hottest()],
        "hot_experts_share_of_assignments": made.measured.hot_share(
            made.setting.precision.hot_experts
        )
        if made.setting.precision.hot
        else None,
    }
