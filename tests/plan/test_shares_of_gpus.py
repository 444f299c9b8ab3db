"""What one of several GPUs holds, counted head by head, and what a whole number of replicas can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from routeprof.plan.buffers import Pass, buffers
from routeprof.plan.cache import cache_bytes, kept
from routeprof.plan.config import shape_of
from routeprof.plan.memory import Setting, obstacle, plan, split, weights_on_gpu
from routeprof.plan.model import load_model, model_of
from routeprof.plan.precision import FORMATS, Precision, hot_count, precision
from routeprof.whatif.layout import Layout

GIB = 1024**3
TPS = (1, 2, 4, 8)
# 8 heads of 16 with 2 groups for B and C, 2 x 64 channels, and no attention layer.
MAMBA2: dict[str, Any] = {
    "model_type": "bamba",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "attn_layer_indices": [],
}
# One layer of 8 key heads of 4 and 16 value heads of 6.
DELTA: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_experts": 0,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def state_of(values: dict[str, Any], tp: int, types: Precision) -> float:
    return cache_bytes(kept(shape_of(values)), 100, types, tp=tp).state


@pytest.mark.parametrize("tp", TPS)
def test_a_state_of_mamba2_goes_by_heads_and_groups(tp: int) -> None:
    heads, groups = 8 // tp, max(2 // tp, 1)  # a group is copied where GPUs are more
    convolved = heads * 16 * 4 + groups * 2 * 32 * 4
    assert state_of(MAMBA2, tp, precision("bf16")) == 2 * convolved + 4 * heads * 16 * 32


@pytest.mark.parametrize("tp", TPS)
def test_a_state_of_the_delta_net_goes_by_key_heads(tp: int) -> None:
    keys = 8 // tp
    convolved = keys * (2 * 4 + 2 * 6) * 4
    assert state_of(DELTA, tp, precision("bf16")) == 2 * convolved + 4 * keys * 2 * 6 * 4


@pytest.mark.parametrize("tp", TPS)
def test_weights_of_mamba2_go_by_heads_and_groups(tp: int) -> None:
    held = weights_on_gpu(model_of(MAMBA2), Layout(tp, 1, 1, tp), Precision())
    heads, groups = 8 // tp, max(2 // tp, 1)
    first = 64 * (heads * (2 * 16 + 1) + groups * 2 * 32)  # z, x and dt; B and C
    convolution = (heads * 16 + groups * 2 * 32) * (4 + 1)
    assert held["state"] == 2 * (first + heads * 16 * 64 + convolution + heads * (3 + 16))


def test_routers_and_biases_of_experts_stay_in_sixteen_bits() -> None:
    told = precision("fp8", experts="mxfp4")
    held = weights_on_gpu(model_of(GPT_OSS), Layout(1, 1, 1, 1), told)
    matrices, biases = 4 * 3 * 64 * 96, 4 * (2 * 96 + 64)
    assert held["routed_experts"] == matrices * FORMATS["mxfp4"].bytes + 2 * biases
    assert held["other"] == 2 * (64 + 2 * 64 + 4 * (64 + 1))  # norms, and the router


def test_biases_of_hot_experts_have_no_type_of_their_own() -> None:
    """One of four experts is hot, on one GPU or on the first of two."""
    told = precision("bf16", experts="mxfp4", hot="fp8", hot_experts=0.25)
    model = model_of(GPT_OSS)
    one, bias = 3 * 64 * 96, 2 * (2 * 96 + 64)
    hot, cold = one * FORMATS["fp8"].bytes, one * FORMATS["mxfp4"].bytes
    for ep, experts in ((1, 4), (2, 2)):
        held = weights_on_gpu(model, Layout(1, ep, ep, 1), told)
        assert held["routed_experts"] == hot + (experts - 1) * cold + experts * bias
    assert plan(model, Setting(GIB, precision=told), gpus=1).weights["routed_experts"] == (
        hot + 3 * cold + 4 * bias
    )


@pytest.mark.parametrize(
    ("experts", "share", "count"),
    [(128, 0.1, 13), (128, 0.101, 13), (30, 0.1, 3), (8, 0.01, 1), (8, 0.0, 0), (8, 1.0, 8)],
)
def test_a_share_of_the_experts_is_rounded_up(experts: int, share: float, count: int) -> None:
    """30 x 0.1 is a little more than 3 in floating point."""
    assert hot_count(experts, share) == count


def test_a_fp32_model_keeps_norms_and_cache_in_fp32() -> None:
    whole = plan(model_of(GPT_OSS), Setting(GIB, precision=precision("fp32")), gpus=1)
    half = plan(model_of(GPT_OSS), Setting(GIB, precision=precision("bf16")), gpus=1)
    assert {part: 2 * size for part, size in half.weights.items()} == whole.weights
    assert whole.cache is not None
    assert half.cache is not None
    assert whole.cache.kv == 2 * half.cache.kv


# -- what a layout holds


def test_each_replica_holds_whole_sequences() -> None:
    """Room for one and a half on each of four replicas is room for four."""
    model, layout = load_model("mixtral-8x7b"), Layout(2, 4, 8, 1)
    one = split(model, Setting(GIB, length=4096), layout).kv
    told: dict[str, Any] = {"length": 4096, "step_tokens": 1, "runtime": 0, "graphs": 0}
    need = split(model, Setting(GIB, reserve=0, **told), layout)
    memory = need.weights_bytes + need.held_back + 1.5 * one
    row = split(model, Setting(int(memory), reserve=0, **told), layout)
    assert row.free / one == pytest.approx(1.5, abs=0.001)
    assert row.sequences == 4


def test_a_pass_has_a_token_of_every_sequence_at_least() -> None:
    model, layout = load_model("mixtral-8x7b"), Layout(1, 2, 2, 1)
    rows = {
        tokens: split(model, Setting(GIB, batch=600, step_tokens=tokens), layout).dispatch
        for tokens in (1, 300, 301)
    }
    assert rows[1] == rows[300] == 2 * 300 * 4096 * 2
    assert rows[301] > rows[300]


@pytest.mark.parametrize(("there", "back"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_the_way_to_the_experts_and_back_have_their_own_types(there: str, back: str) -> None:
    row = split(
        load_model("mixtral-8x7b"),
        Setting(GIB, step_tokens=64, dispatch=there, combine=back),
        Layout(1, 2, 2, 1),
    )
    numbers = 2 * 64 * 4096
    assert row.dispatch == numbers * FORMATS[there].bytes
    assert row.combine == numbers * FORMATS[back].bytes


def test_a_model_without_a_known_cache_neither_fits_nor_does_not() -> None:
    unknown = replace(load_model("mixtral-8x7b"), kept=None)
    rows = plan(unknown, Setting(80 * GIB), gpus=8).splits
    assert {row.fits for row in rows} == {None}
    assert {row.sequences for row in rows} == {None}
    small = plan(unknown, Setting(8 * GIB), gpus=8).splits
    assert {row.fits for row in small} == {False}  # the weights alone are too many


def test_layouts_that_cannot_run_come_last() -> None:
    """Even where they would leave more room than one that does not fit."""
    rows = plan(load_model("gpt-oss-120b"), Setting(30 * GIB), gpus=3).splits
    assert not any(row.fits for row in rows)
    order = [bool(row.why) for row in rows]
    assert True in order
    assert False in order
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("values", "tp", "says"),
    [
        (DELTA, 16, "8 heads of the delta net"),
        (MAMBA2, 16, "8 heads of Mamba2"),
        (DELTA, 8, ""),
        (MAMBA2, 8, ""),
    ],
)
def test_heads_of_linear_attention_must_divide(values: dict[str, Any], tp: int, says: str) -> None:
    found = obstacle(model_of(values), Layout(tp, 1, 1, tp))
    assert found == (f"{says} do not divide by TP {tp}" if says else "")


def test_experts_divide_by_their_own_tensor_parallelism() -> None:
    values = GPT_OSS | {"intermediate_size": 60}
    model = model_of(values)
    assert not obstacle(model, Layout(8, 1, 4, 2))
    assert obstacle(model, Layout(1, 8, 1, 8)) == "experts of width 60 do not divide by TP 8"
    held = weights_on_gpu(model, Layout(1, 4, 1, 4), Precision())
    assert held["routed_experts"] == 2 * (4 * 3 * 64 * 15 + 4 * (2 * 60 + 64))


def test_each_layer_has_the_rows_of_its_own_ranks() -> None:
    """Of layers that differ in nothing else the fuller one decides."""
    model = load_model("mixtral-8x7b")
    layout, step = Layout(1, 4, 4, 1), Pass(tokens=256, batch=1)
    even = buffers(model, layout, step)
    for place in (0, 31):
        fullest = tuple(2.0 if at == place else 1.0 for at in range(32))
        fuller = buffers(model, layout, replace(step, fullest=fullest))
        assert fuller.dispatch == 2 * even.dispatch
        assert fuller.activations > even.activations
