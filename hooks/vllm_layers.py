"""vLLM's MoE layers: what they are, and a tap into the router of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from routeprof.topology import Layer, RouterKind

Tap = Callable[[Tensor, Tensor | None, Tensor | None], None]
"""Called with ids [tokens, k], logits [tokens, experts] or None, weights [tokens, k] or None."""

_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)$")
_SCORINGS: dict[str, RouterKind] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrtsoftplus",
}


@dataclass(frozen=True)
class FoundRunner:
    """A layer, and what runs it: a MoERunner, or experts that have a capture slot themselves."""

    layer: Layer
    runner: Any


def find_runners(model: nn.Module, *, gate: bool) -> list[FoundRunner]:
    """The MoE layers of the model, in order.

    Args:
        gate: also say what the routers' outputs are.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    found = []
    for name, module in model.named_modules():
        if isinstance(module, MoERunner):
            found.append(FoundRunner(_layer(name, module, gate), module))
        elif _has_slot(module):
            found.append(FoundRunner(_slot_layer(name, module), module))
    indices = Counter(item.layer.index for item in found)
    if max(indices.values(), default=1) > 1:  # two in one block: running numbers instead
        found = [
            replace(item, layer=replace(item.layer, index=number))
            for number, item in enumerate(found)
        ]
    return found


def dense_layers(model: nn.Module, found: Sequence[FoundRunner]) -> list[Layer]:
    """Decoder blocks of the model without routed experts, where blocks are numbered."""
    moe = [item.layer.name for item in found]
    taken = {item.layer.index for item in found}
    dense = []
    for name, module in model.named_modules():
        match = _BLOCK.search(name)
        if match is None or type(module).__name__ == "PPMissingLayer":
            continue
        index = int(match.group(1))
        if index not in taken and not any(path.startswith(f"{name}.") for path in moe):
            taken.add(index)
            dense.append(Layer(index, name, kind="dense"))
    return dense


def _layer(name: str, runner: Any, gate: bool) -> Layer:
    config, router = runner.moe_config, runner.router
    hashed = getattr(router, "_hash_indices_table", None) is not None
    scoring = _SCORINGS.get(str(getattr(router, "scoring_func", "")), "unknown")
    if type(router).__name__ == "FusedTopKRouter" and scoring == "unknown":
        scoring = "softmax"
    simulated = type(router).__name__ == "RoutingSimulatorRouter"
    readable = gate and scoring != "unknown" and not hashed and not simulated
    return Layer(
        index=int(runner.layer_id),
        name=name,
        experts=int(config.num_logical_experts),
        top_k=int(getattr(router, "top_k", config.experts_per_token)),
        router="hash" if hashed else scoring,
        gate="logits" if readable and not _is_monolithic(runner) else "none",
        unsupported=_unsupported(runner),
        shared_experts=int(runner.shared_experts is not None),
        note="ids come from vLLM's routing simulator" if simulated else "",
    )


def _has_slot(module: nn.Module) -> bool:
    """Whether these are experts that no MoERunner runs (DeepSeek-V4's and Kimi-K3's kernels)."""
    return hasattr(module, "capture_fn") and hasattr(module, "top_k")


def _slot_layer(name: str, experts: Any) -> Layer:
    number = re.search(r"layers\.(\d+)\.", name)
    return Layer(
        index=int(getattr(experts, "layer_id", number.group(1) if number else 0)),
        name=name,
        experts=int(getattr(experts, "num_logical_experts", experts.num_experts)),
        top_k=int(experts.top_k),
    )


def _is_monolithic(runner: Any) -> bool:
    return bool(runner.routed_experts.quant_method.is_monolithic)


def _unsupported(runner: Any) -> str:
    """Why the layer's ids cannot be read; empty if they can."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    if _is_monolithic(runner):
        if not _has_sink(runner):
            return "its kernel routes by itself and hands out no ids"
        if runner.routed_experts.routing_sink is not None:
            return "its routing sink serves vLLM's own routed-experts capturer"
        return ""
    if isinstance(runner.router, ZeroExpertRouter):
        return "its router hides zero experts behind expert 0"
    if not isinstance(runner.router, BaseRouter):
        return f"its router {type(runner.router).__name__} has no capture function"
    return ""


def _has_sink(runner: Any) -> bool:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic

    kernel = getattr(runner.routed_experts.quant_method, "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
    return bool(
        isinstance(experts, FusedMoEExpertsMonolithic) and experts.supports_routing_replay_capture()
    )


def tap(found: FoundRunner, take: Tap) -> None:
    """Have ``take`` called wherever the layer's routing is decided, also inside its graphs."""
    runner, top_k = found.runner, found.layer.choices
    if _has_slot(runner):
        runner.capture_fn = _chained(runner.capture_fn, top_k, take)
    elif _is_monolithic(runner):
        _tap_sink(runner, take)
    elif found.layer.gate == "logits":
        _tap_routing(runner.router, top_k, take)
    else:
        _tap_capture(runner.router, top_k, take)


def _tap_routing(router: Any, top_k: int, take: Tap) -> None:
    """Where ids, logits and combine weights are at hand together."""
    compute = router._compute_routing

    def compute_routing(
        hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        weights, ids = compute(hidden_states, router_logits, *args, **kwargs)
        # Fused shared experts stand behind the routed ones.
        take(ids[:, :top_k], router_logits, weights[:, :top_k])
        return weights, ids

    router._compute_routing = compute_routing


def _tap_capture(router: Any, top_k: int, take: Tap) -> None:
    """Through the router's one capture function; whoever sets another is called behind it."""
    set_capture_fn = router.set_capture_fn
    set_capture_fn(_chained(router.capture_fn, top_k, take))

    def set_behind(capture_fn: Callable[[Tensor], None] | None) -> None:
        set_capture_fn(_chained(capture_fn, top_k, take))

    router.set_capture_fn = set_behind


def _chained(
    other: Callable[[Tensor], None] | None, top_k: int, take: Tap
) -> Callable[[Tensor], None]:
    """Our capture function, and behind it whatever was or will be set."""

    def capture(ids: Tensor) -> None:
        take(ids[:, :top_k], None, None)
        if other is not None:
            other(ids)

    return capture


def _tap_sink(runner: Any, take: Tap) -> None:
    """Through the buffer that a monolithic kernel fills with the ids it chose."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink

    def capture(ids: Tensor) -> None:
        take(ids, None, None)

    runner.routed_experts.routing_sink = RoutedExpertsSink(runner.moe_config, capture)
