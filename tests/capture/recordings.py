"""Recordings made by driving captures by hand: no model, and windows that end when told."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.layout import DEFAULT_CAPACITY_FACTORS, Layout
from routeprof.capture.recorder import Recorder
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.steps import StepCapture
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import RecordingInfo
from routeprof.topology import LEVELS, Layer, RankRole
from tests.capture.oracle import CPU, Step, begin, call, layers_of, random_step

LAYERS = layers_of((8, 2), (6, 3))

NEVER = 3600.0
"""Seconds between windows that the drain thread would write by itself."""


def recorder_of(
    directory: Path,
    layers: tuple[Layer, ...],
    *,
    level: str = "windows",
    window: float = NEVER,
    role: RankRole | None = None,
    ring: int = 128,
    token_ring: int = 4096,
    own_layers: bool = False,
) -> tuple[Recorder, StepCapture]:
    """A recorder with one stream."""
    hooked = tuple(layer for layer in layers if layer.kind == "moe" and not layer.unsupported)
    layout, detail = Layout(hooked), LEVELS.index(level)
    counters = RoutingCounters(
        layout,
        CPU,
        step_ring=StepRing(layout, CPU, ring) if detail >= 1 else None,
        token_ring=TokenRing(layout, CPU, token_ring) if detail >= 2 else None,
    )
    capture = StepCapture(counters)
    info = RecordingInfo(
        id="by hand",
        layers=layers,
        passes=("model",) * len(layers),
        level=level,
        window_seconds=window,
        capacity_factors=DEFAULT_CAPACITY_FACTORS,
    )
    recorder = Recorder(directory, {"model@cpu": capture}, info, role, own_layers=own_layers)
    return recorder, capture


def flush(recorder: Recorder) -> None:
    """End a window now."""
    with recorder._collect_lock:
        recorder._collect(final=False, patience=0.0)


def serve(capture: StepCapture, step: Step, *, fresh: bool = False) -> None:
    """Run a step under whatever tag is open."""
    if fresh:
        capture.begin(step.batch, step.length, step.phase, None, fresh=True)
    else:
        begin(capture, step)
    for one in step.calls:
        call(capture, one)
    capture.end()


def some(random, **facts) -> Step:
    """A step of ``LAYERS``, four rows."""
    return random_step(random, LAYERS, 2, 2, **facts)


def problems(path: Path) -> dict:
    """What the recording's first rank says went wrong."""
    return open_recording(path).ranks[0].state.problems


def loads(layers: tuple[Layer, ...], steps: list[Step]) -> list[np.ndarray]:
    """Assignments per expert of each layer over the steps."""
    sums = [np.zeros(layer.experts, int) for layer in layers]
    for step in steps:
        for one in step.calls:
            ids = one.ids[step.real(len(one.ids))].ravel()
            ids = ids[(ids >= 0) & (ids < len(sums[one.position]))]
            np.add.at(sums[one.position], ids, 1)
    return sums


def same_loads(profile, layers: tuple[Layer, ...], steps: list[Step]) -> None:
    """The profile's counts are those of the steps."""
    for row, expected in zip(profile.counts, loads(layers, steps), strict=True):
        np.testing.assert_array_equal(np.ma.getdata(row)[: len(expected)], expected)
