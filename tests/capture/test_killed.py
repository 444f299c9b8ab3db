"""Killed is not corrupt: after SIGKILL a recording opens, and lacks at most its last window."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import NotARecordingError
from tests.capture.killed import LAYERS, MOMENTS, STEPS_A_FLUSH, steps
from tests.capture.recordings import same_loads

KILLS = int(os.environ.get("ROUTEPROF_KILLS", "12"))
"""How many are killed at random; ``make test-kills`` kills 200."""


@pytest.fixture(scope="module")
def children(tmp_path_factory) -> list[dict]:
    base = str(tmp_path_factory.mktemp("killed"))
    command = [sys.executable, "-m", "tests.capture.killed", base, str(KILLS)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_inside_a_flush(children, moment):
    said = next(child for child in children if Path(child["directory"]).name == moment)
    profile = routeprof.load(said["directory"])
    kept = list(islice(steps(0), STEPS_A_FLUSH * said["flushes"]))
    same_loads(profile, LAYERS, kept)
    assert profile.totals.unread == ()
    assert profile.files.ranks[0].missing() == []
    assert profile.files.ranks[0].state.state == "recording"
    codes = {finding.code for finding in profile.findings(now=profile.files.info.started + 1e12)}
    assert "not-stopped" in codes
    # Detail may lack what the last flush had not come to.
    assert len(profile.steps()) in {2 * len(kept), 2 * (len(kept) - STEPS_A_FLUSH)}


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_time(children, seed):
    said = next(child for child in children if child.get("seed") == seed)
    profile = routeprof.load(said["directory"])
    windows = profile.windows().query("layer == 0")
    recorded = int(windows["steps"].sum())
    same_loads(profile, LAYERS, list(islice(steps(seed), recorded)))
    # What ended before the last window began is there; what is there had begun.
    safe = sum(end < windows["start"].max() for end in said["ends"])
    assert safe <= recorded <= len(said["ends"]) + 1
    assert recorded > 0


@pytest.mark.parametrize("seed", range(100, 100 + KILLS))
def test_killed_at_random(children, seed):
    """Whatever the level and the moment: it opens, and holds the first steps and no others."""
    said = next(child for child in children if child.get("random") == seed)
    directory, ends = Path(said["directory"]), said["ends"]
    if not (directory / "recording.json").exists():
        assert not ends  # it had not begun
        with pytest.raises(NotARecordingError):
            routeprof.load(directory)
        return
    profile = routeprof.load(directory)
    assert profile.totals.unread == ()
    windows = profile.windows().query("layer == 0")
    recorded = int(windows["steps"].sum())
    truth = list(islice(steps(seed), recorded))
    if recorded:
        same_loads(profile, LAYERS, truth)
    # What ended before the last window began is there; what is there had begun.
    assert sum(end < windows["start"].max() for end in ends) <= recorded <= len(ends) + 1
    # Detail may lack what the last flush had not come to, or hold steps of the next.
    least, most = before(windows), len(ends) + 1
    if said["level"] != "windows":
        assert least <= len(profile.steps()) / len(LAYERS) <= most
    if said["level"] == "tokens":
        truth = list(islice(steps(seed), most))
        for position, layer in enumerate(LAYERS):
            ids = profile.tokens(layer.index).ids
            assert 4 * least <= len(ids) <= 4 * most
            expected = [step.calls[position].ids for step in truth[: len(ids) // 4]]
            np.testing.assert_array_equal(ids, np.concatenate([ids[:0], *expected]))


def before(windows) -> int:
    """Steps without those of the last window, whose detail may not have been written."""
    return int(windows["steps"][windows["window"] < windows["window"].max()].sum())
