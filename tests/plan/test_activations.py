"""Activations against real forward passes."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from routeprof.plan import allocated
from routeprof.plan.activations import mixer_numbers, mlp_numbers
from routeprof.plan.allocated import allocated_bytes, peak_bytes
from routeprof.plan.buffers import Pass, buffers
from routeprof.plan.config import text_part
from routeprof.plan.known import known_config
from routeprof.plan.memory import Setting, plan
from routeprof.plan.meta import built_on_meta, model_on_meta, quietly
from routeprof.plan.model import Model, load_model, model_of
from routeprof.plan.shape import (
    Attention,
    Mlp,
)
from routeprof.whatif.layout import Layout
from tests.plan.models import FAMILIES, made, tiny_values
from tests.plan.test_meta import OTHERS, other_values
from tests.zoo.families import quiet

ALONE = Layout(1, 1, 1, 1)
GIB = 1024**3
# Wide enough for activations to be more than what a pass keeps of its routing.
WIDE: dict[str, int] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "intermediate_size": 224,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 48,
}
STATES = {"mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_chunk_size": 32}
FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 192},
    "qwen3_moe": {"moe_intermediate_size": 48},
    "qwen3_next": {"moe_intermediate_size": 32, "linear_num_value_heads": 8},
    "zamba2": {"n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 32},
    "bamba": STATES,
    "granitemoehybrid": {**STATES, "shared_intermediate_size": 128},
    "nemotron_h": {"mamba_head_dim": 32, "ssm_state_size": 16, "moe_latent_size": 64},
    "llama4_text": {"intermediate_size_mlp": 448},
}


def wide_values(family: str) -> dict[str, Any]:
    return tiny_values(family, {**WIDE, **FAMILY.get(family, {})})


def wide_model(values: dict[str, Any], dtype: torch.dtype) -> Any:
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(made(values), dtype=dtype).eval()
    return model


def tokens(number: int, batch: int = 1) -> Tensor:
    return torch.randint(3, 60, (batch, number), generator=torch.Generator().manual_seed(1))


def least(model: Model, number: int, item: float, layout: Layout = ALONE) -> float:
    return buffers(model, layout, Pass(tokens=number, batch=1, item=item)).activations


# -- what real passes allocate


@pytest.mark.parametrize("family", FAMILIES)
def test_no_real_pass_holds_less(family: str) -> None:
    model, known = wide_model(wide_values(family), torch.float32), model_of(wide_values(family))
    for number in (64, 256):
        with quiet():
            found = peak_bytes(model, tokens(number))
        assert found >= least(known, number, 4.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_longer_pass_holds_less(family: str) -> None:
    """1024 tokens, where passes over tensors without values take the same."""
    values = wide_values(family)
    model = built_on_meta(values, family, torch.bfloat16)
    with quiet():
        found = peak_bytes(model, torch.zeros((1, 1024), dtype=torch.long, device="meta"))
    assert found >= least(model_of(values), 1024, 2.0)


def test_a_loop_over_experts_holds_less_than_all_at_once() -> None:
    """As the docs say: the count is of experts that are computed together."""
    values = wide_values("mixtral")
    model = wide_model(values, torch.float32)
    found = {}
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        with quiet():
            found[name] = peak_bytes(model, tokens(256))
    assert found["eager"] < least(model_of(values), 256, 4.0) < found["grouped_mm"]


class Lean(nn.Module):
    """A Llama layer as the count has it: one matrix for all that read the same, nothing kept."""

    def __init__(self, hidden: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        self.sizes = heads, keys, hidden // heads
        head = hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * keys) * head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.first = nn.Linear(hidden, 2 * inner, bias=False)
        self.last = nn.Linear(inner, hidden, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert use_cache
        heads, keys, head = self.sizes
        residual = torch.ones(input_ids.shape[1], heads * head)
        mixed = self.qkv(residual.clone())
        parts = mixed.view(-1, heads + 2 * keys, head).transpose(0, 1)
        del mixed
        attended = scaled_dot_product_attention(
            parts[:heads], parts[heads:-keys], parts[-keys:], enable_gqa=True
        )
        del parts
        flat = attended.transpose(0, 1).contiguous().view(-1, heads * head)
        del attended
        residual += self.out(flat)
        del flat
        first = self.first(residual.clone())
        gate, up = first.chunk(2, dim=1)
        product = torch.empty_like(gate)
        torch.mul(silu(gate, inplace=True), up, out=product)
        del first, gate, up
        residual += self.last(product)
        return type("Output", (), {"past_key_values": None})()


@pytest.mark.parametrize("inner", [24, 64, 512])
def test_a_pass_that_wastes_nothing_holds_so_much(inner: int) -> None:
    """The count is reached, so nothing larger would be the least."""
    model = Lean(64, 8, 2, inner)
    parts = max(
        mixer_numbers(Attention(8, 2, 8), 64, 1),
        mlp_numbers(Mlp(inner), 64, 1),
    )
    assert peak_bytes(model, tokens(40)) == 4 * 40 * (64 + parts)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(30, 20))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert use_cache
        input_ids.view(-1).add_(1)
        made = self.weight.t().expand(3, 20, 30) * 2
        made[0].mul_(3)
        return type("Output", (), {"past_key_values": None})()


class Circular(nn.Module):
    """Makes something that refers to itself, which is not gone when nobody has it any more."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert use_cache
        ring: list[Any] = [torch.ones(30, 20) + 1]
        ring.append(ring)
        return type("Output", (), {"past_key_values": None})()


