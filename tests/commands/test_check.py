"""``routeprof check`` for CI: JUnit XML and annotations, beside its lines and its status."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.diagnose.made import EXPERTS, one_hot, record, steady
from tests.report.test_junit import commands


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("even") / "run", steady(np.ones(EXPERTS)))


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("hot") / "run", steady(one_hot(4)))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of this project may run on GitHub."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


def cases(path: Path) -> dict[str | None, ElementTree.Element]:
    return {case.get("name"): case for case in ElementTree.parse(path).iter("testcase")}


def test_junit_says_what_the_status_says(cli: Cli, tmp_path: Path, even: Path, hot: Path):
    for run, status in ((even, 0), (hot, 1)):
        done = cli("check", run, "--max-imbalance", 3, "--junit", tmp_path / "new" / "check.xml")
        assert done.returncode == status
        assert len(done.stdout.splitlines()) == 1
        own = cases(tmp_path / "new" / "check.xml")
        failed = [name for name, case in own.items() if case.find("failure") is not None]
        assert failed == ["hot-experts"][:status]


def test_junit_of_what_cannot_be_judged_or_read(cli: Cli, tmp_path: Path, even: Path):
    """An old file must not stand for a check that could not be made."""
    file = tmp_path / "check.xml"
    file.write_text("old")
    line = one_line(cli("check", even, "--max-rank-imbalance", 2, "--junit", file))
    (error,) = cases(file)["rank-imbalance"]
    assert (error.tag, f"routeprof: {error.get('message')}") == ("error", line)
    line = one_line(cli("check", tmp_path / "nothing", "--junit", file))
    (error,) = cases(file)["check"]
    assert f"routeprof: {error.text}" == line
    assert "cannot write" in one_line(cli("check", even, "--junit", tmp_path))


def test_annotations_are_asked_for_or_come_on_github(
    cli: Cli, even: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = cli("check", hot, "--github").stdout.splitlines()
    level, properties, text = commands(first)
    assert (level, properties) == ("warning", {"title": "routeprof: hot-experts"})
    evidence = second.removeprefix("warning: hot-experts: ")
    assert text.startswith(evidence)
    assert cli("check", even, "--github").stdout.splitlines()[0].startswith("passed")
    assert "::" not in cli("check", hot).stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert cli("check", hot).stdout.splitlines()[0] == first
    assert "::" not in cli("check", hot, "--no-github").stdout
    assert json.loads(cli("check", hot, "--json").stdout)["failed"] == ["hot-experts"]
    done = cli("check", even, "--max-rank-imbalance", 2)
    assert done.returncode == 2
    assert commands(done.stdout.strip())[0] == "error"
    assert "leave one out" in one_line(cli("check", even, "--json", "--github"))
