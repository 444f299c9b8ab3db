import doctest
from importlib import import_module

import pytest

MODULES = (
    "_arrays",
    "affinity",
    "balance",
    "capacity",
    "drift",
    "gate",
    "gemm",
    "overflow",
    "quantiles",
    "ranks",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    assert doctest.testmod(import_module(f"routeprof.metrics.{name}")).failed == 0
