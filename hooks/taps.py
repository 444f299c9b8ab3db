"""Taps: where in a model the executed expert ids and the router's outputs can be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from routeprof.topology import Layer

Read = Callable[[tuple[Any, ...], Mapping[str, Any], Any], tuple[Tensor, ...] | None]
"""(args, kwargs, output) of a module call to (ids, weights) or (logits,); None: nothing here."""

ID_ARGUMENTS = {"top_k_index", "router_indices", "selected_experts"}


@dataclass(frozen=True)
class Tap:
    """One place to read: before or after ``module`` runs."""

    module: nn.Module
    when: Literal["before", "after"]
    read: Read


@dataclass(frozen=True)
class FoundLayer:
    """A MoE layer and the taps onto it; ``ids`` is None for an unsupported one."""

    layer: Layer
    module: nn.Module
    ids: Tap | None = None
    gate: Tap | None = None


def forward_parameters(module: nn.Module) -> list[str]:
    """Names of the class's forward parameters, self left out.

    Taken from the class: parallel and offloading wrappers replace the instance's forward.
    """
    return list(inspect.signature(type(module).forward).parameters)[1:]


def takes_ids(module: nn.Module) -> bool:
    """Whether this is an experts module in the manner of transformers 5: it is told the ids."""
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        return False
    names = forward_parameters(module)
    return "hidden_states" in names and bool(ID_ARGUMENTS.intersection(names))


def is_ids(value: Any) -> bool:
    """A 2-D tensor of whole numbers."""
    return (
        isinstance(value, Tensor)
        and value.ndim == 2
        and not value.dtype.is_floating_point
        and value.dtype != torch.bool
    )


def ids_from_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> tuple[Tensor, ...] | None:
    """Ids and combine weights among the arguments, by dtype and shape, never by position."""
    del output
    values = [*args, *kwargs.values()]
    ids = next((value for value in values if is_ids(value)), None)
    return None if ids is None else _with_weights(ids, values)


def ids_from_output(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> tuple[Tensor, ...] | None:
    """Ids and combine weights in what a router returns."""
    del args, kwargs
    values = output if isinstance(output, (tuple, list)) else (output,)
    ids = next((value for value in values if is_ids(value)), None)
    return None if ids is None else _with_weights(ids, list(values))


def _with_weights(ids: Tensor, values: list[Any]) -> tuple[Tensor, ...]:
    for value in values:
        if isinstance(value, Tensor) and value.shape == ids.shape and value is not ids:
            return ids, value
    return (ids,)


def logits_from_output(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> tuple[Tensor, ...] | None:
    """The first floating-point matrix that a router returns, rows flattened."""
    del args, kwargs
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, Tensor) and value.ndim >= 2 and value.dtype.is_floating_point:
            return (value.reshape(-1, value.shape[-1]),)
    return None


Take = Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]
"""Called with (args, kwargs, output) of a module call; before it runs, output is None."""


def call_tap(tap: Tap, take: Take) -> RemovableHandle:
    """Have ``take`` called at the tap."""
    register = call_before if tap.when == "before" else call_after
    return register(tap.module, take)


def call_before(module: nn.Module, take: Take) -> RemovableHandle:
    """Have ``take`` called before each call of the module."""

    def before(module: nn.Module, args: tuple[Any, ...], *kwargs: dict[str, Any]) -> None:
        # torch leaves the kwargs out where another thread is just removing the hook.
        if kwargs:
            take(args, kwargs[0], None)

    return module.register_forward_pre_hook(before, with_kwargs=True)


def call_after(module: nn.Module, take: Take, *, always: bool = False) -> RemovableHandle:
    """Have ``take`` called after each call of the module; always: also after one that raised."""

    def after(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if len(rest) == 2:
            take(args, *rest)

    return module.register_forward_hook(after, with_kwargs=True, always_call=always)
