"""Modules that no rule knows, user-named layers, and the layout of transformers 4."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import routeprof
from routeprof import LayerSpec, Profile
from routeprof.errors import NoMoELayersError, UsageError
from routeprof.metrics.gate import gate_sums
from tests.hooks.conftest import Record, counts_of, model_of, problems_of, profile_of
from tests.zoo.families import BY_TYPE, inputs, quiet

HIDDEN, EXPERTS, TOP_K = 16, 6, 2
ROOT = Path(__file__).parents[2]


class Plain(nn.Module):
    """A MoE block as a user may write it; it notes what it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(HIDDEN, EXPERTS)
        self.workers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.logits: list[Tensor] = []
        self.ids: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.rows = [0] * EXPERTS

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = hidden.reshape(-1, HIDDEN)
        logits = self.choose(rows)
        weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
        out = torch.zeros_like(rows)
        for number, worker in enumerate(self.workers):
            row, place = (ids == number).nonzero(as_tuple=True)
            self.rows[number] += len(row)
            out.index_add_(0, row, worker(rows[row]) * weights[row, place, None])
        for kept, value in zip(
            (self.logits, self.ids, self.weights), (logits, ids, weights), strict=True
        ):
            kept.append(value)
        return out.view_as(hidden), ids, weights, logits


