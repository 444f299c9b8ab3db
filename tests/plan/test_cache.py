"""Bytes of caches and states against the tensors that real tiny models fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from routeprof.plan.cache import cache_bytes, kept
from routeprof.plan.config import shape_of
from routeprof.plan.known import known_config
from routeprof.plan.precision import Precision, precision
from routeprof.plan.shape import Shape
from tests.plan.models import FAMILIES, made, tiny_values
from tests.zoo.families import quiet

# Grouped keys where the zoo's tiny configs have a key for each query.
GROUPED = {
    family: {"num_key_value_heads": 2} for family in FAMILIES if not family.startswith("deepseek")
}
WINDOW = 6
WINDOWS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": WINDOW},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW},
    "llama4_text": {"attention_chunk_size": WINDOW},
}


def tensors(value: Any) -> Iterator[Tensor]:
    """Floating point tensors in a cache layer's attributes."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def real_cache(values: dict[str, Any], length: int, batch: int, dtype: torch.dtype) -> Any:
    """The cache after one forward pass over random tokens."""
    with quiet(), torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(made(values)).to(dtype).eval()
        ids = torch.randint(3, 64, (batch, length))
        return model(ids, use_cache=True).past_key_values


def real_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of keys and values, and of everything else that is kept."""
    kv = state = 0
    for layer in cache.layers:
        for name, value in vars(layer).items():
            found = sum(tensor.nbytes for tensor in tensors(value))
            if name in ("keys", "values"):
                kv += found
            else:
                state += found
    return kv, state + sum(tensor.nbytes for tensor in tensors(getattr(cache, "linear_cache", [])))


def planned(values: dict[str, Any], length: int, batch: int, wanted: Precision) -> tuple[int, int]:
    made_bytes = cache_bytes(kept(shape_of(values)), length, wanted, batch=batch)
    assert made_bytes.total == made_bytes.kv + made_bytes.state
    return int(made_bytes.kv), int(made_bytes.state)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [5, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_real_cache(family: str, length: int, batch: int) -> None:
    values = tiny_values(family, GROUPED.get(family))
    if family in WINDOWS:
        values |= {"sliding_window": None, "attention_chunk_size": 64}
        values |= {"sliding_window": 64} if family == "gpt_oss" else {}
    cache = real_cache(values, length, batch, torch.float32)
    assert planned(values, length, batch, precision("fp32")) == real_bytes(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_stay_in_full_precision_as_in_transformers(family: str) -> None:
    values = tiny_values(family)
    real = real_bytes(real_cache(values, 5, 2, torch.bfloat16))
    assert planned(values, 5, 2, precision("bf16")) == real


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_keep_no_more_than_they_see(family: str, batch: int) -> None:
    """Between two steps a dynamic cache lacks the token that the next step brings."""
    values = tiny_values(family, WINDOWS[family])
    for length in (WINDOW - 1, WINDOW, 17):
        real, _ = real_bytes(real_cache(values, length, batch, torch.float32))
        kv, _ = planned(values, length, batch, precision("fp32"))
        sliding = [one for one in kept(shape_of(values)) if one.window is not None]
        assert sliding
        next_token = 4 * batch * sum(one.numbers for one in sliding)
        assert kv == real + (next_token if length >= WINDOW else 0)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4_text"])
def test_the_layers_that_slide_are_those_of_transformers(family: str) -> None:
    values = tiny_values(family, WINDOWS[family] | {"num_hidden_layers": 7})
    if family == "qwen2_moe":
        values["max_window_layers"] = 4
    types = made(values).layer_types
    slides = [one.window is not None for one in kept(shape_of(values))]
    assert slides == [kind != "full_attention" for kind in types]
    assert True in slides
    assert False in slides


def known_shape(name: str) -> Shape:
    values = known_config(name)
    assert values is not None
    return shape_of(values)


def test_published_cache_sizes_come_out() -> None:
    """DeepSeek-V3: (512 + 64) numbers of 2 bytes in 61 layers; Mixtral: 2 x 8 heads x 128 x 32."""
    latent = cache_bytes(kept(known_shape("deepseek-v3")), 1, Precision())
    assert latent.kv == 70_272
    grouped = cache_bytes(kept(known_shape("mixtral-8x7b")), 4096, Precision())
    assert grouped.kv == 4096 * 131_072
    assert grouped.state == 0


def test_smaller_types_take_their_share() -> None:
    found = kept(known_shape("mixtral-8x7b"))
    full = cache_bytes(found, 100, precision("bf16")).kv
    for name, part in {"fp8": 0.5, "int8": 0.5, "int4": 0.25 + 2 / 64, "fp32": 2.0}.items():
        assert cache_bytes(found, 100, precision("bf16", cache=name)).kv == full * part


@pytest.mark.parametrize(("tp", "share"), [(1, 8), (2, 4), (3, 3), (8, 1), (32, 1)])
def test_key_heads_are_copied_where_gpus_are_more(tp: int, share: int) -> None:
    found = kept(known_shape("mixtral-8x7b"))
    whole = cache_bytes(found, 64, Precision()).kv
    assert cache_bytes(found, 64, Precision(), tp=tp).kv == whole * share / 8


def test_latents_are_whole_on_each_gpu() -> None:
    found = kept(known_shape("deepseek-v3"))
    alone = cache_bytes(found, 64, Precision())
    assert cache_bytes(found, 64, Precision(), tp=8) == alone


def test_states_do_not_grow() -> None:
    found = kept(known_shape("nemotron-3-nano-30b-a3b"))
    short, long = (cache_bytes(found, length, Precision()) for length in (1, 10_000))
    assert short.state == long.state > 0
    assert long.kv == 10_000 * short.kv


def test_default_config_of_transformers_is_read_alike() -> None:
    values = AutoConfig.for_model("qwen3_next").to_dict()
    assert kept(shape_of(values)) == kept(known_shape("qwen3-next-80b-a3b"))
