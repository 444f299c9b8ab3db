"""What is predicted of placements and layouts is what real processes compute and send."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import pytest
import torch
from torch import Tensor

import routeprof
from routeprof.plan.buffers import Pass, rows_on_fullest
from routeprof.plan.hotness import Measured
from routeprof.plan.shape import Moe
from routeprof.sample_data import encode, load_model, load_prompts
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.cost import Sizes
from routeprof.whatif.hardware import hardware
from routeprof.whatif.layer_runs import LayerRun, layer_runs
from routeprof.whatif.layout import Layout
from routeprof.whatif.layout_sums import Setting, sums_of_layer
from routeprof.whatif.placement import place
from routeprof.whatif.traffic import (
    dispatch,
    executed_slots,
    homes,
    slot_loads,
    traffic_matrix,
)
from tests.whatif.expert_parallel import Done, Weights, Work, run

LAYER, PROMPTS, NEW_TOKENS = 1, 8, 6
BYTES = 128 * 4  # hidden size, float32

LAYOUTS = {
    "EP 2": Layout(tp=1, dp=2, ep=2, etp=1),
    "EP 4 on 2 nodes": Layout(tp=1, dp=4, ep=4, etp=1, nodes=2),
    "TP 2, EP 4": Layout(tp=2, dp=2, ep=4, etp=1),
    "EP 2 x TP 2": Layout(tp=1, dp=4, ep=2, etp=2, nodes=2),
}
PLACINGS = ("in order", "placed")


@dataclass(frozen=True)
class Recorded:
    """One layer of the sample model, recorded while it generated, and what went into it.

    Attributes:
        inputs: of each step, hidden states ``[rows, h]``; outputs: what came out.
        sequence: of each row, by step.
    """

    run: LayerRun
    weights: Weights
    inputs: list[Tensor]
    outputs: list[Tensor]
    sequence: list[Tensor]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    model = load_model()
    block = model.model.layers[LAYER].mlp
    batch = encode(load_prompts("code")[:PROMPTS])
    seen: list[tuple[Tensor, Tensor]] = []
    handle = block.register_forward_hook(
        lambda module, args, output: seen.append((args[0].clone(), output.clone()))
    )
    folder = tmp_path_factory.mktemp("expert-parallel")
    torch.manual_seed(0)
    with torch.inference_mode(), routeprof.record(model, folder / "run", level="tokens"):
        model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=True)
    handle.remove()
    inputs, outputs, sequence = [], [], []
    for given, made in seen:
        first = len(inputs) == 0
        real = batch["attention_mask"].bool() if first else torch.ones(given.shape[:2]).bool()
        inputs.append(given[real])
        outputs.append(made[real])
        sequence.append(real.nonzero()[:, 0])
    runs, every = layer_runs(routeprof.load(folder / "run"))
    assert every == 1
    weights = Weights(
        block.gate.weight.detach(),
        block.experts.gate_up_proj.detach(),
        block.experts.down_proj.detach(),
        2,
    )
    return Recorded(runs[LAYER], weights, inputs, outputs, sequence)


def slots_for(recorded: Recorded, layout: Layout, placing: str) -> np.ndarray:
    experts = recorded.run.experts
    if placing == "in order":
        return np.arange(experts)
    cluster = Cluster.even(layout.ep, experts + layout.ep)
    return place(recorded.run.counts[:, np.newaxis], cluster).slots[0]


def dealt(recorded: Recorded, layout: Layout) -> list[list[Tensor]]:
    """Rows of each step by process: requests to replicas, a replica's tokens to its processes."""
    rows = []
    for sequence in recorded.sequence:
        own: list[list[int]] = [[] for _ in range(layout.gpus)]
        dealt_out = [0] * layout.dp
        for row, request in enumerate(sequence.tolist()):
            replica = request % layout.dp
            own[replica * layout.tp + dealt_out[replica] % layout.tp].append(row)
            dealt_out[replica] += 1
        rows.append([torch.tensor(one, dtype=torch.int64) for one in own])
    return rows


@dataclass(frozen=True)
class Ran:
    """What real processes did with the recorded layer."""

    layout: Layout
    slots: np.ndarray
    done: list[Done]

    @property
    def computed(self) -> np.ndarray:
        """Assignments of every process, ``[steps, processes]``."""
        return np.array([process.assignments for process in self.done]).T

    @property
    def sent(self) -> np.ndarray:
        """Bytes from each process to each, ``[processes, processes]``."""
        return np.array([process.sent for process in self.done])


