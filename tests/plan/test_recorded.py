from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.plan import recorded
from routeprof.plan.known import known_facts, known_names
from routeprof.plan.model import load_model
from routeprof.plan.recorded import own_model, places, recorded_model
from routeprof.profile import Profile
from routeprof.topology import Layer, ModelInfo
from tests.dashboards.synthetic import Shape, write

ROUTED = [name for name in known_names() if load_model(name).moes]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("recorded") / "run"
    write(path, Shape(layers=2, experts=8, windows=1))
    return routeprof.load(path)


def as_of(profile: Profile, known: str, **facts: Any) -> Profile:
    """What a recording of a known model says of it."""
    model = load_model(known)
    moes = dict(model.moes)
    layers = tuple(
        Layer(at, f"layers.{at}", experts=moes[at].experts, top_k=moes[at].top_k)
        if at in moes
        else Layer(at, f"layers.{at}", kind="dense")
        for at in range(max(moes) + 1)
    )
    values = {
        "name": "served",
        "model_type": model.family,
        "hidden_size": model.hidden,
        "expert_width": model.moes[0][1].width,
    }
    info = replace(profile.info, layers=layers, model=ModelInfo(**(values | facts)))
    return replace(profile, info=info)


@pytest.mark.parametrize("name", ROUTED)
def test_a_known_model_is_found_by_its_shape(profile: Profile, name: str) -> None:
    found = recorded_model(as_of(profile, name))
    assert found is not None
    assert load_model(found).weights == load_model(name).weights
    facts = known_facts(name)
    assert facts is not None
    for called in (name, facts["name"], f"/models/{facts['name']}/"):
        assert recorded_model(as_of(profile, name, name=called)) == name


@pytest.mark.parametrize("name", ["jamba-1.5-mini", "jamba-v0.1", "deepseek-v3", "deepseek-v3.1"])
def test_of_one_shape_the_full_name_decides_whatever_the_order(
    profile: Profile, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "known_names", lambda: [*reversed(known_names())])
    facts = known_facts(name)
    assert facts is not None
    assert recorded_model(as_of(profile, name, name=facts["name"])) == name


@pytest.mark.parametrize("name", ROUTED)
def test_the_width_may_be_unknown_and_must_not_differ(profile: Profile, name: str) -> None:
    assert recorded_model(as_of(profile, name, expert_width=None)) is not None
    assert recorded_model(as_of(profile, name, expert_width=7)) is None


@pytest.mark.parametrize(
    "facts", [{"hidden_size": 4097}, {"hidden_size": None}, {"model_type": "llama"}]
)
def test_a_name_does_not_make_another_shape_the_model(
    profile: Profile, facts: dict[str, Any]
) -> None:
    assert recorded_model(as_of(profile, "mixtral-8x7b", name="mixtral-8x7b", **facts)) is None


@pytest.mark.parametrize("change", [{"top_k": 1}, {"experts": 16}, {"zero_experts": 1}])
def test_every_layer_must_agree(profile: Profile, change: dict[str, Any]) -> None:
    whole = as_of(profile, "mixtral-8x7b")
    *others, last = whole.info.layers
    info = replace(whole.info, layers=(*others, replace(last, **change)))
    assert recorded_model(replace(whole, info=info)) is None
    assert recorded_model(replace(whole, info=replace(info, layers=tuple(others)))) is None


def test_a_dense_model_is_not_looked_for(profile: Profile) -> None:
    layers = (Layer(0, "layers.0", kind="dense"),)
    model = ModelInfo(name="llama-3.1-8b", model_type="llama", hidden_size=4096)
    info = replace(profile.info, layers=layers, model=model)
    assert recorded_model(replace(profile, info=info)) is None


def test_an_unknown_model_is_none(profile: Profile) -> None:
    assert recorded_model(profile) is None


# -- by its own configuration


def test_its_own_configuration_is_the_model(profile: Profile) -> None:
    config = known_facts("jamba-v0.1")["config"]  # type: ignore[index]
    found = own_model(as_of(profile, "jamba-v0.1", name="served", config=config))
    assert found == replace(load_model("jamba-v0.1"), name="served")
    unnamed = own_model(as_of(profile, "jamba-v0.1", name="", config=config))
    assert unnamed is not None
    assert unnamed.name == "the recorded model"
    assert own_model(as_of(profile, "jamba-v0.1")) is None
    with pytest.raises(UsageError, match="the recording's configuration lacks"):
        own_model(as_of(profile, "jamba-v0.1", config={"model_type": "jamba"}))


@pytest.mark.parametrize("name", ROUTED)
def test_layers_stand_where_the_model_has_them(profile: Profile, name: str) -> None:
    moes = load_model(name).moes
    whole = as_of(profile, name)
    assert places(whole, moes) == {at: at for at, _ in moes}
    assert places(whole, moes[1:]) is None
    assert places(whole, [(at + 1, moe) for at, moe in moes]) is None
    assert places(whole, [(at, replace(moe, top_k=moe.top_k + 1)) for at, moe in moes]) is None
    assert places(whole, [(at, replace(moe, experts=moe.experts + 1)) for at, moe in moes]) is None


def test_layers_with_numbers_of_the_recordings_own_are_matched_in_order(profile: Profile) -> None:
    moes = load_model("jamba-v0.1").moes
    layers = tuple(
        Layer(place, f"stages.0.blocks.{at}", experts=moe.experts, top_k=moe.top_k)
        for place, (at, moe) in enumerate(moes)
    )
    renumbered = replace(profile, info=replace(profile.info, layers=layers))
    assert places(renumbered, moes) == {at: place for place, (at, _) in enumerate(moes)}
    assert places(renumbered, moes[:-1]) is None


def test_experts_that_do_no_work_are_none_of_the_models(profile: Profile) -> None:
    (_, moe), *_ = moes = load_model("mixtral-8x7b").moes
    layers = tuple(
        Layer(at, f"layers.{at}", experts=moe.experts + 2, top_k=moe.top_k, zero_experts=2)
        for at, _ in moes
    )
    with_idle = replace(profile, info=replace(profile.info, layers=layers))
    assert places(with_idle, moes) is not None
