"""Models of other families, which transformers builds without memory to count their parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from routeprof.errors import MissingExtraError, NoMoELayersError, UsageError
from routeprof.plan.cache import Kept
from routeprof.plan.model import Model
from routeprof.plan.parameters import Part, Weight
from routeprof.plan.shape import Moe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from routeprof.hooks.taps import FoundLayer

LENGTHS = (8, 16)
SHARED = re.compile(r"shared_(experts?|mlp)|share_expert")
EMBEDDING = re.compile(r"embed|wte|lm_head")
ATTENTION = re.compile(r"attn|attention")
STATE = re.compile(r"mamba|ssm|linear_attn|delta|conv")
NO_CACHE = "the cache of this family is not known: what is kept of a sequence is left out"
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
    model = _built(values, name)
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
        moes=tuple((layer.layer.index, _moe(model, layer, hidden)) for layer in layers),
        notes=(GUESSED.format(family), *(() if kept is not None else (NO_CACHE,))),
    )


def _built(values: Mapping[str, Any], name: str) -> nn.Module:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    fields = {key: value for key, value in values.items() if key != "model_type"}
    fields.pop("quantization_config", None)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.for_model(values["model_type"], **fields)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model.eval()
    except Exception as error:
        said = " ".join(str(error).split())
        raise UsageError(
            f"{name}: transformers cannot build {values['model_type']!r:.60} ({said:.160}): pass "
            f"the config.json of a language model that it knows"
        ) from None
    finally:
        logging.set_verbosity(verbosity)


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


def _moe(model: nn.Module, found: FoundLayer, hidden: int) -> Moe:
    layer = found.layer
    width = _first(model, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    return Moe(layer.experts - layer.zero_experts, layer.top_k, width or hidden)


def _weights(model: nn.Module, layers: list[FoundLayer]) -> Iterator[Weight]:
    blocks = {found.layer.name: found.layer for found in layers}
    for name, tensor in model.named_parameters():
        block = next((one for path, one in blocks.items() if name.startswith(path + ".")), None)
        matrix = tensor.ndim >= 2
        if block and "experts" in name and not SHARED.search(name):
            experts = block.experts - block.zero_experts
            stacked = tensor.ndim >= 2 and tensor.shape[0] == experts
            if stacked and tensor.ndim == 3:
                yield Weight(
                    "routed_experts",
                    tensor.numel(),
                    ANY_WAYS,
                    layer=block.index,
                    experts=experts,
                    top_k=block.top_k,
                )
                continue
        yield Weight(
            _part(name, block is not None), tensor.numel(), ANY_WAYS if matrix else 1, matrix
        )


def _part(name: str, in_block: bool) -> Part:
    if EMBEDDING.search(name):
        return "embeddings"
    if in_block and SHARED.search(name):
        return "shared_experts"
    if STATE.search(name):
        return "state"
    return "attention" if ATTENTION.search(name) else "other"


def _kept(model: nn.Module) -> tuple[Kept, ...] | None:
    """What a pass of two lengths leaves behind; None where the pass or its cache is not plain."""
    import torch

    found = []
    try:
        for length in LENGTHS:
            with torch.inference_mode():
                ids = torch.zeros((1, length), dtype=torch.long, device="meta")
                cache = model(input_ids=ids, use_cache=True).past_key_values
            found.append(_layers_of(cache))
    except Exception:  # whatever the model does that fake tensors cannot
        return None
    short, long = found
    if not short or len(short) != len(long):
        return None
    kept = []
    for at, (one, two) in enumerate(zip(short, long, strict=True)):
        tokens = (two[0] - one[0]) // (LENGTHS[1] - LENGTHS[0])
        if tokens * LENGTHS[0] != one[0] or one[1] != two[1]:
            return None
        kept.append(Kept("kv", tokens, max(one[2], 1), one[3], at))
        kept.append(Kept("recurrent", one[1], 1, layer=at))
    return tuple(one for one in kept if one.numbers) or None


def _layers_of(cache: Any) -> list[tuple[int, int, int, int | None]]:
    """For each layer: numbers of keys and values, of anything else, key heads, and the window."""
    rows = []
    for layer in cache.layers:
        kv = fixed = heads = 0
        for name, value in vars(layer).items():
            for tensor in _tensors(value):
                if name in ("keys", "values"):
                    kv += tensor.numel()
                    heads = int(tensor.shape[1])
                else:
                    fixed += tensor.numel()
        window = getattr(layer, "sliding_window", None)
        rows.append((kv, fixed, heads, window if isinstance(window, int) else None))
    return rows


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
