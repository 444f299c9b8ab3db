"""A file system that is slow, forgets its answers, refuses, or shows old listings."""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.profile import Profile
from routeprof.recording.reader import open_recording
from tests.capture.recordings import problems
from tests.trouble.conftest import documented, whole


def windows_of(profile: Profile) -> pd.DataFrame:
    """One row a window: its bounds, and the steps of the first layer over all phases."""
    table = profile.windows().query("layer == 0").groupby("window")
    return table.agg({"start": "first", "end": "first", "steps": "sum"})


def steps_within(profile: Profile, windows: pd.DataFrame) -> list[int]:
    """How many recorded steps ended between the bounds of each window."""
    times = profile.steps().query("layer == 0").sort_values("step")["time"].to_numpy()
    assert (np.diff(times) >= 0).all()
    return np.histogram(times, [windows["start"].iloc[0], *windows["end"]])[0].tolist()


def test_slow_renames_do_not_hold_the_engine_up(shimmed):
    directory, said = shimmed("slow_renames")
    whole(directory, said)
    assert min(said["during"]) > 0
    assert "write_failures" not in problems(directory)


def test_a_window_ends_when_its_sums_were_taken(shimmed):
    """However slow the disk: the steps between its bounds are those that it counts."""
    directory, said = shimmed("slow_renames")
    profile = whole(directory, said)
    windows = windows_of(profile)
    assert len(windows) >= 6
    assert (windows["start"].to_numpy()[1:] == windows["end"].to_numpy()[:-1]).all()
    assert steps_within(profile, windows) == windows["steps"].tolist()


def test_a_rename_that_was_done_though_the_answer_says_otherwise(shimmed):
    """Written again, a part would change under whoever has read it."""
    directory, said = shimmed("lost_answers")
    whole(directory, said)
    assert "write_failures" not in problems(directory)


def test_renames_that_fail_leave_nothing_and_lose_nothing(shimmed):
    directory, said = shimmed("failing_renames")
    assert said["left"] == []
    profile = whole(directory, said)
    assert profile.windows()["window"].nunique() == 2
    assert problems(directory)["write_failures"] == 3


def test_a_quota(shimmed):
    directory, said = shimmed("quota")
    whole(directory, said)
    assert problems(directory)["write_failures"] > 2
    lines = [line for line in said["stderr"].splitlines() if "quota/" in line]
    assert len(lines) == 1  # said once
    assert documented(lines[0], DIR=directory, REASON="Disk quota exceeded")


def test_a_file_system_without_hard_links(shimmed):
    directory, said = shimmed("no_links")
    whole(directory, said)
    assert sorted(path.name for path in directory.iterdir()) == ["rank-00000", "recording.json"]


def test_parts_that_are_not_listed_yet_are_named_and_come(shimmed):
    directory, said = shimmed("late_listings")
    whole(directory, said)
    assert said["missing"] == [f"{kind}-00000{n}" for kind in ("part", "steps") for n in range(3)]
    everything = sum(map(sum, said["loads"]))
    assert said["before"] == said["shown"] == [everything, ""]
    assert said["hidden"][0] == 0


def test_a_directory_that_cannot_be_listed_is_one_line_and_looked_at_again(shimmed):
    directory, said = shimmed("late_listings")
    assert documented(said["line"], DIR=directory, REASON="Stale file handle")
    assert said["unlisted"] == [said["before"][0], said["line"]]  # its numbers stay
    assert said["shown"] == said["before"]


def test_a_list_of_recordings_stays_while_it_cannot_be_listed(shimmed):
    _, said = shimmed("listed_library")
    assert said["names"] == [["a", "b"], ["a", "b"]]
    assert said["message"] == "Choose a recording."


def test_a_clock_that_is_set_back(shimmed):
    directory, said = shimmed("clock_set")
    profile = whole(directory, said)
    windows = windows_of(profile)
    bounds = [windows["start"].iloc[0], *windows["end"]]
    assert (np.diff(bounds) > 0).all()
    assert steps_within(profile, windows) == windows["steps"].tolist()
    # Set forward it is followed: two hours and no more lie between the first and the last.
    assert 3600 <= bounds[-1] - said["start"] < 2 * 3600
    # What says that the process lives is by the clock of whoever reads it.
    assert max(map(abs, said["told"])) < 600
    assert open_recording(directory).ranks[0].state.state == "stopped"
