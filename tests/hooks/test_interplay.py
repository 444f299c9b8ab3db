"""Hooks beside offloading, checkpointing, threads and failures: the model never notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from routeprof import LayerSpec
from routeprof.errors import AlreadyAttachedError, RecordingExistsError
from tests.hooks.conftest import (
    TOP_K,
    Record,
    by_block,
    counts_of,
    hooks_left,
    model_of,
    problems_of,
    profile_of,
)
from tests.zoo.families import BY_TYPE, EXPERTS, HIDDEN, inputs, quiet
from tests.zoo.oracle import oracle, unpadded_counts

MIXTRAL = BY_TYPE["mixtral"]
REAL, ROWS = 16, 20
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def run(model: nn.Module, tensors: dict[str, Tensor] | None = None) -> Any:
    with quiet(), torch.no_grad():
        return model(**(tensors or inputs(MIXTRAL)))


def truth_of(times: int = 1) -> dict[str, list[int]]:
    return by_block(unpadded_counts(model_of("mixtral"), MIXTRAL, inputs(MIXTRAL)), times)


# -- accelerate


def dispatched(model: nn.Module, folder: Path) -> nn.Module:
    places = {"model.embed_tokens": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    layers = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(4)}
    places["model.rotary_emb"] = "cpu"
    return accelerate.dispatch_model(
        model, device_map=places | layers, main_device="cpu", offload_dir=str(folder)
    )


OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(
        model, str(folder), execution_device="cpu"
    ),
    "dispatch_model": dispatched,
}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("first", ["hooks", "offload"])
def test_offloading(offload: str, first: str, record: Record, tmp_path: Path):
    model = model_of("mixtral", implementation="grouped_mm")
    expected = run(model).logits
    if first == "offload":
        OFFLOADS[offload](model, tmp_path)
    with record(model) as recording:
        if first == "hooks":
            OFFLOADS[offload](model, tmp_path)
        assert torch.equal(run(model).logits, expected)
        run(model)
    profile = profile_of(recording)
    assert counts_of(profile) == truth_of(2)
    assert profile.coverage == 1.0
    assert profile.info.model.device == "cpu"


# -- transformers


def test_experts_implementation_changed_while_recording(record: Record):
    model = model_of("mixtral")
    with record(model) as recording:
        for name in ("eager", "grouped_mm", "batched_mm", "eager"):
            model.set_experts_implementation(name)
            run(model)
    assert counts_of(profile_of(recording)) == truth_of(4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_the_forward_pass_once(reentrant: bool, record: Record):
    def gradients(model: nn.Module) -> list[Tensor]:
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        tensors = inputs(MIXTRAL)
        model(**tensors, labels=tensors["input_ids"]).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients(model_of("mixtral"))
    model = model_of("mixtral")
    calls: list[int] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    with record(model) as recording, quiet():
        recorded = gradients(model)
    assert len(calls) == 2  # forward, and again inside backward
    assert all(one.equal(other) for one, other in zip(recorded, plain, strict=True))
    profile = profile_of(recording)
    assert counts_of(profile) == truth_of()
    assert profile.coverage == 1.0
    assert profile.totals.sums["calls"].sum(0).tolist() == [1] * 4


@pytest.mark.parametrize(
    "model_type", ["mixtral", "deepseek_v3", "llama4_text", "jetmoe", "zaya", "gemma4_text"]
)
def test_outputs_are_the_same_in_every_bit(model_type: str, record: Record):
    model, tensors = model_of(model_type, implementation=""), inputs(BY_TYPE[model_type])
    logits, tokens = run(model, tensors).logits, model.generate(**tensors, **GREEDY)
    with record(model, level="tokens"):
        assert torch.equal(run(model, tensors).logits, logits)
        assert torch.equal(model.generate(**tensors, **GREEDY), tokens)
    assert torch.equal(run(model, tensors).logits, logits)


def test_passes_inside_each_other(record: Record):
    """Encoder and decoder each have layers and steps of their own."""
    family = BY_TYPE["switch_transformers"]
    model, tensors = model_of("switch_transformers"), inputs(family, pad=0)
    with record(model, level="steps") as recording, oracle(model) as truth:
        model(**tensors)
        model.encoder(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"])
    profile = profile_of(recording)
    assert set(profile.info.passes) == {"encoder", "decoder"}
    assert counts_of(profile) == by_block(truth.counts)
    steps = profile.totals.sums["steps"].sum(0)
    for name, count in zip(profile.info.passes, steps, strict=True):
        assert count == (2 if name == "encoder" else 1)


# -- failures of the model


class FailingError(Exception):
    pass


def fail(*_: Any) -> None:
    raise FailingError


@pytest.mark.parametrize("place", ["model.layers.2", "model.layers.1.mlp.experts", "model.norm"])
@pytest.mark.parametrize("length", [10, 150], ids=["stashed", "direct"])
def test_a_pass_that_fails_is_not_counted(place: str, length: int, record: Record):
    tensors = inputs(MIXTRAL, length=length)
    model = model_of("mixtral", implementation="grouped_mm")
    truth = by_block(unpadded_counts(model, MIXTRAL, tensors), 2)
    with record(model, level="tokens") as recording:
        run(model, tensors)
        broken = model.get_submodule(place).register_forward_hook(fail)
        with pytest.raises(FailingError):
            run(model, tensors)
        broken.remove()
        run(model, tensors)
    profile = profile_of(recording)
    assert counts_of(profile) == truth
    assert problems_of(profile) == {"aborted_passes": 1}
    assert profile.coverage == 1.0
    for layer in profile.info.layers:
        tokens = profile.tokens(layer.index)
        assert (
            torch.tensor(tokens.ids).flatten().bincount(minlength=EXPERTS).tolist()
            == (truth[layer.name])
        )


def test_a_pass_that_is_interrupted_is_not_counted(record: Record):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = model_of("mixtral")
    with record(model) as recording:
        handle = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model)
        handle.remove()
        run(model)
    assert counts_of(profile_of(recording)) == truth_of()


# -- failures of our own


def test_a_hook_that_fails_is_taken_out(record: Record):
    calls = []

    def broken(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        calls.append(1)
        raise ValueError("cannot be read")

    model, name = model_of("mixtral"), "model.layers.1.mlp"
    logits = run(model).logits
    spec = LayerSpec(EXPERTS, TOP_K, broken)
    with record(model, layers={name: spec}, gate=False) as recording:
        for _ in range(5):
            assert torch.equal(run(model).logits, logits)
    profile = profile_of(recording)
    assert len(calls) == 3
    problems = problems_of(profile)
    assert problems["hook_failures"] == 3
    assert problems["first_hook_failure"] == "ValueError: cannot be read"
    assert profile.in_state("silent") == (1,)
    truth = truth_of(5)
    del truth[name]
    assert counts_of(profile) == truth
    assert profile.coverage == 3 / 4


def test_a_gate_that_cannot_be_read_leaves_the_counts(
    record: Record, monkeypatch: pytest.MonkeyPatch
):
    def narrow(args: Any, kwargs: Any, output: Any) -> tuple[Tensor]:
        return (output[1],)

    monkeypatch.setattr("routeprof.hooks.discovery.logits_from_output", narrow)
    model = model_of("mixtral")
    with record(model) as recording:
        for _ in range(5):
            run(model)
    profile = profile_of(recording)
    problems = problems_of(profile)
    assert problems["hook_failures"] == 4 * 3
    assert problems["first_hook_failure"] == "ValueError: the router has 3 outputs, expected 8"
    assert counts_of(profile) == truth_of(5)
    assert profile.coverage == 1.0
    assert profile.totals.sums["gate_rows"].sum() == 0


def test_a_hook_that_fails_once_goes_on(record: Record):
    calls = []

    def broken_at_first(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("cannot be read")
        return module.gate(args[0].flatten(0, 1))[2]

    model = model_of("mixtral")
    spec = LayerSpec(EXPERTS, TOP_K, broken_at_first)
    with record(model, layers={"model.layers.1.mlp": spec}, gate=False) as recording:
        for _ in range(4):
            run(model)
    profile = profile_of(recording)
    assert counts_of(profile)["model.layers.1.mlp"] == truth_of(3)["model.layers.1.mlp"]
    assert profile.coverage == 15 / 16


@pytest.mark.parametrize("level", ["windows", "tokens"])
def test_a_pass_that_cannot_be_read_is_no_concern_of_the_model(
    level: str, record: Record, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> None:
        raise ValueError("cannot be read")

    model = model_of("mixtral")
    logits = run(model).logits
    with record(model, level=level) as recording:
        monkeypatch.setattr("routeprof.hooks.batch.row_mask", broken)
        for _ in range(5):
            assert torch.equal(run(model).logits, logits)
        monkeypatch.undo()
    problems = problems_of(profile_of(recording))
    assert problems["hook_failures"] >= 3
    assert problems["first_hook_failure"] == "ValueError: cannot be read"


def test_counters_that_fail_are_no_concern_of_the_model(
    record: Record, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("broken")

    model = model_of("mixtral")
    logits = run(model).logits
    with record(model) as recording:
        for name in ("begin", "end", "ids", "logits"):
            monkeypatch.setattr(f"routeprof.capture.steps.StepCapture.{name}", broken)
            assert torch.equal(run(model).logits, logits)
            monkeypatch.undo()
    assert problems_of(profile_of(recording))["hook_failures"]


# -- threads


def test_a_pass_beside_another_is_reported_as_missed(record: Record):
    tensors = inputs(MIXTRAL, pad=0)
    model = model_of("mixtral", implementation="grouped_mm")
    inside, done = threading.Event(), threading.Event()
    first = threading.Thread(target=run, args=(model, tensors))

    def wait(*_: Any) -> None:
        if threading.current_thread() is first:
            inside.set()
            assert done.wait(60)

    model.model.layers[2].register_forward_pre_hook(wait)
    with record(model) as recording:
        first.start()
        assert inside.wait(60)
        run(model, tensors)
        done.set()
        first.join()
    profile = profile_of(recording)
    assert problems_of(profile) == {"missed_passes": 1, "missed_tokens": ROWS}
    truth = unpadded_counts(model_of("mixtral"), MIXTRAL, tensors)
    assert counts_of(profile) == by_block(truth)
    assert profile.coverage == 0.5


def test_threads_one_after_the_other(record: Record):
    model = model_of("mixtral")
    with record(model) as recording:
        for _ in range(3):
            thread = threading.Thread(target=run, args=(model,))
            thread.start()
            thread.join()
    assert counts_of(profile_of(recording)) == truth_of(3)


# -- attaching and detaching


def test_nothing_is_left_behind(record: Record):
    model = model_of("mixtral")
    assert hooks_left(model) == []
    with record(model):
        assert len(hooks_left(model)) > 8
    assert hooks_left(model) == []


def test_a_recorded_model_cannot_be_recorded_again(record: Record):
    model = model_of("mixtral")
    with record(model) as recording:
        before = hooks_left(model)
        with pytest.raises(AlreadyAttachedError, match="stop that recording first"):
            record(model)
        with pytest.raises(AlreadyAttachedError):
            record(model.model)
        assert hooks_left(model) == before
        run(model)
    with record(model) as again:
        run(model)
    for one in (recording, again):
        assert counts_of(profile_of(one)) == truth_of()


def test_a_directory_in_use_leaves_the_model_free(record: Record, tmp_path: Path):
    (tmp_path / "recording-0").mkdir()
    (tmp_path / "recording-0" / "something").touch()
    model = model_of("mixtral")
    with pytest.raises(RecordingExistsError):
        record(model)
    assert hooks_left(model) == []
    with record(model):
        pass


def test_an_exception_ends_the_recording(record: Record):
    model = model_of("mixtral")
    recording = record(model)

    def fail_while_recording() -> None:
        with recording:
            run(model)
            raise FailingError

    with pytest.raises(FailingError):
        fail_while_recording()
    assert hooks_left(model) == []
    assert counts_of(profile_of(recording)) == truth_of()
    recording.stop()  # again, to no effect


def test_paused_passes_are_not_counted(record: Record):
    model = model_of("mixtral")
    with record(model, paused=True) as recording:
        run(model)
        recording.start()
        run(model)
        recording.pause()
        run(model)
    profile = profile_of(recording)
    assert counts_of(profile) == truth_of()
    assert profile.coverage == 1.0


def test_a_pass_that_returns_nothing_is_counted(record: Record):
    class Discarding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = model_of("mixtral").model.layers[0].mlp

        def forward(self, hidden: Tensor) -> None:
            self.mlp(hidden)

    model, hidden = Discarding(), torch.randn(2, 5, HIDDEN)
    with record(model) as recording, torch.no_grad():
        model(hidden)
        model(hidden)
    profile = profile_of(recording)
    assert problems_of(profile) == {}
    assert profile.totals.sums["tokens"].sum() == 2 * 10
    assert profile.coverage == 1.0