def test_what_refers_to_itself_is_counted() -> None:
    assert peak_bytes(Circular(), tokens(10)) == 2 * 30 * 20 * 4


def test_views_of_weights_and_inputs_take_nothing() -> None:
    assert peak_bytes(Views(), tokens(10)) == 3 * 20 * 30 * 4


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bytes_are_those_that_the_allocator_reports(family: str) -> None:
    """Of torch's profiler, which sees every allocation: here no kernel makes any of its own."""
    model, ids = wide_model(wide_values(family), torch.float32), tokens(256)
    inner: Any = model.base_model
    with quiet(), torch.inference_mode():
        inner(input_ids=ids, use_cache=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiled:
            output = inner(input_ids=ids, use_cache=True)
        cached = sum(one.keys.nbytes + one.values.nbytes for one in output.past_key_values.layers)
    results: Any = profiled.profiler
    told = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(told, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert peak_bytes(model, ids) == most - cached


# -- followed on the meta device


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_tensors_without_values_take_what_real_ones_do(family: str) -> None:
    """Byte for byte; where a family's experts ask for values, it is not known."""
    values = wide_values(family) if family in FAMILIES else other_values(family)
    with quiet():
        real = peak_bytes(wide_model(values, torch.bfloat16), tokens(80))
    found = allocated_bytes(json.dumps(values, default=str), 80, 2.0)
    assert isnan(found) if family == "dbrx" else found == real
    if family in FAMILIES:
        assert real >= least(model_of(values), 80, 2.0)


def test_a_pass_of_too_many_operations_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = model_on_meta(wide_values("mixtral"), "config.json").config
    assert allocated_bytes(text, 50, 2.0) > 0
    monkeypatch.setattr(allocated, "MOST_OPERATIONS", 50)
    assert isnan(allocated_bytes(text, 51, 2.0))


def test_numbers_of_another_width_take_as_much_more() -> None:
    text = model_on_meta(wide_values("llama"), "config.json").config
    assert 1.9 < allocated_bytes(text, 50, 4.0) / allocated_bytes(text, 50, 2.0) <= 2


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("llama-3.1-8b", 1.3), ("mixtral-8x7b", 1.5), ("olmoe-1b-7b", 2.8), ("qwen3-30b-a3b", 3.0)],
)
def test_transformers_takes_as_much_more_as_the_docs_say(name: str, ratio: float) -> None:
    values = dict(text_part(known_config(name))[0])
    with quietly():
        model = built_on_meta({**values, "num_hidden_layers": 2}, name, torch.bfloat16)
        found = peak_bytes(model, torch.zeros((1, 8192), dtype=torch.long, device="meta"))
    assert round(found / least(load_model(name), 8192, 2.0), 1) == ratio


