"""Counting inside CUDA graphs: padded buckets, replayed as a serving engine does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

# First, because it skips this module where no kernel can run.
from tests.gpu.device import DEVICE, INTERPRETED
from tests.gpu.reference import (
    GATE_START,
    STEP_START,
    Call,
    StepConstants,
    add_step,
    counted_by_hand,
    fused,
    layout_of,
)

if INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

LAYOUT = layout_of((128, 8), (60, 4), (8, 2))
SCORINGS = ("softmax", "sigmoid", "probabilities")
BUCKETS = (1, 8, 64)


class Engine:
    """A graph for each bucket; its layers read fixed buffers, as those of an engine do."""

    def __init__(self) -> None:
        self.on, self.rows, self.slot = zeros(), zeros(), zeros(1)
        layers = len(LAYOUT.layers)
        self.step_rows = zeros(layers, LAYOUT.step_width)
        self.gate_rows = zeros(layers, LAYOUT.gate_width, dtype=torch.float64)
        self.totals = zeros(LAYOUT.slots, layers, LAYOUT.int_width)
        self.largest = zeros(LAYOUT.slots, layers, dtype=torch.float64)
        self.constants = StepConstants(LAYOUT, torch.device(DEVICE))
        self.calls = {
            bucket: [self._call(bucket, place) for place in range(layers)] for bucket in BUCKETS
        }
        self.graphs = {bucket: self._captured(bucket) for bucket in BUCKETS}

    def _call(self, bucket: int, place: int) -> Call:
        layer = LAYOUT.layers[place]
        return Call(
            ids=zeros(bucket, layer.top_k, dtype=torch.int32),
            logits=zeros(bucket, layer.experts, dtype=torch.bfloat16),
            weights=zeros(bucket, layer.top_k, dtype=torch.float32),
            on=self.on,
            rows=self.rows,
            valid=None,
            offset=0,
            experts=layer.experts,
            top_k=layer.top_k,
            scoring=SCORINGS[place],
            widest=LAYOUT.experts,
        )

    def _forward(self, bucket: int) -> None:
        for place, call in enumerate(self.calls[bucket]):
            into = self.step_rows[place], self.gate_rows[place]
            given = call.ids, call.logits, call.weights, call.on, call.rows, call.valid, call.offset
            fused.count_layer(*into, *given, call.experts, call.top_k, call.scoring)
        into = self.totals, self.largest
        fused.fold_steps(*into, self.step_rows[None], self.slot, LAYOUT, self.constants)
        self.step_rows.zero_()

    def _captured(self, bucket: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(bucket)  # compiles the kernels; counts nothing, for the switch is off
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward(bucket)
        return graph

    def step(self, random: np.random.Generator, bucket: int, rows: int, slot: int, on: int) -> None:
        """Write the inputs, padding included, and replay."""
        self.on.fill_(on)
        self.rows.fill_(rows)
        self.slot.fill_(slot)
        for call in self.calls[bucket]:
            ids = random.integers(-1, call.experts + 1, call.ids.shape)
            logits = random.random(call.logits.shape)
            logits /= logits.sum(1, keepdims=True)
            weights = random.random(call.weights.shape)
            ids[rows:] = 3
            logits[rows:] = weights[rows:] = np.nan
            for buffer, values in zip(
                (call.ids, call.logits, call.weights), (ids, logits, weights), strict=True
            ):
                buffer.copy_(torch.from_numpy(values))
        self.graphs[bucket].replay()


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def numbers(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.cpu().numpy().copy() for tensor in tensors]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_warming_up_and_capturing_count_nothing(engine):
    assert not engine.totals[..., : LAYOUT.step_width].any()
    assert not engine.gate_rows.any()


def test_replays_count_their_real_rows(engine):
    random = np.random.default_rng(0)
    totals, largest, gate = numbers(engine.totals, engine.largest, engine.gate_rows)
    for _ in range(60):
        bucket = int(random.choice(BUCKETS))
        rows, slot = int(random.integers(bucket + 1)), int(random.integers(LAYOUT.slots))
        engine.step(random, bucket, rows, slot, on=int(random.random() < 0.8))
        by_hand = [counted_by_hand(call) for call in engine.calls[bucket]]
        step = np.stack([step_row - STEP_START for step_row, _ in by_hand])
        gate += np.stack([gate_row - GATE_START for _, gate_row in by_hand])
        for place in range(len(LAYOUT.layers)):
            add_step(totals[slot, place], largest[slot], LAYOUT, step, place)
    found = numbers(engine.totals, engine.largest, engine.gate_rows)
    assert totals[..., 1 : LAYOUT.experts].sum() > 1000
    np.testing.assert_array_equal(found[0], totals)
    np.testing.assert_array_equal(found[1], largest)
    np.testing.assert_allclose(found[2], gate, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_replay_without_real_rows_counts_none(engine, bucket):
    """A dummy pass: the layers were called, and saw no token."""
    totals, gate = numbers(engine.totals, engine.gate_rows)
    engine.step(np.random.default_rng(1), bucket, rows=0, slot=2, on=1)
    found, found_gate = numbers(engine.totals, engine.gate_rows)
    added = found - totals
    row = added[2, :, LAYOUT.sections["row"]]
    assert not row[:, :-1].any()
    assert row[:, -1].tolist() == [1] * len(LAYOUT.layers)
    for name in ("max_load", "imbalance", "overflow", "capacity"):
        assert not added[2, :, LAYOUT.sections[name]].any(), name
    np.testing.assert_array_equal(found_gate, gate)


def test_a_replay_that_is_switched_off_counts_nothing(engine):
    totals, gate = numbers(engine.totals, engine.gate_rows)
    engine.step(np.random.default_rng(2), 64, rows=64, slot=1, on=0)
    found, found_gate = numbers(engine.totals, engine.gate_rows)
    np.testing.assert_array_equal(found, totals)
    np.testing.assert_array_equal(found_gate, gate)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_counting_neither_waits_nor_allocates(engine):
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._forward(64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
