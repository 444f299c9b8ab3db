"""Families of transformers that the generic rule does not reach, each with its own taps.

An adapter takes a block of its class and returns what ``FoundLayer`` needs. It reads what the
model executed; where the model executes something else than its router chose, the layer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from routeprof.hooks.taps import Read, Tap, ids_from_arguments, logits_from_output
from routeprof.topology import GateOutput, RouterKind

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


@dataclass(frozen=True)
class Adapted:
    """What an adapter knows about its block."""

    ids: Tap
    gate: Tap | None
    experts: int
    top_k: int
    router: RouterKind
    gate_output: GateOutput = "logits"
    drops: bool = False
    executed: bool = True
    note: str = ""
    zero_experts: int = 0


def llama4(block: Any) -> Adapted:
    """The router returns (scores, logits); scores are 0 but for the chosen experts."""
    router = block.router
    top_k = int(router.top_k)

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        weights, chosen = output[0].topk(top_k, dim=-1)
        return chosen, weights

    def logits(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (output[1],)

    return Adapted(
        _after(router, ids), _after(router, logits), int(router.num_experts), top_k, "sigmoid"
    )


def switch(block: Any) -> Adapted:
    """The router returns a one-hot dispatch that is all zero for a dropped token."""
    router = block.router
    experts = int(router.num_experts)

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        dispatch = output[0].reshape(-1, experts)
        kept, chosen = dispatch.max(dim=-1)
        chosen = torch.where(kept > 0, chosen, -1)
        return chosen[:, None], output[1].reshape(-1, 1)

    def logits(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (output[2].reshape(-1, experts),)

    note = "tokens above the expert capacity are dropped by the model and counted as invalid"
    return Adapted(
        _after(router, ids), _after(router, logits), experts, 1, "softmax", drops=True, note=note
    )


def nllb(block: Any) -> Adapted:
    """The router returns combine weights [tokens, experts] with at most two that are not 0."""
    router = block.router
    experts = int(router.num_experts)

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        weights, chosen = output[1].reshape(-1, experts).topk(2, dim=-1)
        return torch.where(weights > 0, chosen, -1), weights

    def logits(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (output[2].reshape(-1, experts),)

    note = "router intent: this version of the model runs experts 0 and 1 whatever was chosen"
    return Adapted(
        _after(router, ids),
        _after(router, logits),
        experts,
        2,
        "softmax",
        drops=True,
        executed=False,
        note=note,
    )


def jetmoe(block: Any) -> Adapted:
    """The router returns assignments sorted by expert; topk(logits) is what it sorts."""
    router = block.router
    top_k = int(router.top_k)

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (output[4].topk(top_k, dim=-1).indices,)

    def logits(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (output[4],)

    return Adapted(
        _after(router, ids), _after(router, logits), int(router.num_experts), top_k, "softmax"
    )


def doge(block: Any) -> Adapted:
    """Product-key retrieval: the ids are what the expert embedding is asked for."""

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...]:
        return (args[0],)

    return Adapted(
        Tap(block.up_embed, "before", ids),
        None,
        int(block.num_experts),
        int(block.top_k),
        "unknown",
        "none",
        note="product-key routing has no distribution over experts to take gate outputs from",
    )


def zaya(block: Any) -> Adapted:
    """A skipped token is sent to expert 0 with weight 0: it belongs to the skip class."""
    router = next(child for child in block.children() if hasattr(child, "num_router_classes"))
    classes = int(router.num_router_classes)

    def ids(args: Arguments, kwargs: Keywords, output: Any) -> tuple[Tensor, ...] | None:
        found = ids_from_arguments(args, kwargs, output)
        if found is None or len(found) < 2:
            return None
        chosen, weights = found
        return torch.where(weights == 0, classes - 1, chosen), weights

    return Adapted(
        Tap(block.experts, "before", ids),
        _after(router, logits_from_output),
        classes,
        int(router.top_k),
        "softmax",
        zero_experts=1,
    )


def _after(module: nn.Module, read: Read) -> Tap:
    return Tap(module, "after", read)


ADAPTERS: dict[str, Callable[[Any], Adapted]] = {
    "Llama4TextMoe": llama4,
    "SwitchTransformersSparseMLP": switch,
    "NllbMoeSparseMLP": nllb,
    "JetMoeMoE": jetmoe,
    "JetMoeMoA": jetmoe,
    "DogeCDMoE": doge,
    "ZayaSparseMoeBlock": zaya,
}

PLAIN_TOP_K_BLOCKS = {
    "MixtralSparseMoeBlock",
    "Qwen2MoeSparseMoeBlock",
    "Qwen3MoeSparseMoeBlock",
    "Qwen3NextSparseMoeBlock",
    "OlmoeSparseMoeBlock",
    "FlexOlmoSparseMoeBlock",
    "JambaSparseMoeBlock",
    "MiniMaxSparseMoeBlock",
}
"""Blocks of transformers 4.5x whose own top-k is plain topk(softmax(gate(x))): softmax keeps the
order, so topk of the logits gives the ids that run. Others of that age are not guessed at."""

OPAQUE_EXPERTS = {"Mxfp4GptOssExperts": "its kernel routes and runs the experts in one call"}
"""Experts modules that are never called with ids."""