class Stack(nn.Module):
    """Two such blocks around a dense one, on hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Plain(), nn.Linear(HIDDEN, HIDDEN), Plain()])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


BLOCKS = ("layers.0", "layers.2")
Read = Callable[[nn.Module, Any, Any, Any], Any]


def specs(read: Read, **options: Any) -> dict[str, LayerSpec]:
    return dict.fromkeys(BLOCKS, LayerSpec(EXPERTS, TOP_K, read, **options))


def ids_only(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
    return output[1]


def everything(module: nn.Module, args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
    return output[1:]


def executed(model: nn.Module) -> dict[str, list[int]]:
    return {name: model.get_submodule(name).rows for name in BLOCKS}


def exact(profile: Profile) -> Profile:
    assert problems_of(profile) == {}
    assert profile.coverage == 1.0
    return profile


# -- layers that the user names


@pytest.mark.parametrize(
    "shape", [(HIDDEN,), (7, HIDDEN), (2, 7, HIDDEN), (300, HIDDEN), (3, 200, HIDDEN)], ids=str
)
@pytest.mark.parametrize("read", [ids_only, everything])
def test_named_layers(read: Read, shape: tuple[int, ...], record: Record):
    model = Stack()
    with record(model, layers=specs(read)) as recording, torch.no_grad():
        model(torch.randn(shape))
        model(torch.randn(shape))
    profile = exact(profile_of(recording))
    assert counts_of(profile) == executed(model)
    assert profile.totals.sums["steps"].sum(0)[profile.captured].tolist() == [2, 2]


def test_named_layers_among_dense_ones(record: Record):
    with record(Stack(), layers=specs(ids_only)) as recording:
        pass
    layers = recording.info.layers
    assert [(layer.index, layer.name, layer.kind) for layer in layers] == [
        (0, "layers.0", "moe"),
        (1, "layers.1", "dense"),
        (2, "layers.2", "moe"),
    ]


@pytest.mark.parametrize("rows", [14, 400], ids=["stashed", "direct"])
def test_weights_and_logits_of_named_layers(rows: int, record: Record):
    model = Stack()
    with record(model, layers=specs(everything)) as recording, torch.no_grad():
        model(torch.randn(1, rows, HIDDEN))
    totals = exact(profile_of(recording)).totals
    for position in (0, 2):
        block = model.layers[position]
        expected = gate_sums(block.logits[0].numpy(), TOP_K, "softmax")
        mass = totals.lists["probability_mass"][0, position, :EXPERTS]
        np.testing.assert_allclose(mass, expected.mass, rtol=1e-5)
        assert totals.sums["entropy_sum"][0, position] == pytest.approx(expected.entropy, rel=1e-5)
        assert totals.sums["gate_rows"][0, position] == rows
        weights = torch.zeros(EXPERTS).scatter_add(
            0, block.ids[0].flatten(), block.weights[0].flatten()
        )
        recorded = totals.lists["weight_sum"][0, position, :EXPERTS]
        np.testing.assert_allclose(recorded, weights.numpy(), rtol=1e-5)


@pytest.mark.parametrize("level", ["windows", "tokens"])
@pytest.mark.parametrize("rows", [9, 300], ids=["stashed", "direct"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_of_any_integer_type(dtype: torch.dtype, rows: int, level: str, record: Record):
    model = Stack()
    layers = specs(lambda module, args, kwargs, output: output[1].to(dtype))
    with record(model, layers=layers, level=level) as recording, torch.no_grad():
        model(torch.randn(1, rows, HIDDEN))
    profile = exact(profile_of(recording))
    assert counts_of(profile) == executed(model)
    if level == "tokens":
        for index in (0, 2):
            assert profile.tokens(index).ids.tolist() == model.layers[index].ids[0].tolist()


@pytest.mark.parametrize("rows", [9, 300], ids=["stashed", "direct"])
@pytest.mark.parametrize("wrong", [-1, -100, EXPERTS, 200])
def test_ids_outside_the_range_are_invalid(wrong: int, rows: int, record: Record):
    def spoilt(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        return output[1].masked_fill(output[1] == 1, wrong)

    model = Stack()
    with record(model, layers=specs(spoilt), level="tokens") as recording, torch.no_grad():
        model(torch.randn(1, rows, HIDDEN))
    profile = exact(profile_of(recording))
    counts, truth = counts_of(profile), executed(model)
    for place, (name, index) in enumerate(zip(BLOCKS, (0, 2), strict=True)):
        assert truth[name][1] > 0
        assert counts[name] == [truth[name][0], 0, *truth[name][2:]]
        assert profile.totals.sums["invalid"][0, profile.captured[place]] == truth[name][1]
        ids = model.layers[index].ids[0]
        assert profile.tokens(index).ids.tolist() == ids.masked_fill(ids == 1, -1).tolist()


def test_unsigned_ids_outside_the_range_are_invalid(record: Record):
    def spoilt(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        return output[1].masked_fill(output[1] == 1, 200).to(torch.uint8)

    model = Stack()
    with record(model, layers=specs(spoilt), level="tokens") as recording, torch.no_grad():
        model(torch.randn(1, 9, HIDDEN))
    ids = model.layers[0].ids[0]
    tokens = exact(profile_of(recording)).tokens(0)
    assert tokens.ids.tolist() == ids.masked_fill(ids == 1, -1).tolist()


def test_layers_called_outside_any_pass(record: Record):
    """Each call of a layer that ran already is a step of its own."""
    model = Stack()
    first, last = model.layers[0], model.layers[2]
    with record(model, layers=specs(ids_only)) as recording, torch.no_grad():
        first(torch.randn(5, HIDDEN))
        last(torch.randn(5, HIDDEN))
        first(torch.randn(7, HIDDEN))
        first(torch.randn(2, HIDDEN))
        model(torch.randn(1, 4, HIDDEN))
        last(torch.randn(3, HIDDEN))
    profile = profile_of(recording)
    assert problems_of(profile) == {}
    assert counts_of(profile) == executed(model)
    assert profile.phases == ("prefill", "unknown")
    tokens = profile.totals.sums["tokens"].sum(0)[profile.captured]
    assert tokens.tolist() == [5 + 7 + 2 + 4, 5 + 4 + 3]


def test_a_block_that_is_the_whole_model(record: Record):
    model = Plain()
    layers = {"": LayerSpec(EXPERTS, TOP_K, ids_only)}
    with record(model, layers=layers) as recording, torch.no_grad():
        model(torch.randn(2, 5, HIDDEN))
    assert exact(profile_of(recording)).counts.tolist() == [model.rows]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"layers.9": LayerSpec(EXPERTS, TOP_K, ids_only)}, "no module 'layers.9'"),
        ({"layers.0": LayerSpec(EXPERTS, EXPERTS + 1, ids_only)}, "cannot be right"),
        ({"layers.0": LayerSpec(0, 0, ids_only)}, "cannot be right"),
    ],
)
def test_a_wrong_name_or_size_is_refused(
    layers: dict[str, LayerSpec], message: str, record: Record
):
    with pytest.raises(UsageError, match=message):
        record(Stack(), layers=layers)


# -- what cannot be read


class Custom(nn.Module):
    """Experts in a list and a gate of its own kind: nothing says how it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.top_k = TOP_K

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = self.gate(hidden).neg().topk(TOP_K, dim=-1).indices  # the worst ones
        return hidden + chosen.sum()


class Stacked(nn.Module):
    """All experts in one tensor that is never told any ids."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.projection = nn.Module()
        self.projection.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class Named(nn.Module):
    """A dictionary of experts, and no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(HIDDEN, 1) for n in range(4)})


@pytest.mark.parametrize("kind", [Custom, Stacked, Named])
def test_an_unknown_block_is_not_guessed_at(kind: type[nn.Module], record: Record):
    model = Stack()
    model.layers.append(kind())
    with record(model, layers=specs(ids_only)) as recording:
        pass
    layer = recording.info.layers[3]
    assert (layer.name, layer.kind) == ("layers.3", "moe")
    assert layer.unsupported
    assert recording.messages == (f"layer layers.3 is not recorded: {layer.unsupported}",)
    profile = profile_of(recording)
    assert profile.in_state("unsupported") == (3,)
    with pytest.raises(NoMoELayersError, match=f"cannot read the routing of {kind.__name__}"):
        record(nn.Sequential(kind()))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4)),
        nn.ModuleDict({"gate": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 2)}),
        nn.TransformerEncoderLayer(16, 2, batch_first=True),
    ],
    ids=["linear", "gated convolution", "transformer"],
)
def test_a_model_without_experts_is_refused(model: nn.Module, record: Record):
    with pytest.raises(NoMoELayersError, match="has no MoE layer"):
        record(model)