@pytest.fixture(scope="module")
def runs(recorded: Recorded) -> dict[tuple[str, str], Ran]:
    """All layouts and placements, those on as many processes together."""
    asked = {
        (name, placing): (layout, slots_for(recorded, layout, placing))
        for name, layout in LAYOUTS.items()
        for placing in PLACINGS
    }
    ran = {}
    for processes in sorted({layout.gpus for layout in LAYOUTS.values()}):
        mine = {key: own for key, own in asked.items() if own[0].gpus == processes}
        done = run([work(recorded, *own) for own in mine.values()], processes)
        ran |= {key: Ran(*own, seen) for (key, own), seen in zip(mine.items(), done, strict=True)}
    return ran


def work(recorded: Recorded, layout: Layout, slots: np.ndarray) -> Work:
    rows = dealt(recorded, layout)
    steps = [
        [hidden[own] for own in step] for hidden, step in zip(recorded.inputs, rows, strict=True)
    ]
    return Work(recorded.weights, steps, rows, slots, layout.etp)


@pytest.fixture(params=[(name, one) for name in LAYOUTS for one in PLACINGS], ids=": ".join)
def ran(runs: dict[tuple[str, str], Ran], request: pytest.FixtureRequest) -> Ran:
    return runs[request.param]


def test_outputs_are_those_of_the_model(recorded: Recorded, ran: Ran):
    for number, step in enumerate(dealt(recorded, ran.layout)):
        for own, one in zip(step, ran.done, strict=True):
            torch.testing.assert_close(one.outputs[number], recorded.outputs[number][own])


def test_loads_and_bytes_are_those_of_real_processes(recorded: Recorded, ran: Ran):
    one, layout, slots = recorded.run, ran.layout, ran.slots
    assert one.ids is not None
    assert one.step is not None
    assert one.request is not None
    executed = executed_slots(one.ids, one.step, slots)
    loads = slot_loads(executed, one.step, len(slots), one.steps)
    ranks = loads.reshape(one.steps, layout.ep, -1).sum(axis=2)
    assert np.array_equal(np.repeat(ranks, layout.etp, axis=1), ran.computed)

    rank = executed // (len(slots) // layout.ep)
    sends = dispatch(layout, rank, homes(layout, one.step, one.request), one.step)
    matrix = traffic_matrix(layout, sends) * BYTES
    assert np.array_equal(matrix, ran.sent)
    assert np.array_equal(matrix.T, [process.returned for process in ran.done])


def test_buffers_of_a_plan_hold_what_real_processes_receive(recorded: Recorded, ran: Ran):
    """Rows of the fullest rank, by the loads of the step; each token comes once, so fewer bytes."""
    layout, one = ran.layout, recorded.run
    moe = Moe(one.experts, 2, 96)
    received = np.array([process.received for process in ran.done]).T
    for tokens, computed, held in zip(recorded.inputs, ran.computed, received, strict=True):
        each = len(tokens) / layout.dp
        step = Pass(tokens=ceil(each), batch=PROMPTS)
        fullest = computed.max() / (len(tokens) * 2 / layout.ep)
        rows = rows_on_fullest(moe, layout, step, fullest)
        assert computed.max() <= rows <= ceil(computed.max() * ceil(each) / each) + 1e-9
        assert held.max() <= rows * BYTES
        # A token that chose two experts of the rank is sent to it once.
        assert held.max() >= rows * BYTES / 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_of_a_recording_give_the_buffers_of_its_prefill(
    recorded: Recorded, runs: dict[tuple[str, str], Ran], name: str
):
    """Within a hundredth; steps of a few tokens can be more uneven than all of them together."""
    ran, one = runs[name, "in order"], recorded.run
    (fullest,) = Measured((LAYER,), (one.counts.sum(axis=0),)).fullest(ran.layout.ep)
    step = Pass(tokens=len(recorded.inputs[0]) // ran.layout.dp, batch=PROMPTS)
    rows = rows_on_fullest(Moe(one.experts, 2, 96), ran.layout, step, fullest)
    assert rows == pytest.approx(ran.computed[0].max(), rel=0.01)


def test_sums_of_a_layout_are_those_of_real_processes(recorded: Recorded, ran: Ran):
    layout, computed, one = ran.layout, ran.computed, recorded.run
    sizes, gpu = Sizes(128, 96, 4, 4, 4), hardware("h100")
    placed = len(ran.slots) > one.experts
    setting = Setting(sizes, gpu, "routeprof", layout.ep) if placed else Setting(sizes, gpu)
    ((_, sums),) = sums_of_layer(one, one if placed else None, [layout], setting)
    assert sums.slowest == computed.max(axis=1).sum()
    assert sums.mean == computed.mean(axis=1).sum()
    node = np.arange(layout.gpus) // layout.per_node
    inside = node[:, np.newaxis] == node
    assert sums.dispatch_inside == sums.combine_inside == ran.sent[inside].sum()
    assert sums.dispatch_between == sums.combine_between == ran.sent[~inside].sum()
    assert (sums.dispatch_between > 0) == (layout.nodes > 1)
