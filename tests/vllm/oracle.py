"""What really happens in a worker, told by somebody who knows nothing of routeprof.

vLLM mixes ``Oracle`` into its worker class (``worker_extension_cls``), and ``collective_rpc``
calls its methods. It stands at the door of the expert kernels, behind everything that routes. In
eager mode only: a compiled graph does not pass through Python.

Importing the module also makes vLLM's routing simulator fit for the CPU, and gives it a strategy
whose choices are known beforehand; see ``ByRow``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router import routing_simulator_router
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    DistributionBasedRouting,
    RoutingSimulator,
    RoutingStrategy,
)


class ByRow(RoutingStrategy):
    """Row r of a batch goes to experts r·k, r·k + 1, … r·k + k - 1, counted round and round."""

    def route_tokens(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, experts = hidden_states.shape[0], router_logits.shape[-1]
        choices = torch.arange(rows * top_k, device=hidden_states.device).reshape(rows, top_k)
        weights = torch.full_like(choices, 1 / top_k, dtype=torch.float32)
        return weights, (choices % experts).to(torch.int32)


class UniformRandom(DistributionBasedRouting):
    """vLLM's own, with ids as its CPU kernels want them."""

    def route_tokens(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = super().route_tokens(*args, **kwargs)
        return weights, ids.to(torch.int32)


class Quiet:
    """On the CPU vLLM compiles the simulator too, and its warning cannot be compiled."""

    @staticmethod
    def warning_once(*args: Any) -> None:
        """Warn of nothing."""


RoutingSimulator.register_strategy("by_row", ByRow())
RoutingSimulator.register_strategy("uniform_random", UniformRandom())
routing_simulator_router.logger = Quiet


class Witness:
    """What one worker saw.

    Attributes:
        counts, weights, mass: for each layer, assignments, combine weights and probability of
            each expert.
        steps: what the scheduler asked for, and in eager mode the rows that the model was given.
    """

    def __init__(self) -> None:
        self.watching = True
        self.counts: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.mass: dict[int, Tensor] = {}
        self.early: dict[int, Tensor] = {}
        self.late: dict[int, Tensor] = {}
        self.steps: list[dict[str, Any]] = []

    def add(self, sums: dict[int, Tensor], layer: int, values: Tensor) -> None:
        """Add to a layer's sums."""
        if self.watching:
            sums[layer] = sums.get(layer, 0) + values


witness = Witness()


class Oracle:
    """Methods of a worker."""

    def oracle_begin(self, eager: bool) -> None:
        """Watch from now on; warm-up passes are over."""
        _watch_steps(self)
        if eager:
            for index, runner in runners(self.model_runner.get_model()).items():
                _watch_layer(index, runner)
            model = self.model_runner.get_model()
            model.register_forward_pre_hook(_note_rows, with_kwargs=True)

    def oracle_dummy_pass(self, rows: int) -> None:
        """Have the engine run rows that are nobody's."""
        witness.watching = False
        self.model_runner._dummy_run(rows)
        witness.watching = True

    def oracle_capture_late(self) -> None:
        """Set a capture function, as any code may after the model is loaded."""
        for index, runner in runners(self.model_runner.get_model()).items():
            runner.router.set_capture_fn(_capture(witness.late, index, runner))

    def oracle_read(self) -> dict[str, Any]:
        """All sums, as JSON takes them."""
        names = ("counts", "weights", "mass", "early", "late")
        sums = {name: _lists(getattr(witness, name)) for name in names}
        return sums | {"steps": witness.steps}


def runners(model: torch.nn.Module) -> dict[int, Any]:
    """The MoE layers by the number of their block."""
    return {
        int(re.search(r"layers\.(\d+)\.", name)[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MoERunner)
    }


def _lists(sums: dict[int, Tensor]) -> dict[int, list[float]]:
    return {layer: values.tolist() for layer, values in sums.items()}


def _capture(sums: dict[int, Tensor], index: int, runner: Any) -> Any:
    experts = runner.moe_config.num_logical_experts

    def capture(ids: Tensor) -> None:
        witness.add(sums, index, torch.bincount(ids.flatten().long(), minlength=experts))

    return capture


# -- watching


def _watch_steps(worker: Any) -> None:
    execute_model = worker.execute_model

    def execute_and_note(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = list(scheduler_output.num_scheduled_tokens.values())
        if scheduled:
            witness.steps.append({"tokens": sum(scheduled), "requests": len(scheduled)})
        return execute_model(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_and_note


def _note_rows(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if witness.watching and witness.steps:
        step = witness.steps[-1]
        step["token_ids"] = kwargs["input_ids"][: step["tokens"]].tolist()
        step["positions"] = kwargs["positions"][: step["tokens"]].tolist()


def _watch_layer(index: int, runner: Any) -> None:
    """Watch what the expert kernel gets, and what the router is asked."""
    kernel, experts = runner.routed_experts.quant_method.moe_kernel, runner.moe_config.num_experts
    apply, select_experts = kernel.apply, runner.router.select_experts
    sigmoid = getattr(runner.router, "scoring_func", "softmax") == "sigmoid"

    def apply_and_count(*args: Any, topk_ids: Tensor, topk_weights: Tensor, **kwargs: Any) -> Any:
        ids = topk_ids.flatten().long()
        witness.add(witness.counts, index, torch.bincount(ids, minlength=experts))
        sums = torch.zeros(experts, dtype=torch.float64)
        sums.index_add_(0, ids, topk_weights.flatten().double())
        witness.add(witness.weights, index, sums)
        return apply(*args, topk_ids=topk_ids, topk_weights=topk_weights, **kwargs)

    def select_and_add(*args: Any, router_logits: Tensor, **kwargs: Any) -> Any:
        logits = router_logits.double()
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        witness.add(witness.mass, index, (scores / scores.sum(-1, keepdim=True)).sum(0))
        return select_experts(*args, router_logits=router_logits, **kwargs)

    kernel.apply = apply_and_count
    runner.router.select_experts = select_and_add
