"""Finding the MoE layers of a torch model: the generic rule, the adapters, and what is left."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from routeprof.errors import NoMoELayersError, UsageError
from routeprof.hooks.adapters import ADAPTERS, OPAQUE_EXPERTS, PLAIN_TOP_K_BLOCKS
from routeprof.hooks.taps import (
    FoundLayer,
    Tap,
    forward_parameters,
    ids_from_arguments,
    ids_from_output,
    logits_from_output,
    takes_ids,
)
from routeprof.topology import GateOutput, Layer, RouterKind

ROUTER_NAMES = ("gate", "router")
EXPERT_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "n_experts",
)
TOP_K_NAMES = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_selected_experts",
)
SHARED_NAMES = re.compile(r"^shared_(experts?|mlp)$|^share_expert$")


@dataclass(frozen=True)
class LayerSpec:
    """How to read a MoE module that routeprof does not know.

    Attributes:
        experts: number of experts a token can be sent to.
        top_k: experts per token.
        read: called with (module, args, kwargs, output) of the module's forward pass; returns
            the ids that ran [tokens, k], or a tuple (ids, weights) or (ids, weights, logits),
            where weights [tokens, k] and logits [tokens, experts] may be None.
        router: how logits become scores, if ``read`` returns logits.
    """

    experts: int
    top_k: int
    read: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
    router: RouterKind = "softmax"


def find_layers(model: nn.Module, named: Mapping[str, LayerSpec] | None = None) -> list[FoundLayer]:
    """All MoE layers of a model in the order of its modules, dense blocks among them.

    Raises:
        UsageError: ``named`` has a path that the model lacks.
        NoMoELayersError: there is no MoE layer, or none that can be read.
    """
    found = [_named(model, path, spec) for path, spec in (named or {}).items()]
    taken = {item.layer.name for item in found}
    found += list(_search(model, taken))
    if not found:
        raise NoMoELayersError(
            f"{type(model).__name__} has no MoE layer; record a Mixture-of-Experts model, or "
            "name its blocks with layers={'path': LayerSpec(...)}"
        )
    if all(item.layer.unsupported for item in found):
        names = ", ".join(sorted({type(item.module).__name__ for item in found}))
        raise NoMoELayersError(
            f"cannot read the routing of {names}: {found[0].layer.unsupported}; name the blocks "
            "with layers={'path': LayerSpec(...)}"
        )
    return _numbered(model, found)


def _search(model: nn.Module, taken: set[str]) -> Iterator[FoundLayer]:
    covered = set(taken)
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if any(path == name or path.startswith(f"{name}.") for name in covered if name):
            continue
        item = _read_block(path, module, modules)
        if item is not None:
            if item.module is module and not takes_ids(module):
                covered.add(path)
            yield item


def _read_block(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module]
) -> FoundLayer | None:
    name = type(module).__name__
    if name in ADAPTERS:
        return _adapted(path, module)
    if takes_ids(module):
        return _generic(path.rpartition(".")[0], modules, module)
    if name in OPAQUE_EXPERTS:
        return _unsupported(path, module, OPAQUE_EXPERTS[name])
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.ModuleList) and len(experts) > 1:
        return _module_list(path, module, len(experts))
    return _unknown(path, module)


def _adapted(path: str, block: nn.Module) -> FoundLayer:
    adapted = ADAPTERS[type(block).__name__](block)
    layer = Layer(
        index=-1,
        name=path,
        experts=adapted.experts,
        top_k=adapted.top_k,
        router=adapted.router,
        gate=adapted.gate_output,
        shared_experts=_shared(block),
        zero_experts=adapted.zero_experts,
        drops=adapted.drops,
        executed=adapted.executed,
        note=adapted.note,
    )
    return FoundLayer(layer, block, adapted.ids, adapted.gate)


def _generic(path: str, modules: Mapping[str, nn.Module], experts_module: nn.Module) -> FoundLayer:
    """The rule that holds for transformers 5: the experts module is handed the ids."""
    block = modules[path]
    router = _router(block)
    experts = _experts(router, experts_module)
    top_k = _first_int((router, block, _config(block)), TOP_K_NAMES)
    if not experts or not top_k:
        reason = "the number of experts or experts per token is not where it usually is"
        return _unsupported(path, block, reason)
    kind, gate = _scoring(router, block)
    layer = Layer(
        index=-1,
        name=path,
        experts=experts,
        top_k=top_k,
        router=kind,
        gate=gate,
        # Some families keep them beside the block.
        shared_experts=_shared(block) or _shared(modules[path.rpartition(".")[0]]),
        zero_experts=_zero_experts(router, block),
        sees_all_tokens=not re.search(r"(text|vision)_moe$", path),
    )
    tap = (
        Tap(router, "after", logits_from_output) if router is not None and gate != "none" else None
    )
    return FoundLayer(layer, block, Tap(experts_module, "before", ids_from_arguments), tap)


def _module_list(path: str, block: nn.Module, experts: int) -> FoundLayer | None:
    """Blocks of transformers 4.5x, which keep one module per expert."""
    router = _router(block)
    if router is None:
        return _unsupported(path, block, "it has experts but neither a gate nor a router")
    top_k = _first_int((block, router, _config(block)), TOP_K_NAMES)
    if not top_k:
        return _unsupported(path, block, "the number of experts per token is not found")
    layer = Layer(
        -1, path, experts=experts, top_k=top_k, shared_experts=_shared(block), router="unknown"
    )
    if type(block).__name__ in PLAIN_TOP_K_BLOCKS and isinstance(router, nn.Linear):

        def ids(args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
            return (output.topk(top_k, dim=-1).indices,)

        layer = replace(layer, router="softmax", gate="logits")
        gate = Tap(router, "after", logits_from_output)
        return FoundLayer(layer, block, Tap(router, "after", ids), gate)
    if not isinstance(router, nn.Linear):
        return FoundLayer(layer, block, Tap(router, "after", ids_from_output))
    return _unsupported(path, block, "its block chooses the experts itself, in a way not known")


def _unknown(path: str, module: nn.Module) -> FoundLayer | None:
    """A block that looks like MoE and that no rule reads."""
    experts, routed = getattr(module, "experts", None), _router(module) is not None
    if isinstance(experts, nn.Module):
        if takes_ids(experts) or type(experts).__name__ in OPAQUE_EXPERTS:
            return None
        many = isinstance(experts, nn.ModuleDict) and len(experts) > 1
        found = routed or many or _stacked(experts)
    else:
        found = routed and any(_stacked(child) for child in module.children())
    if not found:
        return None
    return _unsupported(path, module, "its experts are not told the ids in a way routeprof knows")


def _stacked(module: nn.Module) -> bool:
    """Whether it holds the weights of several experts in one tensor."""
    convolution = hasattr(module, "kernel_size")
    return not convolution and any(weight.ndim == 3 for weight in module.parameters(recurse=False))


def _unsupported(path: str, block: nn.Module, reason: str) -> FoundLayer:
    return FoundLayer(Layer(-1, path, unsupported=reason), block)


def _named(model: nn.Module, path: str, spec: LayerSpec) -> FoundLayer:
    """A block that the user describes."""
    try:
        block = model.get_submodule(path)
    except AttributeError:
        raise UsageError(f"the model has no module {path!r}; see model.named_modules()") from None
    if spec.experts < 1 or not 1 <= spec.top_k <= spec.experts:
        raise UsageError(
            f"layers[{path!r}]: {spec.top_k} of {spec.experts} experts per token cannot be right"
        )

    def read(args: Any, kwargs: Any, output: Any) -> tuple[Any, ...]:
        result = spec.read(block, args, kwargs, output)
        return result if isinstance(result, tuple) else (result,)

    def ids(args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
        return tuple(value for value in read(args, kwargs, output)[:2] if value is not None)

    def logits(args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...] | None:
        values = read(args, kwargs, output)
        return (values[2],) if len(values) > 2 and values[2] is not None else None

    layer = Layer(
        -1, path, experts=spec.experts, top_k=spec.top_k, router=spec.router, gate="logits"
    )
    return FoundLayer(layer, block, Tap(block, "after", ids), Tap(block, "after", logits))


# -- reading the parts of a block


def _router(block: nn.Module) -> nn.Module | None:
    for name in ROUTER_NAMES:
        router = getattr(block, name, None)
        if isinstance(router, nn.Module):
            return router
    return None


def _config(block: nn.Module) -> Any:
    return getattr(block, "config", None)


def _first_int(owners: Sequence[Any], names: Sequence[str]) -> int:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _experts(router: nn.Module | None, experts: nn.Module) -> int:
    """The width of the router's logits: an expert-parallel experts module knows its share only."""
    if router is not None:
        linear = [child.out_features for child in router.modules() if isinstance(child, nn.Linear)]
        declared = _first_int((router,), EXPERT_COUNTS)
        if declared and (not linear or declared in linear):
            return declared
        if linear:
            return int(linear[-1])
        weight = getattr(router, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            return int(weight.shape[0])
    return _first_int((experts, _config(experts)), EXPERT_COUNTS)


def _zero_experts(router: nn.Module | None, block: nn.Module) -> int:
    value = getattr(_config(block) or router, "zero_expert_num", None)
    if value is None and router is not None:
        total = getattr(router, "n_routed_experts", 0) or 0
        real = getattr(router, "num_experts", total) or total
        value = max(0, total - real) if isinstance(total, int) else 0
    return int(value or 0)


def _shared(block: nn.Module) -> int:
    return sum(bool(SHARED_NAMES.match(name)) for name, _ in block.named_children())


def _scoring(router: nn.Module | None, block: nn.Module) -> tuple[RouterKind, GateOutput]:
    """How a router turns logits into scores, read off its configuration or its forward code."""
    if router is None:
        return "unknown", "none"
    name = type(router).__name__
    if "Hash" in name:
        return "hash", "none"
    code = re.sub(r"#.*", "", inspect.getsource(type(router).forward))
    functions = [getattr(router, name, None) for name in ("score_fn", "scoring_function")]
    declared = str(getattr(router, "expert_selection_fn", ""))
    declared += " ".join(_function_name(function) for function in functions)
    text = declared if re.search("softmax|sigmoid|softplus", declared) else code
    if not re.search("softmax|sigmoid|softplus|select|topk", text):
        # The router only projects; its block turns the logits into scores.
        text = re.sub(r"#.*", "", inspect.getsource(type(block)))
    kind: RouterKind = "unknown"
    if "softplus" in text:
        kind = "sqrtsoftplus"
    elif "sigmoid" in text:
        kind = "sigmoid"
    elif "softmax" in text:
        kind = "softmax"
    if kind == "unknown":
        return kind, "none"
    return kind, _gate_output(router, code)


def _gate_output(router: nn.Module, code: str) -> GateOutput:
    """What the first thing that the router returns is called."""
    if isinstance(router, nn.Linear):
        return "logits"
    first = code.rsplit("return", 1)[-1].split(",")[0]
    if "logit" in first:
        return "logits"
    return "probabilities" if "router_prob" in first else "none"


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).lower()


