"""whatif placement with files: written, read as today's, and what is refused."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import routeprof
from routeprof.formats.placements import FORMATS
from routeprof.metrics.ranks import rank_loads
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.topology import Layer
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.decision import decide
from routeprof.whatif.room import parse_bytes
from tests.capture.oracle import random_step
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.commands.test_whatif import said
from tests.profile.by_hand import MOE, record

SAMPLE = RECORDINGS_DIR / "healthy"
ON_8 = ("--gpus", 8, "--slots", 24)
FILES = [file for files in FORMATS.values() for file in files]


def figure(counts, slots, gpus: int) -> float:
    """Mean over layers of max ÷ mean rank load."""
    loads = rank_loads(counts, slots, gpus)
    return float((loads.max(1) / loads.mean(1)).mean())


def test_what_is_written_is_what_the_figures_say(cli: Cli, tmp_path: Path):
    data = said(cli, "placement", SAMPLE, *ON_8, "--out", "placed")
    assert [Path(file).name for file in data["written"]["files"]] == FILES
    assert data["written"]["left_out"] == {}
    assert data["written"]["fitted_steps"] is None
    rows = json.loads((tmp_path / "placed" / "sglang.json").read_text())["physical_to_logical_map"]
    counts = routeprof.load(SAMPLE).counts
    assert figure(counts, rows, 8) == pytest.approx(data["fitted"]["routeprof"])
    assert data["fitted"]["routeprof"] < data["fitted"]["before"]


def test_all_files_say_the_same(cli: Cli, tmp_path: Path):
    done = cli("whatif", "placement", SAMPLE, *ON_8, "--out", "placed")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "placed"
    rows = json.loads((folder / "sglang.json").read_text())["physical_to_logical_map"]
    assert torch.load(folder / "sglang.pt")["physical_to_logical_map"].tolist() == rows
    assignments = yaml.safe_load((folder / "trtllm.yaml").read_text())["initial_global_assignments"]
    assert [assignments[layer] for layer in range(4)] == rows
    assert np.load(folder / "eplb.npz")["phy2log"].tolist() == rows
    assert np.load(folder / "vllm.npz")["physical_to_logical_map"].tolist() == rows
    layers = json.loads((folder / "vllm-ascend.json").read_text())["layer_list"]
    devices = [[one["device_expert"] for one in layer["device_list"]] for layer in layers]
    assert np.reshape(devices, (4, 24)).tolist() == rows
    with (folder / "placement.csv").open() as file:
        table = [int(row["expert"]) for row in csv.DictReader(file)]
    assert np.reshape(table, (4, 24)).tolist() == rows
    for name in FILES:
        assert f"  placed/{name}" in done.stdout.splitlines()


def test_the_file_is_fitted_on_all_steps_and_the_figures_are_not(
    cli: Cli, recording: Path, tmp_path: Path
):
    plain = said(cli, "placement", recording, "--gpus", 2, "--slots", 10)
    data = said(cli, "placement", recording, "--gpus", 2, "--slots", 10, "--out", "placed")
    written = data.pop("written")
    assert data == plain
    assert written["fitted_steps"] == 5
    done = cli("whatif", "placement", recording, "--gpus", 2, "--slots", 10, "-o", "placed")
    assert "written, fitted on all 5 steps (the figures: on the first half):" in done.stdout


def test_a_file_can_be_todays(cli: Cli, placed: Path):
    again = said(cli, "placement", SAMPLE, *ON_8, "--today", placed / "sglang.pt")
    rows = np.load(placed / "eplb.npz")["phy2log"]
    assert again["before_is"] == "given"
    assert again["fitted"]["before"] == pytest.approx(
        figure(routeprof.load(SAMPLE).counts, rows, 8)
    )


def test_a_format_alone(cli: Cli, tmp_path: Path):
    said(cli, "placement", SAMPLE, *ON_8, "--out", "placed", "--format", "sglang,csv")
    names = {file.name for file in (tmp_path / "placed").iterdir()}
    assert names == {"sglang.json", "sglang.pt", "placement.csv"}


def test_moves_are_kept(cli: Cli, tmp_path: Path):
    """Of the rows of GPUs, no more experts are new than were allowed."""
    few = ("--gpus", 4, "--slots", 16, "--moves", 2, "--out", "placed")
    data = said(cli, "placement", SAMPLE, *few)
    rows = np.load(tmp_path / "placed" / "eplb.npz")["phy2log"].reshape(4, 4, 4)
    new = [
        sum(len(set(gpu) - set(range(4 * rank, 4 * rank + 4))) for rank, gpu in enumerate(row))
        for row in rows.tolist()
    ]
    assert max(new) <= 2
    assert data["written"]["moved_experts"] == sum(new)
    assert data["fitted"]["routeprof"] < data["fitted"]["before"]


def test_ascend_gets_no_expert_twice_on_a_gpu(cli: Cli, tmp_path: Path):
    few = ("--gpus", 1, "--slots", 20)  # more slots than experts on the one GPU
    data = said(cli, "placement", SAMPLE, *few, "--out", "placed")
    assert list(data["written"]["left_out"]) == ["vllm-ascend.json"]
    assert not (tmp_path / "placed" / "vllm-ascend.json").exists()
    done = cli("whatif", "placement", SAMPLE, *few, "--out", "placed")
    assert "  not vllm-ascend.json: vLLM-Ascend cannot hold expert" in done.stdout
    only = ("--out", "other", "--format", "vllm-ascend")
    assert "twice on GPU 0" in one_line(cli("whatif", "placement", SAMPLE, *few, *only))
    data = said(cli, "placement", SAMPLE, *ON_8, "--out", "more", "--no-repeats")
    assert data["written"]["left_out"] == {}


def test_layers_without_tokens_are_said(cli: Cli, tmp_path: Path):
    layers = [Layer(n, f"layers.{n}.mlp", experts=8, top_k=2, **MOE) for n in range(2)]
    random = np.random.default_rng(5)
    steps = [random_step(random, layers[:1], 4, 5) for _ in range(4)]
    record(tmp_path / "r", steps, layers=tuple(layers))
    few = ("--gpus", 2, "--slots", 10, "--out", "placed")
    assert said(cli, "placement", "r", *few)["written"]["layers_without_tokens"] == [1]
    done = cli("whatif", "placement", "r", *few)
    assert "layers without tokens, as today or in order: 1" in done.stdout


# -- bad input


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample placed on 8 GPUs."""
    from routeprof.formats.placements import write_placement

    folder = tmp_path_factory.mktemp("placed")
    profile = routeprof.load(SAMPLE)
    write_placement(decide(profile, Cluster.even(8, 24), effort="low").placement, folder)
    (folder / "other.json").write_text(json.dumps({"physical_to_logical_map": [[*range(24)]] * 4}))
    (folder / "short.json").write_text(json.dumps({"physical_to_logical_map": [[*range(16)]] * 3}))
    (folder / "cut.pt").write_bytes((folder / "sglang.pt").read_bytes()[:500])
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--today nowhere.json", "nowhere.json is no file"),
        ("--today PLACED/other.json", "places 24 experts, and the model has 16"),
        ("--today PLACED/short.json", "has 3 layers, and the model 4"),
        ("--today PLACED/cut.pt", "cannot be read"),
        ("--today PLACED", "is of no known kind"),
        ("--gpus 4 --today PLACED/vllm-ascend.json", "is for 8 GPUs, not for 4"),
        ("--gpus 4 --today PLACED/placement.csv", "is for 8 GPUs, not for 4"),
        ("--moves 1", "which is contiguous and has 16 slots, not 24"),
        ("--slots 16 --moves 1 --today PLACED/eplb.npz", "is given and has 24 slots, not 16"),
        ("--today PLACED/eplb.npz --moves=-1", "moves >= 0"),
        ("--format csv", "pass --out"),
        ("--speed 1,2", "2 speeds for 8 GPUs"),
        ("--speed fast", "'fast' is no numbers"),
        ("--out placed --format cvs", "'cvs' is not one of sglang, trtllm"),
        ("--out PLACED/other.json", "cannot be written to"),
        # As recorded: 3 matrices of 128 x 96 in float32 are 144 KiB, in each of 4 layers.
        ("--gpu-memory 1727KiB", "at most 16 slots fit, pass --slots 16"),
        ("--expert-bytes 80GiB", "--gpu-memory"),
        ("--gpu-memory 80Gbit --expert-bytes 1GiB", "'80Gbit' is no size"),
        ("--gpu-memory 80 --expert-bytes 1GiB", "'80' has no unit: pass one such as 80GiB"),
        ("--gpu-memory 0 --expert-bytes 1GiB", "'0' is no size"),
        ("--gpu-memory 8GiB --expert-bytes 1GiB", "at most 16 slots fit, pass --slots 16"),
        ("--gpu-memory 7GiB --expert-bytes 1GiB", "at most 8 slots fit, and 16 experts need one"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, placed: Path, arguments: str, says: str):
    words = shlex.split(arguments.replace("PLACED", str(placed)))
    given = [word for word in words if word in ("--gpus", "--slots")]
    rest = {"--gpus": "8", "--slots": "24"}
    words += [part for name, value in rest.items() if name not in given for part in (name, value)]
    assert says in one_line(cli("whatif", "placement", SAMPLE, *words))