# -- where activations are known, and what follows where they are not


def test_what_transformers_allocates_is_known_where_nothing_is_cut() -> None:
    model = model_on_meta(wide_values("mixtral"), "config.json")
    step = Pass(tokens=64, batch=1)
    whole = allocated_bytes(model.config, 64, 2.0)
    for layout in (ALONE, Layout(1, 4, 4, 1)):
        needs = buffers(model, layout, step)
        assert needs.activations == needs.ceiling == whole
    # A part of each matrix holds no more; rows of other replicas may.
    for layout, ceiling in ((Layout(2, 1, 2, 1), whole), (Layout(1, 2, 1, 2), float("nan"))):
        needs = buffers(model, layout, step)
        assert isnan(needs.activations)
        assert needs.ceiling == pytest.approx(ceiling, nan_ok=True)
    recorded = Pass(tokens=64, batch=1, fullest=(1.0,) * 4)
    assert buffers(model, ALONE, recorded).activations == whole
    uneven = Pass(tokens=64, batch=1, fullest=(1.5,) * 4)
    needs = buffers(model, Layout(1, 4, 4, 1), uneven)
    assert isnan(needs.activations)
    assert isnan(needs.ceiling)


def test_dense_replicas_do_not_share_experts() -> None:
    model = model_on_meta(wide_values("llama"), "config.json")
    needs = buffers(model, Layout(1, 2, 1, 2), Pass(tokens=64, batch=1))
    assert needs.activations == allocated_bytes(model.config, 64, 2.0)


def test_many_logits_are_more_than_a_layer() -> None:
    model = model_on_meta(wide_values("llama") | {"vocab_size": 5000}, "config.json")
    needs = buffers(model, ALONE, Pass(tokens=100, batch=100))
    layer, logits = allocated_bytes(model.config, 100, 2.0), 100 * (5000 * 4 + 128 * 2)
    assert layer < logits == needs.activations


@pytest.mark.parametrize("config", ["", "{}"])
def test_what_cannot_be_followed_is_not_known(config: str) -> None:
    model = replace(model_on_meta(wide_values("llama"), "config.json"), config=config)
    needs = buffers(model, ALONE, Pass(tokens=10, batch=10))
    assert isnan(needs.activations)
    assert isnan(needs.ceiling)


def test_unknown_activations_count_only_where_they_could_be_more_than_the_reserve() -> None:
    """With a large reserve the layouts fit; with none, whether they do is not known."""
    model = model_on_meta(wide_values("mixtral"), "config.json")
    told: dict[str, Any] = {"runtime": 0, "graphs": 0, "step_tokens": 64, "length": 64}
    for reserve, known in ((0.5, True), (0.0, False)):
        rows = plan(model, Setting(memory=GIB, reserve=reserve, **told), gpus=2).splits
        cut = next(row for row in rows if row.layout == Layout(2, 1, 2, 1))
        assert isnan(cut.activations)
        assert cut.held_back == reserve * GIB
        assert cut.sure == known
        assert cut.fits == (True if known else None)
        assert (cut.sequences is not None) == known
        alone = next(row for row in rows if row.layout == Layout(1, 2, 2, 1))
        assert alone.sure
        assert alone.fits
    tight = plan(model, Setting(memory=1000, reserve=0.0, **told), gpus=2).splits
    assert {(row.fits, row.sequences) for row in tight} == {(False, 0)}