# -- numbering


def _numbered(model: nn.Module, found: list[FoundLayer]) -> list[FoundLayer]:
    """Layers by their number in the model where that is unique, with the dense blocks between."""
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    found = sorted(found, key=lambda item: order.get(item.layer.name, 0))
    numbers = [_block_number(item.layer.name) for item in found]
    if None in numbers or len(set(numbers)) < len(numbers):
        return [
            replace(item, layer=replace(item.layer, index=place))
            for place, item in enumerate(found)
        ]
    numbered = [
        replace(item, layer=replace(item.layer, index=int(number or 0)))
        for item, number in zip(found, numbers, strict=True)
    ]
    numbered += _dense(model, numbered)
    return sorted(numbered, key=lambda item: item.layer.index)


def _block_number(path: str) -> int | None:
    numbers = [part for part in path.split(".") if part.isdigit()]
    return int(numbers[0]) if len(numbers) == 1 else None


def _dense(model: nn.Module, found: list[FoundLayer]) -> list[FoundLayer]:
    """Blocks beside the MoE layers that have none."""
    parents = {re.sub(r"\.\d+(\..*)?$", "", item.layer.name) for item in found}
    if len(parents) != 1:
        return []
    parent = parents.pop()
    blocks = model.get_submodule(parent)
    taken = {item.layer.index for item in found}
    return [
        FoundLayer(Layer(number, f"{parent}.{name}", kind="dense"), block)
        for number, (name, block) in enumerate(blocks.named_children())
        if number not in taken
    ]


def pass_of(model: nn.Module, path: str) -> str:
    """The module whose forward pass is a step of the layer at ``path``.

    It is the innermost one around the layer that takes a mask and tokens, such as a decoder
    stack; the model itself where there is none.
    """
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        name = ".".join(parts[:length])
        names = set(forward_parameters(model.get_submodule(name)))
        if "attention_mask" in names and names & {"input_ids", "inputs_embeds"}:
            return name
    return ""
