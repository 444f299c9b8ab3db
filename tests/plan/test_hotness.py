"""Plans with measured loads of experts."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.plan.hotness import Measured, measured
from routeprof.plan.memory import Setting, plan, weights_on_gpu
from routeprof.plan.model import load_model, model_of
from routeprof.plan.precision import precision
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.whatif.layout import Layout

TINY = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}
LOADS = Measured((0, 1), (np.array([10, 2, 4, 0]), np.array([1, 1, 1, 9])))
MODEL = Path(__file__).parents[2] / "sample_data" / "model"


def test_the_fullest_rank_is_of_experts_in_order() -> None:
    assert LOADS.fullest(1) == (1.0, 1.0)
    assert LOADS.fullest(2) == (12 * 2 / 16, 10 * 2 / 12)
    assert LOADS.fullest(4) == (10 * 4 / 16, 9 * 4 / 12)
    # Two, one and one expert.
    assert LOADS.fullest(3) == (12 * 3 / 16, 9 * 3 / 12)


def test_a_layer_that_was_not_seen_counts_as_even() -> None:
    assert Measured((0,), (np.zeros(4, dtype=np.int64),)).fullest(2) == (1.0,)


def test_the_hottest_experts_come_first() -> None:
    found = LOADS.hottest(3)
    assert [(one.layer, one.expert) for one in found] == [(1, 3), (0, 0), (0, 2)]
    assert [one.over_mean for one in found] == [3.0, 2.5, 1.0]
    assert [one.share for one in found] == [9 / 12, 10 / 16, 4 / 16]


def test_hot_experts_are_counted_on_one_rank() -> None:
    # Half of four: experts 0 and 2 in the first layer, 3 and 0 in the second.
    assert LOADS.hot_slots(0.5, 1) == (2, 2)
    assert LOADS.hot_slots(0.5, 2) == (1, 1)
    # Expert 0 is hot in both layers.
    assert LOADS.hot_slots(0.5, 4) == (1, 1)
    # The last rank holds the hottest expert of both.
    last = Measured((0, 1), (np.array([1, 1, 1, 9]), np.array([1, 1, 2, 9])))
    assert last.hot_slots(0.25, 2) == (1, 1)
    assert last.hot_slots(0.5, 2) == (1, 2)
    assert LOADS.hot_share(0.5) == (14 + 10) / 28
    assert LOADS.hot_share(1.0) == 1.0


def test_the_rank_with_the_most_hot_experts_is_the_fullest() -> None:
    model = model_of(TINY)
    told = precision("bf16", experts="int4", hot="bf16", hot_experts=0.25)
    loads = Measured((0, 1), (np.array([9, 1, 1, 1]), np.array([9, 1, 1, 1])))
    held = weights_on_gpu(model, Layout(1, 4, 4, 1), told, loads)
    assert held["routed_experts"] == 2 * 3 * 32 * 16 * 2
    # On different ranks, each rank holds one of them.
    apart = Measured((0, 1), (np.array([9, 1, 1, 1]), np.array([1, 9, 1, 1])))
    held = weights_on_gpu(model, Layout(1, 4, 4, 1), told, apart)
    assert held["routed_experts"] == 3 * 32 * 16 * (2 + (4 + 20 / 128) / 8)


def test_buffers_grow_with_the_fullest_rank() -> None:
    model = model_of(TINY)
    setting = Setting(1024**3, step_tokens=1000)
    even = {row.layout: row for row in plan(model, setting, gpus=4).splits}
    uneven = {row.layout: row for row in plan(model, setting, gpus=4, measured=LOADS).splits}
    for layout, row in uneven.items():
        rows = 1000 * layout.dp
        if layout.ep > 1:
            rows = ceil(rows * max(LOADS.fullest(layout.ep)) / layout.ep)
        assert row.dispatch == (0 if layout.dp == 1 else rows * 32 * 2)
        assert row.activations >= even[layout].activations
    assert any(row.dispatch > even[layout].dispatch for layout, row in uneven.items())


def test_loads_are_those_of_the_recording() -> None:
    profile = routeprof.load(RECORDINGS_DIR / "collapsed")
    found = measured(profile, load_model(str(MODEL)))
    assert found.layers == tuple(profile.layer_indices)
    np.testing.assert_array_equal(np.stack(found.counts), profile.counts)
    ratios = profile.layers()["imbalance_ratio"]
    assert found.fullest(16) == pytest.approx(tuple(ratios))


def test_a_recording_of_another_model_is_refused() -> None:
    profile = routeprof.load(RECORDINGS_DIR / "collapsed")
    with pytest.raises(UsageError, match=r"4 MoE layers of 16 experts and .* 32 MoE layers of 8"):
        measured(profile, load_model("mixtral-8x7b"))
    with pytest.raises(UsageError, match="0 MoE layers of no experts"):
        measured(profile, load_model("llama-3.1-8b"))
