"""Recordings of random numbers, written row by row, and their sums added up by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from routeprof.recording.schema import WINDOW_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, RankRole

FACTORS = (1.0, 1.5)
LAYERS = (
    Layer(0, "layers.0", kind="dense"),
    Layer(3, "layers.3.mlp", experts=8, top_k=2, router="softmax", gate="logits"),
    Layer(4, "layers.4.mlp", experts=6, top_k=1, router="softmax", gate="logits"),
)
SUMS = "steps calls tokens invalid max_load_sum gate_rows cost_seconds".split()
NULLABLE = "entropy_sum top1_sum margin_sum z_sum expected_tokens".split()
LISTS = "counts imbalance_histogram gemm_histogram overflow overflow_steps capacity_slots".split()
NULLABLE_LISTS = "probability_mass weight_sum".split()
KEYS = [("prefill", None), ("decode", None), ("decode", "code"), ("decode", "客户"), ("mixed", "b")]


def info_of(**changes) -> RecordingInfo:
    facts = {"layers": LAYERS, "passes": ("", "model", "model"), "capacity_factors": FACTORS}
    return RecordingInfo(**({"id": "made"} | facts | changes))


def random_row(random, window: int, rank: int = 0, keys=KEYS) -> dict:
    """One row of a window part with every kind of null."""
    layer = LAYERS[random.integers(1, 3)]
    phase, tag = keys[random.integers(len(keys))]
    row = {"window": window, "start": 100.0 + window, "end": 101.0 + window, "rank": rank}
    row |= {"layer": layer.index, "phase": phase, "tag": tag, "steps": int(random.integers(1, 9))}
    row["expected_tokens"] = int(random.integers(100)) if random.random() < 0.7 else None
    if random.random() < 0.2:
        names = set(WINDOW_SCHEMA.names) - row.keys() - {"calls", "cost_seconds"}
        return row | dict.fromkeys(names) | {"calls": 0, "cost_seconds": random.random()}
    row |= {name: int(random.integers(1, 99)) for name in SUMS[1:6]}
    row["cost_seconds"] = random.random()
    row["imbalance_max"] = 1 + 7 * random.random() if random.random() < 0.9 else None
    for name in NULLABLE[:4]:
        row[name] = random.normal() if random.random() < 0.7 else None
    for name in LISTS[1:3]:
        row[name] = random.integers(0, 50, random.integers(0, 12)).tolist()
    for name in LISTS[3:]:
        row[name] = random.integers(0, 50, len(FACTORS)).tolist()
    row["counts"] = random.integers(0, 50, layer.experts).tolist()
    for name in NULLABLE_LISTS:
        known = random.random() < 0.7
        row[name] = random.random(layer.experts).tolist() if known else None
    return row


def random_parts(seed: int, parts: int = 6, rows: int = 12, rank: int = 0) -> list[list[dict]]:
    """Rows of each part; some parts lack some of the tags."""
    random = np.random.default_rng(seed)
    return [
        [
            random_row(random, number, rank, KEYS if number % 2 else KEYS[: 2 + number // 2])
            for _ in range(rows)
        ]
        for number in range(parts)
    ]


def write(
    directory: Path, parts: list[list[dict]], role: RankRole | None = None, **changes
) -> RecordingWriter:
    """A recording with these rows."""
    writer = RecordingWriter(directory, info_of(**changes), RankState(role=role or RankRole()))
    for rows in parts:
        write_part(writer, rows)
    writer.write_state(state="stopped")
    return writer


def write_part(writer: RecordingWriter, rows: list[dict]) -> None:
    names = WINDOW_SCHEMA.names
    writer.write("part", WINDOW_SCHEMA, {name: [row[name] for row in rows] for name in names})


def by_hand(rows: list[dict]) -> dict:
    """For each (key, layer index, column): the sum of what is known, None where nothing is."""
    sums = {}
    for row in rows:
        place = ((row["phase"], row["tag"]), row["layer"])
        for name in SUMS + NULLABLE:
            if row[name] is not None:
                sums[(*place, name)] = sums.get((*place, name), 0) + row[name]
        for name in LISTS + NULLABLE_LISTS:
            if row[name] is not None:
                into = sums.setdefault((*place, name), {})
                for index, value in enumerate(row[name]):
                    into[index] = into.get(index, 0) + value
        if row["imbalance_max"] is not None:
            largest = sums.get((*place, "imbalance_max"), 0.0)
            sums[(*place, "imbalance_max")] = max(largest, row["imbalance_max"])
    return sums
