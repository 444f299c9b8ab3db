"""Hooks for transformers models, and for any torch module whose MoE layers can be found."""

from __future__ import annotations

import functools
import sys
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns, time
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.layout import DEFAULT_CAPACITY_FACTORS, Layout
from routeprof.capture.recorder import Recorder, Recording
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.steps import StepCapture
from routeprof.errors import AlreadyAttachedError, UsageError
from routeprof.hooks.batch import Batch, BatchReader
from routeprof.hooks.compiled import forget_compiled
from routeprof.hooks.configuration import configuration
from routeprof.hooks.discovery import LayerSpec, find_layers, pass_of
from routeprof.hooks.taps import FoundLayer, Take, call_after, call_before, call_tap
from routeprof.hooks.widths import expert_width
from routeprof.recording.schema import RecordingInfo
from routeprof.topology import LEVELS, ModelInfo, RankRole

STEP_RING, TOKEN_RING = 1024, 65_536
STEP = -1
"""Where failures and cost of a whole step stand, in place of a layer's position."""
_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_attach_lock = threading.Lock()


def record(
    model: nn.Module,
    directory: str | Path,
    *,
    level: str = "windows",
    gate: bool = True,
    window: float = 1.0,
    capacity_factors: Sequence[float] = DEFAULT_CAPACITY_FACTORS,
    layers: Mapping[str, LayerSpec] | None = None,
    role: RankRole | None = None,
    paused: bool = False,
    name: str = "",
) -> Recording:
    """Attach to a model and record its routing until the recording is stopped.

    Args:
        model: any torch module that holds MoE layers; it may be compiled before or after.
        directory: where the recording goes; must not exist or be empty.
        level: ``windows``, ``steps`` or ``tokens``; each keeps what the one before keeps.
        gate: also keep the router's outputs (probability mass, entropy, top-1, margin).
        window: seconds that a window should last.
        capacity_factors: for which overflow is counted.
        layers: how to read MoE modules that routeprof does not know, by module path.
        role: this process's part in a parallel group.
        paused: attach, but count nothing until ``start``.
        name: model name to note; taken from the model's config by default.

    Returns:
        The recording under way; a context manager that stops it.

    Raises:
        NoMoELayersError: the model has no MoE layer that can be read.
        RecordingExistsError: the directory holds something already.
        AlreadyAttachedError: one of the layers is being recorded already.
        UsageError: an argument that cannot be right.
    """
    _check(level, window, capacity_factors)
    inner = _inner(model)
    found = find_layers(inner, layers)
    info = _info(inner, found, level, gate, window, capacity_factors, name)
    messages = [*_messages(found), *forget_compiled(model)]
    with _attach_lock, torch.inference_mode(False):
        hooked = [item for item in found if item.ids is not None]
        _claim(item.module for item in hooked)
        captures = _captures(inner, hooked, info)
        try:
            recorder = Recorder(Path(directory), captures, info, role, paused=paused)
        except BaseException:
            _release(item.module for item in hooked)
            raise
        handles = _attach(inner, hooked, captures)
    return Recording(recorder, functools.partial(_detach, handles, hooked), messages)


def _check(level: str, window: float, capacity_factors: Sequence[float]) -> None:
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if not 0.05 <= window <= 3600:
        raise UsageError(f"window {window} is not between 0.05 and 3600 seconds")
    if not capacity_factors or not all(0 < factor <= 1000 for factor in capacity_factors):
        raise UsageError("capacity_factors must be numbers above 0 and at most 1000")


