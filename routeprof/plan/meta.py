"""Models of other families, which transformers builds without memory to count their parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routeprof.errors import MissingExtraError, NoMoELayersError, UsageError
from routeprof.plan.cache import Kept
from routeprof.plan.model import Model
from routeprof.plan.parameters import Part, Weight
from routeprof.plan.shape import Moe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from routeprof.hooks.taps import FoundLayer
    from routeprof.topology import Layer

LENGTHS = (8, 16)
SHARED = re.compile(r"shared_(experts?|mlp)|share_expert")
ROUTER = re.compile(r"\b(gate|router)\.")
EMBEDDING = re.compile(r"embed|wte|lm_head")
STATE = re.compile(r"Mixer$|MambaLayer$|GatedDelta|LightningAttention$|LinearAttention$|ShortConv$")
NO_CACHE = "the cache of this family is not known: what is kept of a sequence is left out"
ALLOCATED = (
    "activations are shown where no matrix is cut and loads are even, as transformers allocates "
    "them, which is not the least"
)
ANY_WAYS = 1 << 30
GUESSED = "{} is not a family that routeprof knows: parts are told by the names of its modules"


def model_on_meta(values: Mapping[str, Any], name: str) -> Model:
    """A model of any family that transformers can build.

    Matrices are taken to be cut into as many pieces as there are GPUs; keys and values by their
    heads. What is kept of a sequence is read off a pass of two lengths on the meta device.

    Raises:
        MissingExtraError: transformers is not installed.
        UsageError: it cannot build the model.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError("transformers", "demo") from None
    model = built_on_meta(values, name)
    layers = _moe_layers(model)
    hidden = _first(model, "hidden_size", "d_model")
    kept = _kept(model)
    family = str(values["model_type"])
    return Model(
        name=name,
        family=family,
        hidden=hidden,
        vocab=_first(model, "vocab_size"),
        weights=tuple(_weights(model, layers)),
        kept=kept,
        moes=tuple((found.layer.index, _moe(found.layer, hidden)) for found in layers),
        config=json.dumps(dict(values), sort_keys=True, default=str),
        notes=(GUESSED.format(family), ALLOCATED, *(() if kept is not None else (NO_CACHE,))),
    )


def built_on_meta(
    values: Mapping[str, Any], name: str, dtype: torch.dtype | None = None
) -> nn.Module:
    """The language model, without memory, in eval mode.

    Args:
        dtype: of its weights; what the values say if None.

    Raises:
        UsageError: transformers cannot build it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: _decoded(value) for key, value in values.items() if key != "model_type"}
    fields.pop("quantization_config", None)
    told = {} if dtype is None else {"dtype": dtype}
    try:
        with quietly(), torch.device("meta"):
            config = AutoConfig.for_model(values["model_type"], **fields)
            model: nn.Module = AutoModelForCausalLM.from_config(config, **told)
        return model.eval()
    except Exception as error:
        said = " ".join(str(error).split())
        raise UsageError(
            f"{name}: transformers cannot build {values['model_type']!r:.60} ({said:.160}): pass "
            f"the config.json of a language model that it knows"
        ) from None


@contextmanager
def quietly() -> Iterator[None]:
    """Without what transformers logs."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _decoded(value: Any) -> Any:
    """A value with infinite numbers as numbers, which a config.json writes as objects."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _moe_layers(model: nn.Module) -> list[FoundLayer]:
    from routeprof.hooks.discovery import find_layers

    try:
        return [found for found in find_layers(model) if found.layer.kind == "moe"]
    except NoMoELayersError:
        return []


def _first(model: nn.Module, *names: str) -> int:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((value for name in names if isinstance(value := getattr(text, name, 0), int)), 0)


def _moe(layer: Layer, hidden: int) -> Moe:
    """Its experts; their width is not needed where activations are not computed."""
    return Moe(layer.experts - layer.zero_experts, layer.choices, hidden)


def _weights(model: nn.Module, layers: list[FoundLayer]) -> Iterator[Weight]:
    """Parameters one by one, except that a layer's routed experts are added up."""
    blocks = {found.layer.name + ".": found.layer for found in layers}
    mixers = {
        path + ".": part for path, module in model.named_modules() if (part := _mixer(module))
    }
    routed: dict[Layer, int] = {}
    for name, tensor in model.named_parameters():
        block = next((layer for path, layer in blocks.items() if name.startswith(path)), None)
        if block and _is_routed(name, tensor, block):
            routed[block] = routed.get(block, 0) + tensor.numel()
            continue
        matrix = tensor.ndim >= 2 and not ROUTER.search(name)
        part = _part(name, bool(layers), mixers)
        yield Weight(part, tensor.numel(), ANY_WAYS if matrix else 1, matrix)
    for layer, numbers in routed.items():
        experts = layer.experts - layer.zero_experts
        yield Weight("routed_experts", numbers, ANY_WAYS, True, layer.index, experts, layer.choices)


