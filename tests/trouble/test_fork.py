"""A fork after recording began: the parent records on, the child does not."""

from __future__ import annotations

from tests.trouble.conftest import program, whole
from tests.trouble.forking import FORKS


def test_children_neither_hang_nor_write_nor_count(tmp_path):
    (said,) = program("forking", tmp_path / "a")
    assert said["codes"] == [0] * FORKS
    profile = whole(tmp_path / "a", said)
    assert {key[1] for key in profile.totals.keys} == {None, "parent"}
    (rank,) = profile.files.ranks
    assert (rank.state.pid, rank.state.state, rank.missing()) == (said["pid"], "stopped", [])
    written = {path.name for path in (tmp_path / "a/rank-00000").iterdir()}
    assert written == {"rank.json"} | {part.path.name for part in rank.parts}