def _inner(model: nn.Module) -> nn.Module:
    """The module behind a torch.compile wrapper, whose names and hooks are the real ones."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise UsageError(f"expected a torch module, got {type(model).__name__}")
    return inner


def _messages(found: Sequence[FoundLayer]) -> list[str]:
    unsupported = [item.layer for item in found if item.layer.unsupported]
    return [f"layer {layer.name} is not recorded: {layer.unsupported}" for layer in unsupported]


def _info(
    model: nn.Module,
    found: Sequence[FoundLayer],
    level: str,
    gate: bool,
    window: float,
    capacity_factors: Sequence[float],
    name: str,
) -> RecordingInfo:
    from routeprof import __version__

    passes = [pass_of(model, item.layer.name) if item.layer.kind == "moe" else "" for item in found]
    return RecordingInfo(
        id=uuid.uuid4().hex,
        layers=tuple(item.layer for item in found),
        passes=tuple(passes),
        model=_model_info(model, name),
        level=level,
        gate=gate,
        window_seconds=window,
        capacity_factors=tuple(float(factor) for factor in capacity_factors),
        started=time(),
        routeprof=__version__,
    )


def _model_info(model: nn.Module, name: str) -> ModelInfo:
    config = getattr(model, "config", None)
    engine = sys.modules.get("transformers")
    parameter = next(model.parameters(), None)
    text = getattr(config, "text_config", config)
    return ModelInfo(
        name=name or str(getattr(config, "_name_or_path", "") or type(model).__name__),
        model_type=str(getattr(config, "model_type", "")),
        hidden_size=getattr(text, "hidden_size", None),
        expert_width=expert_width(text),
        dtype="" if parameter is None else str(parameter.dtype).removeprefix("torch."),
        engine="transformers" if engine and config is not None else "torch",
        engine_version=str(getattr(engine if config is not None else torch, "__version__", "")),
        device=str(_device(model)),
        config=configuration(config),
    )


def _device(module: nn.Module) -> torch.device:
    """Where the module computes, also where its parameters are offloaded."""
    for child in module.modules():
        hook = getattr(child, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        for tensor in child.parameters(recurse=False):
            if tensor.device.type != "meta":
                return tensor.device
    return torch.device("cpu")


# -- attaching


def _claim(modules: Iterable[nn.Module]) -> None:
    modules = list(modules)
    if any(module in _attached for module in modules):
        raise AlreadyAttachedError(
            "this model is being recorded already; stop that recording first"
        )
    _attached.update(modules)


def _release(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        _attached.discard(module)


def _captures(
    model: nn.Module, hooked: Sequence[FoundLayer], info: RecordingInfo
) -> dict[str, StepCapture]:
    """One capture for each pass and device: its layers share steps and buffers."""
    groups: dict[str, list[FoundLayer]] = {}
    for item in hooked:
        groups.setdefault(_stream_name(model, item), []).append(item)
    return {name: _capture(items, info) for name, items in groups.items()}


def _stream_name(model: nn.Module, item: FoundLayer) -> str:
    return f"{pass_of(model, item.layer.name)}@{_device(item.module)}"


def _capture(items: Sequence[FoundLayer], info: RecordingInfo) -> StepCapture:
    device = _device(items[0].module)
    layout = Layout(tuple(item.layer for item in items), info.capacity_factors)
    level = LEVELS.index(info.level)
    gate = info.gate and any(item.gate is not None for item in items)
    counters = RoutingCounters(
        layout,
        device,
        gate=gate,
        step_ring=StepRing(layout, device, STEP_RING) if level >= 1 else None,
        token_ring=TokenRing(layout, device, TOKEN_RING) if level >= 2 else None,
    )
    return StepCapture(counters)


def _attach(
    model: nn.Module, hooked: Sequence[FoundLayer], captures: Mapping[str, StepCapture]
) -> list[RemovableHandle]:
    handles: list[RemovableHandle] = []
    places = dict.fromkeys(captures, 0)
    for item in hooked:
        stream = _stream_name(model, item)
        handles += _hook_layer(captures[stream], places[stream], item)
        places[stream] += 1
    for path in dict.fromkeys(name.rpartition("@")[0] for name in captures):
        own = {name: one for name, one in captures.items() if name.rpartition("@")[0] == path}
        homes = [next(i.module for i in hooked if _stream_name(model, i) == name) for name in own]
        handles += _hook_pass(model.get_submodule(path), list(own.values()), homes)
    return handles


def _detach(handles: list[RemovableHandle], hooked: Sequence[FoundLayer]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    _release(item.module for item in hooked)


def _hook_layer(capture: StepCapture, position: int, item: FoundLayer) -> list[RemovableHandle]:
    assert item.ids is not None
    read_ids = item.ids.read
    experts = item.layer.experts

    def ids(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        found = read_ids(args, kwargs, output)
        if found is None:
            raise LookupError("no expert ids where they should be")
        chosen = found[0]
        if chosen.ndim != 2:
            raise ValueError(f"expert ids have shape {tuple(chosen.shape)}, expected [tokens, k]")
        capture.ids(position, chosen, found[1] if len(found) > 1 else None)

    handles = [call_tap(item.ids, _guarded(capture, position, ids))]
    if item.gate is None or capture.counters.gate_totals is None:
        return handles
    read_logits = item.gate.read

    def logits(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        found = read_logits(args, kwargs, output)
        if found is None:
            return
        if found[0].shape[-1] != experts:
            raise ValueError(f"the router has {found[0].shape[-1]} outputs, expected {experts}")
        capture.logits(position, found[0])

    gate = _guarded(capture, position, logits, number=-2 - position)
    return [*handles, call_tap(item.gate, gate)]


def _guarded(capture: StepCapture, position: int, take: Take, *, number: int | None = None) -> Take:
    """The hook as the engine calls it: it fails for nobody, and its time is measured.

    Args:
        number: under which its failures are counted, if not with those of the layer: a gate that
            cannot be read is no reason to stop counting.
    """
    number = position if number is None else number

    def guarded(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            try:
                take(args, kwargs, output)
            except Exception:
                # A graph can neither format the error nor count; the layer will be silent.
                capture.failures.first = "a hook failed while the model was being compiled"
            return
        # Gradient checkpointing runs the forward pass again inside backward.
        if capture.failures.out(number) or torch._C._current_graph_task_id() != -1:
            return
        start, before = perf_counter_ns(), capture.cost_ns[position]
        try:
            take(args, kwargs, output)
        except Exception as error:
            capture.failures.add(number, error)
        # What the capture measured of itself meanwhile is part of it.
        capture.cost_ns[position] = before + perf_counter_ns() - start

    return guarded


def _hook_pass(
    module: nn.Module, captures: Sequence[StepCapture], homes: Sequence[nn.Module]
) -> list[RemovableHandle]:
    """Follow a module's passes; ``homes`` are modules on the devices of the captures."""
    reader = BatchReader(module)
    # A parameter stays the same object when its module is moved.
    anchors = [next(home.parameters(), None) for home in homes]

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        batch = reader.read(args, kwargs)
        if batch is None:
            return
        for capture, anchor in zip(captures, anchors, strict=True):
            _begin(capture, batch, anchor)

    def end(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        # A forward pass may well return nothing without having failed.
        failed = (
            output is None and not torch.compiler.is_compiling() and sys.exc_info()[0] is not None
        )
        for capture in captures:
            capture.end(failed=failed)

    first = captures[0]
    return [
        call_before(module, _guarded(first, STEP, begin)),
        call_after(module, _guarded(first, STEP, end), always=True),
    ]


def _begin(capture: StepCapture, batch: Batch, anchor: nn.Parameter | None) -> None:
    valid = batch.valid
    if not torch.compiler.is_compiling():
        capture.unread_masks += batch.mask_unread
        # An offloaded module keeps its parameters on the meta device between its calls.
        if anchor is not None and anchor.device.type not in ("meta", "cpu"):
            capture.follow(anchor.device)
    if valid is not None and valid.device != capture.counters.device:
        valid = valid.to(capture.counters.device, non_blocking=True)
    capture.begin(
        batch.batch,
        batch.length,
        batch.phase,
        valid,
        fresh=batch.fresh,
        rewound=batch.rewound,
    )