def test_speeds(cli: Cli):
    speeds = ("--speed", "1,1,1,1,1,1,1,0.5", "--effort", "low")
    data = said(cli, "placement", SAMPLE, *ON_8, *speeds)
    assert data["fitted"]["routeprof"] < data["fitted"]["eplb"]
    assert data["speed"] == speeds[1]
    done = cli("whatif", "placement", SAMPLE, *ON_8, *speeds)
    assert done.stdout.startswith("rank load by speed, max ÷ mean;")


def test_as_many_slots_as_fit_are_placed(cli: Cli):
    for room in ("--gpu-memory 12GiB --expert-bytes 1GiB", "--gpu-memory 1728KiB"):
        assert said(cli, "placement", SAMPLE, *ON_8, *room.split())["slots"] == 24


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("84MB", 84_000_000),
        ("1.5KiB", 1536),
        ("7000", 7000),
        ("7 B", 7),
        ("80g", 80_000_000_000),
        ("80gib", 80 * 2**30),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_bytes(text, "memory") == size


def test_layers_that_differ_cannot_be_written(cli: Cli, tmp_path: Path):
    layers = (
        Layer(0, "layers.0.mlp", experts=8, top_k=2, **MOE),
        Layer(1, "layers.1.mlp", experts=6, top_k=2, **MOE),
    )
    random = np.random.default_rng(6)
    record(tmp_path / "r", [random_step(random, layers, 4, 5) for _ in range(4)], layers=layers)
    said(cli, "placement", "r", "--gpus", 2, "--slots", 8)
    line = one_line(cli("whatif", "placement", "r", "--gpus", 2, "--slots", 8, "--out", "placed"))
    assert "6 and 8 experts" in line
