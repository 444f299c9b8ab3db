"""What counting costs a decode step inside CUDA graphs: ``python -m tests.gpu.bench``.

A synthetic model, 48 layers of 128 experts, top-8, in plain torch and without attention, so that
its steps are shorter, and the share of counting larger, than in a real model. Its layers share
one set of experts: each reads 1.2 GB of weights, which no cache keeps. Replays with and without
counting alternate; the ratio is of medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from routeprof.capture import fused, kernels
from routeprof.capture.kernels import StepConstants
from tests.gpu.reference import layout_of

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 48, 128, 8, 2048, 768
ROUNDS, REPLAYS = 15, 10
LAYOUT = layout_of(*[(EXPERTS, TOP_K)] * LAYERS)
CUDA = torch.device("cuda")

Count = Callable[[int, Tensor, Tensor, Tensor], None]


class Tap:
    """Counts what the layers hand over, and folds at the end of a step."""

    def __init__(self, *, fused_kernels: bool, gate: bool) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=CUDA)

        self.fused_kernels, self.gate = fused_kernels, gate
        self.step_rows = zeros(LAYERS, LAYOUT.step_width)
        self.gate_rows = zeros(LAYERS, LAYOUT.gate_width, dtype=torch.float64)
        self.totals = zeros(LAYOUT.slots, LAYERS, LAYOUT.int_width)
        self.gate_totals = zeros(LAYOUT.slots, *self.gate_rows.shape, dtype=torch.float64)
        self.largest = zeros(LAYOUT.slots, LAYERS, dtype=torch.float64)
        self.on, self.rows, self.slots = zeros(), zeros(), zeros(1)
        self.constants = StepConstants(LAYOUT, CUDA)

    def count(self, place: int, ids: Tensor, logits: Tensor, weights: Tensor) -> None:
        if not self.fused_kernels:
            return self._count_by_twin(place, ids, logits, weights)
        gate_row = self.gate_rows[place] if self.gate else None
        given = (ids, logits, weights, self.on, self.rows, None, 0, EXPERTS, TOP_K, "softmax")
        fused.count_layer(self.step_rows[place], gate_row, *given)

    def _count_by_twin(self, place: int, ids: Tensor, logits: Tensor, weights: Tensor) -> None:
        row, gate_row = self.step_rows[place], self.gate_rows[place]
        keep = torch.arange(len(ids), device=CUDA) < self.rows * self.on
        source = keep.long()
        kernels.count_ids(row, ids, source[:, None].expand(ids.shape).reshape(-1), EXPERTS)
        row[-2] += source.sum()
        row[-1] += self.on
        if self.gate:
            mass, scalars = kernels.gate_statistics(logits, keep, "softmax", TOP_K, False)
            gate_row[:EXPERTS] += mass
            gate_row[2 * EXPERTS :] += scalars
            gate_row[EXPERTS : 2 * EXPERTS] += kernels.weight_sums(weights, ids, keep, EXPERTS)

    def fold(self) -> None:
        rows = self.step_rows[None]
        if self.fused_kernels:
            given = (rows, self.slots, LAYOUT, self.constants)
            fused.fold_steps(self.totals, self.largest, *given)
        else:
            statistics, ratio = kernels.step_statistics(rows, LAYOUT, self.constants)
            self.totals.index_add_(0, self.slots, statistics[None])
            place = self.slots[:, None].expand(1, LAYERS)
            self.largest.scatter_reduce_(0, place, ratio[None], "amax")
        self.step_rows.zero_()
        if self.gate:
            self.gate_totals.index_add_(0, self.slots, self.gate_rows[None])
            self.gate_rows.zero_()


class Experts(nn.Module):
    """Gated experts, all in one grouped product; without it, in one that also multiplies zeros."""

    def __init__(self) -> None:
        super().__init__()
        options = {"device": CUDA, "dtype": torch.bfloat16}
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, **options) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, **options) * 0.02)
        self.grouped = hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability() >= (
            9,
            0,
        )

    def forward(self, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not self.grouped:
            dense = states.new_zeros(len(states), EXPERTS).scatter(1, ids, weights.to(states.dtype))
            first, second = (states.expand(EXPERTS, *states.shape) @ self.up.mT).chunk(2, -1)
            every = (nn.functional.silu(first) * second) @ self.down.mT
            return (every * dense.T[..., None]).sum(0)
        order = ids.flatten().argsort()
        source = order // TOP_K
        ones = torch.ones(ids.numel(), dtype=torch.int32, device=CUDA)
        sizes = torch.zeros(EXPERTS, dtype=torch.int32, device=CUDA)
        ends = sizes.scatter_add(0, ids.flatten(), ones).cumsum(0, dtype=torch.int32)
        first, second = torch._grouped_mm(states[source], self.up.mT, offs=ends).chunk(2, -1)
        chosen = torch._grouped_mm(nn.functional.silu(first) * second, self.down.mT, offs=ends)
        chosen = chosen * weights.flatten()[order][:, None].to(chosen.dtype)
        return torch.zeros_like(states).index_add_(0, source, chosen)


class Model(nn.Module):
    """Routers of their own, experts in common."""

    def __init__(self) -> None:
        super().__init__()
        options = {"device": CUDA, "dtype": torch.bfloat16}
        self.routers = nn.ParameterList(
            torch.randn(HIDDEN, EXPERTS, **options) * 0.05 for _ in range(LAYERS)
        )
        self.experts = Experts()

    def forward(self, states: Tensor, count: Count | None) -> Tensor:
        for place, router in enumerate(self.routers):
            normed = nn.functional.rms_norm(states, (HIDDEN,))
            logits = normed @ router
            weights, ids = logits.float().softmax(-1).topk(TOP_K)
            if count is not None:
                count(place, ids, logits, weights)
            states = states + self.experts(normed, ids, weights)
        return states


def captured(model: Model, states: Tensor, tap: Tap | None) -> torch.cuda.CUDAGraph:
    """The model's step as a graph, with the tap's work in it."""

    def step() -> None:
        model(states, None if tap is None else tap.count)
        if tap is not None:
            tap.fold()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def measure(model: Model, rows: int) -> None:
    states = torch.randn(rows, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    taps = {
        "fused, counts": Tap(fused_kernels=True, gate=False),
        "fused, counts and gate": Tap(fused_kernels=True, gate=True),
        "torch twin, counts and gate": Tap(fused_kernels=False, gate=True),
    }
    graphs = {"": captured(model, states, None)}
    graphs |= {name: captured(model, states, tap) for name, tap in taps.items()}
    for tap in taps.values():
        tap.on.fill_(1)
        tap.rows.fill_(rows)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        for name, graph in graphs.items():
            spent = milliseconds(graph)
            if number:  # the first round warms up
                times[name].append(spent)
    alone = statistics.median(times.pop(""))
    print(f"{rows} rows: {alone:.3f} ms a step without counting")
    for name, spent in times.items():
        median = statistics.median(spent)
        print(f"    {median / alone:.4f} x ({(median - alone) * 1000:+.0f} us)  {name}")
    replays = (ROUNDS + 1) * REPLAYS
    for name, tap in taps.items():
        counted = int(tap.totals[0, :, 1 : EXPERTS + 1].sum())
        if counted != replays * rows * TOP_K * LAYERS:
            print(f"    {name} counted {counted}: WRONG")


def main() -> None:
    if not torch.cuda.is_available() or not fused.available():
        print("no CUDA device, or no Triton: nothing measured")
        return
    torch.manual_seed(0)
    with torch.inference_mode():
        model = Model()
        way = "grouped" if model.experts.grouped else "dense"
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {way} experts")
        for rows in (1, 16, 64, 256):
            measure(model, rows)


if __name__ == "__main__":
    main()
