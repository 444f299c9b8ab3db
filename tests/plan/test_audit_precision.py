"""The precision plan against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import MismatchError, UsageError
from routeprof.plan.audit.mixed import mixed
from routeprof.plan.audit.options import SCHEME_OF
from routeprof.plan.weights import Audit, audit
from routeprof.profile import Profile
from routeprof.sample_data import MODEL_DIR, RECORDINGS_DIR
from tests.plan.checkpoints import gaussian, save


@pytest.fixture(scope="module")
def done() -> Audit:
    return audit(MODEL_DIR)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return routeprof.load(RECORDINGS_DIR / "healthy")


def test_the_fewest_experts_that_take_the_share_are_hot(done: Audit, profile: Profile):
    plan = mixed(done, profile, hot_share=0.7, cold="fp8")
    for index, counts in zip(profile.layer_indices, profile.counts, strict=True):
        rows = plan.rows[plan.rows["layer"] == index]
        assert rows["assignments"].tolist() == counts.tolist()
        hot = (rows["precision"] == "source").to_numpy()
        assert counts[hot].sum() >= 0.7 * counts.sum()
        assert counts[hot].sum() - counts[hot].min() < 0.7 * counts.sum()
        assert counts[hot].min() >= counts[~hot].max()
        layer = plan.layers[plan.layers["layer"] == index].iloc[0]
        share = counts[~hot].sum() / counts.sum()
        assert layer["low_share"] == pytest.approx(share)
        assert layer["hot_experts"] == hot.sum()
        assert layer["tokens_touched_lower"] == pytest.approx(share)
        assert layer["tokens_touched_upper"] == pytest.approx(min(1, 2 * share))
    low = plan.rows["precision"] == "fp8"
    total = plan.rows["assignments"].sum()
    assert plan.low_share == pytest.approx(plan.rows.loc[low, "assignments"].sum() / total)


def test_bytes_are_those_of_the_formats(done: Audit, profile: Profile):
    elements = 3 * 96 * 128
    none = mixed(done, profile, hot_share=0.0, cold="int8")
    assert none.source_bytes == 64 * elements * 2 == done.read
    assert none.bytes == 64 * elements * (1 + 2 / 128)
    assert none.low_share == 1.0
    whole = mixed(done, profile, hot_share=1.0, hot="fp8", cold="int4")
    used = int((profile.counts > 0).sum())
    assert (whole.rows["precision"] == "fp8").sum() == used
    assert whole.low_share == 0.0


def test_errors_are_the_worst_matrix_s(done: Audit, profile: Profile):
    plan = mixed(done, profile, cold="int4")
    assert (plan.rows.loc[plan.rows["precision"] == "source", "error"] == 0).all()
    for row in plan.rows[plan.rows["precision"] == "int4"].to_dict("records"):
        errors = [
            one.of(SCHEME_OF["int4"])[row["expert"]]
            for one in done.matrices
            if one.index == row["layer"]
        ]
        assert len(errors) == 3
        assert row["error"] == max(errors)


def counted(profile: Profile, counts: list[int]) -> Profile:
    """The same counts of experts in every layer, all in one group."""
    lists = {name: values.copy() for name, values in profile.totals.lists.items()}
    lists["counts"][:] = 0
    lists["counts"][0, :, : len(counts)] = counts
    return replace(profile, totals=replace(profile.totals, lists=lists))


def test_a_share_that_is_met_exactly_takes_no_further_expert(done: Audit, profile: Profile):
    plan = mixed(done, counted(profile, [40, 10, 30, 20] + [0] * 12), hot_share=0.7)
    hot = plan.rows[plan.rows["precision"] == "source"]
    assert hot["expert"].tolist() == [0, 2] * 4


def test_zero_experts_have_no_weights(done: Audit, profile: Profile):
    layers = tuple(replace(layer, experts=18, zero_experts=2) for layer in profile.info.layers)
    with_zeros = replace(profile, info=replace(profile.info, layers=layers))
    lists = dict(profile.totals.lists)
    wide = np.zeros((*lists["counts"].shape[:2], 18), dtype=np.int64)
    wide[:, :, :16] = lists["counts"][:, :, :16]
    wide[:, :, 16:] = 99
    lists["counts"] = wide
    with_zeros = replace(with_zeros, totals=replace(profile.totals, lists=lists))
    assert with_zeros.counts.shape == (4, 18)
    assert mixed(done, with_zeros).rows.equals(mixed(done, profile).rows)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99, 1.0])
def test_a_budget_is_kept_and_used_for_the_hottest(done: Audit, profile: Profile, part: float):
    least = mixed(done, profile, hot_share=0.0, cold="int4").bytes
    most = float(done.read)
    budget = least + part * (most - least)
    plan = mixed(done, profile, budget=budget, cold="int4")
    one = (most - least) / 64
    hot = (plan.rows["precision"] == "source").to_numpy()
    assert plan.bytes <= budget
    assert budget - plan.bytes < one or hot.sum() == (profile.counts > 0).sum()
    loads = plan.rows["assignments"].to_numpy()
    if hot.any() and not hot.all():
        assert loads[hot].min() >= loads[~hot].max()


def test_tokens_that_meet_a_low_expert_are_counted_where_tokens_were_recorded(tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=8,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    with routeprof.record(model, tmp_path / "run", level="tokens"), torch.no_grad():
        model(torch.randint(1, 64, (2, 20)))
    profile = routeprof.load(tmp_path / "run")
    plan = mixed(audit(tmp_path / "model"), profile, hot_share=0.5)
    for row in plan.layers.to_dict("records"):
        rows = plan.rows[plan.rows["layer"] == row["layer"]]
        low = set(rows.loc[rows["precision"] == "int4", "expert"])
        ids = profile.tokens(row["layer"]).ids
        touched = sum(bool(low & set(token.tolist())) for token in ids) / len(ids)
        assert row["tokens_touched_lower"] == row["tokens_touched_upper"] == touched
        assert row["low_share"] < touched <= 2 * row["low_share"]


def test_a_layer_that_was_not_captured_is_kept_and_named(done: Audit, profile: Profile):
    sums = {name: values.copy() for name, values in profile.totals.sums.items()}
    for values in sums.values():
        values[:, 2] = 0
    silent = replace(profile, totals=replace(profile.totals, sums=sums))
    assert silent.layer_indices == [0, 1, 3]
    plan = mixed(done, silent)
    rows = plan.rows[plan.rows["layer"] == 2]
    assert set(rows["precision"]) == {"source"}
    assert rows["assignments"].isna().all()
    assert plan.not_recorded == ("model.layers.2.mlp",)
    assert plan.layers["layer"].tolist() == [0, 1, 3]


def renamed(profile: Profile, name: str, **changes: int) -> Profile:
    layers = tuple(
        replace(layer, name=name.format(layer.index), **changes) for layer in profile.info.layers
    )
    return replace(profile, info=replace(profile.info, layers=layers))


@pytest.mark.parametrize(
    "name", ["model.layers.{}.mlp.experts", "language.model.layers.{}.mlp", "{}"]
)
def test_layers_are_found_under_the_names_of_engines(done: Audit, profile: Profile, name: str):
    plan = mixed(done, renamed(profile, name))
    assert plan.rows.equals(mixed(done, profile).rows)


def test_a_recording_of_another_model_is_refused(tmp_path: Path, profile: Profile):
    for weights in (gaussian(6, 4), gaussian(16, 2)):
        with pytest.raises(MismatchError, match="pass a recording of this model"):
            mixed(audit(save(weights, tmp_path)), profile)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hot": "bf32"}, "hot 'bf32' is not one of source, fp8, int8, int4"),
        ({"cold": "mxfp4"}, "cold 'mxfp4'"),
        ({"hot": "int4", "cold": "int4"}, "no higher precision"),
        ({"hot": "int4", "cold": "fp8"}, "no higher precision"),
        ({"hot_share": 1.5}, "from 0 to 1"),
        ({"hot_share": float("nan")}, "from 0 to 1"),
        ({"hot_share": 0.5, "budget": 1e9}, "pass one of them"),
        ({"budget": 1000.0}, "raise it"),
    ],
)
def test_options_that_cannot_be(done: Audit, profile: Profile, options: dict, says: str):
    with pytest.raises(UsageError, match=says):
        mixed(done, profile, **options)


def test_experts_without_assignments_are_known_to_be_cold(done: Audit, profile: Profile):
    plan = mixed(done, profile, hot_share=1.0)
    unused = plan.rows["assignments"] == 0
    assert set(plan.rows.loc[unused, "precision"]) <= {"int4"}
    assert np.isfinite(plan.rows["error"]).all()
