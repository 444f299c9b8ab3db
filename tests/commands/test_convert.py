"""``routeprof convert``, in and out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.formats.test_tables import EXPERTS, TOP_K, routed

HEALTHY = RECORDINGS_DIR / "healthy"


@pytest.fixture
def array(tmp_path: Path) -> np.ndarray:
    counts = routed(11, steps=5, layers=3)
    np.save(tmp_path / "counts.npy", counts)
    return counts


def test_in_and_out_again(cli: Cli, tmp_path: Path, array: np.ndarray):
    told = ("--top-k", TOP_K, "--phase", "decode", "--tag", "code", "--json")
    facts = json.loads(cli("convert", "counts.npy", "run", *told).stdout)
    assert (facts["format"], facts["level"], facts["layers"]) == ("npy", "steps", 3)
    assert facts["assignments"] == array.sum() == 5 * 3 * 20 * TOP_K
    profile = routeprof.load(tmp_path / "run").select(phase="decode", tag="code")
    assert profile.layers()["tokens"].tolist() == [100] * 3
    done = cli("convert", "run", "back.json")
    assert done.returncode == 0, done.stderr
    back = json.loads((tmp_path / "back.json").read_text(encoding="utf-8"))
    assert back == {"logical_count": array.sum(axis=0).tolist()}


def test_a_file_is_made_into_another(cli: Cli, tmp_path: Path, array: np.ndarray):
    assert cli("convert", "counts.npy", "other.csv").returncode == 0
    assert np.array_equal(routeprof.load(tmp_path / "other.csv").counts, array.sum(axis=0))


def test_of_a_recording_a_part_is_written(cli: Cli, tmp_path: Path):
    assert cli("convert", HEALTHY, "a.npy", "--phase", "decode", "--tag", "code").returncode == 0
    chosen = routeprof.load(HEALTHY).select(phase="decode", tag="code")
    assert np.array_equal(np.load(tmp_path / "a.npy"), chosen.counts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run",), "one path is given"),
        (("nothere.npy", "run"), "does not exist"),
        (("counts.npy", "run", "--from", "cvs"), "'cvs' is not one of"),
        (("counts.npy", "a.csv", "--to", "cvs"), "nobody writes 'cvs'"),
        (("counts.npy", "run", "--top-k", EXPERTS + 1), "pass 1 to 8"),
        (("counts.npy", "run", "--top-k", 3), "--top-k"),
        (("counts.npy", "run", "--phase", "warmup"), "not one of prefill"),
        ((HEALTHY, "run"), "is a recording already"),
        ((HEALTHY, "a.trace.json", "--beside", "counts.npy"), "pass a trace"),
        ((HEALTHY, "a.npy", "--phase", "mixed"), "does not occur"),
    ],
)
def test_bad_input_gets_one_line(
    cli: Cli, array: np.ndarray, arguments: tuple[object, ...], says: str
):
    assert says in one_line(cli("convert", *arguments))
