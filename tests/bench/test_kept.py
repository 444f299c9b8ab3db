"""Results, their comparison and the page made of them, with made-up numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.__main__ import SUITES, keep
from tests.bench.kept import Figure, Machine, Result, changes, figure, may_replace
from tests.bench.page import ORDER, PAGE, TEXTS, filled, page

ROOT = Path(__file__).parents[2]
QUIET = Machine("made up", 2, 8.0, {"Python": "3.11"}, load=0.1)
BUSY = replace(QUIET, load=2.0)


def result(*figures: Figure, machine: Machine = QUIET) -> Result:
    return Result("made", "2026-01-02", "Once.", machine, figures)


def ratio(values: list[float], **options: object) -> Figure:
    return figure("t", "r", "c", values, **{"better": "higher"} | options)


def verdict(before: Figure, now: Figure, machine: Machine = QUIET) -> str:
    (change,) = changes(result(before), result(now, machine=machine))
    return change.verdict


STEADY = [0.97, 0.98, 0.98, 0.99, 0.97, 0.98]


def test_a_regression_is_marked():
    slower = [value - 0.1 for value in STEADY]
    assert verdict(ratio(STEADY), ratio(slower)) == "worse"
    assert verdict(ratio(slower), ratio(STEADY)) == "better"
    assert verdict(ratio(STEADY, better="lower"), ratio(slower, better="lower")) == "better"
    assert verdict(ratio(STEADY, better=""), ratio(slower, better="")) == "changed"


def test_noise_is_not():
    noisy = [0.93, 1.02, 0.95, 0.99, 0.97, 0.91]
    assert verdict(ratio(STEADY), ratio(noisy)) == ""
    # Spans that don't meet, and 1 % between them.
    assert verdict(ratio(STEADY), ratio([value + 0.012 for value in STEADY])) == ""


def test_what_was_measured_once_has_a_tenth_of_noise():
    assert verdict(ratio([1.0]), ratio([1.0])) == ""
    once = Figure("t", "r", "c", 100.0, better="lower")
    assert verdict(once, replace(once, middle=115.0)) == ""
    assert verdict(once, replace(once, middle=125.0)) == "worse"
    exact = replace(once, exact=True, digits=1)
    assert verdict(exact, replace(exact, middle=100.2)) == "worse"
    assert verdict(exact, replace(exact, middle=100.01)) == ""  # not shown


def test_times_of_another_machine_are_not_judged():
    other = replace(QUIET, processor="another")
    before, now = ratio(STEADY, unit="ms"), ratio([2.0, 2.1, 2.0, 2.2], unit="ms")
    assert verdict(before, now, other) == "other machine"
    assert verdict(before, now) == "better"
    assert verdict(replace(before, unit=""), replace(now, unit=""), other) == "better"


def test_new_figures_and_those_that_are_gone():
    one, other = ratio(STEADY), replace(ratio(STEADY), row="other")
    assert [change.verdict for change in changes(None, result(one))] == ["new"]
    assert [change.verdict for change in changes(result(one), result(other))] == ["new", "gone"]


def test_a_range_without_a_median_is_compared_by_its_ends():
    before = Figure("t", "r", "c", None, 0.8, 1.2, better="higher")
    assert str(before) == "0.800 to 1.200"
    assert verdict(before, ratio([0.9, 1.0])) == ""
    assert verdict(before, ratio([0.5, 0.6])) == "worse"
    assert verdict(ratio([0.9, 1.0]), ratio([0.86, 0.88])) == ""  # two runs say little


def test_a_busy_machine_does_not_replace_a_quiet_one(tmp_path: Path, capsys):
    assert BUSY.busy
    assert not QUIET.busy
    quiet, busy = result(ratio(STEADY)), result(ratio([0.5]), machine=BUSY)
    assert may_replace(None, busy)
    assert may_replace(busy, quiet)
    keep(quiet, tmp_path)
    keep(busy, tmp_path)
    assert Result.load("made", tmp_path).machine == QUIET
    assert "worse" in (said := capsys.readouterr().out)
    assert "--replace" in said
    keep(busy, tmp_path, replace=True)
    assert Result.load("made", tmp_path).machine == BUSY


def test_a_result_comes_back_as_it_was(tmp_path: Path):
    one = result(ratio([0.5, 1.5], target=0.97, digits=2), Figure("t", "x", "y", None, 1.0, 2.0))
    one.save(tmp_path)
    assert Result.load("made", tmp_path) == one
    assert Result.load("other", tmp_path) is None


def test_medians_and_quartiles():
    assert ratio([3.0, 1.0]).middle == 2.0
    assert str(ratio([3.0, 1.0])) == "2.000 (1.000 to 3.000)"
    assert ratio([3.0, 1.0]).span == pytest.approx((0.95, 3.15))
    assert ratio([3.0]).span == pytest.approx((2.7, 3.3))
    five = ratio([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.middle, *five.span) == (3.0, 1.5, 4.5)
    assert str(five) == "3.000 (1.500 to 4.500)"


def test_targets():
    assert ratio([0.98], target=0.97).met is True
    assert ratio([0.96], target=0.97).met is False
    assert ratio([0.96], target=0.97, better="lower").met is True
    assert ratio([0.96]).met is None


def test_a_text_is_filled():
    one = result(
        ratio([0.98], target=0.97),
        Figure("t", "other", "c", 1234.5, digits=0, better="lower", target=1.0),
        Figure("t", "other", "d", 2.0),
    )
    text = "{{date}} {{t/other/d}} {{met t/r/c}} {{met t/other/c}} {{met t/other/d}}\n{{table t}}"
    assert filled(text, one).splitlines() == [
        "2026-01-02 2.000 met **missed** –",
        "|  | c | d |",
        "| --- | --- | --- |",
        "| r | 0.980 |  |",
        "| other | 1,234 | 2.000 |",
    ]
    for name in ("{{t/none/c}}", "{{table none}}", "{{met t/none/c}}"):
        assert filled(name, one) == "not measured"


# -- what is kept here


def test_the_page_is_made_of_the_kept_results():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "python -m tests.bench.page writes it"
    # The measured gain of placements is newer than the kept result.
    assert text.count("not measured") <= 1


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "results").glob("*.json")))
def test_kept_results_are_on_the_page_and_name_no_machine(path: Path):
    assert path.stem in ORDER
    assert (TEXTS / path.name).with_suffix(".md").is_file()
    kept = Result.load(path.stem)
    assert kept.machine.processor
    assert not re.search(r"/(home|root|tmp|work)\b", path.read_text(encoding="utf-8"))


def test_make_knows_every_suite():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-m tests.bench $(ARGS)" in makefile
    (targets,) = re.findall(r"^(bench-\S+(?: bench-\S+)*): bench-%:", makefile, re.MULTILINE)
    assert {name.removeprefix("bench-") for name in targets.split()} <= SUITES.keys()
    assert "\nbench-vllm:" in makefile
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        target
        for one in pages
        for target in re.findall(r"make (bench[\w-]*|soak)", one.read_text(encoding="utf-8"))
    }
    assert all(re.search(rf"^(.* )?{target}[ :]", makefile, re.MULTILINE) for target in named)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_results(name: str):
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert "def results(arguments: Sequence[str])" in text
