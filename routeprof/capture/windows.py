"""From snapshots to table rows: a window is what changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.capture.layout import GATE_SCALARS, Layout, slot_key
from routeprof.capture.snapshot import Snapshot, StepDetail, TokenDetail
from routeprof.recording.id_bytes import packed

Columns = dict[str, list[Any]]


def window_columns(
    layout: Layout, before: Snapshot | None, after: Snapshot, tags: dict[int, str | None]
) -> Columns:
    """One row for each slot that saw steps and each layer.

    Args:
        before: the snapshot at the window's start; None for zero.
        tags: name of each tag number; None for untagged.

    Returns:
        Columns of ``schema.WINDOW_SCHEMA`` without window, start, end and rank. A layer that did
        not run in these steps has nulls: it was not captured, which is not zero.
    """
    rows: Columns = {}
    costs = _costs(layout, before, after)
    busy = [index for index in range(len(after.slots)) if _steps(before, after, index) > 0]
    for index in busy:
        slot = int(after.slots[index])
        expected = after.expected[index] - _earlier(before, "expected", slot)
        totals = after.totals[index] - _earlier(before, "totals", slot)
        gate = None if after.gate is None else after.gate[index] - _earlier(before, "gate", slot)
        tag, phase = slot_key(slot)
        for position, layer in enumerate(layout.layers):
            row = {
                "layer": layer.index,
                "phase": phase,
                "tag": tags.get(tag),
                "steps": int(expected[1]),
                "expected_tokens": int(expected[0]) if layer.sees_all_tokens else None,
                "cost_seconds": costs[position] / len(busy),
                **_counted(layout, position, totals[position]),
                **_gated(layout, position, None if gate is None else gate[position]),
                "imbalance_max": float(after.imbalance_max[index, position]) or None,
            }
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
    return rows


def _position(snapshot: Snapshot | None, slot: int) -> int | None:
    if snapshot is None:
        return None
    found = np.flatnonzero(snapshot.slots == slot)
    return int(found[0]) if len(found) else None


def _earlier(snapshot: Snapshot | None, name: str, slot: int) -> Any:
    index = _position(snapshot, slot)
    return 0 if index is None else getattr(snapshot, name)[index]


def _steps(before: Snapshot | None, after: Snapshot, index: int) -> int:
    earlier = _earlier(before, "expected", int(after.slots[index]))
    return int((after.expected[index] - earlier)[1])


def _costs(layout: Layout, before: Snapshot | None, after: Snapshot) -> NDArray[np.float64]:
    """Seconds of own time per layer; a step's own cost is shared by its layers."""
    cost = np.array(after.cost_ns, dtype=np.float64)
    if before is not None:
        cost -= np.array(before.cost_ns)
    layers = len(layout.layers)
    return np.asarray((cost[:layers] + cost[-1] / layers) / 1e9)


def _counted(layout: Layout, position: int, totals: NDArray[np.int64]) -> dict[str, Any]:
    """Columns that come from the integer sums [int_width] of one layer."""
    sections = layout.sections
    row = totals[sections["row"]]
    experts = layout.layers[position].experts
    calls = int(row[layout.calls_column])
    if not calls:
        names = (
            "tokens counts invalid max_load_sum imbalance_histogram gemm_histogram "
            "overflow overflow_steps capacity_slots"
        )
        return {"calls": 0, **dict.fromkeys(names.split())}
    return {
        "calls": calls,
        "tokens": int(row[layout.tokens_column]),
        "counts": row[1 : experts + 1],
        "invalid": int(row[0] + row[experts + 1]),
        "max_load_sum": int(totals[sections["max_load"]][0]),
        "imbalance_histogram": _trimmed(totals[sections["imbalance"]]),
        "gemm_histogram": _trimmed(totals[sections["gemm"]]),
        "overflow": totals[sections["overflow"]],
        "overflow_steps": totals[sections["overflow_steps"]],
        "capacity_slots": totals[sections["capacity"]],
    }


