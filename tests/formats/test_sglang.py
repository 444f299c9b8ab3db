"""SGLang's recorder: its own files, and files of its schema that torch wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import routeprof
from routeprof.errors import UsageError
from routeprof.formats import convert

DATA = Path(__file__).parent / "data" / "sglang"
FILES = ("stat.pt", "per_pass_rank0.pt", "per_token_rank0.pt")
LAYER_0 = [32, 9, 10, 49, 29, 4, 11, 54, 24, 80, 22, 36, 18, 29, 13, 12]

LAYERS, EXPERTS, TOP_K = 3, 16, 4


@pytest.mark.parametrize("name", FILES)
def test_the_recorders_own_files(name: str):
    profile = routeprof.load(DATA / name)
    assert profile.counts.sum(axis=1).tolist() == [432] * 4
    assert profile.counts[0].tolist() == LAYER_0
    assert np.array_equal(profile.counts, routeprof.load(DATA / FILES[0]).counts)
    assert profile.info.model.engine == "sglang"


def test_phases_and_tokens_of_per_token():
    profile = routeprof.load(DATA / FILES[2])
    assert profile.layers()["tokens"].tolist() == [108] * 4
    assert profile.layers()["top_k"].tolist() == [4] * 4
    steps = profile.steps()
    first = steps[steps["layer"] == 0]
    assert first["phase"].tolist() == ["prefill"] * 2 + ["decode"] * 7
    assert first["tokens"].tolist() == [60, 27, *[3] * 7]
    found = torch.load(DATA / FILES[2], weights_only=True)
    first_choices = found["records"][0]["topk_ids_of_layer"][2, :, 0].tolist()
    assert profile.tokens(2).ids[:60, 0].tolist() == first_choices


def test_what_the_recorder_does_not_say_is_not_known():
    for name in FILES[:2]:
        rows = routeprof.load(DATA / name).layers()
        assert rows["top_k"].isna().all()
        assert rows["tokens"].isna().all()
        assert rows["steps"].tolist() == [8] * 4


def test_a_ring_is_unordered_and_partly_empty(tmp_path: Path):
    found = torch.load(DATA / FILES[0], weights_only=True)
    found["logical_count"] = torch.roll(found["logical_count"], 995, 0)
    torch.save(found, tmp_path / "rolled.pt")
    profile = routeprof.load(tmp_path / "rolled.pt")
    assert profile.counts[0].tolist() == LAYER_0
    assert profile.layers()["steps"].tolist() == [8] * 4
    assert any("not in the order of time" in note for note in profile.info.notes)
    assert not any("full" in note for note in profile.info.notes)
    found["logical_count"] = found["logical_count"][found["logical_count"].any(2).any(1)]
    torch.save(found, tmp_path / "full.pt")
    notes = routeprof.load(tmp_path / "full.pt").info.notes
    assert any("ring of 8 steps is full" in note for note in notes)


def test_logical_counts_as_json_with_dense_layers(tmp_path: Path):
    counts = np.arange(2 * 4 * EXPERTS).reshape(2, 4, EXPERTS)
    counts[:, 1] = 0
    for name, values in (("steps", counts), ("sums", counts.sum(axis=0))):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"logical_count": values.tolist()}))
        profile = routeprof.load(path)
        assert profile.layer_indices == [0, 2, 3]
        assert profile.states[1] == "dense"
        assert np.array_equal(profile.counts, counts[:, [0, 2, 3]].sum(axis=0))
        assert profile.info.level == ("steps" if name == "steps" else "windows")


# -- files of single passes, made to the schema


def ids_of(random: np.random.Generator, tokens: int, top_k: int = TOP_K) -> np.ndarray:
    """Chosen experts [layers, tokens, top_k]; layer 0 is dense and has none."""
    ids = np.argsort(random.random((LAYERS, tokens, EXPERTS)), axis=2)[:, :, :top_k]
    ids[0] = -1
    return ids


def record(
    number: int,
    rank: int,
    ids: np.ndarray,
    slot_of: np.ndarray,
    mode: int = 2,
    *,
    detail: bool = True,
    padding: int = 0,
) -> dict[str, Any]:
    """A record as SGLang makes it: slots, counted, in a table 8 wide filled up with -1."""
    slots = np.where(
        ids >= 0, np.take_along_axis(slot_of, ids.reshape(LAYERS, -1), 1).reshape(ids.shape), -1
    )
    counts = np.zeros(slot_of.max() + 1, dtype=int)[None].repeat(LAYERS, 0)
    for layer in range(LAYERS):
        np.add.at(counts[layer], slots[layer][slots[layer] >= 0], 1)
    table = np.full((LAYERS, ids.shape[1] + padding, 8), -1)
    table[:, : ids.shape[1], : min(8, ids.shape[2])] = slots[:, :, :8]
    found: dict[str, Any] = {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor(counts, dtype=torch.int32),
    }
    if detail:
        found |= {
            "input_ids": [5] * ids.shape[1],
            "positions": list(range(ids.shape[1])),
            "extend_seq_lens": None,
            "forward_mode": mode,
            "topk_ids_of_layer": torch.tensor(table, dtype=torch.int32),
            "misc_objects": [],
        }
    return found


def dump(path: Path, records: list[dict[str, Any]], experts: np.ndarray) -> Path:
    table = torch.tensor(np.broadcast_to(experts, (LAYERS, experts.shape[-1])).copy())
    torch.save({"records": records, "last_physical_to_logical_map": table}, path)
    return path


STRAIGHT = np.arange(EXPERTS)
ORDER = np.broadcast_to(STRAIGHT, (LAYERS, EXPERTS))


def expected(*all_ids: np.ndarray) -> np.ndarray:
    """Counts of layers 1 and 2 by brute force."""
    counts = np.zeros((2, EXPERTS), dtype=int)
    for ids in all_ids:
        for layer in (1, 2):
            for row in ids[layer]:
                for expert in row:
                    counts[layer - 1, expert] += 1
    return counts


@pytest.mark.parametrize("detail", [False, True])
def test_several_ranks_and_a_missing_record(tmp_path: Path, detail: bool):
    random = np.random.default_rng(1)
    ids = {(number, rank): ids_of(random, 5 + rank) for number in range(4) for rank in (0, 1)}
    del ids[2, 1]
    files = [
        dump(
            tmp_path / f"rank{rank}.pt",
            [record(n, r, own, ORDER, detail=detail) for (n, r), own in ids.items() if r == rank],
            STRAIGHT,
        )
        for rank in (1, 0)
    ]
    profile = routeprof.load(convert(files, tmp_path / "run"))
    assert np.array_equal(profile.counts, expected(*ids.values()))
    assert profile.states[0] == "dense"
    assert "1 of 4 passes lack a rank's record" in profile.info.notes
    assert any("multiple of what was routed" in note for note in profile.info.notes)
    if detail:
        assert len(profile.ranks()) == 2
        assert profile.layers()["tokens"].tolist() == [sum(i.shape[1] for i in ids.values())] * 2
    else:  # one step a pass, whatever ranks hold of it
        assert profile.layers()["steps"].tolist() == [4, 4]
        third = profile.step_counts()
        assert np.array_equal(third.counts[third.step == 2], expected(ids[2, 0]))


def test_a_rank_whose_file_is_not_there_is_named(tmp_path: Path):
    ids = ids_of(np.random.default_rng(2), 4)
    path = dump(tmp_path / "rank2.pt", [record(0, 2, ids, ORDER)], STRAIGHT)
    assert any("ranks 0, 1 have no file" in note for note in routeprof.load(path).info.notes)


def test_the_same_rank_twice(tmp_path: Path):
    ids = ids_of(np.random.default_rng(2), 4)
    path = dump(tmp_path / "a.pt", [record(0, 0, ids, ORDER)], STRAIGHT)
    with pytest.raises(UsageError, match="pass each once"):
        convert([path, path], tmp_path / "run")


@pytest.mark.parametrize("detail", [False, True])
def test_slots_with_replicas_become_experts(tmp_path: Path, detail: bool):
    random = np.random.default_rng(3)
    experts = np.stack([random.permutation(np.append(STRAIGHT, [3, 3, 7])) for _ in range(LAYERS)])
    own = [ids_of(random, 30) for _ in range(3)]
    records = []
    for number, ids in enumerate(own):
        places = [[random.choice(np.flatnonzero(row == e)) for e in STRAIGHT] for row in experts]
        made = record(number, 0, ids, np.array(places), detail=detail)
        wide = np.zeros((LAYERS, experts.shape[1]), dtype=np.int32)
        counts = made["global_physical_count"].numpy()
        wide[:, : counts.shape[1]] = counts
        made["global_physical_count"] = torch.tensor(wide)
        records.append(made)
    profile = routeprof.load(dump(tmp_path / "moved.pt", records, experts))
    assert profile.counts.shape == (2, EXPERTS)
    assert np.array_equal(profile.counts, expected(*own))
    assert any("last rebalancing" in note for note in profile.info.notes)


def test_order_of_choices_padding_and_idle_passes(tmp_path: Path):
    random = np.random.default_rng(4)
    own = [ids_of(random, 6), ids_of(random, 3)]
    idle = np.zeros((LAYERS, 0, TOP_K), dtype=int)
    records = [
        record(0, 0, own[0], ORDER, mode=1, padding=10),
        record(1, 0, idle, ORDER, mode=4, padding=2),
        record(2, 0, own[1], ORDER, mode=5),
        record(3, 0, idle, ORDER, mode=4),
    ]
    profile = routeprof.load(dump(tmp_path / "a.pt", records, STRAIGHT))
    assert profile.phases == ("prefill", "verify")
    assert profile.layers()["tokens"].tolist() == [9, 9]
    assert profile.layers()["invalid"].tolist() == [0, 0]
    ids = np.concatenate([one[1] for one in own])
    assert np.array_equal(profile.tokens(1).ids, ids)  # the first choice stays the first


def test_ids_outside_the_slots_are_tallied(tmp_path: Path):
    ids = ids_of(np.random.default_rng(5), 8)
    made = record(0, 0, ids, ORDER)
    made["topk_ids_of_layer"][1, 2, 0] = -1
    made["global_physical_count"][1, ids[1, 2, 0]] -= 1
    made["topk_ids_of_layer"][2, 3, 1] = EXPERTS  # a fused shared expert, counted nowhere
    made["global_physical_count"][2, ids[2, 3, 1]] -= 1
    profile = routeprof.load(dump(tmp_path / "a.pt", [made], STRAIGHT))
    rows = profile.layers()
    assert rows["invalid"].tolist() == [1, 1]
    assert rows["tokens"].tolist() == [8, 8]
    assert (rows["assignments"] + rows["invalid"]).tolist() == [8 * TOP_K] * 2


def test_a_table_too_narrow_for_top_k_counts_all_the_same(tmp_path: Path):
    ids = ids_of(np.random.default_rng(6), 7, top_k=10)
    profile = routeprof.load(dump(tmp_path / "a.pt", [record(0, 0, ids, ORDER)], STRAIGHT))
    assert profile.info.level == "steps"
    assert profile.layers()["top_k"].isna().all()
    assert profile.counts.sum(axis=1).tolist() == [70, 70]
    assert np.array_equal(profile.counts, expected(ids))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"records": []}, "lacks what SGLang records"),
        ({"weights": torch.ones(3)}, "is no dump of SGLang"),
        ([1, 2], "holds no dictionary"),
        ({"logical_count": torch.ones(3, dtype=torch.int32)}, "has logical_count of shape"),
        ({"logical_count": torch.zeros(2, 3, 4, dtype=torch.int32)}, "counts nothing"),
        ({"logical_count": [[1, 2]]}, "that is no tensor"),
        ({"logical_count": torch.full((2, 2), 0.5)}, "fractions"),
        ({"logical_count": -torch.ones(2, 2)}, "no counts"),
        (
            {"records": [{"rank": 0}], "last_physical_to_logical_map": torch.zeros(1, 2).int()},
            "lacks what SGLang records",
        ),
        (
            {"records": [{"rank": 0}], "last_physical_to_logical_map": [[0, 1]]},
            "tensor of whole numbers",
        ),
        (
            {"records": [7], "last_physical_to_logical_map": torch.zeros(1, 2).int()},
            "lacks what SGLang records",
        ),
        (
            {"records": [], "last_physical_to_logical_map": torch.zeros(1, 2).int()},
            "are of different models, or hold no pass",
        ),
    ],
)
def test_bad_dumps(tmp_path: Path, found: Any, says: str):
    torch.save(found, tmp_path / "bad.pt")
    with pytest.raises(UsageError, match=says) as error:
        routeprof.load(tmp_path / "bad.pt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"global_physical_count": torch.ones(LAYERS, EXPERTS + 1).int()}, "counts of shape"),
        ({"topk_ids_of_layer": torch.ones(LAYERS, 4).int()}, "ids of shape"),
        ({"topk_ids_of_layer": torch.ones(LAYERS + 1, 4, 8).int()}, "ids of shape"),
        ({"topk_ids_of_layer": [[1]]}, "tensor of whole numbers"),
        ({"forward_pass_id": "one"}, "lacks what SGLang records"),
        ({"rank": [0]}, "lacks what SGLang records"),
        ({"forward_mode": [1]}, "lacks what SGLang records"),
    ],
)
def test_bad_records(tmp_path: Path, change: dict[str, Any], says: str):
    made = record(0, 0, ids_of(np.random.default_rng(7), 4), ORDER) | change
    path = dump(tmp_path / "bad.pt", [made], STRAIGHT)
    with pytest.raises(UsageError, match=says) as error:
        routeprof.load(path)
    assert "\n" not in str(error.value)
