"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.diagnose.made import EXPERTS, one_hot, record, steady
from tests.test_api import imported_by
from tests.test_docs_examples import CI, blocks

pytest_plugins = ["pytester"]

# Not in this process: pytester takes back what was imported, and torch can only be imported once.
PLUGIN = ("-p", "routeprof.pytest_plugin", "-p", "no:cacheprovider", "-q")

CONFTEST = """
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

@pytest.fixture
def model():
    torch.manual_seed(0)
    small = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)
    return MixtralForCausalLM(MixtralConfig(**small, **heads)).eval()

@pytest.fixture
def inputs():
    return {"input_ids": torch.arange(512).reshape(2, 256) % 64}
"""

MODELS = """
import pytest
import torch

import routeprof
from routeprof.testing import assert_balanced

def run(model, tokens=256):
    with torch.no_grad():
        model(torch.randint(1, 64, (2, tokens // 2)))

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_passes(routing, model):
    with routing.record(model):
        run(model)

@pytest.mark.routing_limits(max_imbalance=1.01)
def test_fails(routing, model):
    with routing.record(model):
        run(model)

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_too_few_to_judge(routing, model):
    with routing.record(model):
        run(model, tokens=4)

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_model_never_ran(routing, model):
    with routing.record(model):
        pass

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_nothing_recorded(routing):
    pass

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_without_the_fixture():
    pass

@pytest.mark.routing_limits(max_imbalance=3.9)
def test_second_of_two_fails(routing, model):
    with routing.record(model):
        run(model)
    with routing.record(model):
        run(model, tokens=4)

@pytest.mark.routing_limits(max_imbalance=1.01)
def test_own_failure_comes_first(routing, model):
    with routing.record(model):
        run(model)
    assert False, "of its own"

@pytest.mark.routing_limits(max_overflow=0.01, min_load=1)
class TestClass:
    @pytest.mark.routing_limits(max_overflow=1)
    def test_nearest_counts(self, routing, model):
        with routing.record(model, level="steps"):
            run(model)

    def test_of_the_class(self, routing, model):
        with routing.record(model, level="steps"):
            run(model)

def test_without_marker(routing, model):
    with routing.record(model):
        run(model)
    assert_balanced(routing.profile, max_imbalance=3.9)
"""

WRONG = """
import pytest

@pytest.mark.routing_limits(max_imbalanse=3)
def test_name(routing):
    open("ran", "w")

@pytest.mark.routing_limits(3)
def test_positional(routing):
    open("ran", "w")

@pytest.mark.routing_limits(max_imbalance=0.5)
def test_value(routing):
    open("ran", "w")

@pytest.mark.routing_limits(fail_on="never")
def test_severity(routing):
    open("ran", "w")
"""


@pytest.fixture(autouse=True)
def only_this_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed routeprof may have registered the plugin under its short name already."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("COLUMNS", "80")


def test_the_marker_judges_what_the_fixture_recorded(pytester: pytest.Pytester):
    """Also in the example of docs/ci.md, and with the text that stands there."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_models=MODELS, test_docs=blocks(CI, "python")[0])
    options = (*PLUGIN, "--strict-markers", "--junitxml=out.xml")
    result = pytester.runpytest_subprocess(*options)
    (shown,) = (block for block in blocks(CI, "text") if block.startswith("___"))
    assert shown in result.stdout.str()
    told = {
        case.attrib["name"]: case.find("failure")
        for case in ElementTree.parse(pytester.path / "out.xml").iter("testcase")
    }
    passed = {name for name, failure in told.items() if failure is None}
    assert passed == {"test_passes", "test_nearest_counts", "test_without_marker"}
    texts = {name: str(failure.text) for name, failure in told.items() if failure is not None}
    expected = {
        "test_fails": "warning: hot-experts: in layer",
        "test_too_few_to_judge": "max_imbalance cannot be judged: needs 16 assignments an expert",
        "test_model_never_ran": "error: nothing-captured: no forward pass was recorded",
        "test_nothing_recorded": "the test recorded nothing; take the fixture `routing`",
        "test_without_the_fixture": "the test recorded nothing; take the fixture `routing`",
        "test_second_of_two_fails": "(recording 2 of 2)",
        "test_own_failure_comes_first": "of its own",
        "test_prompts_spread_over_the_experts": "above 1.5 in 2 layers",
        "test_of_the_class": "warning: overflow: a capacity factor of 1.25 would drop",
    }
    assert texts.keys() == expected.keys()
    for name, part in expected.items():
        assert part in texts[name]
    assert "→ compare tags" in texts["test_fails"]
    assert "hot-experts" not in texts["test_own_failure_comes_first"]
    assert texts["test_fails"].count("hot-experts") == 1


def test_a_wrong_marker_fails_before_the_test_runs(pytester: pytest.Pytester):
    pytester.makepyfile(WRONG)
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "*no threshold 'max_imbalanse'; there are max_imbalance, *",
            "*takes limits by name, such as max_imbalance=3",
            "*threshold hot_imbalance is 0.5: pass a number of 1 or more",
            "*severity 'never' is not one of error, warning, info",
        ]
    )
    assert not (pytester.path / "ran").exists()


@pytest.fixture
def judged(tmp_path: Path) -> str:
    """Tests of two recordings that something else made."""
    even = record(tmp_path / "even", steady(np.ones(EXPERTS)))
    hot = record(tmp_path / "hot", steady(one_hot(4)))
    return f"""
import pytest

@pytest.mark.routing_limits(max_imbalance=3)
@pytest.mark.parametrize("run", [{str(even)!r}, {str(hot)!r}], ids=["even", "hot"])
@pytest.mark.parametrize("number", range(2))
def test_run(routing, run, number):
    routing.add(run)
"""


def test_with_xdist(pytester: pytest.Pytester, judged: str):
    pytester.makepyfile(judged)
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "xdist", "-n", "2", "--junitxml=out.xml")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*warning: hot-experts: in layer * gets 4.00 times the mean*"])
    assert "hot-experts" in (pytester.path / "out.xml").read_text()


def test_it_costs_a_start_of_pytest_no_import():
    assert not {"torch", "numpy", "pandas", "pyarrow", "typer", "rich"} & imported_by(
        "import routeprof.pytest_plugin, routeprof.testing"
    )


def test_a_run_without_the_marker_imports_nothing(pytester: pytest.Pytester):
    pytester.makepyfile(
        "import sys\n"
        "def test_one(routing):\n"
        "    assert not {'torch', 'numpy', 'pandas'} & sys.modules.keys()"
    )
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--markers", *PLUGIN],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "@pytest.mark.routing_limits(max_imbalance=" in done.stdout
