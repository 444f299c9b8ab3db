"""What the exporter says, in the format that Prometheus reads; a real one is in dashboards/."""

from __future__ import annotations

from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pandas as pd
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from routeprof.profile import Profile
from routeprof.report.monitoring import Snapshot
from routeprof.report.prometheus import registry, server
from routeprof.tables import column
from tests.report.conftest import large


def series(profile: Profile, *, detailed: bool = False) -> dict[tuple[str, ...], float]:
    """Value by name and labels, without the model."""
    snapshot = Snapshot(profile, profile)
    text = generate_latest(registry(lambda: snapshot, detailed=detailed)).decode()
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


@pytest.mark.parametrize("experts", [8, 128])
def test_only_series_on_request_grow_with_the_model(experts: int):
    """61 layers, of which 58 were captured."""
    profile = large(experts=experts, steps=2)
    assert len(series(profile)) == 29
    assert len(series(profile, detailed=True)) == 29 + 58 + 58 * experts


def test_a_scrape_that_fails_is_seen_and_the_next_may_succeed(profile: Profile):
    answers = iter([OSError("the disk is gone"), Snapshot(profile, profile)])

    def take() -> Snapshot:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    serving = server(registry(take), "127.0.0.1", 0)
    thread = Thread(target=serving.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{serving.server_port}"
    try:
        with pytest.raises(HTTPError, match="500") as failed:
            urlopen(f"{url}/metrics")
        assert failed.value.read() == (
            b"The recording cannot be read (OSError: the disk is gone).\n"
        )
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/favicon.ico")
        with urlopen(f"{url}/metrics?x=1") as answer:
            assert b"routeprof:tokens_total" in answer.read()
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()


def test_a_column_has_nan_where_there_is_no_value():
    table = pd.DataFrame({"whole": pd.array([1, None], "Int64"), "real": [np.nan, 0.5]})
    np.testing.assert_array_equal(column(table, "whole"), [1.0, np.nan])
    np.testing.assert_array_equal(column(table, "real"), [np.nan, 0.5])
