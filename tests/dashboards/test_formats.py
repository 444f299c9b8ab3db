from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from routeprof.dashboards import formats, grids
from routeprof.dashboards.definitions import DEFINITIONS


@pytest.mark.parametrize("write", ["count", "large", "number", "ratio", "times", "percent"])
@pytest.mark.parametrize("nothing", [None, np.nan, pd.NA])
def test_no_value_is_a_dash(write: str, nothing: Any) -> None:
    assert getattr(formats, write)(nothing) == "–"


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        ("count", 1234567, "1,234,567"),
        ("large", 4404.0, "4,404"),
        ("large", 12_345, "12.3 k"),
        ("large", 2_500_000, "2.50 M"),
        ("number", 44.0, "44.0"),
        ("number", 1234.5, "1,234"),
        ("ratio", 3.14159, "3.14"),
        ("ratio", float("inf"), "∞"),
        ("percent", 1.0, "100 %"),
        ("percent", 0.999, "99.9 %"),
        ("percent", 0.9996, "99.96 %"),
        ("percent", 0.99999, "> 99.99 %"),
        ("percent", 0.0, "0 %"),
        ("percent", 0.00001, "< 0.01 %"),
        ("percent", 0.1234, "12.3 %"),
        ("seconds", 0.00012, "120 µs"),
        ("seconds", 12.34, "12.3 s"),
        ("seconds", 185, "3 min 5 s"),
        ("seconds", 7800, "2 h 10 min"),
    ],
)
def test_numbers(write: str, value: float, text: str) -> None:
    assert getattr(formats, write)(value) == text


def test_every_definition_says_what_it_means() -> None:
    for meaning in DEFINITIONS.values():
        assert meaning.label
        assert meaning.text.endswith(".")


def test_grid_rows_are_json_and_keep_missing_apart_from_zero() -> None:
    frame = pd.DataFrame(
        {
            "layer": np.array([1, 2], dtype=np.int64),
            "tokens": pd.array([0, None], dtype="Int64"),
            "imbalance_ratio": [float("inf"), np.nan],
        }
    )
    assert grids.rows(frame) == [
        {"layer": 1, "tokens": 0, "imbalance_ratio": "∞"},
        {"layer": 2, "tokens": None, "imbalance_ratio": None},
    ]
    columns = grids.columns(frame)
    assert columns[0]["headerName"] == "Layer"
    assert all("'–'" in column["valueFormatter"]["function"] for column in columns)
