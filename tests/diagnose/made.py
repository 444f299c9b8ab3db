"""Recordings whose every step is given: counts, invalid ids, margins, ids of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from routeprof.metrics.gemm import gemm_bucket
from routeprof.metrics.quantiles import histogram_bin
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    TOKEN_SCHEMA,
    WINDOW_SCHEMA,
    RankState,
    RecordingInfo,
)
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import Layer, ModelInfo, RankRole
from tests.recording.id_lists import as_bytes

EXPERTS, TOP_K = 16, 2
FACTORS = (1.0, 1.25, 2.0)
MODEL = ModelInfo("made", hidden_size=2048, expert_width=1024, dtype="bfloat16", engine="none")


def moe(index: int, **changes) -> Layer:
    facts = {"experts": EXPERTS, "top_k": TOP_K, "router": "softmax", "gate": "logits"}
    return Layer(index, f"layers.{index}.mlp", **(facts | changes))


def apportioned(shares: Sequence[float], total: int) -> np.ndarray:
    """Whole numbers in these proportions with that sum, by largest remainder."""
    exact = np.array(shares, dtype=float) / np.sum(shares) * total
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def one_hot(times: float, expert: int = 0, experts: int = EXPERTS) -> np.ndarray:
    """Shares in which one expert gets so many times the mean, and the others as much each."""
    shares = np.full(experts, (experts - times) / (experts - 1))
    shares[expert] = times
    return shares


def halves(larger: float, experts: int = EXPERTS) -> np.ndarray:
    """Shares in which every second expert gets so many times the mean."""
    return np.where(np.arange(experts) % 2, 2 - larger, larger)


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        counts: of every layer, ``[layers][experts]``; None for a layer whose hook did not run.
        ids: of the tokens, ``[tokens, k]``, the same in all layers; only for level tokens.
        request: of the first token; the others are of those that follow.
        position: of every token in its request; unset, the number of the step.
    """

    counts: Sequence[Sequence[int] | None]
    phase: str = "decode"
    tag: str | None = None
    invalid: int = 0
    expected: int | None = None
    ids: np.ndarray | None = None
    request: int = 0
    position: int | None = None


def steady(shares: Sequence[float], steps: int = 32, tokens: int = 256, **facts) -> list[Step]:
    """The same step again and again, in two layers."""
    counts = apportioned(shares, tokens * TOP_K)
    return [Step([counts, counts], **facts) for _ in range(steps)]


def record(
    directory: Path,
    steps: Sequence[Step],
    *,
    layers: Sequence[Layer] | None = None,
    level: str = "steps",
    margin: float | None = 0.1,
    role: RankRole | None = None,
    host: str = "node",
    model: ModelInfo = MODEL,
    windows: int = 0,
    **state,
) -> Path:
    """Write a finished recording.

    Args:
        margin: mean p(k) − p(k+1); None for a recording without gate outputs.
        windows: so many windows of as many steps each; unset, a window for each step.
    """
    layers = tuple(layers or (moe(0), moe(1)))
    info = RecordingInfo(
        id="made",
        layers=layers,
        passes=("model",) * len(layers),
        model=model,
        level=level,
        capacity_factors=FACTORS,
        started=1000.0,
    )
    role = role or RankRole()
    told = RankState(role=role, host=host, pid=role.rank + 1, started=1000.0)
    writer = RecordingWriter(directory, info, told)
    pairs = [
        (number, step, layer, counts)
        for number, step in enumerate(steps)
        for layer, counts in zip(layers, step.counts, strict=True)
    ]
    rows = [_window(*pair, role.rank, margin) for pair in pairs]
    if windows:
        each = ceil(len(steps) / windows)
        rows = [row | {"window": row["window"] // each} for row in rows]
        for row in rows:
            row["start"], row["end"] = 1000.0 + row["window"], 1001.0 + row["window"]
    _write(writer, "part", WINDOW_SCHEMA, rows)
    seen = [pair for pair in pairs if pair[3] is not None]
    if level != "windows":
        _write(writer, "steps", STEP_SCHEMA, [_step(*pair, role.rank) for pair in seen])
    if level == "tokens":
        _write(writer, "tokens", TOKEN_SCHEMA, [_ids(*pair, role.rank) for pair in seen])
        rows = [_request(number, step, role.rank) for number, step in enumerate(steps)]
        _write(writer, "rows", ROW_SCHEMA, rows)
    writer.write_state(**({"state": "stopped"} | state))
    return directory


def _write(writer: RecordingWriter, kind: str, schema, rows: list[dict]) -> None:
    writer.write(kind, schema, {name: [row.get(name) for row in rows] for name in schema.names})


def _tokens(step: Step, layer: Layer, counts: Sequence[int]) -> int:
    return (int(np.sum(counts)) + step.invalid) // layer.top_k


def _window(number: int, step: Step, layer: Layer, counts, rank: int, margin) -> dict:
    row = {"window": number, "start": 1000.0 + number, "end": 1001.0 + number, "rank": rank}
    row |= {"layer": layer.index, "phase": step.phase, "tag": step.tag, "steps": 1}
    row |= {"cost_seconds": 0.001, "expected_tokens": step.expected}
    if counts is None:
        return row | {"calls": 0}
    counts = np.asarray(counts)
    tokens, ratio = _tokens(step, layer, counts), counts.max() / counts.mean()
    slots = [ceil(factor * tokens * layer.top_k / layer.experts) for factor in FACTORS]
    over = [int(np.maximum(counts - room, 0).sum()) for room in slots]
    gates: dict = {}
    if margin is not None:
        gates = {"margin_sum": margin * tokens, "probability_mass": counts / layer.top_k}
        gates |= {"weight_sum": counts / layer.top_k, "entropy_sum": 2.0 * tokens}
        gates |= {"top1_sum": 0.3 * tokens, "z_sum": 1.0 * tokens}
    return row | {
        "calls": 1,
        "tokens": tokens,
        "expected_tokens": tokens if step.expected is None else step.expected,
        "counts": counts,
        "invalid": step.invalid,
        "max_load_sum": int(counts.max()),
        "imbalance_histogram": np.bincount(histogram_bin([ratio]), [tokens]).astype(int),
        "imbalance_max": float(ratio),
        "gemm_histogram": np.bincount(np.asarray(gemm_bucket(counts))),
        "overflow": over,
        "overflow_steps": [int(one > 0) for one in over],
        "capacity_slots": [room * layer.experts for room in slots],
        "gate_rows": 0 if margin is None else tokens,
        **gates,
    }


def _step(number: int, step: Step, layer: Layer, counts, rank: int) -> dict:
    facts = {"step": number, "time": 1000.5 + number, "rank": rank, "layer": layer.index}
    facts |= {"phase": step.phase, "tag": step.tag, "invalid": step.invalid, "counts": counts}
    return facts | {"requests": 1, "tokens": _tokens(step, layer, counts)}


def _ids(number: int, step: Step, layer: Layer, counts, rank: int) -> dict:
    facts = {"step": number, "rank": rank, "layer": layer.index, "phase": step.phase}
    ids = as_bytes(step.ids.ravel().tolist(), layer.experts)
    return facts | {"tokens": len(step.ids), "ids": ids}


def _request(number: int, step: Step, rank: int) -> dict:
    facts = {"step": number, "rank": rank, "pass": "model@cpu"}
    each = list(range(step.request, step.request + len(step.ids)))
    position = number if step.position is None else step.position
    return facts | {"request": each, "position": [position] * len(each)}
