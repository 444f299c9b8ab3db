"""The table of limits: defaults, a TOML file, what cannot be."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from routeprof.diagnose import DEFAULTS, Thresholds, read_thresholds
from routeprof.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs" / "diagnose.md"


def written(folder: Path, text: str) -> Path:
    path = folder / "routeprof.toml"
    path.write_text(text)
    return path


def test_a_file_changes_what_it_names(tmp_path: Path):
    path = written(tmp_path, "[thresholds]\nhot_imbalance = 4\nmargin = 0.2\n")
    assert read_thresholds(path) == DEFAULTS.changed(hot_imbalance=4, margin=0.2)
    assert read_thresholds(written(tmp_path, "")) == DEFAULTS
    # As some editors write UTF-8.
    path.write_bytes(b"\xef\xbb\xbf[thresholds]\nmargin = 0.2\n")
    assert read_thresholds(path) == DEFAULTS.changed(margin=0.2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[thresholds]\nhot = 3\n", "no threshold 'hot'"),
        ("[limits]\nhot_imbalance = 3\n", "'limits'"),
        ("thresholds = 3\n", "'thresholds'"),
        ("[thresholds]\nhot_imbalance = 'three'\n", "hot_imbalance is 'three'"),
        ("[thresholds]\nhot_imbalance = true\n", "hot_imbalance is True"),
        ("[thresholds]\nhot_imbalance = 0.5\n", "1 or more"),
        ("[thresholds]\nhot_imbalance = nan\n", "1 or more"),
        ("[thresholds]\nmin_load = inf\n", "min_load is too large"),
        (f"[thresholds]\nmin_load = {'9' * 400}\n", "min_load is too large"),
        (f"[thresholds]\nmin_load = -{'9' * 400}\n", "min_load is too large"),
        ("[thresholds]\nmax_overflow = 1.5\n", "from 0 to 1"),
        ("[thresholds]\nhot_imbalance = 3 3\n", "is no TOML"),
        ("[thresholds\n", "is no TOML"),
    ],
)
def test_what_cannot_be_gets_one_line(tmp_path: Path, text: str, part: str):
    with pytest.raises(UsageError, match=re.escape(part)) as caught:
        read_thresholds(written(tmp_path, text))
    assert "routeprof.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_none(tmp_path: Path):
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            read_thresholds(path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no TOML"):
        read_thresholds(binary)


def test_the_manual_has_every_threshold_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", DOCS.read_text(encoding="utf-8"), re.M)
    assert {name: float(value) for name, value in rows} == {
        item.name: getattr(DEFAULTS, item.name) for item in fields(Thresholds)
    }


def test_every_limit_is_in_force(tmp_path: Path):
    """A limit that no rule looks at would be a promise that is not kept."""
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in (Path(__file__).parents[2] / "routeprof" / "diagnose").glob("*.py")
        if path.name != "thresholds.py"
    )
    for item in fields(Thresholds):
        assert re.search(rf"limits\.{item.name}\b", source), item.name
