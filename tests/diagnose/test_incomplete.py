"""What was not captured, or went wrong: each finding alone, and what just does not cause it."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
import routeprof.diagnose
from routeprof.compare.stretches import stretches
from routeprof.diagnose.examine import GAINS, RULES, examine
from routeprof.diagnose.question import Question
from routeprof.diagnose.ranks import _PROBLEMS, STALE_SECONDS
from routeprof.diagnose.remarks import _FACTS
from routeprof.recording.compact import compact
from routeprof.recording.retention import Policy
from routeprof.topology import RankRole
from tests.diagnose.made import EXPERTS, MODEL, Step, apportioned, moe, record, steady
from tests.diagnose.test_rules import CASES, Case, Make, severities, with_problem

EVEN = np.ones(EXPERTS)


def with_note(root: Path, note: str) -> Path:
    return record(root / "run", steady(EVEN), layers=[moe(0), moe(1, note=note)])


def converted(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A recording as if another tool's file had said less, or needed a remark."""
    path = record(root / "run", steady(EVEN)) / "recording.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    change(info)
    path.write_text(json.dumps(info), encoding="utf-8")
    return root / "run"


def with_notes(root: Path, notes: list[str]) -> Path:
    return converted(root, lambda info: info.update(source="sglang", notes=notes))


def choosing(root: Path, top_k: int | None) -> Path:
    return converted(root, lambda info: info["layers"][1].update(top_k=top_k))


def second_layer_unread(root: Path, unread: bool) -> Path:
    counts = apportioned(EVEN, 512)
    reason = {"unsupported": "its experts are not known"} if unread else {}
    steps = [Step([counts, None if unread else counts])] * 8
    return record(root / "run", steps, layers=[moe(0), moe(1, **reason)])


def so_many_steps(root: Path, steps: int) -> Path:
    return record(root / "run", steady(EVEN, steps))


def naming_no_expert(root: Path, invalid: int) -> Path:
    counts = apportioned(EVEN, 512 - invalid)
    return record(root / "run", [Step([counts, counts], invalid=invalid)] * 8)


def damaged_part(root: Path, lost: int) -> Path:
    """So many bytes at the end of the second rank's part are lost."""
    for rank in (0, 1):
        record(root / "run", steady(EVEN, 8), role=RankRole(rank, 2, dp=rank, ep=rank))
    path = root / "run" / "rank-00001" / "part-000000.parquet"
    path.write_bytes(path.read_bytes()[: -lost or None])
    return root / "run"


def damaged_rank(root: Path, lost: int) -> Path:
    path = record(root / "run", steady(EVEN)) / "rank-00000" / "rank.json"
    path.write_bytes(path.read_bytes()[: -lost or None])
    return root / "run"


def twins(root: Path, moved: int) -> Path:
    """The second counts so many assignments of the last layer for another expert."""
    counts = apportioned(EVEN, 512)
    other = counts.copy()
    other[:2] += (-moved, moved)
    for rank, own in ((0, counts), (1, other)):
        role = RankRole(rank, 2, tp=rank, ep=rank, owns_tokens=not rank)
        record(root / "run", [Step([counts, own])] * 8, role=role)
    return root / "run"


def of_models(root: Path, names: tuple[str, str]) -> list[Path]:
    """Two nodes of one run."""
    return [
        record(
            root / str(rank),
            steady(EVEN),
            role=RankRole(rank, 2, dp=rank, ep=rank),
            model=replace(MODEL, name=name),
        )
        for rank, name in enumerate(names)
    ]


def going_on(root: Path, value: float) -> Path:
    return record(root / "run", steady(EVEN), state="recording")


def later(root: Path, seconds: float) -> dict[str, float]:
    """So long after the rank wrote last."""
    files = routeprof.load(root / "run").files
    assert files is not None
    (rank,) = files.ranks
    assert rank.state is not None
    return {"now": rank.state.updated + seconds}


def with_fact(name: str) -> Make:
    return lambda root, count: record(root / "run", steady(EVEN), facts={name: count})


def compacted(root: Path, keep: float) -> Path:
    """The last step ran half a second before the last window ended."""
    path = record(root / "run", steady(EVEN))
    compact(path, Policy(keep=keep))
    return path


