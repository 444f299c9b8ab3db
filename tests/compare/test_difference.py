"""Two recordings on disk, held against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import routeprof
from routeprof.compare.comparable import incomparable
from routeprof.compare.difference import Difference, compare, unjudged
from routeprof.errors import MismatchError, UsageError
from routeprof.metrics.drift import jensen_shannon
from routeprof.profile import Profile
from routeprof.report.diff import difference_json, print_difference
from routeprof.sample_data import RECORDINGS_DIR
from tests.diagnose.made import EXPERTS, Step, moe, record


def made(path: Path, seed: int, number: int = 40, *, turned: bool = False, **facts) -> Path:
    """Even loads in two layers; turned, expert 5 of layer 1 gets half as much more."""
    random = np.random.default_rng(seed)
    shares = np.full((2, EXPERTS), 1 / EXPERTS)
    if turned:
        shares[1, 5] *= 1.5
        shares[1] /= shares[1].sum()
    phases = [facts.pop("phase")] if "phase" in facts else ["decode", "prefill"]
    steps = [
        Step(random.multinomial(512, shares), phase=phases[place % len(phases)])
        for place in range(number)
    ]
    return record(path, steps, **facts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    names = enumerate(("before", "again", "after"))
    before, again, after = (made(folder / name, n, turned=n == 2) for n, name in names)
    return before, again, after


def held(one: Path, other: Path, **facts) -> Difference:
    return compare(routeprof.load(one), routeprof.load(other), **facts)


def written(difference: Difference, **facts) -> str:
    console = Console(file=StringIO(), width=100, no_color=True)
    with console.capture() as captured:
        print_difference(difference, console, **facts)
    return captured.get()


def test_what_changed_comes_first(runs: tuple[Path, Path, Path]):
    found = held(runs[0], runs[2])
    assert found.significant
    changed = found.layers[found.layers["significant"].eq(True)]
    assert sorted(zip(changed["phase"], changed["layer"], strict=True)) == [
        ("decode", 1),
        ("prefill", 1),
    ]
    assert found.layers.index[found.layers["significant"].eq(True)].tolist() == [0, 1]
    first = found.experts.iloc[0]
    assert (first["layer"], first["expert"]) == (1, 5)
    assert first["relative_change"] == pytest.approx(0.45, abs=0.1)
    assert len(found.experts) == 2 * 2 * EXPERTS
    assert "2 layers and 2 experts changed by more than noise of 4 layers and 64" in " ".join(
        written(found).split()
    )


def test_nothing_changed(runs: tuple[Path, Path, Path]):
    found = held(runs[0], runs[1])
    assert found.judged
    assert not found.significant
    text = written(found)
    assert text.startswith("no significant change of 4 layers and 64 experts compared, level 0.05")
    assert "experts that changed" not in text


def test_figures_are_those_of_the_profiles(runs: tuple[Path, Path, Path]):
    a, b = (routeprof.load(path) for path in (runs[0], runs[2]))
    found = compare(a, b)
    for row in found.layers.to_dict("records"):
        tables = [profile.select(phase=row["phase"]).layers() for profile in (a, b)]
        counts = [profile.select(phase=row["phase"]).counts[row["layer"]] for profile in (a, b)]
        for name, table, own in zip("ab", tables, counts, strict=True):
            place = table.set_index("layer").loc[row["layer"]]
            assert row[f"assignments_{name}"] == place["assignments"] == own.sum()
            assert row[f"imbalance_{name}"] == place["imbalance_ratio"]
        assert row["divergence"] == jensen_shannon(*counts)
        experts = found.experts[
            (found.experts["phase"] == row["phase"]) & (found.experts["layer"] == row["layer"])
        ].sort_values("expert")
        one, other = (own / own.sum() for own in counts)
        np.testing.assert_allclose(experts["share_change"], other - one)
        np.testing.assert_allclose(experts["relative_change"], other / one - 1)
        assert row["experts_changed"] == experts["significant"].sum()
        assert bool(row["significant"]) == (row["p"] <= 0.05)


def test_windows_are_judged_as_steps_are(tmp_path: Path):
    a, b = (
        made(tmp_path / str(n), n, turned=n == 1, level="windows", phase="decode") for n in (0, 1)
    )
    found = held(a, b)
    assert found.significant
    assert found.groups[0].judged is not None
    assert found.groups[0].judged.stretches == (32, 32)


def test_too_few_steps_leave_noise_unknown(tmp_path: Path):
    a, b = (made(tmp_path / str(n), n, 3, turned=n == 1, phase="decode") for n in (0, 1))
    found = held(a, b)
    assert not found.judged
    assert found.layers[["noise_bound", "p", "significant"]].isna().all(axis=None)
    assert found.layers["divergence"].notna().all()
    text = " ".join(written(found).split())
    assert "none of them called significant" in text
    assert "everywhere: noise is not known from so few steps or windows: record longer" in text
    data = json.loads(json.dumps(difference_json(found)))
    assert data["significant"] is None
    assert data["experts"][0]["noise_bound"] is None


def test_converted_files_without_steps_have_no_noise(tmp_path: Path):
    files = []
    for name, extra in (("a", 0), ("b", 40)):
        rows = [
            f"{layer},{expert},{100 + extra * (expert == 2)}"
            for layer in (0, 1)
            for expert in range(4)
        ]
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text("layer,expert,count\n" + "\n".join(rows) + "\n")
    found = held(*files)
    assert not found.judged
    assert "does not say when" in found.groups[0].reason
    first = found.experts.iloc[0]
    assert (first["expert"], first["relative_change"]) == (2, pytest.approx(1.4 * 400 / 440 - 1))
    assert pd.isna(first["significant"])
    assert any("not known on one side" in line for line in found.caveats)


def test_phases_that_only_one_has(runs: tuple[Path, Path, Path], tmp_path: Path):
    other = made(tmp_path / "other", 3, phase="decode")
    found = held(runs[0], other)
    assert [group.key[0] for group in found.groups] == ["decode"]
    assert "only in A, not compared: prefill" in found.caveats
    with pytest.raises(UsageError, match="no phase and tag in common"):
        compare(routeprof.load(runs[0]).select(phase="prefill"), routeprof.load(other))


def test_no_layer_in_both(runs: tuple[Path, Path, Path]):
    """Assignments of one phase in both, but of other layers."""

    def only(path: Path, position: int) -> Profile:
        profile = routeprof.load(path)
        counts = profile.totals.lists["counts"].copy()
        counts[:, np.arange(counts.shape[1]) != position] = 0
        lists = {**profile.totals.lists, "counts": counts}
        return replace(profile, totals=replace(profile.totals, lists=lists))

    with pytest.raises(UsageError, match="assignments of a layer in both"):
        compare(only(runs[0], 0), only(runs[1], 1))


def test_without_noise_all_else_is_the_same(runs: tuple[Path, Path, Path]):
    profiles = routeprof.load(runs[0]), routeprof.load(runs[2])
    bare, found = unjudged(*profiles, "not asked for"), compare(*profiles)
    assert not bare.judged
    assert {group.reason for group in bare.groups} == {"not asked for"}
    for name, keys in (("layers", ["phase", "layer"]), ("experts", ["phase", "layer", "expert"])):
        one, other = (getattr(item, name).sort_values(keys) for item in (bare, found))
        known = [column for column in one if other[column].notna().all() and column not in JUDGED]
        pd.testing.assert_frame_equal(
            one[known].reset_index(drop=True), other[known].reset_index(drop=True)
        )
        assert one[[column for column in JUDGED if column in one]].isna().all(axis=None)


JUDGED = ("noise_bound", "p", "significant", "experts_changed")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((moe(0), moe(2)), "only one of the two has MoE layer 1"),
        ((moe(0), replace(moe(1), top_k=5)), "Layer 1 has . experts per token in A and 5 in B"),
    ],
)
def test_other_models_are_not_compared(
    runs: tuple[Path, Path, Path], tmp_path: Path, layers: tuple, text: str
):
    other = record(tmp_path / "other", [Step([np.ones(EXPERTS, dtype=int)] * 2)], layers=layers)
    with pytest.raises(MismatchError, match=text):
        held(runs[0], other)


def test_a_layer_that_one_has_not_captured(runs: tuple[Path, Path, Path], tmp_path: Path):
    counts = np.full(EXPERTS, 4)
    other = record(tmp_path / "other", [Step([counts, None])] * 40)
    found = held(runs[0], other)
    assert set(found.layers["layer"]) == {0}
    assert "layer 1 is silent in B: not compared" in found.caveats


def test_top_k_that_is_not_known_is_no_difference(runs: tuple[Path, Path, Path]):
    one = routeprof.load(runs[0])
    layers = tuple(replace(layer, top_k=None) for layer in one.info.layers)
    other = Profile(replace(one.info, layers=layers), one.totals, one.files)
    assert incomparable(one, other) == ""


def test_a_recording_against_itself():
    found = held(RECORDINGS_DIR / "healthy", RECORDINGS_DIR / "healthy")
    assert "A and B are of the same recording" in found.caveats[0]
    assert (found.experts["share_change"] == 0).all()
