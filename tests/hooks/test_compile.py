"""torch.compile: hooks inside the graph, switched without compiling again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

from routeprof import Profile, Recording
from routeprof.hooks.compiled import MESSAGE
from tests.hooks.conftest import (
    Record,
    by_block,
    counts_of,
    problems_of,
    profile_of,
)
from tests.zoo.families import BY_TYPE, build, inputs, quiet
from tests.zoo.oracle import unpadded_counts

LAYERS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
FAMILIES = ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_vl_moe_text"]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    # pytest would format each of its thousands of records.
    silence = patch.object(logging.getLogger("torch.__trace"), "disabled", True)
    with silence, quiet(), torch.no_grad():
        yield
    torch._dynamo.reset()


def counter() -> CompileCounterWithBackend:
    """A backend that counts the graphs it is given."""
    return CompileCounterWithBackend("aot_eager")


def model_and_inputs(
    model_type: str = "mixtral", **options: Any
) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """A model of two layers, its inputs, and what its experts execute for rows without padding."""
    family = replace(BY_TYPE[model_type], overrides=LAYERS)
    model, tensors = build(family, experts_implementation="grouped_mm"), inputs(family, **options)
    return model, tensors, unpadded_counts(model, family, tensors)


def whole(recording: Recording) -> Profile:
    """The profile of a recording in which nothing went wrong."""
    profile = profile_of(recording)
    assert profile.coverage == 1.0
    assert problems_of(profile) == {}
    return profile


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_graph_counts_exactly(model_type: str, record: Record):
    model, tensors, truth = model_and_inputs(model_type)
    backend = counter()
    with record(model) as recording:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        compiled(**tensors)
        graphs = backend.frame_count
        compiled(**tensors)
        compiled(**tensors)
    assert counts_of(whole(recording)) == by_block(truth, times=3)
    # Hooks of the compiled module itself are graphs of their own, before and after.
    assert graphs == (3 if recording.info.passes[-1] == "" else 1)
    assert backend.frame_count == graphs
    assert recording.messages == ()


def test_compiled_in_place(record: Record):
    model, tensors, truth = model_and_inputs()
    backend = counter()
    with record(model) as recording:
        model.compile(fullgraph=True, backend=backend)
        model(**tensors)
        model(**tensors)
    assert counts_of(whole(recording)) == by_block(truth, times=2)
    assert backend.frame_count == 1


# torch itself still uses it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor(record: Record):
    model, tensors, truth = model_and_inputs()
    plain = model(**tensors).logits
    with record(model, level="tokens") as recording:
        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            logits = compiled(**tensors).logits
    torch.testing.assert_close(logits, plain, rtol=1e-3, atol=1e-4)
    assert counts_of(whole(recording)) == by_block(truth, times=2)


@pytest.mark.parametrize("level", ["windows", "tokens"])
def test_switches_and_tags_reach_the_graph(level: str, record: Record):
    model, tensors, truth = model_and_inputs()
    backend = counter()
    with record(model, level=level) as recording:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        compiled(**tensors)
        recording.pause()
        compiled(**tensors)
        recording.start()
        with recording.tag("tagged"):
            compiled(**tensors)
            compiled(**tensors)
        compiled(**tensors)
    profile = whole(recording)
    assert backend.frame_count == 1
    assert counts_of(profile) == by_block(truth, times=4)
    assert counts_of(profile.select(tag="tagged")) == by_block(truth, times=2)
    assert counts_of(profile.select(tag="untagged")) == by_block(truth, times=2)


def test_attached_paused(record: Record):
    model, tensors, truth = model_and_inputs()
    backend = counter()
    with record(model, paused=True) as recording:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        compiled(**tensors)
        recording.start()
        compiled(**tensors)
    assert counts_of(whole(recording)) == by_block(truth)
    assert backend.frame_count == 1


@pytest.mark.parametrize("begin", ["paused", "counting"])
def test_regional_compilation(begin: str, record: Record):
    """Every decoder layer is compiled on its own; the pass around them is not."""
    model, tensors, truth = model_and_inputs()
    with record(model, paused=begin == "paused") as recording:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        model(**tensors)
        recording.start()
        with recording.tag("tagged"):
            model(**tensors)
        recording.pause()
        model(**tensors)
        recording.start()
        model(**tensors)
    profile = whole(recording)
    counted = 2 + (begin == "counting")
    assert counts_of(profile) == by_block(truth, times=counted)
    assert counts_of(profile.select(tag="tagged")) == by_block(truth)
    assert profile.totals.sums["steps"].sum(0).tolist() == [counted] * 2


def test_regional_compilation_of_forward(record: Record):
    model, tensors, truth = model_and_inputs()
    with record(model) as recording:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        model(**tensors)
        model(**tensors)
    assert counts_of(whole(recording)) == by_block(truth, times=2)


@pytest.mark.parametrize("passed", ["wrapper", "inner"])
def test_attaching_to_what_ran_compiled(passed: str, record: Record):
    model, tensors, truth = model_and_inputs()
    backend = counter()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(**tensors)
    with record(compiled if passed == "wrapper" else model) as recording:
        compiled(**tensors)
        compiled(**tensors)
    assert recording.messages == (MESSAGE,)
    assert counts_of(whole(recording)) == by_block(truth, times=2)
    assert backend.frame_count == 2


def test_attaching_to_what_was_compiled_in_place(record: Record):
    model, tensors, truth = model_and_inputs()
    model.compile(fullgraph=True, backend="aot_eager")
    model(**tensors)
    with record(model) as recording:
        model(**tensors)
    assert recording.messages == (MESSAGE,)
    assert counts_of(whole(recording)) == by_block(truth)


def test_attaching_to_what_was_compiled_by_layer(record: Record):
    model, tensors, truth = model_and_inputs()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    model(**tensors)
    with record(model) as recording:
        model(**tensors)
    assert recording.messages == (MESSAGE,)
    assert counts_of(whole(recording)) == by_block(truth)


def test_attaching_to_what_was_compiled_by_forward(record: Record):
    model, tensors, truth = model_and_inputs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    model(**tensors)
    with record(model) as recording:
        model(**tensors)
    assert recording.messages == (MESSAGE,)
    assert counts_of(whole(recording)) == by_block(truth)


class Decorated(nn.Module):
    """A forward pass that dynamo does not look into as such."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.no_grad()
    def forward(self, **tensors: Tensor) -> Tensor:
        return self.inner(**tensors).logits


