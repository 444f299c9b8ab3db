"""Placement files against readers written anew from what the engines publish, and back again."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.formats.placements import (
    FORMATS,
    Deployment,
    ExpertMap,
    read_placement,
    write_placement,
)
from tests.realdata import realdata  # noqa: F401

FILES = [file for files in FORMATS.values() for file in files]


@st.composite
def maps(draw, repeats: bool = True) -> ExpertMap:
    """Any placement: dense layers anywhere, replicas anywhere."""
    gpus = draw(st.integers(1, 4))
    room = draw(st.integers(1, 5))
    experts = draw(st.integers(room if not repeats else 1, gpus * room))
    model_layers = draw(st.integers(1, 5))
    numbers = st.integers(0, model_layers - 1)
    layers = tuple(sorted(draw(st.sets(numbers, min_size=1))))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [_row(random, experts, gpus, room, repeats) for _ in layers]
    return ExpertMap(Deployment(layers, experts, gpus, model_layers), np.array(rows))


def _row(random, experts: int, gpus: int, room: int, repeats: bool) -> list[int]:
    if repeats:
        more = random.integers(0, experts, gpus * room - experts)
        return random.permutation([*range(experts), *more]).tolist()
    # A shuffled round of the experts again and again, cut into GPUs: none twice in experts slots.
    return np.resize(random.permutation(experts), gpus * room).tolist()


# -- readers of our own, for nothing but the published schema


def sglang_json(path: Path, place: Deployment) -> list[list[int]]:
    data = json.loads(path.read_text())
    return init_by_mapping(place, **data)


def sglang_pt(path: Path, place: Deployment) -> list[list[int]]:
    data = torch.load(path, weights_only=True, map_location="cpu")
    return init_by_mapping(place, **data)


def init_by_mapping(place: Deployment, physical_to_logical_map) -> list[list[int]]:
    """SGLang passes the file's keys on as arguments, and indexes by the layer's number."""
    rows = torch.as_tensor(physical_to_logical_map)
    assert rows.dtype == torch.int64
    assert len(rows) == place.model_layers
    for row in rows.tolist():  # of dense layers too
        assert set(row) == set(range(place.experts))
    return [rows[layer].tolist() for layer in place.layers]


def trtllm(path: Path, place: Deployment) -> list[list[int]]:
    """MoeLoadBalancerConfig: three fields, no others; layers by their number in the model."""
    data = yaml.safe_load(path.read_text())
    assert set(data) == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert data["num_slots"] % place.gpus == 0
    assert data["layer_updates_per_iter"] == 0
    rows = data["initial_global_assignments"]
    assert all(type(layer) is int and len(row) == data["num_slots"] for layer, row in rows.items())
    return [rows[layer] for layer in place.layers]


def arrays(path: Path, place: Deployment, names: tuple[str, str, str]) -> list[list[int]]:
    loaded = np.load(path, allow_pickle=False)
    rows, slots, count = (loaded[name].tolist() for name in names)
    assert loaded["layers"].tolist() == list(place.layers)
    assert loaded["gpus"] == place.gpus
    assert len(slots[0][0]) == max(max(layer) for layer in count)
    for layer, row in enumerate(rows):
        for expert in range(place.experts):
            where = [slot for slot, held in enumerate(row) if held == expert]
            padded = where + [-1] * (len(slots[layer][expert]) - len(where))
            assert slots[layer][expert] == padded
            assert count[layer][expert] == len(where)
    return rows


def eplb(path: Path, place: Deployment) -> list[list[int]]:
    return arrays(path, place, ("phy2log", "log2phy", "logcnt"))


def vllm(path: Path, place: Deployment) -> list[list[int]]:
    names = ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")
    return arrays(path, place, names)


def ascend(path: Path, place: Deployment) -> list[list[int]]:
    """vLLM-Ascend takes the n-th MoE layer from the list, and numbers the slots of each device."""
    data = json.loads(path.read_text())
    assert data["moe_layer_count"] == len(data["layer_list"]) == len(place.layers)
    rows = []
    for number in range(len(place.layers)):
        layer = data["layer_list"][number]
        assert (layer["layer_id"], layer["device_count"]) == (number, place.gpus)
        assert [device["device_id"] for device in layer["device_list"]] == [*range(place.gpus)]
        devices = torch.tensor([device["device_expert"] for device in layer["device_list"]])
        for device in devices:
            local = torch.full((place.experts,), -1)
            local[device] = torch.arange(len(device))
            assert (local >= 0).sum() == len(device)  # it counts the slots of a device so
        rows.append(devices.flatten().tolist())
    return rows


def table(path: Path, place: Deployment) -> list[list[int]]:
    rows: dict[int, dict[int, int]] = {layer: {} for layer in place.layers}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["layer"])][int(row["slot"])] = int(row["expert"])
    return [[row[slot] for slot in range(len(row))] for row in rows.values()]


ORACLES = {
    "sglang.json": sglang_json,
    "sglang.pt": sglang_pt,
    "trtllm.yaml": trtllm,
    "vllm.npz": vllm,
    "eplb.npz": eplb,
    "vllm-ascend.json": ascend,
    "placement.csv": table,
}
SLOW = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SLOW
@given(placement=maps(repeats=False))
def test_every_file_says_what_engines_read(tmp_path: Path, placement: ExpertMap):
    written = write_placement(placement, tmp_path)
    assert [file.name for file in written.files] == FILES == list(ORACLES)
    for file in written.files:
        assert ORACLES[file.name](file, placement.deployment) == placement.slots.tolist()


@SLOW
@given(placement=maps())
def test_every_file_is_read_back(tmp_path: Path, placement: ExpertMap):
    written = write_placement(placement, tmp_path)
    for file in written.files:
        back = read_placement(file, placement.deployment)
        assert back.deployment == placement.deployment
        assert back.slots.dtype == np.int64
        assert back.slots.tolist() == placement.slots.tolist()


@SLOW
@given(placement=maps())
def test_an_expert_twice_on_a_gpu_is_not_for_ascend(tmp_path: Path, placement: ExpertMap):
    twice = any(len(set(gpu)) < len(gpu) for row in placement.by_gpu.tolist() for gpu in row)
    written = write_placement(placement, tmp_path)
    assert list(written.left_out) == ["vllm-ascend.json"] * twice
    if twice:
        with pytest.raises(UsageError, match="--no-repeats"):
            write_placement(placement, tmp_path, ["vllm-ascend"])


# -- EPLB's published example

PHY2LOG = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example(tmp_path: Path):
    placement = ExpertMap(Deployment((0, 1), 12, 8, 2), np.array(PHY2LOG))
    assert placement.replicas.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert placement.slots_of_experts[0, :3].tolist() == [[12, -1], [13, 15], [11, -1]]
    assert placement.by_gpu[0, :2].tolist() == [[5, 6], [5, 7]]


def test_dense_layers_have_a_row_where_the_engine_wants_all(tmp_path: Path):
    place = Deployment((1, 3), 2, 2, 6)
    placement = ExpertMap(place, np.array([[1, 0, 1, 0], [1, 1, 0, 0]]))
    write_placement(placement, tmp_path, ["sglang", "trtllm"])
    order = [0, 1, 0, 1]
    rows = json.loads((tmp_path / "sglang.json").read_text())["physical_to_logical_map"]
    assert rows == [order, [1, 0, 1, 0], order, [1, 1, 0, 0], order, order]
    text = (tmp_path / "trtllm.yaml").read_text()
    assert list(yaml.safe_load(text)["initial_global_assignments"]) == [1, 3]


# -- others' files


def test_arrays_without_layers_are_of_moe_layers(tmp_path: Path):
    place = Deployment((1, 2), 3, 2, 3)
    rows = np.array([[0, 1, 2, 0], [2, 1, 0, 1]], dtype=np.int32)
    np.savez(tmp_path / "moe.npz", phy2log=rows)
    np.savez(tmp_path / "vllm.npz", physical_to_logical_map=rows)
    np.save(tmp_path / "bare.npy", rows)
    for name in ("moe.npz", "vllm.npz", "bare.npy"):
        assert read_placement(tmp_path / name, place).slots.tolist() == rows.tolist()


def test_the_rows_of_a_table_may_be_in_any_order(tmp_path: Path):
    place = Deployment((0, 7), 3, 2, 9)
    placement = ExpertMap(place, np.array([[0, 1, 2, 0], [2, 1, 0, 1]]))
    write_placement(placement, tmp_path, ["csv"])
    file = tmp_path / "placement.csv"
    header, *rows = file.read_text().splitlines()
    file.write_text("\n".join([header, *rows[::-1]]))
    assert read_placement(file, place).slots.tolist() == placement.slots.tolist()


def test_yaml_in_blocks_and_other_orders(tmp_path: Path):
    rows = "initial_global_assignments:\n  4:\n  - 1\n  - 0\n  3: [0, 1]\n"
    (tmp_path / "a.yml").write_text(f"# by hand\n{rows}num_slots: 2\n")
    found = read_placement(tmp_path / "a.yml", Deployment((3, 4), 2, 1, 5))
    assert found.slots.tolist() == [[0, 1], [1, 0]]


def test_a_pattern(tmp_path: Path):
    pattern = np.zeros((2, 2, 3), dtype=np.int32)
    for gpu, layer, held in ((0, 0, [2, 0]), (1, 0, [1, 2]), (0, 1, [0, 1]), (1, 1, [0, 2])):
        pattern[gpu, layer, held] = 1
    np.save(tmp_path / "a.npy", pattern)
    found = read_placement(tmp_path / "a.npy", Deployment((1, 2), 3, 2, 4))
    assert found.slots.tolist() == [[0, 2, 1, 2], [0, 1, 0, 2]]


def test_omnis_patterns(realdata: Path):  # noqa: F811
    place = Deployment(tuple(range(3, 61)), 256, 8, 61)
    for name, room in (("A2_900", 32), ("A3_500", 33)):
        (file,) = (realdata / "omni-placement").glob(f"{name}*.npy")
        pattern = np.load(file)
        found = read_placement(file, place)
        assert found.by_gpu.shape == (58, 8, room)
        for layer in (0, 31, 57):
            for gpu in range(8):
                held = np.flatnonzero(pattern[gpu, layer]).tolist()
                assert found.by_gpu[layer, gpu].tolist() == held
        assert found.replicas.tolist() == pattern.sum(0).tolist()


# -- files that are none, and placements for others

PLACE = Deployment((1, 2), 4, 2, 3)
GOOD = ExpertMap(PLACE, np.array([[0, 1, 2, 3, 0, 1], [3, 1, 2, 0, 2, 3]]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Deployment((1, 2), 5, 2, 3), "4 experts, and the model has 5"),
        (Deployment((1, 2), 3, 2, 3), "4 experts, and the model has 3"),
        (Deployment((1, 2, 4), 4, 2, 5), "for this model"),
        (Deployment((1,), 4, 2, 2), "for this model"),
        (Deployment((1, 2), 4, 4, 3), "GPUs"),
    ],
)
@pytest.mark.parametrize("file", FILES)
def test_a_placement_for_another_model(tmp_path: Path, file: str, other: Deployment, says: str):
    write_placement(GOOD, tmp_path)
    with pytest.raises(UsageError, match=says) as caught:
        read_placement(tmp_path / file, other)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("file", FILES)
def test_damaged_files(tmp_path: Path, file: str):
    write_placement(GOOD, tmp_path)
    path = tmp_path / file
    whole = path.read_bytes()
    more = [] if path.suffix in (".pt", ".npz") else [b"\x00\xff" + whole, whole[:-9] + b"[" * 9]
    for damaged in (b"", whole[: len(whole) // 2], *more):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=file) as caught:
            read_placement(path, PLACE)
        assert len(str(caught.value).splitlines()) == 1


@settings(SLOW, max_examples=150)
@given(data=st.data())
def test_no_damage_makes_a_traceback(tmp_path: Path, data):
    """Bytes changed anywhere: a placement, or one line."""
    write_placement(GOOD, tmp_path)
    path = tmp_path / data.draw(st.sampled_from(FILES))
    whole = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        found = read_placement(path, PLACE)
    except UsageError as error:
        said = str(error)
    else:
        said = f"{len(found.slots)} layers"
    assert len(said.splitlines()) == 1


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path):
    sprung = tmp_path / "sprung"
    trap = Trap(sprung)
    torch.save({"physical_to_logical_map": trap}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(trap))
    np.save(tmp_path / "c.npy", np.array([trap], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "d.npz", phy2log=np.array([trap], dtype=object))
    (tmp_path / "e.npz").write_bytes(pickle.dumps(trap))
    (tmp_path / "f.yaml").write_text(f"!!python/object/apply:os.mkdir ['{sprung}']")
    for file in sorted(tmp_path.iterdir()):
        with pytest.raises(UsageError, match="cannot be read"):
            read_placement(file, PLACE)
    assert not sprung.exists()


ROWS = [[0, 1, 2, 3], [3, 2, 1, 0]]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.json", {"logical_count": ROWS}, "counts of tokens, no placement"),
        ("a.json", {"other": 1}, "no physical_to_logical_map"),
        ("a.json", [1, 2], "no physical_to_logical_map"),
        ("a.json", {"physical_to_logical_map": ROWS}, "has 2 layers, and the model 3"),
        ("a.json", {"physical_to_logical_map": [[0, 1, 2, 3], [0]]}, "is no placement"),
        ("a.json", {"physical_to_logical_map": [[0.5] * 4] * 3}, "is no placement"),
        ("a.json", {"physical_to_logical_map": [[True] * 4] * 3}, "is no placement"),
        ("a.json", {"physical_to_logical_map": [[2**70] * 4] * 3}, "is no placement"),
        ("a.json", {"physical_to_logical_map": []}, "is no placement"),
        ("a.json", {"physical_to_logical_map": [[-1, 1, 2, 3]] * 3}, "expert -1 in slot 0"),
        ("a.json", {"physical_to_logical_map": [[0, 3, 2, 3]] * 3}, "expert 1 of layer 1 has no"),
        ("a.json", {"physical_to_logical_map": [[0, 1, 2, 3, 0]] * 3}, "5 slots on 2 GPUs"),
        ("a.json", {"layer_list": 3, "moe_layer_count": 2}, "is no expert map"),
        ("a.json", {"layer_list": [{"device_list": [{}]}]}, "is no expert map"),
        ("a.json", {"layer_list": [], "moe_layer_count": 0}, "different numbers|no placement"),
    ],
)
def test_json_that_holds_something_else(tmp_path: Path, name: str, data, says: str):
    (tmp_path / name).write_text(json.dumps(data))
    with pytest.raises(UsageError, match=says):
        read_placement(tmp_path / name, PLACE)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "num_slots: 4", "no initial_global_assignments"),
        ("a.yaml", "initial_global_assignments: {x: [0]}", "no initial_global_assignments"),
        ("a.yaml", "a: &a [*a]", "cannot be read|no initial_global"),
        (
            "a.yaml",
            "{num_slots: 5, initial_global_assignments: {1: [0,1,2,3], 2: [0,1,2,3]}}",
            "rows of 4 slots and num_slots 5",
        ),
        ("a.csv", "layer,slot,expert\n", "first line is not"),
        ("a.csv", "layer,slot,gpu,expert\n1,0,0\n", "cannot be read"),
        ("a.csv", "layer,slot,gpu,expert\n1,0,0,x\n", "cannot be read"),
        ("a.csv", "layer,slot,gpu,expert\n", "cannot be read"),
        ("a.csv", "layer,slot,gpu,expert\n1,0,0,0\n1,0,1,1\n", "repeats some"),
        ("a.csv", "layer,slot,gpu,expert\n1,0,1,0\n1,1,0,1\n", "in order"),
        ("a.txt", "", "of no known kind"),
        ("a.json", "[" * 100_000, "cannot be read"),
    ],
)
def test_text_that_holds_something_else(tmp_path: Path, name: str, text: str, says: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says):
        read_placement(tmp_path / name, PLACE)


def test_arrays_that_hold_something_else(tmp_path: Path):
    rows = np.array(ROWS)
    cases = {
        "floats": ({"phy2log": rows / 2}, "is no placement"),
        "flat": ({"phy2log": rows[0]}, "is no placement"),
        "names": ({"weights": rows}, "neither phy2log nor"),
        "layers": ({"phy2log": rows, "layers": np.arange(3)}, "3 layers for 2 rows"),
        "counts": ({"phy2log": rows, "logcnt": rows + 1}, "not of its phy2log"),
    }
    for name, (arrays_, says) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays_)
        with pytest.raises(UsageError, match=says):
            read_placement(tmp_path / f"{name}.npz", PLACE)
    for name, array, says in (
        ("seven", np.full((2, 2, 4), 7), "pattern of 0 and 1"),
        ("more", np.array([[[1, 1, 1, 0]] * 2, [[0, 0, 0, 1]] * 2]), "1 to 3 experts on a GPU"),
        ("five", np.ones((2, 2, 5), dtype=int), "5 experts"),
        ("three", np.ones((3, 2, 4), dtype=int), "for 3 GPUs"),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(UsageError, match=says):
            read_placement(tmp_path / f"{name}.npy", PLACE)


def test_no_file_and_no_directory(tmp_path: Path):
    with pytest.raises(UsageError, match="is no file"):
        read_placement(tmp_path / "a.json", PLACE)
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"):
        write_placement(GOOD, tmp_path / "taken")
    with pytest.raises(UsageError, match="'tensorrt' is not one of sglang, trtllm"):
        write_placement(GOOD, tmp_path / "new", ["tensorrt"])


@pytest.mark.parametrize(
    ("layers", "experts", "gpus", "model_layers", "says"),
    [
        ((), 4, 2, 3, "layers is 0"),
        ((2, 1), 4, 2, 3, "ascending"),
        ((-1,), 4, 2, 3, "ascending"),
        ((1, 3), 4, 2, 3, "layer 3 of a model of 3 layers"),
        ((1,), 4, 0, 3, "gpus is 0"),
    ],
)
def test_deployments_that_are_none(layers, experts: int, gpus: int, model_layers: int, says: str):
    with pytest.raises(UsageError, match=says):
        Deployment(layers, experts, gpus, model_layers)