INCOMPLETE = [
    Case("detail-dropped", compacted, 0.4, 0.6),
    Case("unsupported-layers", second_layer_unread, True, False),
    Case("nothing-captured", so_many_steps, 0, 1),
    Case("invalid-ids", naming_no_expert, 2, 0),
    Case("damaged-part", damaged_part, 1, 0),
    Case("damaged-rank", damaged_rank, 1, 0),
    Case("twins-differ", twins, 1, 0),
    Case("recordings-differ", of_models, ("base", "tuned"), ("base", "base")),
    Case("not-stopped", going_on, STALE_SECONDS + 0.5, STALE_SECONDS, later),
    Case("converted", with_notes, ["ids are of slots"], []),
    Case("top-k-unknown", choosing, None, 2),
    Case("layer-note", with_note, "counts are of the first stage", ""),
    *(Case(name.replace("_", "-"), with_problem(name), 1, 0) for name in _PROBLEMS),
    *(Case(name.replace("_", "-"), with_fact(name), 1, 0) for name in _FACTS),
]
SEVERITIES = {
    "error": "damaged-part hook-failures lost-windows nothing-captured unsupported-layers",
    "info": "aborted-passes converted late-windows layer-note preemptions prefix-cached-tokens "
    "top-k-unknown",
}
"""The others are warnings."""
BY_CODE = pytest.mark.parametrize("case", INCOMPLETE, ids=lambda case: case.code)


@BY_CODE
def test_it_is_all_that_is_found_beside_the_same_recording_in_order(case: Case, tmp_path: Path):
    wrong = severities(case, tmp_path / "wrong", case.above)
    fine = severities(case, tmp_path / "fine", case.below)
    due = [name for name, codes in SEVERITIES.items() if case.code in codes.split()]
    assert wrong.pop(case.code, "") == (due or ["warning"])[0]
    assert wrong.items() <= fine.items()
    assert case.code not in fine
    assert set(fine.values()) <= {"info"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)
def test_just_below_nothing_else_is_wrong(case: Case, tmp_path: Path):
    found = severities(case, tmp_path, case.below)
    if case.code == "collapse":  # two experts with less than that are hot ones still
        assert found.pop("hot-experts") == "warning"
    assert set(found.values()) <= {"info"}


def test_nothing_in_a_selection_is_not_nothing_recorded(tmp_path: Path):
    profile = routeprof.load(record(tmp_path / "run", steady(EVEN)))
    (finding,) = examine(Question(profile.select(between=(5000.0, 6000.0)))).findings
    assert (finding.code, finding.evidence) == (
        "nothing-captured",
        "no forward pass is in what is selected",
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_of_several_runs_it_is_said_in_which_a_rank_is_missing(tmp_path: Path, runs: int):
    fine, lacking = tmp_path / "fine", tmp_path / "lacking"
    record(fine, steady(EVEN))
    record(lacking, steady(EVEN), role=RankRole(1, 2, dp=1, ep=1))
    path = lacking / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "another"}))
    profile = routeprof.load([lacking, fine][:runs])
    (one,) = [one for one in examine(Question(profile)).findings if one.code == "ranks-missing"]
    where = f" in {lacking}" if runs > 1 else ""
    assert one.evidence.startswith(f"rank 0 of 2 wrote nothing{where}: ")


def test_more_than_the_engine_made_is_no_coverage_either(tmp_path: Path):
    counts = apportioned(EVEN, 512)
    directory = record(tmp_path / "run", [Step([counts, counts], expected=255)] * 8)
    found = {one.code: one for one in examine(Question(routeprof.load(directory))).findings}
    assert found["coverage"].severity == "error"
    assert f"are {256 / 255:.4f} of those" in found["coverage"].evidence


def test_small_gemms_are_the_mean_over_layers(tmp_path: Path):
    """One layer has none, of the other 12 of 16: that is less than half."""
    small = [15] * 12 + [83] * 4
    directory = record(tmp_path / "run", [Step([apportioned(EVEN, 512), small])] * 8)
    found = {one.code for one in examine(Question(routeprof.load(directory))).findings}
    assert "small-gemms" not in found


def test_a_copy_of_a_part_is_not_counted_twice(tmp_path: Path):
    directory = record(tmp_path / "run", steady(EVEN, 8), level="windows")
    before = stretches(routeprof.load(directory))
    part = directory / "rank-00000" / "part-000000.parquet"
    shutil.copy(part, part.with_name("part-000001.parquet"))
    after = stretches(routeprof.load(directory))
    assert before.keys() == after.keys()
    for key, loads in before.items():
        np.testing.assert_array_equal(after[key], loads)


def written_codes() -> Iterator[str]:
    """Codes of findings as the rules' source has them."""
    for path in Path(routeprof.diagnose.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                first = node.args[0] if node.args else node.keywords[0].value
                if isinstance(first, ast.Constant):
                    yield str(first.value)


def test_every_code_has_a_pair_of_recordings():
    codes = {*written_codes(), *RULES, *GAINS}
    codes |= {name.replace("_", "-") for name in (*_PROBLEMS, *_FACTS)}
    assert codes == {case.code for case in (*CASES, *INCOMPLETE)}
