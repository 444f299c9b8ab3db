"""Predictions proven on a model that really drops: Switch, token by token.

Each pass is recorded twice at once: what the router chose, read from its logits before it drops
anything, and what its own mask left over.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import routeprof
from routeprof import LayerSpec
from routeprof.metrics.capacity import capacity
from routeprof.metrics.overflow import beyond_capacity
from routeprof.whatif.capacity import curve, smallest_factors

EXPERTS = 8
LENGTHS = (24, 17, 40, 3, 31)
FACTORS = (0.5, 1.0, 1.1, 1.25, 2.0, 8.0)

before_drop = LayerSpec(
    experts=EXPERTS,
    top_k=1,
    read=lambda module, args, kwargs, output: output[2].argmax(-1).reshape(-1, 1),
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 16, "num_heads": 4, "vocab_size": 64}
    layers = {"num_layers": 4, "num_decoder_layers": 4}
    sparse = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    config = SwitchTransformersConfig(
        **sizes, **layers, **sparse, num_experts=EXPERTS, decoder_start_token_id=0, pad_token_id=0
    )
    return SwitchTransformersForConditionalGeneration(config).eval()


def routers(model):
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "SwitchTransformersTop1Router"
    }


@pytest.fixture(scope="module", params=FACTORS)
def served(request, model, tmp_path_factory):
    """The factor, the recording, and for each router which tokens of each pass it dropped."""
    dropped = {name: [] for name in routers(model)}
    hooks = [
        router.register_forward_hook(
            lambda module, args, output, own=dropped[name]: own.append(
                (output[0].sum(-1) == 0).reshape(-1).numpy()
            )
        )
        for name, router in routers(model).items()
    ]
    path = tmp_path_factory.mktemp("switch") / "r"
    specs = dict.fromkeys(routers(model), before_drop)
    with routeprof.record(model, path, level="tokens", layers=specs), torch.inference_mode():
        torch.manual_seed(1)
        for length in LENGTHS:
            # The model counts capacity by sequence: one a pass, so that it is by pass too.
            ids = torch.randint(1, 64, (1, length))
            for router in routers(model).values():
                router.expert_capacity = int(capacity(length, 1, EXPERTS, request.param))
            model(input_ids=ids, decoder_input_ids=ids)
    for hook in hooks:
        hook.remove()
    return request.param, routeprof.load(path), dropped


def layer_of(profile, name):
    return next(layer.index for layer in profile.info.layers if layer.name == name)


def test_predicted_overflow_is_what_the_router_drops(served):
    factor, profile, dropped = served
    table = curve(profile, [factor]).set_index("layer")
    for name, passes in dropped.items():
        row = table.loc[layer_of(profile, name)]
        tokens = sum(len(one) for one in passes)
        assert tokens == sum(LENGTHS)
        assert row["certainty"] == "exact"
        assert row["overflow_rate"] * tokens == pytest.approx(sum(one.sum() for one in passes))
    everything = sum(one.sum() for passes in dropped.values() for one in passes)
    assert (everything > 0) == (factor < EXPERTS)


def test_it_is_those_very_tokens(served):
    factor, profile, dropped = served
    for name, passes in dropped.items():
        table = profile.tokens(layer_of(profile, name))
        for step, own in zip(np.unique(table.step), passes, strict=True):
            ids = table.ids[table.step == step]
            slots = int(capacity(len(ids), 1, EXPERTS, factor))
            predicted = beyond_capacity(ids, slots, EXPERTS, order="token")
            assert predicted.ravel().tolist() == own.tolist()


def test_what_is_left_after_the_drop_bounds_it(served):
    _, profile, dropped = served
    table = curve(profile, FACTORS).set_index(["layer", "capacity_factor"])
    for name, passes in dropped.items():
        chosen = layer_of(profile, name)
        left = layer_of(profile, name.removesuffix(".router"))
        assert table.loc[left, "happened"].all()
        for factor in FACTORS:
            truth, bounds = table.loc[(chosen, factor)], table.loc[(left, factor)]
            low, high = bounds["overflow_rate_lower"], bounds["overflow_rate_upper"]
            assert low <= truth["overflow_rate"] <= high
            assert (low == high) == (factor == EXPERTS or not sum(one.sum() for one in passes))


def test_the_smallest_factor_without_drops_drops_nothing(model, tmp_path, served):
    _, profile, dropped = served
    needed = {one.layer: one.upper for one in smallest_factors(profile, 0.0)}
    name = next(iter(dropped))  # the first router sees the same whatever is dropped
    factor = needed[layer_of(profile, name)]
    seen = []
    for allowed in (factor, factor - 0.0001):
        router, lost = routers(model)[name], []
        hook = router.register_forward_hook(
            lambda module, args, output, lost=lost: lost.append(int((output[0].sum(-1) == 0).sum()))
        )
        torch.manual_seed(1)
        with torch.inference_mode():
            for length in LENGTHS:
                ids = torch.randint(1, 64, (1, length))
                router.expert_capacity = int(capacity(length, 1, EXPERTS, allowed))
                model(input_ids=ids, decoder_input_ids=ids)
        hook.remove()
        seen.append(sum(lost))
    assert seen[0] == 0 < seen[1]
