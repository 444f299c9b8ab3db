"""What a few forward passes must add up to, counted one assignment at a time in plain Python."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np
import torch

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.layout import Layout
from routeprof.capture.steps import StepCapture
from routeprof.capture.windows import window_columns
from routeprof.metrics.gate import gate_sums
from routeprof.metrics.gemm import gemm_bucket
from routeprof.metrics.quantiles import histogram_bin
from routeprof.topology import PHASES, Layer

CPU = torch.device("cpu")


@dataclass
class Call:
    """One call of a layer: what its hooks would hand over."""

    position: int
    ids: np.ndarray
    logits: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclass
class Step:
    """One forward pass of batch · length rows."""

    batch: int
    length: int
    calls: list[Call] = field(default_factory=list)
    phase: str = "decode"
    tag: int = 0
    valid: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def real(self, rows: int) -> np.ndarray:
        """Which rows of a call with so many count; a layer with rows of its own has no padding."""
        if self.valid is None or rows != self.rows:
            return np.ones(rows, bool)
        return self.valid.astype(bool)


def layers_of(*shapes: tuple[int, int], **facts) -> tuple[Layer, ...]:
    """Layers by (experts, top_k), each with its own index and a softmax router."""
    facts = {"router": "softmax", "gate": "logits"} | facts
    return tuple(
        Layer(10 * place, f"layers.{place}.mlp", experts=experts, top_k=top_k, **facts)
        for place, (experts, top_k) in enumerate(shapes)
    )


def capture_of(layers: tuple[Layer, ...], *, gate: bool = True, **rings) -> StepCapture:
    return StepCapture(RoutingCounters(Layout(layers), CPU, gate=gate, **rings))


def random_step(random, layers, batch=2, length=3, **facts) -> Step:
    """Every layer runs once, with valid ids, logits and weights."""
    rows = batch * length
    calls = [
        Call(
            position,
            random.integers(0, layer.experts, (rows, layer.top_k)),
            random.normal(size=(rows, layer.experts)).astype(np.float32),
            random.random((rows, layer.top_k)).astype(np.float32),
        )
        for position, layer in enumerate(layers)
    ]
    return Step(batch, length, calls, **facts)


def begin(capture: StepCapture, step: Step) -> None:
    valid = None if step.valid is None else torch.tensor(step.valid, dtype=torch.int64)
    capture.begin(step.batch, step.length, step.phase, valid)


def call(capture: StepCapture, one: Call) -> None:
    if one.logits is not None:
        capture.logits(one.position, torch.from_numpy(one.logits))
    weights = None if one.weights is None else torch.from_numpy(one.weights)
    capture.ids(one.position, torch.from_numpy(one.ids), weights)


def run(capture: StepCapture, step: Step) -> None:
    """As the hooks of an eager pass do."""
    capture.set_base(step.tag * len(PHASES))
    begin(capture, step)
    for one in step.calls:
        call(capture, one)
    capture.end()


def run_traced(capture: StepCapture, step: Step) -> None:
    """As a compiled graph does: device operations only."""
    counters = capture.counters
    capture.set_base(step.tag * len(PHASES))
    valid = None if step.valid is None else torch.tensor(step.valid, dtype=torch.int64)
    counters.begin_traced(step.phase, step.rows, valid)
    for one in step.calls:
        own = valid if len(one.ids) == step.rows else None
        ids = torch.from_numpy(one.ids)
        if one.logits is not None:
            counters.add_gate(one.position, torch.from_numpy(one.logits), own)
        counters.count(one.position, ids, own)
        weights = None if one.weights is None else torch.from_numpy(one.weights)
        counters.add_weights(one.position, weights, ids, own)
    counters.end_traced()


# -- the truth


def truth(layout: Layout, steps: list[Step]) -> dict[tuple[int, str, int], dict]:
    """For each (tag, phase, layer position): what the windows must add up to."""
    sums = {}
    for step in steps:
        for position, layer in enumerate(layout.layers):
            key = (step.tag, step.phase, position)
            into = sums.setdefault(key, _nothing(layer, len(layout.capacity_factors)))
            into["steps"] += 1
            into["expected_tokens"] += int(step.real(step.rows).sum())
            _add_step(into, layout, layer, step, position)
    return sums


def _nothing(layer: Layer, factors: int) -> dict:
    names = "steps expected_tokens calls tokens invalid max_load_sum gate_rows".split()
    numbers = dict.fromkeys(names, 0)
    numbers |= {"counts": np.zeros(layer.experts, int), "imbalance_max": None}
    numbers |= {"imbalance_histogram": defaultdict(int), "gemm_histogram": defaultdict(int)}
    for name in ("overflow", "overflow_steps", "capacity_slots"):
        numbers[name] = np.zeros(factors, int)
    for name in ("probability_mass", "weight_sum"):
        numbers[name] = np.zeros(layer.experts)
    return numbers | dict.fromkeys(("entropy_sum", "top1_sum", "margin_sum", "z_sum"), 0.0)


def _add_step(into: dict, layout: Layout, layer: Layer, step: Step, position: int) -> None:
    calls = [one for one in step.calls if one.position == position]
    counts, tokens = np.zeros(layer.experts, int), 0
    for one in calls:
        real = step.real(len(one.ids))
        tokens += int(real.sum())
        for row in np.flatnonzero(real):
            for choice, expert in enumerate(one.ids[row].tolist()):
                if not 0 <= expert < layer.experts:
                    into["invalid"] += 1
                    continue
                counts[expert] += 1
                if one.weights is not None:
                    into["weight_sum"][expert] += one.weights[row, choice]
        if one.logits is not None:
            _add_gate(into, layer, one.logits[real])
    if not calls:
        return
    into["calls"] += len(calls)
    into["tokens"] += tokens
    into["counts"] += counts
    into["max_load_sum"] += int(counts.max())
    for bucket in gemm_bucket(counts).tolist():
        into["gemm_histogram"][bucket] += 1
    if counts.sum():
        ratio = counts.max() / counts.mean()
        into["imbalance_histogram"][int(histogram_bin(ratio))] += tokens
        into["imbalance_max"] = max(ratio, into["imbalance_max"] or 0.0)
    for place, factor in enumerate(layout.capacity_factors):
        factor = Fraction(factor).limit_denominator(1000)
        slots = ceil(factor * tokens * layer.top_k / layer.experts)
        over = sum(max(0, int(count) - slots) for count in counts)
        into["overflow"][place] += over
        into["overflow_steps"][place] += over > 0
        into["capacity_slots"][place] += slots * layer.experts


def _add_gate(into: dict, layer: Layer, logits: np.ndarray) -> None:
    scoring = "probabilities" if layer.gate == "probabilities" else layer.router
    if not len(logits):
        return
    sums = gate_sums(logits, layer.top_k, scoring)
    into["gate_rows"] += sums.rows
    into["probability_mass"] += sums.mass
    into["entropy_sum"] += sums.entropy
    into["top1_sum"] += sums.top1
    into["margin_sum"] += sums.margin if sums.margin_rows else np.nan
    into["z_sum"] += sums.z if sums.z_rows else np.nan


# -- what the capture says


def windows_of(capture: StepCapture, steps: list[Step], runner=run, cuts=()) -> list[dict]:
    """Run the steps, with a snapshot after each of ``cuts``, and return all window rows."""
    rows, before = [], None
    for number, step in enumerate(steps):
        runner(capture, step)
        if number in cuts or number == len(steps) - 1:
            after = capture.snapshot(0.0)
            rows += rows_of(capture.counters.layout, before, after)
            before = after
    return rows


def rows_of(layout: Layout, before, after) -> list[dict]:
    tags = {number: None if number == 0 else number for number in range(layout.tags)}
    columns = window_columns(layout, before, after, tags)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check(layout: Layout, rows: list[dict], expected: dict) -> None:
    """The window rows add up to the truth."""
    places = {layer.index: position for position, layer in enumerate(layout.layers)}
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["tag"] or 0, row["phase"], places[row["layer"]]].append(row)
    assert grouped.keys() == expected.keys()
    for key, want in expected.items():
        layer = layout.layers[key[2]]
        _check_layer(layer, grouped[key], want)


def _check_layer(layer: Layer, rows: list[dict], want: dict) -> None:
    ran = [row for row in rows if row["calls"]]
    for name in ("steps", "calls", "expected_tokens"):
        assert sum(row[name] for row in rows) == want[name], name
    for row in rows:
        if not row["calls"]:
            assert row["counts"] is row["tokens"] is row["overflow"] is None
    if not want["calls"]:
        return
    for name in ("tokens", "invalid", "max_load_sum"):
        assert sum(row[name] for row in ran) == want[name], name
    for name in ("counts", "overflow", "overflow_steps", "capacity_slots"):
        np.testing.assert_array_equal(sum(row[name] for row in ran), want[name], name)
    for name in ("imbalance_histogram", "gemm_histogram"):
        found = defaultdict(int)
        for row in ran:
            for place, weight in enumerate(row[name].tolist()):
                found[place] += weight
        nonzero = [{k: v for k, v in bins.items() if v} for bins in (found, want[name])]
        assert nonzero[0] == nonzero[1], name
    largest = [row["imbalance_max"] for row in ran if row["imbalance_max"] is not None]
    assert max(largest, default=None) == _close(want["imbalance_max"])
    _check_gate(rows, want)


def _check_gate(rows: list[dict], want: dict) -> None:
    gated = [row for row in rows if row["gate_rows"]]
    assert sum(row["gate_rows"] for row in gated) == want["gate_rows"]
    if gated:
        mass = sum(row["probability_mass"] for row in gated)
        np.testing.assert_allclose(mass, want["probability_mass"], rtol=1e-4, atol=1e-5)
        for name in ("entropy_sum", "top1_sum", "margin_sum", "z_sum"):
            values = [row[name] for row in gated]
            if np.isnan(want[name]):
                assert values == [None] * len(values), name
            else:
                assert sum(values) == _close(want[name]), name
    weights = [row["weight_sum"] for row in rows if row["weight_sum"] is not None]
    found = sum(weights) if weights else np.zeros_like(want["weight_sum"])
    np.testing.assert_allclose(found, want["weight_sum"], rtol=1e-4, atol=1e-5)


def _close(value):
    import pytest

    return None if value is None else pytest.approx(value, rel=1e-4, abs=1e-4)
