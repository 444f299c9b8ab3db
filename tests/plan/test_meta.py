"""Models of families that routeprof does not know, counted on the meta device."""

from __future__ import annotations

import json
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from routeprof.errors import MissingExtraError, UsageError
from routeprof.hooks.configuration import configuration
from routeprof.plan.cache import cache_bytes
from routeprof.plan.memory import Setting, plan
from routeprof.plan.meta import NO_CACHE, model_on_meta
from routeprof.plan.model import load_model, model_of
from routeprof.plan.parameters import by_part, total
from routeprof.plan.precision import precision
from routeprof.whatif.layout import Layout
from tests.plan.models import FAMILIES, SMALL, made, on_meta, tiny_values
from tests.plan.test_cache import real_bytes, real_cache
from tests.zoo.families import BY_TYPE, config

OTHERS = ("glm4_moe", "ernie4_5_moe", "lfm2_moe", "kimi_linear", "dbrx", "deepseek_v32")


def other_values(family: str) -> dict[str, Any]:
    return {**config(BY_TYPE[family]).to_dict(), "model_type": family}


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_counted_as_by_their_shape(family: str) -> None:
    told = {"num_experts_per_tok": 3} if family == "deepseek_v2" else {}
    values = tiny_values(family, told)
    known, built = model_of(values), model_on_meta(values, "config.json")
    assert by_part(built.weights) == by_part(known.weights)
    assert built.active == known.active
    assert (built.hidden, built.vocab) == (known.hidden, known.vocab)
    sizes = [(at, moe.experts, moe.top_k) for at, moe in known.moes]
    assert [(at, moe.experts, moe.top_k) for at, moe in built.moes] == sizes
    if family == "minimax":  # a cache of its own kind
        assert built.kept is None
        assert NO_CACHE in built.notes
        return
    assert known.kept is not None
    assert built.kept is not None
    for length in (5, 17):
        wanted = cache_bytes(known.kept, length, precision("bf16"))
        assert cache_bytes(built.kept, length, precision("bf16")) == wanted


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_numbers_of_the_real_model(family: str) -> None:
    values = other_values(family)
    model = model_of(values)
    parameters = sum(one.numel() for one in on_meta(made(values)).parameters())
    assert total(model.weights) == parameters
    assert len(model.moes) == len({one.layer for one in model.weights if one.experts})
    assert model.kept is not None
    import torch

    real = real_bytes(real_cache(values, 11, 2, torch.float32))
    found = cache_bytes(model.kept, 11, precision("fp32"), batch=2)
    assert found.total == sum(real)


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    # Falcon-H1's cache needs the limits of a step; a recording has them like this, too.
    transformers = made({"model_type": "falcon_h1", **SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 4})
    transformers.time_step_limit = (0.0, float("inf"))
    transformers.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    model = load_model(str(tmp_path))
    assert model.kept is not None
    recorded = configuration(transformers)
    assert recorded is not None
    assert model_of(recorded).kept == model.kept


def test_what_is_not_known_is_never_zero() -> None:
    model = model_on_meta(tiny_values("minimax"), "config.json")
    made_plan = plan(model, Setting(memory=2 * 1024**3, runtime=0, graphs=0), gpus=2)
    assert made_plan.cache is None
    for row in made_plan.splits:
        assert isnan(row.kv)
        assert isnan(row.state)
        assert isnan(row.activations) == (row.layout != Layout(1, 2, 2, 1))
        assert row.sequences is None
        assert row.fits is None


def test_a_cache_that_does_not_grow_evenly_is_not_known() -> None:
    values = tiny_values("mixtral", {"sliding_window": 12})
    assert model_on_meta(values, "config.json").kept is None


def test_experts_that_are_not_told_apart_have_no_active_numbers() -> None:
    model = model_on_meta(other_values("doge"), "config.json")
    assert model.moes
    assert model.active is None


def test_weights_that_do_not_fit_are_told_without_a_cache() -> None:
    model = model_on_meta(tiny_values("minimax"), "config.json")
    rows = plan(model, Setting(memory=1000, runtime=0, graphs=0), gpus=2).splits
    assert {row.fits for row in rows} == {False}


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(other_values("glm4_moe")))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'routeprof\[demo\]'"):
        load_model(str(path))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "no_such_model"},
        {"model_type": "clip"},
        {"model_type": "glm4_moe", "hidden_size": "x"},
    ],
)
def test_what_transformers_cannot_build_is_one_line(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="transformers cannot build") as caught:
        model_of(values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
