"""What the exporter says, in the format that Prometheus reads; a real one is in dashboards/."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from routeprof.profile import Profile
from routeprof.report.monitoring import Snapshot
from routeprof.report.prometheus import registry
from routeprof.tables import column


def series(profile: Profile) -> dict[tuple[str, ...], float]:
    """Value by name and labels, without the model."""
    text = generate_latest(registry(lambda: Snapshot(profile, profile))).decode()
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_by_phase(profile: Profile, counts: np.ndarray):
    """Two steps of prefill and four of decode, of ten tokens with two choices in four layers."""
    found = series(profile)
    by_phase = {key: value for key, value in found.items() if key[-1] in ("prefill", "decode")}
    assert by_phase == {
        ("routeprof:tokens_total", "prefill"): 20,
        ("routeprof:tokens_total", "decode"): 40,
        ("routeprof:steps_total", "prefill"): 2,
        ("routeprof:steps_total", "decode"): 4,
        ("routeprof:assignments_total", "prefill"): counts[:2].sum(),
        ("routeprof:assignments_total", "decode"): counts[2:].sum(),
    }


def test_gauges_are_of_the_layers_that_have_a_value(partial: Profile, counts: np.ndarray):
    load = counts[:, 1].sum(0)
    assert series(partial)["routeprof:imbalance_ratio",] == pytest.approx(load.max() / load.mean())


def test_a_column_has_nan_where_there_is_no_value():
    table = pd.DataFrame({"whole": pd.array([1, None], "Int64"), "real": [np.nan, 0.5]})
    np.testing.assert_array_equal(column(table, "whole"), [1.0, np.nan])
    np.testing.assert_array_equal(column(table, "real"), [np.nan, 0.5])
