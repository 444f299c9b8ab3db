"""Tables: a Profile's numbers as DataFrames, one function for each table of docs/csv.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.metrics import balance, capacity, gate, overflow, quantiles
from routeprof.recording.fold import Totals
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

ALL = "all"

LAYER_COLUMNS = (
    "phase tag layer layer_name router experts top_k steps tokens assignments invalid coverage "
    "imbalance_ratio balancedness max_violation hot_cold_ratio hot_cold_ratio_alive cv gini "
    "entropy_normalized effective_experts dead_experts top2_share hottest_expert coldest_expert "
    "step_imbalance_p50 step_imbalance_p95 step_imbalance_max aux_loss gate_entropy "
    "top1_probability"
).split()
EXPERT_COLUMNS = (
    "phase tag layer expert tokens share load_over_mean probability_mass mean_weight"
).split()
OVERFLOW_COLUMNS = (
    "phase tag layer capacity_factor capacity_rule overflow_assignments overflow_rate "
    "padding_rate steps steps_with_overflow happened"
).split()

_BALANCE = (
    "imbalance_ratio balancedness max_violation hot_cold_ratio hot_cold_ratio_alive cv gini "
    "entropy_normalized effective_experts dead_experts top2_share"
).split()
_WHOLE = "steps tokens assignments invalid dead_experts hottest_expert coldest_expert".split()


def groups(profile: Profile, breakdown: bool) -> Iterator[tuple[str, str, list[int]]]:
    """Phase, tag and the key numbers in it: the sum first, then each phase, tag and pair.

    Tags make groups of their own only where at least one step was tagged.
    """
    keys = profile.totals.keys
    everything = list(range(len(keys)))
    yield profile.phase or ALL, profile.tag or ALL, everything
    if not breakdown:
        return
    tagged = profile.tag is None and any(tag is not None for _, tag in keys)
    phased = profile.phase is None
    if phased:
        for phase in profile.phases:
            yield phase, profile.tag or ALL, [n for n in everything if keys[n][0] == phase]
    if tagged:
        for tag in profile.tags:
            yield profile.phase or ALL, tag_name(tag), [n for n in everything if keys[n][1] == tag]
    if phased and tagged:
        for number, (phase, tag) in enumerate(keys):
            yield phase, tag_name(tag), [number]


def tag_name(tag: str | None) -> str:
    return "untagged" if tag is None else tag


def _total(values: NDArray[Any], numbers: list[int], missing: float = 0) -> NDArray[Any]:
    """Sum over some keys; what is missing in one is left out, missing in all stays missing."""
    part = values[numbers]
    if missing == 0:
        return np.asarray(part.sum(0))
    unknown = np.isnan(part) if np.isnan(missing) else part == missing
    return np.where(unknown.all(0), missing, np.where(unknown, 0, part).sum(0))


def known_tokens(layer: Layer, tokens: int) -> int | None:
    """Tokens of a layer; None where its file knows assignments alone."""
    return None if layer.top_k is None else tokens


def moe_layers(profile: Profile) -> list[tuple[int, Layer]]:
    return [(n, layer) for n, layer in enumerate(profile.info.layers) if layer.kind == "moe"]


# -- layers.csv


def coverage_terms(
    profile: Profile, numbers: list[int] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Captured assignments and those the engine made, int64 [layers] each.

    The engine makes tokens · top_k assignments in each call of a layer; a layer that a pass runs
    twice makes them twice. Both are 0 where the engine's number is not known.
    """
    totals = profile.totals
    numbers = list(range(len(totals.keys))) if numbers is None else numbers
    captured = np.zeros(len(profile.info.layers), dtype=np.int64)
    made = captured.copy()
    whole = len(numbers) == len(totals.keys)
    for position, layer in moe_layers(profile):
        for number in numbers:
            expected = int(totals.sums["expected_tokens"][number, position])
            steps = int(totals.sums["steps"][number, position])
            if expected < 0 or not steps or layer.top_k is None:
                continue
            calls = int(totals.sums["calls"][number, position])
            times = max(1.0, calls / steps)
            made[position] += round(expected * layer.top_k * times)
            captured[position] += totals.lists["counts"][number, position].sum()
            captured[position] += totals.sums["invalid"][number, position]
        if whole and made[position]:
            made[position] += int(profile.missed_by_layer[position]) * layer.choices
    return captured, made