def _gated(layout: Layout, position: int, gate: NDArray[np.float64] | None) -> dict[str, Any]:
    """Columns that come from the floating-point sums [gate_width] of one layer."""
    names = ["gate_rows", "probability_mass", "weight_sum"]
    names += [f"{name}_sum" for name in GATE_SCALARS[:-1]]
    if gate is None:
        return dict.fromkeys(names)
    sections = layout.gate_sections
    experts = layout.layers[position].experts
    weights = gate[sections["weight"]][:experts]
    scalars = dict(zip(GATE_SCALARS, gate[sections["scalars"]].tolist(), strict=True))
    rows = round(scalars.pop("rows"))
    columns: dict[str, Any] = dict.fromkeys(names)
    if rows:
        columns |= {f"{name}_sum": _known(value) for name, value in scalars.items()}
        columns |= {"gate_rows": rows, "probability_mass": gate[sections["mass"]][:experts]}
    if weights.any() and not np.isnan(weights).any():
        columns["weight_sum"] = weights
    return columns


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _trimmed(histogram: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without the zeros at its end."""
    used = np.flatnonzero(histogram)
    return histogram[: used[-1] + 1 if len(used) else 0]


def step_columns(layout: Layout, detail: StepDetail, tags: dict[int, str | None]) -> Columns:
    """Rows of ``schema.STEP_SCHEMA`` without time, rank and requests; a layer that did not run
    in a step has no row."""
    rows: Columns = {}
    for offset, (step_row, slot) in enumerate(zip(detail.rows, detail.slots, strict=True)):
        tag, phase = slot_key(int(slot))
        for position, layer in enumerate(layout.layers):
            row = step_row[position]
            if not row[layout.calls_column]:
                continue
            experts = layer.experts
            values = {
                "step": detail.first + offset,
                "layer": layer.index,
                "phase": phase,
                "tag": tags.get(tag),
                "tokens": int(row[layout.tokens_column]),
                "invalid": int(row[0] + row[experts + 1]),
                "counts": row[1 : experts + 1],
            }
            for name, value in values.items():
                rows.setdefault(name, []).append(value)
    return rows


def token_columns(
    layout: Layout, detail: TokenDetail, phases: Mapping[int, str] | None = None
) -> Columns:
    """Rows of ``schema.TOKEN_SCHEMA`` without rank: one per step and layer, real rows only.

    Args:
        phases: of steps by their number; the phase of all others is null.
    """
    rows: Columns = {"step": [], "layer": [], "phase": [], "tokens": [], "ids": []}
    for position, layer in enumerate(layout.layers):
        steps, ids = detail.steps[position], detail.ids[position]
        for step, block in _by_step(steps):
            real = ids[block]
            real = real[real[:, 0] != -2]
            rows["step"].append(step)
            rows["layer"].append(layer.index)
            rows["phase"].append((phases or {}).get(step))
            rows["tokens"].append(len(real))
            rows["ids"].append(packed(real, layer.experts))
    return rows


def row_columns(detail: TokenDetail) -> Columns:
    """Rows of ``schema.ROW_SCHEMA`` without rank and pass: what the rows of each step are."""
    rows: Columns = {"step": [], "request": [], "position": []}
    for step, block in _by_step(detail.row_step):
        real = detail.row_request[block] >= 0
        rows["step"].append(step)
        rows["request"].append(detail.row_request[block][real].astype(np.int32))
        rows["position"].append(detail.row_position[block][real].astype(np.int32))
    return rows


def _by_step(steps: NDArray[np.integer]) -> list[tuple[int, slice]]:
    """Runs of equal step numbers."""
    if not len(steps):
        return []
    edges = np.flatnonzero(np.diff(steps)) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), len(steps)]
    return [(int(steps[a]), slice(a, b)) for a, b in zip(starts, stops, strict=True)]
