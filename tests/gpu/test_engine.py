"""EngineCapture as the engine hooks use it, its layers replayed in a CUDA graph of a bucket."""

from __future__ import annotations

import numpy as np
import pytest
import torch

# First, because it skips this module where no kernel can run.
from tests.gpu.device import INTERPRETED

if INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.engine import EngineCapture
from routeprof.capture.layout import Layout
from tests.capture.oracle import check, layers_of, random_step, rows_of, truth

pytestmark = pytest.mark.gpu

CUDA, BUCKET = torch.device("cuda"), 64
LAYERS = layers_of((128, 8), (60, 4))


class Replayed:
    """Layers that read fixed buffers of BUCKET rows, captured once."""

    def __init__(self) -> None:
        counters = RoutingCounters(Layout(LAYERS), CUDA)
        self.engine = EngineCapture(counters)
        self.inputs = [
            (
                torch.zeros(BUCKET, layer.top_k, dtype=torch.int32, device=CUDA),
                torch.zeros(BUCKET, layer.experts, device=CUDA),
                torch.zeros(BUCKET, layer.top_k, device=CUDA),
            )
            for layer in LAYERS
        ]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()  # a warm-up pass, which also compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        for position, (ids, logits, weights) in enumerate(self.inputs):
            self.engine.count(position, ids, logits, weights)

    def load(self, step) -> None:
        for one, buffers in zip(step.calls, self.inputs, strict=True):
            for buffer, values in zip(buffers, (one.ids, one.logits, one.weights), strict=True):
                buffer.fill_(3)
                buffer[: step.rows].copy_(torch.from_numpy(np.asarray(values)))


def test_replays_count_the_real_rows_of_open_passes():
    random, replayed = np.random.default_rng(3), Replayed()
    steps = []
    for place in range(30):
        rows = int(random.integers(1, BUCKET + 1))
        step = random_step(random, LAYERS, 1, rows, phase=("prefill", "decode")[place % 2])
        replayed.load(step)
        if place % 5 == 4:  # a dummy run: no pass is open
            replayed.graph.replay()
            continue
        replayed.engine.begin_pass(rows, step.phase, 1)
        replayed.graph.replay()
        replayed.engine.end_pass()
        steps.append(step)
    layout = replayed.engine.counters.layout
    check(layout, rows_of(layout, None, replayed.engine.snapshot(0.0)), truth(layout, steps))
    assert not replayed.engine.failures.count, replayed.engine.failures.first


def test_paused_passes_count_nothing():
    random, replayed = np.random.default_rng(4), Replayed()
    step = random_step(random, LAYERS, 1, 9, phase="decode")
    replayed.load(step)
    for on in (True, False, True, False):
        replayed.engine.switch(on)
        replayed.engine.begin_pass(9, "decode", 1)
        replayed.graph.replay()
        replayed.engine.end_pass()
    layout = replayed.engine.counters.layout
    rows = rows_of(layout, None, replayed.engine.snapshot(0.0))
    check(layout, rows, truth(layout, [step, step]))