def layers_table(profile: Profile, *, breakdown: bool = False) -> pd.DataFrame:
    """See ``Profile.layers``."""
    rows = [
        _layer_row(profile, phase, tag, numbers, position, layer, terms)
        for phase, tag, numbers in groups(profile, breakdown)
        for terms in [coverage_terms(profile, numbers)]
        for position, layer in moe_layers(profile)
    ]
    return framed(rows, LAYER_COLUMNS, ["phase", "tag", "layer"], _WHOLE)


def _layer_row(
    profile: Profile,
    phase: str,
    tag: str,
    numbers: list[int],
    position: int,
    layer: Layer,
    terms: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> dict[str, Any]:
    totals = profile.totals
    row: dict[str, Any] = {
        "phase": phase,
        "tag": tag,
        "layer": layer.index,
        "layer_name": layer.name,
        "router": layer.router,
        "experts": layer.experts or None,
        "top_k": layer.top_k or None,
        "steps": int(_total(totals.sums["steps"], numbers)[position]) or None,
        "coverage": terms[0][position] / terms[1][position] if terms[1][position] else np.nan,
    }
    if not _total(totals.sums["calls"], numbers)[position]:
        return row
    counts = _total(totals.lists["counts"], numbers)[position, : layer.experts]
    row |= {
        "tokens": known_tokens(layer, int(_total(totals.sums["tokens"], numbers)[position])),
        "assignments": int(counts.sum()),
        "invalid": int(_total(totals.sums["invalid"], numbers)[position]),
    }
    if not counts.sum():
        return row
    row |= {name: float(getattr(balance, name)(counts)) for name in _BALANCE}
    row |= {
        "hottest_expert": int(balance.hottest_expert(counts)),
        "coldest_expert": int(balance.coldest_expert(counts)),
    }
    return (
        row
        | _step_imbalance(profile, numbers, position, layer)
        | _gates(totals, numbers, position, counts)
    )


@dataclass(frozen=True)
class LayerSteps:
    """Steps of one layer and some keys.

    Attributes:
        counts: int64 [steps, experts].
        tokens: int64 [steps]; assignments, which are in proportion, where no tokens are known.
        whole: the recording kept every step that is in its sums.
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    whole: bool


def layer_steps(profile: Profile, numbers: list[int], position: int, layer: Layer) -> LayerSteps:
    """Steps of the layer at a position of ``info.layers`` (level steps); see ``groups``."""
    table, totals = profile.step_counts(), profile.totals
    mine = (table.layer == layer.index) & np.isin(profile.step_keys, numbers)
    counts, tokens = table.counts[mine][:, : layer.experts], table.tokens[mine]
    summed = _total(totals.lists["counts"], numbers)[position, : layer.experts]
    if layer.top_k is None:
        return LayerSteps(counts, counts.sum(axis=1), np.array_equal(counts.sum(0), summed))
    whole = tokens.sum() == _total(totals.sums["tokens"], numbers)[position]
    return LayerSteps(counts, tokens, bool(whole and np.array_equal(counts.sum(0), summed)))


def _step_imbalance(
    profile: Profile, numbers: list[int], position: int, layer: Layer
) -> dict[str, float]:
    """Quantiles over steps: exact where every step was kept, else from the histogram."""
    totals = profile.totals
    if profile.has("steps") and profile.files is not None:
        steps = layer_steps(profile, numbers, position, layer)
        if steps.whole:
            ratio = balance.imbalance_ratio(steps.counts)
            return {
                "step_imbalance_p50": float(quantiles.weighted_quantile(ratio, steps.tokens, 0.50)),
                "step_imbalance_p95": float(quantiles.weighted_quantile(ratio, steps.tokens, 0.95)),
                "step_imbalance_max": float(np.fmax.reduce(ratio)),
            }
    histogram = _total(totals.lists["imbalance_histogram"], numbers)[position]
    if not len(histogram):  # sums alone
        return {}
    largest = float(np.fmax.reduce(totals.imbalance_max[numbers, position]))
    return {
        "step_imbalance_p50": float(quantiles.histogram_quantile(histogram, 0.50, largest)),
        "step_imbalance_p95": float(quantiles.histogram_quantile(histogram, 0.95, largest)),
        "step_imbalance_max": largest,
    }


def _gates(
    totals: Totals, numbers: list[int], position: int, counts: NDArray[np.int64]
) -> dict[str, float]:
    rows = _total(totals.sums["gate_rows"], numbers)[position]
    if not rows:
        return {}
    mass = _wide(_total(totals.lists["probability_mass"], numbers, np.nan)[position], len(counts))
    entropy = _total(totals.sums["entropy_sum"], numbers, np.nan)[position]
    top1 = _total(totals.sums["top1_sum"], numbers, np.nan)[position]
    return {
        "aux_loss": float(gate.aux_loss(counts, mass, rows)),
        "gate_entropy": float(gate.gate_entropy(entropy, rows)),
        "top1_probability": float(gate.top1_probability(top1, rows)),
    }


def framed(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    keys: Sequence[str],
    whole: Sequence[str] = (),
) -> pd.DataFrame:
    """Rows sorted by their keys; whole numbers stay whole also where some are missing."""
    frame = pd.DataFrame(rows, columns=list(columns))
    for name in {"experts", "top_k", *whole}.intersection(columns):
        frame[name] = frame[name].astype("Int64")
    return frame.sort_values(list(keys), kind="stable").reset_index(drop=True)


def column(table: pd.DataFrame, name: str) -> NDArray[Any]:
    """A column as floats, NaN where there is no value."""
    return table[name].astype("Float64").to_numpy(dtype=float, na_value=np.nan)


# -- experts.csv


def experts_table(profile: Profile, *, breakdown: bool = False) -> pd.DataFrame:
    """See ``Profile.experts``; layers that were not captured have no rows."""
    frames = [
        _experts_of(profile.totals, phase, tag, numbers, position, layer)
        for phase, tag, numbers in groups(profile, breakdown)
        for position, layer in moe_layers(profile)
        if numbers and _total(profile.totals.sums["calls"], numbers)[position]
    ]
    if not frames:
        return pd.DataFrame(columns=EXPERT_COLUMNS)
    keys = ["phase", "tag", "layer", "expert"]
    return pd.concat(frames, ignore_index=True).sort_values(keys, ignore_index=True)


def _experts_of(
    totals: Totals, phase: str, tag: str, numbers: list[int], position: int, layer: Layer
) -> pd.DataFrame:
    width = layer.experts
    counts = _total(totals.lists["counts"], numbers)[position, :width]
    mean = counts.mean() or np.nan
    rows = int(_total(totals.sums["gate_rows"], numbers)[position])
    mass = _wide(_total(totals.lists["probability_mass"], numbers, np.nan)[position], width)
    weights = _wide(_total(totals.lists["weight_sum"], numbers, np.nan)[position], width)
    with np.errstate(invalid="ignore", divide="ignore"):
        return pd.DataFrame(
            {
                "phase": phase,
                "tag": tag,
                "layer": layer.index,
                "expert": np.arange(width),
                "tokens": counts,
                "share": counts / (counts.sum() or np.nan),
                "load_over_mean": counts / mean,
                "probability_mass": mass / (rows or np.nan),
                "mean_weight": np.where(counts > 0, weights / counts, np.nan),
            },
            columns=EXPERT_COLUMNS,
        )


def _wide(values: NDArray[Any], width: int) -> NDArray[np.float64]:
    """Exactly ``width`` values; what is not there is NaN."""
    out = np.full(width, np.nan)
    out[: len(values)] = values[:width]
    return out


# -- overflow.csv


def overflow_table(
    profile: Profile, factors: Sequence[float] | None = None, *, breakdown: bool = False
) -> pd.DataFrame:
    """See ``Profile.overflow``."""
    recorded = profile.info.capacity_factors
    wanted = tuple(recorded if factors is None else (float(factor) for factor in factors))
    for factor in wanted:
        capacity.parse_factor(factor)
    from_windows = set(wanted) <= set(recorded)
    if not from_windows:
        profile.need_batches()
    source = _recorded_overflow if from_windows else _step_overflow
    rows = [
        row
        for phase, tag, numbers in groups(profile, breakdown)
        if numbers
        for row in source(profile, phase, tag, numbers, wanted)
    ]
    keys = ["phase", "tag", "layer", "capacity_factor"]
    whole = ["overflow_assignments", "steps", "steps_with_overflow"]
    return framed(rows, OVERFLOW_COLUMNS, keys, whole)


def _recorded_overflow(
    profile: Profile, phase: str, tag: str, numbers: list[int], wanted: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    totals = profile.totals
    sums = {name: _total(totals.sums[name], numbers) for name in ("calls", "steps", "tokens")}
    names = ("counts", "overflow", "overflow_steps", "capacity_slots")
    lists = {name: _total(totals.lists[name], numbers) for name in names}
    for position, layer in moe_layers(profile):
        if not sums["calls"][position] or layer.top_k is None:
            continue
        for factor in wanted:
            place = profile.info.capacity_factors.index(factor)
            yield _overflow_row(
                (phase, tag, layer, factor),
                over=int(lists["overflow"][position, place]),
                slots=int(lists["capacity_slots"][position, place]),
                assignments=int(lists["counts"][position].sum()),
                tokens=int(sums["tokens"][position]),
                steps=int(sums["steps"][position]),
                steps_over=int(lists["overflow_steps"][position, place]),
            )


def _overflow_row(
    key: tuple[str, str, Layer, float],
    *,
    over: int,
    slots: int,
    assignments: int,
    tokens: int,
    steps: int,
    steps_over: int,
) -> dict[str, Any]:
    phase, tag, layer, factor = key
    padding = slots - assignments + over
    return {
        "phase": phase,
        "tag": tag,
        "layer": layer.index,
        "capacity_factor": factor,
        "capacity_rule": "ceil",
        "overflow_assignments": over,
        "overflow_rate": float(overflow.overflow_rate(over, tokens, layer.choices)),
        "padding_rate": padding / slots if slots else np.nan,
        "steps": steps,
        "steps_with_overflow": steps_over,
        "happened": layer.drops,
    }


def _step_overflow(
    profile: Profile, phase: str, tag: str, numbers: list[int], wanted: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    ran = _total(profile.totals.sums["steps"], numbers)
    for position, layer in moe_layers(profile):
        steps = layer_steps(profile, numbers, position, layer)
        if not len(steps.tokens):
            continue
        for factor in wanted:
            slots = capacity.capacity(steps.tokens, layer.choices, layer.experts, factor)
            over = overflow.overflow_assignments(steps.counts, slots)
            yield _overflow_row(
                (phase, tag, layer, factor),
                over=int(over.sum()),
                slots=int(slots.sum()) * layer.experts,
                assignments=int(steps.counts.sum()),
                tokens=int(steps.tokens.sum()),
                steps=int(ran[position]) if steps.whole else len(steps.tokens),
                steps_over=int((over > 0).sum()),
            )
