"""The plan against closed forms, published figures and what must hold for every layout."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.plan.buffers import Pass, buffers, rows_on_fullest
from routeprof.plan.cache import cache_bytes
from routeprof.plan.known import known_names
from routeprof.plan.memory import Setting, Split, obstacle, plan, split, weights_on_gpu
from routeprof.plan.model import Model, load_model, model_of
from routeprof.plan.precision import FORMATS, Precision, precision
from routeprof.whatif.layout import Layout

GIB = 1024**3
BF16 = Precision()
NOTHING: dict[str, Any] = {"reserve": 0.0, "runtime": 0, "graphs": 0}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def best(name: str, *, gpus: int, memory: int, **told: Any) -> Split:
    return plan(load_model(name), Setting(memory, **told), gpus=gpus).splits[0]


# -- published figures


def test_deepseek_v3_does_not_fit_eight_gpus_of_80_gb() -> None:
    whole = plan(load_model("deepseek-v3"), Setting(80 * 10**9), gpus=8)
    assert whole.weights_bytes == pytest.approx(1.34e12, rel=0.005)
    assert not any(row.fits for row in whole.splits)
    # In FP8 the weights alone are more than eight GPUs have.
    fp8 = plan(load_model("deepseek-v3"), Setting(80 * 10**9, precision=precision("fp8")), gpus=8)
    assert 8 * 80e9 < fp8.weights_bytes < 690e9
    assert not any(row.fits for row in fp8.splits)


def test_deepseek_v3_fits_where_it_is_served() -> None:
    """In FP8 on 8 x H200, and in BF16 on 16.

    docs.sglang.io/docs/basic_usage/deepseek_v3 recommends both, and vLLM's guide the first:
    docs.vllm.ai/projects/recipes/en/latest/DeepSeek/DeepSeek-V3.html.
    """
    assert best("deepseek-v3", gpus=8, memory=141 * 10**9, precision=precision("fp8")).fits
    assert best("deepseek-v3", gpus=16, memory=141 * 10**9, reserve=0.2).fits


def test_mixtral_takes_two_gpus_of_80_gb() -> None:
    whole = plan(load_model("mixtral-8x7b"), Setting(80 * 10**9), gpus=2)
    assert whole.weights_bytes == pytest.approx(93.4e9, rel=0.001)
    assert whole.splits[0].fits
    assert not best("mixtral-8x7b", gpus=1, memory=80 * 10**9).fits


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_checkpoint_sizes_of_gpt_oss_come_out(name: str, gib: float) -> None:
    """Table 1 of the model card, arXiv:2508.10925; the larger fits a single GPU of 80 GB."""
    told = precision("bf16", experts="mxfp4")
    row = best(name, gpus=1, memory=80 * 10**9, precision=told, reserve=0.05)
    assert round(row.weights_bytes / GIB, 1) == gib
    assert row.fits


# -- weights of a GPU


@pytest.mark.parametrize(
    ("layout", "attention", "experts"),
    [
        (Layout(4, 2, 8, 1), 0.25, 8 / 8),
        (Layout(4, 2, 2, 4), 0.25, 8 / 2 / 4),
        (Layout(1, 8, 8, 1), 1.0, 1.0),
        (Layout(8, 1, 1, 8), 0.125, 1.0),
        (Layout(2, 2, 4, 1), 0.5, 2.0),
    ],
)
def test_parts_of_mixtral_on_a_gpu(layout: Layout, attention: float, experts: float) -> None:
    held = weights_on_gpu(load_model("mixtral-8x7b"), layout, BF16)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert held["attention"] == 2 * 32 * layer * attention
    assert held["routed_experts"] == 2 * 32 * 3 * 4096 * 14336 * experts
    assert held["embeddings"] == 2 * 2 * 32000 * 4096 * attention
    assert held["other"] == 2 * (32 * (2 * 4096 + 8 * 4096) + 4096)
    assert held["shared_experts"] == held["state"] == 0


def test_few_key_heads_are_held_by_several_gpus() -> None:
    model = model_of(LLAMA)
    inner = 2 * 64 * 64 // 8  # one of eight heads' queries and outputs
    keys = 2 * 64 * 8  # one of two heads' keys and values
    held = weights_on_gpu(model, Layout(8, 1, 1, 8), BF16)
    assert held["attention"] == 2 * 2 * (inner + keys)


def test_latents_are_whole_on_each_gpu() -> None:
    held = weights_on_gpu(load_model("deepseek-v3"), Layout(8, 1, 8, 1), BF16)
    whole = 7168 * (1536 + 512 + 64) + 1536 + 512
    cut = 128 * (1536 * 192 + 512 * 256 + 128 * 7168) // 8
    assert held["attention"] == 2 * 61 * (whole + cut)


def test_experts_that_do_not_divide_fill_the_first_rank() -> None:
    model = load_model("qwen3-30b-a3b")
    one = 2 * 48 * 3 * 2048 * 768
    for ep in (3, 5, 7, 128):
        held = weights_on_gpu(model, Layout(1, ep, ep, 1), BF16)
        assert held["routed_experts"] == one * ceil(128 / ep)


@pytest.mark.parametrize("name", known_names())
@pytest.mark.parametrize("layout", [Layout(4, 2, 8, 1), Layout(8, 1, 2, 4), Layout(1, 1, 1, 1)])
def test_gpus_together_hold_the_whole_model(name: str, layout: Layout) -> None:
    model = load_model(name)
    whole = plan(model, Setting(GIB), gpus=1).weights
    held = weights_on_gpu(model, layout, BF16)
    if layout.gpus == 1:
        assert held == pytest.approx(whole)
    for part, size in held.items():
        replicas = 1 if part == "routed_experts" else layout.dp
        assert size * layout.gpus >= whole[part] * replicas * (1 - 1e-12)


# -- precision


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_block_are_its_numbers_and_scales(name: str) -> None:
    one = FORMATS[name]
    group = one.group or 1024
    bits = group * one.bits + (one.scale_bits if one.group else 0)
    assert one.bytes * group * 8 == bits


def test_what_stays_in_sixteen_bits() -> None:
    """FP8 is of matrices: norms, routers, biases and embeddings stay as they are."""
    model = model_of(LLAMA)
    low, high = (weights_on_gpu(model, Layout(1, 1, 1, 1), precision(n)) for n in ("fp8", "bf16"))
    assert low["embeddings"] == high["embeddings"]
    assert low["attention"] == high["attention"] * FORMATS["fp8"].bytes / 2
    norms = 2 * (2 * 2 * 64 + 64)
    assert low["other"] - norms == (high["other"] - norms) * FORMATS["fp8"].bytes / 2
    told = weights_on_gpu(
        model, Layout(1, 1, 1, 1), precision("fp8", attention="bf16", embeddings="int8")
    )
    assert told["attention"] == high["attention"]
    assert told["embeddings"] == high["embeddings"] * FORMATS["int8"].bytes / 2


def test_hot_experts_have_a_type_of_their_own() -> None:
    model = load_model("mixtral-8x7b")
    expert = 32 * 3 * 4096 * 14336
    told = precision("bf16", experts="int4", hot="bf16", hot_experts=0.25)
    whole = plan(model, Setting(80 * GIB, precision=told), gpus=8)
    assert whole.weights["routed_experts"] == expert * (2 * 2 + 6 * FORMATS["int4"].bytes)
    # Two hot experts on eight ranks: the fullest holds one of them, and no other expert.
    held = weights_on_gpu(model, Layout(1, 8, 8, 1), told)
    assert held["routed_experts"] == expert * 2
    held = weights_on_gpu(model, Layout(1, 1, 1, 1), told)
    assert held["routed_experts"] == whole.weights["routed_experts"]


# -- cache, buffers and what is left


def test_what_is_left_holds_as_many_sequences() -> None:
    model = load_model("mixtral-8x7b")
    setting = Setting(80 * GIB, length=4096, reserve=0.25)
    row = split(model, setting, Layout(2, 4, 8, 1))
    assert row.held_back == 20 * GIB
    assert row.free == 80 * GIB - row.weights_bytes - 20 * GIB
    one = 4096 * 2 * 4 * 128 * 2 * 32  # four of eight key heads
    assert row.sequences == int(row.free // one) * 4
    full = split(model, Setting(80 * GIB, length=4096, batch=row.sequences), Layout(2, 4, 8, 1))
    assert full.fits
    more = split(model, Setting(80 * GIB, length=4096, batch=row.sequences + 1), Layout(2, 4, 8, 1))
    assert not more.fits


def test_a_batch_is_shared_by_replicas() -> None:
    model = load_model("mixtral-8x7b")
    one = split(model, Setting(80 * GIB, batch=1), Layout(1, 8, 8, 1)).kv
    for batch, each in ((8, 1), (9, 2), (16, 2), (17, 3)):
        row = split(model, Setting(80 * GIB, batch=batch), Layout(1, 8, 8, 1))
        assert row.kv == each * one


def test_more_than_the_reserve_is_held_back_where_it_is_needed() -> None:
    model = load_model("mixtral-8x7b")
    told = {"runtime": 3 * GIB, "graphs": 2 * GIB, "reserve": 0.01}
    row = split(model, Setting(80 * GIB, **told), Layout(1, 8, 8, 1))
    needed = row.activations + row.dispatch + row.combine + 5 * GIB
    assert row.held_back == needed > 0.8 * GIB


def test_activations_of_a_dense_layer() -> None:
    """The residual; the input with gate and up; or the logits in FP32 and what makes them."""
    model = model_of(LLAMA)
    layout = Layout(2, 1, 1, 2)
    needs = buffers(model, layout, Pass(tokens=100, batch=1))
    assert needs.activations == 2 * 100 * (64 + 64 + 2 * 96 // 2)
    assert needs.dispatch == needs.combine == 0
    wide = buffers(model, layout, Pass(tokens=100, batch=50))
    assert wide.activations == 50 * 500 * 4 + 2 * 100 * 64


def test_activations_of_experts_on_eight_ranks() -> None:
    """Residual, what the shared expert reads, and inner width and result of each row; or MLA."""
    step = Pass(tokens=256, batch=1)
    needs = buffers(load_model("deepseek-v3"), Layout(1, 8, 8, 1), step)
    assert needs.activations == 2 * 256 * (7168 + 128 * (192 + 256 + 192 + 128))
    uneven = Pass(tokens=256, batch=1, fullest=(2.0,) * 58)
    needs = buffers(load_model("deepseek-v3"), Layout(1, 8, 8, 1), uneven)
    assert needs.activations == 2 * (256 * 2 * 7168 + 2 * 2048 * (2048 + 7168))


def test_rows_to_and_from_experts() -> None:
    """256 tokens of each of 8 replicas, 8 experts each, on 8 ranks: 2048 rows of 7168."""
    model = load_model("deepseek-v3")
    step = Pass(tokens=256, batch=1, dispatch=1, combine=2)
    needs = buffers(model, Layout(1, 8, 8, 1), step)
    assert (needs.dispatch, needs.combine) == (2048 * 7168, 2 * 2048 * 7168)
    # All GPUs share each expert: every token of all replicas comes along, once.
    needs = buffers(model, Layout(1, 8, 1, 8), step)
    assert needs.dispatch == 8 * 256 * 7168
    # One replica: its GPUs hold all tokens already.
    needs = buffers(model, Layout(8, 1, 8, 1), step)
    assert needs.dispatch == needs.combine == 0


def test_latent_experts_get_narrow_rows() -> None:
    model = load_model("nemotron-3-super-120b-a12b")
    needs = buffers(model, Layout(1, 4, 4, 1), Pass(tokens=64, batch=1, dispatch=1))
    assert needs.dispatch == 64 * 4 * 22 / 4 * 1024


@given(
    tokens=st.integers(1, 5000),
    ep=st.sampled_from([1, 2, 4, 8]),
    fullest=st.floats(1, 20, allow_nan=False),
)
@settings(deadline=None)
def test_the_fullest_rank_gets_no_more_than_there_is(tokens: int, ep: int, fullest: float) -> None:
    moe = load_model("mixtral-8x7b").moes[0][1]
    rows = rows_on_fullest(moe, Layout(1, 8, ep, 8 // ep), Pass(tokens, 1), fullest)
    everything = tokens * 8 * 2
    assert ceil(everything / ep) <= rows <= everything
    assert rows <= tokens * 8 * min(2, 8 // ep)


# -- layouts


@given(
    gpus=st.sampled_from([1, 2, 3, 6, 8, 12, 16]),
    memory=st.integers(10, 200),
    batch=st.integers(1, 300),
    length=st.integers(1, 200_000),
    name=st.sampled_from(["mixtral-8x7b", "qwen3-next-80b-a3b", "gpt-oss-20b", "llama-3.1-8b"]),
)
@settings(deadline=None, max_examples=40)
def test_every_row_adds_up(gpus: int, memory: int, batch: int, length: int, name: str) -> None:
    setting = Setting(memory * GIB, length=length, batch=batch)
    model = load_model(name)
    rows = plan(model, setting, gpus=gpus).splits
    assert rows
    for row in rows:
        assert row.layout.gpus == gpus
        assert row.weights_bytes + row.held_back + row.free == pytest.approx(memory * GIB)
        assert bool(row.fits) == (not row.why and row.cache_bytes <= row.free)
        if row.fits:
            assert row.sequences is not None
            assert row.sequences >= min(batch, row.layout.dp)
    order = [bool(row.fits) for row in rows]
    assert order == sorted(order, reverse=True)


def test_layouts_that_cannot_run_say_why() -> None:
    model = load_model("gpt-oss-120b")
    assert obstacle(model, Layout(3, 1, 3, 1)) == "64 heads of attention do not divide by TP 3"
    assert "2880" in obstacle(model, Layout(1, 7, 1, 7))
    assert not obstacle(model, Layout(8, 1, 8, 1))
    rows = plan(model, Setting(80 * GIB), gpus=3).splits
    bad = [row for row in rows if row.layout.tp == 3]
    assert bad
    assert all(row.why and row.fits is False and row.sequences == 0 for row in bad)


def test_layouts_that_leave_a_node_are_marked() -> None:
    rows = plan(load_model("mixtral-8x7b"), Setting(80 * GIB), gpus=16, nodes=2).splits
    for row in rows:
        assert row.spans_nodes == (row.layout.tp > 8 or row.layout.etp > 8)
    assert any(row.spans_nodes for row in rows)


def test_dense_models_have_one_layout_for_each_number_of_replicas() -> None:
    rows = plan(load_model("llama-3.1-8b"), Setting(80 * GIB), gpus=8).splits
    assert sorted(row.layout.dp for row in rows) == [1, 2, 4, 8]


def test_the_cache_of_one_sequence_is_whole() -> None:
    model = load_model("nemotron-3-nano-30b-a3b")
    made = plan(model, Setting(80 * GIB, length=1000), gpus=8)
    assert model.kept is not None
    assert made.cache == cache_bytes(model.kept, 1000, BF16)


@pytest.mark.parametrize(
    "told",
    [{"memory": 0}, {"length": 0}, {"batch": -1}, {"step_tokens": 0}, {"reserve": 1.0}],
)
def test_settings_that_cannot_be_right(told: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="pass"):
        Setting(**{"memory": GIB, **told})


@pytest.mark.parametrize(("gpus", "nodes"), [(0, 1), (8, 0), (8, 3), (10**6, 1)])
def test_gpus_that_cannot_be_right(gpus: int, nodes: int) -> None:
    model: Model = load_model("mixtral-8x7b")
    with pytest.raises(UsageError, match="pass"):
        plan(model, Setting(GIB), gpus=gpus, nodes=nodes)
