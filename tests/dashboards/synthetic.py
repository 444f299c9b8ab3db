"""Big recordings made up in one go: any number of layers, experts and windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.metrics.gemm import gemm_bucket
from routeprof.metrics.quantiles import histogram_bin
from routeprof.recording.schema import WINDOW_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, ModelInfo, RankRole

FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)
KEYS = (("prefill", None), ("decode", None), ("decode", "code"), ("decode", "chat"))
STEPS, TOKENS, TOP_K = 4, 64, 8
VARIETY = 16
"""Different loads that a layer cycles through."""


@dataclass(frozen=True)
class Shape:
    """What a recording is to be like; ``silent`` are the layers whose hook never ran."""

    layers: int = 61
    experts: int = 256
    windows: int = 10_000
    windows_per_part: int = 1
    gate: bool = False
    silent: frozenset[int] = frozenset()


def write(path: Path, shape: Shape, started: float = 1_700_000_000.0) -> None:
    """Write a finished recording of that shape, one key a window in turns."""
    layers = tuple(
        Layer(
            index,
            f"model.layers.{index}.mlp",
            experts=shape.experts,
            top_k=TOP_K,
            router="softmax",
            gate="logits" if shape.gate else "none",
        )
        for index in range(shape.layers)
    )
    info = RecordingInfo(
        id=path.name,
        layers=layers,
        passes=("",) * len(layers),
        model=ModelInfo(name="Synthetic MoE", engine="torch", hidden_size=64),
        gate=shape.gate,
        capacity_factors=FACTORS,
        started=started,
    )
    state = RankState(role=RankRole(), started=started, flush_seconds=1.0)
    writer = RecordingWriter(path, info, state)
    kinds = [_window(shape, np.random.default_rng(number)) for number in range(VARIETY)]
    for first in range(0, shape.windows, shape.windows_per_part):
        numbers = range(first, min(first + shape.windows_per_part, shape.windows))
        rows: dict[str, list[Any]] = {name: [] for name in WINDOW_SCHEMA.names}
        for number in numbers:
            columns = _placed(kinds[number % VARIETY], number, started, shape)
            for name, values in rows.items():
                values.extend(columns.get(name, [None] * shape.layers))
        writer.write("part", WINDOW_SCHEMA, rows)
    writer.write_state(state="stopped", cost_seconds=1.0, busy_seconds=100.0)


def _placed(
    kind: dict[str, list[Any]], number: int, started: float, shape: Shape
) -> dict[str, list[Any]]:
    phase, tag = KEYS[number % len(KEYS)]
    same = {
        "window": number,
        "start": started + number,
        "end": started + number + 1,
        "rank": 0,
        "phase": phase,
        "tag": tag,
    }
    return kind | {name: [value] * shape.layers for name, value in same.items()}


def _window(shape: Shape, random: np.random.Generator) -> dict[str, list[Any]]:
    """Columns of one window, one entry a layer."""
    columns: dict[str, list[Any]] = {}
    for index in range(shape.layers):
        loads = _loads(shape, index, random)
        for name, value in _row(index, loads, shape).items():
            columns.setdefault(name, []).append(value)
    return columns


def _loads(shape: Shape, index: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Loads of the steps of a window, int64 [steps, experts]; some layers are more skewed."""
    skew = np.arange(1, shape.experts + 1) ** -(0.1 + 0.5 * (index % 7) / 7)
    shares = np.random.default_rng(index).permutation(skew / skew.sum())
    return random.multinomial(TOKENS * TOP_K, shares, size=STEPS)


def _row(index: int, loads: NDArray[np.int64], shape: Shape) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_COUNTED)
    row |= {"layer": index, "steps": STEPS, "expected_tokens": STEPS * TOKENS, "calls": 0}
    row |= {"cost_seconds": 1e-4}
    return row if index in shape.silent else row | dict(_counted(loads, shape))


def _counted(loads: NDArray[np.int64], shape: Shape) -> Iterator[tuple[str, Any]]:
    ratios = loads.max(1) * shape.experts / loads.sum(1)
    slots = np.ceil(np.array(FACTORS) * TOKENS * TOP_K / shape.experts).astype(np.int64)
    over = np.maximum(loads[:, :, None] - slots, 0).sum(1)
    yield "calls", STEPS
    yield "tokens", STEPS * TOKENS
    yield "counts", loads.sum(0)
    yield "invalid", 0
    yield "max_load_sum", int(loads.max(1).sum())
    yield "imbalance_histogram", np.bincount(histogram_bin(ratios), [TOKENS] * STEPS).astype(int)
    yield "imbalance_max", float(ratios.max())
    yield "gemm_histogram", np.bincount(np.asarray(gemm_bucket(loads)).ravel())
    yield "overflow", over.sum(0)
    yield "overflow_steps", (over > 0).sum(0)
    yield "capacity_slots", STEPS * shape.experts * slots
    if shape.gate:
        rows = STEPS * TOKENS
        yield "gate_rows", rows
        yield "probability_mass", loads.sum(0) / TOP_K
        yield "weight_sum", loads.sum(0) / TOP_K
        yield "entropy_sum", 3.0 * rows
        yield "top1_sum", 0.2 * rows
        yield "margin_sum", 0.05 * rows
        yield "z_sum", 1.0 * rows


_COUNTED = (
    "calls tokens counts invalid max_load_sum imbalance_histogram imbalance_max gemm_histogram "
    "overflow overflow_steps capacity_slots gate_rows probability_mass weight_sum entropy_sum "
    "top1_sum margin_sum z_sum"
).split()
