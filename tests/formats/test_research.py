"""Files of research tools: a patched vLLM's log, ESFT's and CD-MoE's records, and what is no count.

Files of the same schemas that are made here; ``test_realdata.py`` has their authors' own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import NotKnownError, RouteprofError, UsageError
from routeprof.formats import Told, convert, read
from routeprof.formats.recorded import write_recording

EXPERTS, TOP_K = 8, 2
META = {"type": "meta", "model_id": "m", "vllm_version": "0.16", "layers_logged": [0, 3]}


def chosen(rows: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [source.sample(range(EXPERTS), TOP_K) for _ in range(rows)]


def counted(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(row.count(expert) for row in map(list, rows)) for expert in range(EXPERTS)]


def log(path: Path, passes: Sequence[dict[int, list[list[int]]]]) -> Path:
    """A log of passes: by layer, the experts of each row."""
    lines: list[dict[str, Any]] = [META]
    for one in passes:
        for layer, rows in one.items():
            lines += [
                {"type": "route", "req_id": "r1", "token_idx": row, "layer": layer, "topk_ids": ids}
                for row, ids in enumerate(rows)
            ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_passes_of_a_log(tmp_path: Path):
    sizes = (5, 1, 1, 3)
    passes = [{layer: chosen(n, 10 * n + layer) for layer in (0, 3)} for n in sizes]
    profile = routeprof.load(log(tmp_path / "a.jsonl", passes))
    assert profile.layer_indices == [0, 3]
    assert profile.layers()["top_k"].tolist() == [TOP_K] * 2
    for place, layer in enumerate((0, 3)):
        rows = [ids for one in passes for ids in one[layer]]
        assert profile.counts[place].tolist() == counted(rows)
        assert profile.tokens(layer).ids.tolist() == rows
    steps = profile.steps()
    assert steps["tokens"].tolist() == [n for n in sizes for _ in range(2)]
    assert (profile.info.model.name, profile.info.model.engine) == ("m", "vllm")
    assert profile.phases == ("unknown",)
    assert not any("warm-up" in note for note in profile.info.notes)


@pytest.mark.parametrize(("rows", "noticed"), [(63, False), (64, True)])
def test_rows_that_are_all_alike_are_noticed(tmp_path: Path, rows: int, noticed: bool):
    real = chosen(40, 1)
    passes = [{0: [[2, 5]] * rows}, {0: real}, {0: [[2, 5]] * rows}]
    profile = routeprof.load(log(tmp_path / "a.jsonl", passes))
    assert profile.layers()["tokens"].tolist() == [2 * rows + 40]
    notes = [note for note in profile.info.notes if "warm-up" in note]
    assert bool(notes) == noticed
    if noticed:
        assert profile.select(tag="untagged").counts[0].tolist() == counted(real)
        due = [counted([*passes[0][0], *real, *passes[2][0]]), counted(real)]
        with_them, without = (max(own) * EXPERTS / sum(own) for own in due)
        assert f"is {with_them:.2f} with them and {without:.2f} without" in notes[0]
        assert f"{2 * rows} of {2 * rows + 40} rows" in notes[0]


def test_a_log_of_dummies_alone(tmp_path: Path):
    profile = routeprof.load(log(tmp_path / "a.jsonl", [{0: [[2, 5]] * 100}]))
    assert any("nothing is left without" in note for note in profile.info.notes)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            {"type": "route", "token_idx": 0, "layer": 0, "topk_ids": ["a"]},
            "lacks layer, token_idx",
        ),
        ({"type": "route", "token_idx": 0, "layer": 0, "topk_ids": []}, "lacks layer, token_idx"),
        ({"type": "route", "token_idx": 0, "topk_ids": [1]}, "lacks layer, token_idx"),
        ({"type": "route", "token_idx": 4, "layer": 0, "topk_ids": [1]}, "in its middle"),
        ({"type": "route", "token_idx": 0, "layer": 0, "topk_ids": [1, 2**70]}, "pass another"),
        (
            {"type": "route", "token_idx": 0, "layer": -1, "topk_ids": [1, 2]},
            "lacks layer, token_idx",
        ),
        ({"type": "other", "token_idx": 0, "topk_ids": [1]}, "holds no routes"),
        (7, "no JSON object"),
    ],
)
def test_bad_logs(tmp_path: Path, line: Any, says: str):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(META) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(RouteprofError, match=says) as error:
        convert([path], tmp_path / "run", "vllm-log")
    assert "\n" not in str(error.value)


def test_rows_of_several_widths(tmp_path: Path):
    for passes in ([{0: [[1, 2], [1, 2, 3]]}], [{0: [[1, 2]]}, {0: [[1, 2, 3]]}]):
        with pytest.raises(UsageError, match="widths"):
            routeprof.load(log(tmp_path / "a.jsonl", passes))


# -- ESFT


def sequences(folder: Path, layer: int, lengths: Sequence[int]) -> tuple[Path, list[list[int]]]:
    rows = [chosen(length, 100 * layer + length) for length in lengths]
    lines = []
    for one in rows:
        flat = [str(expert) for ids in one for expert in ids]
        lines.append("\t".join(flat) + "\t\t" + "\t".join(["0.25"] * len(flat)))
    path = folder / f"expert_weights_{layer}.txt"
    path.write_text("\n".join(lines) + "\n")
    return path, [ids for one in rows for ids in one]


def test_sequences_of_several_layers(tmp_path: Path):
    lengths = (7, 1, 12)
    made = [sequences(tmp_path, layer, lengths) for layer in (4, 1)]
    paths = [path for path, _ in made]
    told = Told(TOP_K, "prefill", experts=10)
    profile = routeprof.load(convert(paths, tmp_path / "run", told=told))
    assert profile.layer_indices == [1, 4]
    assert profile.counts.tolist() == [[*counted(rows), 0, 0] for _, rows in reversed(made)]
    assert profile.requests()["prefill_tokens"].tolist() == list(lengths)
    assert profile.tokens(4).ids.tolist() == made[0][1]
    with pytest.raises(NotKnownError):
        profile.steps()


def test_bad_sequences(tmp_path: Path):
    path, _ = sequences(tmp_path, 1, (6, 3))
    other, _ = sequences(tmp_path, 2, (3, 6))
    cases: list[tuple[list[Path], Told, str]] = [
        ([path], Told(), "--top-k"),
        ([path], Told(5), "5 experts for each token"),
        ([path], Told(6), "choose an expert twice"),
        ([path, other], Told(TOP_K), "not the same ones"),
        ([path, path], Told(TOP_K), "not the same ones"),
    ]
    for paths, told, says in cases:
        with pytest.raises(UsageError, match=says):
            convert(paths, tmp_path / "run", "esft", told)
    path.write_text("1\t2\t\t0.5\n")
    with pytest.raises(UsageError, match="not as many weights"):
        convert([path], tmp_path / "run", told=Told(TOP_K))
    path.rename(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="is not named"):
        convert([tmp_path / "a.txt"], tmp_path / "run", "esft", Told(TOP_K))


# -- CD-MoE


def test_sums_of_weights(tmp_path: Path):
    cells = {(0, 1): 5, (0, 3): 7, (2, 0): 12}
    found = {f"{layer}-{expert}": [n / 10, n, 0.1] for (layer, expert), n in cells.items()}
    (tmp_path / "a.json").write_text(json.dumps(found))
    profile = routeprof.load(tmp_path / "a.json")
    assert profile.layer_indices == [0, 2]
    assert profile.counts.tolist() == [[0, 5, 0, 7], [12, 0, 0, 0]]
    assert profile.layers()["steps"].isna().all()


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"0-1": [1, 2, 3], "a": [1, 2, 3]}, "not layer-expert"),
        ({"0-1": [1, 2]}, "not layer-expert"),
        ({"0-1": [1, "a", 2]}, "not counts"),
        ({"0-1": [1, -2, 2]}, "no counts"),
        ({"0-1": [1, 0.5, 2]}, "fractions"),
        ({"0-1": [1, None, 2]}, "not counts"),
        ({"0-99999": [1, 2, 3]}, "which cannot be"),
    ],
)
def test_bad_sums_of_weights(tmp_path: Path, found: Any, says: str):
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match=says):
        routeprof.load(tmp_path / "a.json")


def test_more_experts_than_were_told(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"0-9": [1, 2, 3]}')
    with pytest.raises(UsageError, match="pass more --experts"):
        convert([tmp_path / "a.json"], tmp_path / "run", told=Told(experts=9))


# -- what is no count


@pytest.mark.parametrize(
    "found",
    [
        {"token_scores": {"1": {"0": 0.1}}, "gate_scores": {}},
        {"code": {"think_expert_analytics": {"layer_0": {"1": {"count_frequency": 0.1}}}}},
    ],
)
def test_shares_are_refused(tmp_path: Path, found: Any):
    (tmp_path / "a.json").write_text(json.dumps(found))
    for use in (routeprof.load, lambda path: convert([path], tmp_path / "run")):
        with pytest.raises(UsageError, match="shares by expert, not counts"):
            use(tmp_path / "a.json")


def pattern(gpus: int, layers: int, experts: int, replicas: int, seed: int) -> np.ndarray:
    """1 where a GPU holds an expert, [gpus, layers, experts]."""
    source = np.random.default_rng(seed)
    held = np.zeros((gpus, layers, experts), dtype=np.int64)
    slots = (experts + replicas) // gpus
    for layer in range(layers):
        order = source.permutation(experts)
        for gpu in range(gpus):
            own = order[gpu * (experts // gpus) : (gpu + 1) * (experts // gpus)]
            held[gpu, layer, own] = 1
            free = np.flatnonzero(held[gpu, layer] == 0)
            held[gpu, layer, source.choice(free, slots - len(own), replace=False)] = 1
    return held


@pytest.mark.parametrize("replicas", [0, 4, 8])
def test_a_placement_is_refused(tmp_path: Path, replicas: int):
    np.save(tmp_path / "a.npy", pattern(4, 3, 16, replicas, 1))
    with pytest.raises(UsageError, match="which expert is where"):
        routeprof.load(tmp_path / "a.npy")


def test_steps_of_single_tokens_are_no_placement(tmp_path: Path):
    """They are zeros and ones too, and all of one sum."""
    ids = np.argsort(np.random.default_rng(2).random((40, 3, 16)), axis=2)[:, :, :4]
    counts = np.zeros((40, 3, 16), dtype=np.int64)
    np.put_along_axis(counts, ids, 1, axis=2)
    np.save(tmp_path / "a.npy", counts)
    assert np.array_equal(routeprof.load(tmp_path / "a.npy").counts, counts.sum(axis=0))


# -- any damage


def _log(folder: Path) -> Path:
    return log(folder / "a.jsonl", [{layer: chosen(4, layer) for layer in (0, 3)}] * 2)


def _sequences(folder: Path) -> Path:
    return sequences(folder, 1, (4, 3))[0]


def _sums(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps({f"{n // 4}-{n % 4}": [0.5, n, 0.5] for n in range(8)}))
    return path


def _counts(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps({"logical_count": [[1, 2, 3], [4, 5, 6]]}))
    return path


def _table(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_text("layer,expert,count,step,phase\n0,0,1,0,decode\n0,1,2,1,decode\n")
    return path


PLENTIFUL = b'0123456789-[]{}",:\n\t.eEn\x00\xff'


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(st.data())
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_log, "vllm-log"),
        (_sequences, "esft"),
        (_sums, "cd-moe"),
        (_counts, "sglang"),
        (_table, "csv"),
    ],
)
def test_damage_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[Path], Path],
    name: str,
    data: st.DataObject,
):
    folder = tmp_path_factory.mktemp("damage")
    path = make(folder)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        change = data.draw(st.sampled_from(["set", "cut", "drop", "double"]))
        if change == "set":
            content[place : place + 1] = bytes([data.draw(st.sampled_from(PLENTIFUL))])
        elif change == "cut":
            del content[place:]
        elif change == "drop":
            del content[place : place + 9]
        else:
            content[place:place] = content[place : place + 20]
    path.write_bytes(content)
    told = Told(TOP_K) if name == "esft" else Told()
    try:
        write_recording(read([path], name, told), folder / "run")
    except RouteprofError as error:
        assert "\n" not in str(error)  # noqa: PT017