def _is_routed(name: str, tensor: Tensor, layer: Layer) -> bool:
    """Whether a MoE block's parameter is of its experts: by its path, or stacked by expert."""
    if SHARED.search(name) or ROUTER.search(name):
        return False
    stacked = tensor.ndim == 3 and tensor.shape[0] == layer.experts - layer.zero_experts
    return stacked or "experts." in name.removeprefix(layer.name)


def _mixer(module: nn.Module) -> Part | None:
    name = type(module).__name__
    if STATE.search(name):
        return "state"
    return "attention" if name.endswith(("Attention", "MLA")) else None


def _part(name: str, has_experts: bool, mixers: Mapping[str, Part]) -> Part:
    owner = next((part for path, part in mixers.items() if name.startswith(path)), None)
    if owner:
        return owner
    if EMBEDDING.search(name):
        return "embeddings"
    return "shared_experts" if has_experts and SHARED.search(name) else "other"


# -- what is kept of a sequence


def _kept(model: nn.Module) -> tuple[Kept, ...] | None:
    """What passes of two lengths leave behind; None where one fails or the cache is not plain."""
    try:
        short, long = (_layers_of(_cache(model, length)) for length in LENGTHS)
    except Exception:  # whatever the model does that tensors without values cannot
        return None
    if not short or len(short) != len(long):
        return None
    kept: list[Kept] = []
    for at, (one, two) in enumerate(zip(short, long, strict=True)):
        if one.tensors.keys() != two.tensors.keys():
            return None
        for name, numbers in one.tensors.items():
            found = _growth(name, numbers, two.tensors[name], two, at)
            if found is None:
                return None
            kept.append(found)
    return tuple(kept) or None


def _growth(name: str, short: int, long: int, layer: _CacheLayer, at: int) -> Kept | None:
    """A tensor that stays the same, or one that grows with each token."""
    if short == long:
        return Kept("plain" if name.startswith("conv") else "recurrent", long, 1, layer=at)
    token = short // LENGTHS[0]
    if token * LENGTHS[0] != short or token * LENGTHS[1] != long:
        return None
    return Kept("kv", token, layer.heads, layer.window, at)


def _cache(model: nn.Module, length: int) -> Any:
    import torch

    with quietly(), _idle_experts(model), torch.inference_mode():
        ids = torch.zeros((1, length), dtype=torch.long, device="meta")
        return model(input_ids=ids, use_cache=True).past_key_values


@contextmanager
def _idle_experts(model: nn.Module) -> Iterator[None]:
    """Without what experts do, which needs to know how many tokens each got."""
    import torch

    from routeprof.hooks.taps import takes_ids

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.empty_like(hidden_states)

    idle = [module for module in model.modules() if takes_ids(module)]
    for module in idle:
        module.forward = forward
    try:
        yield
    finally:
        for module in idle:
            del module.forward


@dataclass(frozen=True)
class _CacheLayer:
    tensors: dict[str, int]
    heads: int
    window: int | None


def _layers_of(cache: Any) -> list[_CacheLayer]:
    """Numbers of each tensor of each layer, with its key heads and its window."""
    if isinstance(getattr(cache, "linear_cache", None), list):
        raise ValueError("a cache with a part of its own")
    rows = []
    for layer in cache.layers:
        sizes = {
            name: count
            for name, value in vars(layer).items()
            if (count := sum(tensor.numel() for tensor in _tensors(value)))
        }
        keys, window = getattr(layer, "keys", None), getattr(layer, "sliding_window", None)
        heads = 1 if keys is None or keys.ndim != 4 else int(keys.shape[1])
        rows.append(_CacheLayer(sizes, heads, window if isinstance(window, int) else None))
    return rows


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
