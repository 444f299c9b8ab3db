"""What the engine may never pay: a synchronisation, a copy to the host, memory that grows."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.layout import Layout
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.stash import STASH_ROWS
from routeprof.capture.steps import StepCapture
from tests.capture.oracle import CPU, capture_of, layers_of, random_step, run

META = torch.device("meta")
"""Stands for a device: its tensors are not the host's."""

LAYERS = layers_of((8, 2), (6, 3))
SYNCHRONISING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_static",
    "unique_consecutive",
    "_unique2",
}


class NoSynchronisation(TorchDispatchMode):
    """Refuses what makes the host wait for the device; notes the operators that it saw."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen.add(name)
        if name in SYNCHRONISING:
            raise AssertionError(f"{name} synchronises")
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype != torch.bool for index in indices), f"{name} by a bool mask"
        if name == "_to_copy":
            target = torch.device((kwargs or {}).get("device") or args[0].device)
            assert target == args[0].device or target == META, f"{name} to the host"
        if name == "copy_":
            assert args[1].device == args[0].device or args[0].is_meta, f"{name} to the host"
        return function(*args, **(kwargs or {}))


def everything(device: torch.device) -> StepCapture:
    """A capture that keeps steps and tokens too."""
    layout = Layout(LAYERS)
    rings = {
        "step_ring": StepRing(layout, device, 128),
        "token_ring": TokenRing(layout, device, 512),
    }
    return StepCapture(RoutingCounters(layout, device, **rings))


def passes(capture: StepCapture, device: torch.device) -> None:
    """Every way through the code: stash and direct, masked, failed, twice, odd rows, traced."""
    for length in (2, STASH_ROWS + 1):
        for mask in (None, torch.ones(length, dtype=torch.int64, device=device)):
            for failed in (False, True):
                capture.begin(1, length, "prefill", mask, fresh=True)
                for rows in (length, length, length + 1):
                    layers(capture, rows, device)
                capture.end(failed=failed)
            layers(capture, length, device)
            capture.counters.begin_traced("decode", length, mask)
            capture.counters.token_ring.begin_step(
                1, length, mask, fresh=False, on=capture.counters.step_on
            )
            ids = torch.zeros(length, 2, dtype=torch.int64, device=device)
            capture.counters.count(0, ids, mask)
            capture.counters.end_traced()
    for _ in range(130):  # across the fold of pending steps
        capture.begin(1, 1, "decode", None)
        layers(capture, 1, device)
        capture.end()


def layers(capture: StepCapture, rows: int, device: torch.device) -> None:
    for position, layer in enumerate(LAYERS):
        capture.logits(position, torch.randn(rows, layer.experts, device=device))
        ids = torch.zeros(rows, layer.top_k, dtype=torch.int32, device=device)
        weights = torch.rand(rows, layer.top_k, device=device)
        capture.ids(position, ids, weights)


def test_a_pass_on_fake_tensors():
    """Fake tensors have no values: whatever looks at one raises."""
    with FakeTensorMode():
        capture = everything(CPU)
        passes(capture, CPU)
    assert not capture.failures.count, capture.failures.first


def test_fake_tensors_would_catch_a_look_at_a_value():
    with FakeTensorMode():
        for look in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool):
            with pytest.raises(RuntimeError):
                look(torch.zeros(1))


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_nothing_synchronises_or_copies_to_the_host(device):
    """Watched on the CPU, and on a device that is not the host, so that a copy to it is one."""
    capture = everything(device)
    with NoSynchronisation() as watch:
        passes(capture, device)
    assert not capture.failures.count, capture.failures.first
    assert {"scatter_add_", "index_add_", "index_copy_"} <= watch.seen


def test_the_watch_would_catch_it():
    with NoSynchronisation():
        for look in (
            lambda value: value[0].item(),
            lambda value: value.nonzero(),
            lambda value: value[value > 0],
            lambda value: value.bincount(),
        ):
            with pytest.raises(AssertionError):
                look(torch.ones(3, dtype=torch.int64))
        on_device = torch.ones(3, device=META)
        with pytest.raises(AssertionError, match="to the host"):
            on_device.cpu()
        with pytest.raises(AssertionError, match="to the host"):
            torch.zeros(3).copy_(on_device)


def own_memory() -> int:
    """Traced bytes that lines of the capture allocated; other threads of pytest allocate too."""
    own = tracemalloc.Filter(True, "*/routeprof/capture/*")
    traces = tracemalloc.take_snapshot().filter_traces([own])
    return sum(trace.size for trace in traces.statistics("filename"))


@pytest.mark.parametrize("level", ["windows", "steps", "tokens"])
def test_ten_thousand_steps_leave_no_more_memory_than_a_hundred(level):
    """Without a single snapshot: the drain thread may be held up for as long as it likes."""
    layers = layers_of((4, 1))
    layout = Layout(layers)
    rings = {}
    if level != "windows":
        rings["step_ring"] = StepRing(layout, CPU, 64)
    if level == "tokens":
        rings["token_ring"] = TokenRing(layout, CPU, 64)
    capture = capture_of(layers, **rings)
    step = random_step(np.random.default_rng(0), layers, 1, 1)

    def measure(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            run(capture, step)
        gc.collect()
        tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
        return tensors, own_memory()

    for _ in range(3 * 64):
        run(capture, step)
    tracemalloc.start()
    try:
        tensors, memory = measure(64)
        later_tensors, later_memory = measure(10_000 - 64)
    finally:
        tracemalloc.stop()
    assert later_tensors == tensors
    assert later_memory - memory < 20_000


def test_the_cost_is_measured():
    """Rule 10: our own time is part of the time of the steps, and not nothing."""
    capture = capture_of(LAYERS)
    step = random_step(np.random.default_rng(0), LAYERS, 1, 4)
    heavy = torch.randn(256, 256)
    for _ in range(20):
        capture.begin(1, 4, "decode", None)
        heavy = torch.nn.functional.normalize(heavy @ heavy)
        for one in step.calls:
            capture.ids(one.position, torch.from_numpy(one.ids), None)
        capture.end()
    assert 0 < capture.cost_ns[-1] < capture.busy_ns