@pytest.mark.parametrize("in_place", [True, False])
def test_attaching_to_a_decorated_forward(in_place: bool, record: Record):
    inner, tensors, truth = model_and_inputs()
    model: Any = Decorated(inner)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model(**tensors)
    with record(model) as recording:
        model(**tensors)
    assert recording.messages == (MESSAGE,)
    assert list(counts_of(whole(recording)).values()) == list(by_block(truth).values())


def test_detaching_and_attaching_again(record: Record):
    model, tensors, truth = model_and_inputs()
    backend = counter()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with record(compiled) as first:
        compiled(**tensors)
    after = compiled(**tensors).logits
    with record(compiled) as second:
        compiled(**tensors)
        compiled(**tensors)
    assert torch.equal(after, model(**tensors).logits)
    assert counts_of(whole(first)) == by_block(truth)
    assert counts_of(whole(second)) == by_block(truth, times=2)


def test_a_model_that_never_ran_compiled_is_left_alone(record: Record):
    model, tensors, _ = model_and_inputs()
    model(**tensors)
    with record(torch.compile(model, backend="aot_eager")) as recording:
        pass
    assert recording.messages == ()


@pytest.mark.parametrize("batch", [2, 40], ids=["small", "large"])
def test_detail_is_the_same_as_in_eager_mode(batch: int, record: Record):
    model, tensors, _ = model_and_inputs(batch=batch)
    shorter = {name: value[:, -6:] for name, value in tensors.items()}
    calls = (tensors, shorter, tensors)
    with record(model, level="tokens") as eager:
        for call in calls:
            model(**call)
    with record(model, level="tokens") as traced:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
        for call in calls:
            compiled(**call)
    one, other = whole(eager), whole(traced)
    for name in ("step", "layer", "tokens", "invalid", "counts", "phase", "tag"):
        np.testing.assert_array_equal(
            getattr(other.step_counts(), name), getattr(one.step_counts(), name)
        )
    for layer in one.info.layers:
        for name in ("ids", "step", "request", "position"):
            np.testing.assert_array_equal(
                getattr(other.tokens(layer.index), name), getattr(one.tokens(layer.index), name)
            )
    for name, sums in one.totals.sums.items():
        if name != "cost_seconds":
            np.testing.assert_allclose(other.totals.sums[name], sums, rtol=1e-5)
    for name, lists in one.totals.lists.items():
        np.testing.assert_allclose(other.totals.lists[name], lists, rtol=1e-5)
    np.testing.assert_array_equal(other.totals.imbalance_max, one.totals.imbalance_max)


def test_dynamic_shapes(record: Record):
    model, tensors, _ = model_and_inputs(pad=0)
    family = BY_TYPE["mixtral"]
    calls = [{name: value[:, :size] for name, value in tensors.items()} for size in (10, 7, 5, 9)]
    with record(model) as recording:
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
        for call in calls:
            compiled(**call)
    truths = [unpadded_counts(model, family, call) for call in calls]
    total = {name: sum(truth[name] for truth in truths) for name in truths[0]}
    assert counts_of(whole(recording)) == by_block(total)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_generate_with_a_compiled_forward(model_type: str, record: Record):
    model, tensors, _ = model_and_inputs(model_type)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with record(model) as eager:
        plain = model.generate(**tensors, **options, cache_implementation="static")
    config = CompileConfig(backend="aot_eager", fullgraph=True)
    config._compile_all_devices = True
    with record(model) as recording:
        generated = model.generate(
            **tensors, **options, cache_implementation="static", compile_config=config
        )
    assert generated.equal(plain)
    profile = whole(recording)
    assert counts_of(profile) == counts_of(profile_of(eager))
    assert profile.phases == ("prefill", "decode")
    for phase in profile.phases:
        one, other = (whole(each).select(phase=phase) for each in (eager, recording))
        assert counts_of(one) == counts_of(other)
        assert one.totals.sums["steps"].tolist() == other.totals.sums["steps"].tolist()


def test_an_eager_pass_between_compiled_ones(record: Record):
    model, tensors, truth = model_and_inputs()
    with record(model) as recording:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for run in (compiled, model, compiled, model):
            run(**tensors)
    assert counts_of(whole(recording)) == by_block(truth, times=4)


def test_a_reader_that_fails_while_compiling_is_no_concern_of_the_model(
    record: Record, monkeypatch: pytest.MonkeyPatch
):
    model, tensors, _ = model_and_inputs()
    plain = model(**tensors).logits

    def broken(args: Any, kwargs: Any, output: Any) -> None:
        raise LookupError("no ids here")

    monkeypatch.setattr("routeprof.hooks.discovery.ids_from_arguments", broken)
    with record(model) as recording:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        logits = compiled(**tensors).logits
        compiled(**tensors)
    assert torch.equal(logits, plain)
    profile = profile_of(recording)
    assert profile.coverage == 0.0
    assert profile.states == ("silent", "silent")
    assert "while the model was being compiled" in problems_of(profile)["first_hook_failure"]