def test_something_else_than_a_module_is_refused(record: Record):
    with pytest.raises(UsageError, match="expected a torch module"):
        record("model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"level": "everything"},
        {"window": 0.0},
        {"capacity_factors": ()},
        {"capacity_factors": (0,)},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_right_is_refused(options: dict[str, Any], record: Record):
    with pytest.raises(UsageError):
        record(Stack(), layers=specs(ids_only), **options)


def test_dense_layers_are_listed(record: Record):
    model = model_of("deepseek_v3")
    with record(model) as recording, quiet(), torch.no_grad():
        model(**inputs(BY_TYPE["deepseek_v3"]))
    profile = profile_of(recording)
    assert [layer.index for layer in profile.info.layers] == [0, 1, 2, 3]
    assert profile.in_state("dense") == (0,)
    assert profile.layer_indices == [1, 2, 3]


# -- the layout of transformers 4: one module per expert, top-k in the block

PLAIN_TOP_K = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3", "Jamba"]
OTHERS = ["GptOss", "GraniteMoe", "Phimoe", "Dbrx"]


class MixtralSparseMoeBlock(Custom):
    """A double of the block of that name in transformers 4."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden.reshape(-1, HIDDEN)
        logits = self.gate(rows)
        weights, ids = logits.softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (ids == number).nonzero(as_tuple=True)
            if len(row):
                out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return out.view_as(hidden), logits


class Router(nn.Module):
    """A double of deepseek_v3's router in transformers 4: ids first, no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.top_k = TOP_K

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = (rows @ self.weight.T).sigmoid()
        ids = (scores * torch.linspace(1, 2, EXPERTS)).topk(TOP_K, dim=-1).indices
        return ids, scores.gather(1, ids)


class DeepseekV3MoE(MixtralSparseMoeBlock):
    """A double of the block of that name in transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, HIDDEN)
        ids, _ = self.gate(rows)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row = (ids == number).any(1).nonzero()[:, 0]
            out.index_add_(0, row, expert(rows[row]))
        return out.view_as(hidden)


@pytest.mark.parametrize("kind", [MixtralSparseMoeBlock, DeepseekV3MoE])
def test_doubles_of_transformers_4(kind: type[nn.Module], record: Record):
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    rows = [0] * EXPERTS
    for number, expert in enumerate(model[0].experts):
        expert.register_forward_pre_hook(_row_counter(rows, number))
    with record(model) as recording, torch.no_grad():
        model(torch.randn(3, 5, HIDDEN))
    profile = exact(profile_of(recording))
    assert profile.counts.tolist() == [rows]
    layer = profile.info.layers[0]
    plain = kind is MixtralSparseMoeBlock
    assert (layer.router, layer.gate) == (("softmax", "logits") if plain else ("unknown", "none"))


def _row_counter(counts: list[int], number: int) -> Callable[..., None]:
    def count(expert: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts[number] += len(args[0])

    return count


@pytest.fixture(scope="module")
def of_transformers_4() -> dict[str, dict[str, Any]]:
    """What ``transformers_4.py`` printed, by family."""
    python = os.environ.get("ROUTEPROF_TRANSFORMERS_4")
    if not python:
        pytest.skip("ROUTEPROF_TRANSFORMERS_4 does not name a Python that has transformers 4")
    script = Path(__file__).with_name("transformers_4.py")
    done = subprocess.run(
        [python, str(script), *PLAIN_TOP_K, *OTHERS],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["family"]: line for line in lines}


@pytest.mark.parametrize("family", PLAIN_TOP_K)
def test_transformers_4(family: str, of_transformers_4: dict[str, dict[str, Any]]):
    seen = of_transformers_4[family]
    assert seen["counts"] == seen["rows"]
    assert len(seen["counts"]) >= 2
    assert (seen["coverage"], seen["unsupported"], seen["messages"]) == (1.0, [], [])


@pytest.mark.parametrize("family", OTHERS)
def test_transformers_4_is_never_guessed_at(
    family: str, of_transformers_4: dict[str, dict[str, Any]]
):
    seen = of_transformers_4[family]
    if "refused" in seen:
        assert "cannot read the routing" in seen["refused"]
    else:
        assert seen["counts"] == seen["rows"]
        assert seen["gates"] == ["none"]  # its router returns weights, not logits


def test_the_public_names():
    assert routeprof.LayerSpec is LayerSpec
