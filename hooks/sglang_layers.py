"""SGLang's MoE layers: what they are, whether their ids can be read, and whose rows they see."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from routeprof.topology import Layer, RankRole, RouterKind

_NUMBER = re.compile(r"\.\d+\.")
_SCORINGS: dict[str, RouterKind] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrtsoftplus",
}


@dataclass(frozen=True)
class Found:
    """A layer, and the configuration of the TopK that routes it, if one does."""

    layer: Layer
    config: Any


@dataclass(frozen=True)
class Rows:
    """Which rows of a pass this rank's routers see.

    Attributes:
        shard: where the padded rows are cut into equal parts, which of them is this rank's.
        unsupported: why they cannot be told from others' rows; empty if they can.
    """

    shard: int = 0
    unsupported: str = ""


# -- layers


def find_layers(model: nn.Module, config: Any, *, gate: bool) -> list[Found]:
    """The MoE layers that this process holds, in order.

    Args:
        config: the model's text config.
        gate: also say what the routers' outputs are.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.hash_topk import HashTopK
    from sglang.srt.layers.moe.topk import TopK

    routers: dict[str, nn.Module] = {}
    experts: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        block = name.rpartition(".")[0]
        if isinstance(module, TopK | HashTopK):
            routers.setdefault(block, module)
        elif isinstance(module, FusedMoE):
            experts.setdefault(block, module)
    found = [
        _found(block, model.get_submodule(block), routers.get(block), module, config, gate)
        for block, module in experts.items()
    ]
    indices = Counter(item.layer.index for item in found)
    if max(indices.values(), default=1) > 1:  # two in one block: running numbers instead
        found = [
            replace(item, layer=replace(item.layer, index=number))
            for number, item in enumerate(found)
        ]
    return found


def dense_layers(first: int, last: int, found: Sequence[Found]) -> list[Layer]:
    """Decoder blocks without routed experts, among those from ``first`` to before ``last``."""
    if not found:
        return []
    sample = found[0].layer.name
    taken = {item.layer.index for item in found}
    return [
        Layer(index, _NUMBER.sub(f".{index}.", sample, count=1).rpartition(".")[0], kind="dense")
        for index in range(first, last)
        if index not in taken
    ]


def _found(name: str, block: Any, router: Any, experts: Any, config: Any, gate: bool) -> Found:
    top = getattr(router, "topk_config", None)
    zero = int(getattr(block, "zero_expert_num", None) or 0)
    scoring = _scoring(top)
    layer = Layer(
        index=int(experts.layer_id),
        name=name,
        experts=_logical_experts(experts) + zero,
        top_k=_top_k(experts, top),
        router="hash" if type(router).__name__ == "HashTopK" else scoring,
        gate="logits" if gate and scoring != "unknown" else "none",
        unsupported=_unsupported(router, top),
        shared_experts=_shared_experts(block, experts, config),
        zero_experts=zero,
        note="ids come from SGLang's routing simulation" if _simulated() else "",
    )
    return Found(layer, top)


def _logical_experts(experts: Any) -> int:
    """Routed experts before any was replicated; shared ones have slots of their own behind."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is not None:
        return int(metadata.num_logical_experts)
    return int(experts._num_global_routed)


def _top_k(experts: Any, top: Any) -> int:
    """Routed experts of each token, fused shared ones left out."""
    if top is None:
        return int(experts.top_k) - int(experts.num_fused_shared_experts)
    return int(top.top_k) - int(top.num_shared_topk_slots)


def _scoring(top: Any) -> RouterKind:
    if top is None or top.custom_routing_function is not None:
        return "unknown"
    if top.use_grouped_topk and top.correction_bias is not None:
        return "sigmoid"  # SGLang's biased grouped routing knows nothing else
    return _SCORINGS.get(str(top.scoring_func), "unknown")


def _shared_experts(block: Any, experts: Any, config: Any) -> int:
    fused = int(experts.num_fused_shared_experts)
    own = any(
        getattr(block, name, None) is not None for name in ("shared_experts", "shared_expert")
    )
    if not (fused or own):
        return 0
    return int(getattr(config, "n_shared_experts", None) or fused or 1)


def _unsupported(router: Any, top: Any) -> str:
    """Why the layer's ids cannot be read; empty if they can."""
    from sglang.srt.layers.moe import topk, utils

    if not hasattr(getattr(topk, "_post_process_topk_ids", None), "__wrapped__"):
        return "this version of SGLang routes in a way that routeprof does not know"
    if top is None:
        kind = "no router" if router is None else f"a {type(router).__name__}"
        return f"it has {kind} where SGLang's TopK would be"
    if utils.get_moe_a2a_backend().is_megamoe():
        return "the megamoe backend routes inside its kernel"
    # On other devices the same configurations go through plain tensors.
    if topk.is_cuda() and top.output_format is not None:
        if top.output_format.name == "TRITON_KERNEL":
            return "the triton_kernel backend sorts tokens without handing out ids"
        if top.output_format.name == "BYPASSED":
            return "its kernel routes by itself and hands out no ids"
    return ""


def _simulated() -> bool:
    from sglang.srt.layers.moe import topk

    return bool(topk.routing_simulation_enabled())


# -- ranks


def rank_role() -> RankRole:
    """This process's part. Replicas are worlds of their own; here, ranks count over all."""
    from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    world = int(parallel.tp_size) * int(parallel.pp_size)
    replicas = 1 if parallel.attn_dp_enabled else int(parallel.num_dp_ranks)
    replica = int(parallel.dp_rank or 0) if replicas > 1 else 0
    return RankRole(
        rank=(replica * int(parallel.pp_size) + int(parallel.pp_rank)) * int(parallel.tp_size)
        + int(parallel.tp_rank),
        world_size=world * replicas,
        tp=int(parallel.attn_tp_rank),
        dp=replica if replicas > 1 else int(parallel.attn_dp_rank),
        ep=int(parallel.moe_ep_rank),
        pp=int(parallel.pp_rank),
        owns_tokens=int(parallel.attn_tp_rank) == 0 or is_moe_input_scattered_across_dp_ranks(),
    )


def rows_seen() -> Rows:
    """Which rows of a pass this rank's routers see; after SGLang's own mask of padding rows
    (``ForwardBatch.moe_num_token_non_padded``)."""
    from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
    from sglang.srt.runtime_context import get_exec, get_parallel
    from sglang.srt.utils.common import require_gathered_buffer

    parallel = get_parallel()
    if get_exec().overlap.enable_two_batch_overlap:
        return Rows(unsupported="two-batch overlap routes each pass in two halves")
    if parallel.attn_cp_size > 1:
        return Rows(unsupported="context parallelism spreads the rows of a pass over ranks")
    if not is_moe_input_scattered_across_dp_ranks():
        if parallel.attn_dp_size > 1:
            return Rows(
                unsupported="data-parallel attention gathers all replicas' rows, padding between "
                "them; with --moe-a2a-backend each rank routes its own"
            )
        return Rows()
    if parallel.attn_tp_size > 1 and require_gathered_buffer():
        return Rows(shard=int(parallel.attn_tp_rank))
    return Rows()
