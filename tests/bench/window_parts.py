"""A windows-level recording of any size, written by the real writer: random loads, exact gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from routeprof.recording.schema import WINDOW_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, RankRole

TOP_K, TOKENS, STEPS = 8, 2_560, 20
"""Of a window: tokens and steps of one layer."""

FACTORS = (1.0, 1.25, 1.5, 2.0)


def info_of(layers: int, experts: int, *, gate: bool) -> RecordingInfo:
    """A model with so many MoE layers behind three dense ones."""
    return RecordingInfo(
        "bench",
        tuple(
            Layer(3 + n, f"layers.{3 + n}.mlp", experts=experts, top_k=TOP_K, gate="logits")
            for n in range(layers)
        ),
        ("model",) * layers,
        gate=gate,
        capacity_factors=FACTORS,
    )


def columns(
    info: RecordingInfo, windows: range, rank: int, random: np.random.Generator
) -> dict[str, Any]:
    """Rows of these windows, one a layer, all of phase decode."""
    layers, experts = len(info.layers), info.layers[0].experts
    rows = len(windows) * layers
    window = np.repeat(np.array(windows), layers)
    load = random.gamma(2.0, size=experts)
    counts = random.poisson(TOKENS * TOP_K * load / load.sum(), (rows, experts))
    total = counts.sum(1)
    scalars = {
        "window": window,
        "start": 1e9 + window.astype(float),
        "end": 1e9 + 1.0 + window,
        "rank": np.full(rows, rank),
        "layer": np.tile([layer.index for layer in info.layers], len(windows)),
        "steps": np.full(rows, STEPS),
        "calls": np.full(rows, STEPS),
        "tokens": total // TOP_K,
        "expected_tokens": total // TOP_K,
        "invalid": total % TOP_K,
        "max_load_sum": counts.max(1) + random.integers(0, 99, rows),
        "imbalance_max": 2 + random.random(rows),
        "gate_rows": total // TOP_K,
        "cost_seconds": random.random(rows) / 1e3,
    }
    found: dict[str, Any] = dict(scalars)
    found |= {"phase": ["decode"] * rows, "tag": [None] * rows, "counts": list(counts)}
    bins = [random.integers(0, 999, 60 + number) for number in random.integers(0, 20, rows)]
    found |= {"imbalance_histogram": bins, "gemm_histogram": [own[:12] for own in bins]}
    for name in ("overflow", "overflow_steps", "capacity_slots"):
        found[name] = list(random.integers(0, 5_000, (rows, len(FACTORS))))
    for name in ("probability_mass", "weight_sum"):
        values = list(random.random((rows, experts)) * counts) if info.gate else [None] * rows
        found[name] = values
    for name in ("entropy_sum", "top1_sum", "margin_sum", "z_sum"):
        found[name] = random.random(rows) * total if info.gate else [None] * rows
    return found


def write(
    directory: Path,
    *,
    ranks: int,
    windows: int = 60,
    parts: int = 1,
    layers: int = 58,
    experts: int = 256,
    gate: bool = True,
    first: int = 0,
) -> RecordingInfo:
    """Write a recording of ranks ``first`` and so on, each with its windows in so many parts."""
    info = info_of(layers, experts, gate=gate)
    for rank in range(first, first + ranks):
        role = RankRole(rank=rank, world_size=first + ranks + 1, dp=rank)
        writer = RecordingWriter(directory, info, RankState(role=role))
        random = np.random.default_rng(rank)
        for part in range(parts):
            span = range(part * windows // parts, (part + 1) * windows // parts)
            writer.write("part", WINDOW_SCHEMA, columns(info, span, rank, random))
        writer.write_state(state="stopped")
    return info
