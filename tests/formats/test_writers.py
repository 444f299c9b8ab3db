"""Files that are written, read back by ours, by pandas, by torch, and beside a real trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.formats.trace import PROCESS, write_beside
from routeprof.formats.writers import WRITERS, write
from routeprof.sample_data import RECORDINGS_DIR, load_model
from routeprof.topology import Layer
from tests.diagnose.made import Step, moe, record

HEALTHY = RECORDINGS_DIR / "healthy"
COUNTS = [[[0, 4, 2, 2] * 4, [1, 1, 1, 5] * 4], [[2, 2, 2, 2] * 4, [0, 0, 8, 0] * 4]]


@pytest.fixture
def dense_between(tmp_path: Path) -> Path:
    """Two steps; the layer between the two is dense."""
    layers = [moe(0), Layer(1, "layers.1.mlp", kind="dense"), moe(2)]
    steps = [Step([one, None, other]) for one, other in COUNTS]
    return record(tmp_path / "run", steps, layers=layers)


def due(steps: list[list[list[int]]]) -> np.ndarray:
    sums = np.sum(steps, axis=0)
    return np.stack([sums[0], np.zeros(16), sums[1]]).astype(np.int64)


def test_counts_with_dense_layers(dense_between: Path, tmp_path: Path):
    loaded = routeprof.load(dense_between)
    table = due(COUNTS)
    assert np.array_equal(np.load(write(loaded, tmp_path / "a.npy")), table)
    data = json.loads(write(loaded, tmp_path / "a.json").read_text(encoding="utf-8"))
    assert data == {"logical_count": table.tolist()}
    saved = torch.load(write(loaded, tmp_path / "a.pt"), weights_only=True)
    assert torch.equal(saved["logical_count"], torch.from_numpy(table))


@pytest.mark.parametrize("name", ["a.npy", "a.json", "a.pt", "a.csv"])
def test_what_is_written_is_read_back(dense_between: Path, tmp_path: Path, name: str):
    loaded = routeprof.load(dense_between)
    back = routeprof.load(write(loaded, tmp_path / name))
    assert back.layer_indices == loaded.layer_indices
    assert np.array_equal(back.counts, loaded.counts)


@pytest.mark.parametrize("ending", ["csv", "arrow", "parquet"])
def test_tables_have_every_cell(tmp_path: Path, ending: str):
    loaded = routeprof.load(HEALTHY)
    path = write(loaded, tmp_path / f"t.{ending}")
    readers = {"csv": pd.read_csv, "arrow": pd.read_feather, "parquet": pd.read_parquet}
    table = readers[ending](path)
    assert list(table) == ["phase", "tag", "layer", "expert", "count"]
    for (phase, tag), own in table.groupby(["phase", "tag"]):
        chosen = loaded.select(phase=phase, tag=tag)
        grid = own.pivot(index="layer", columns="expert", values="count").to_numpy()
        assert np.array_equal(grid, chosen.counts)
    assert table["count"].sum() == loaded.counts.sum()


def test_a_layer_that_was_not_captured_is_no_layer_without_tokens(tmp_path: Path):
    steps = [Step([one, None]) for one, _ in COUNTS]
    layers = [moe(0), moe(1, unsupported="its experts are not known")]
    loaded = routeprof.load(record(tmp_path / "run", steps, layers=layers))
    with pytest.raises(UsageError, match=r"layers 1 were not captured"):
        write(loaded, tmp_path / "a.npy")
    table = pd.read_csv(write(loaded, tmp_path / "a.csv"))
    assert set(table["layer"]) == {0}


def test_counters_by_step(dense_between: Path, tmp_path: Path):
    loaded = routeprof.load(dense_between)
    data = json.loads(write(loaded, tmp_path / "a.trace.json").read_text(encoding="utf-8"))
    counters = [event for event in data["traceEvents"] if event["ph"] == "C"]
    by_name = {
        name: [event for event in counters if event["name"] == name]
        for name in ("imbalance", "worst layer", "tokens")
    }
    grids = np.array(COUNTS)  # [steps, layers, experts]
    ratios = grids.max(axis=2) / grids.mean(axis=2)
    values = [event["args"]["worst layer"] for event in by_name["imbalance"]]
    assert values == pytest.approx(ratios.max(axis=1))
    worst = [event["args"]["layer"] for event in by_name["worst layer"]]
    assert worst == [(0, 2)[place] for place in ratios.argmax(axis=1)]
    assert [event["args"] for event in by_name["tokens"]] == [{"decode": 16}, {"decode": 16}]
    assert [event["ts"] for event in by_name["tokens"]] == [1000.5e6, 1001.5e6]
    assert {event["pid"] for event in counters} == {PROCESS}


def test_counters_by_window_where_there_are_no_steps(tmp_path: Path):
    loaded = routeprof.load(HEALTHY)
    path = write(loaded, tmp_path / "a.trace.json.gz")
    data = json.loads(gzip.decompress(path.read_bytes()))
    tokens = [event for event in data["traceEvents"] if event["name"] == "tokens"]
    windows = loaded.windows()
    assert len(tokens) == windows["end"].nunique()
    assert {event["ts"] for event in tokens} == {end * 1e6 for end in windows["end"]}


def test_beside_a_trace_of_torch(tmp_path: Path):
    """Every step of the model lies within the span that torch's own clock gives its pass."""
    model = load_model()
    tokens = torch.randint(0, 64, (2, 8))
    with (
        profile(activities=[ProfilerActivity.CPU]) as traced,
        routeprof.record(model, tmp_path / "run", level="steps"),
        torch.no_grad(),
    ):
        for _ in range(4):
            with torch.profiler.record_function("one pass"):
                model(tokens)
    traced.export_chrome_trace(str(tmp_path / "torch.json"))
    loaded = routeprof.load(tmp_path / "run")
    write_beside(loaded, tmp_path / "torch.json", tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "one pass"
    )
    steps = sorted(event["ts"] for event in events if event["name"] == "imbalance")
    assert len(spans) == len(steps) == 4
    slack = 2000.0  # the two clocks are read apart
    for step, (begin, end) in zip(steps, spans, strict=True):
        assert begin - slack <= step <= end + slack


def test_what_cannot_be_written(dense_between: Path, tmp_path: Path):
    loaded = routeprof.load(dense_between)
    with pytest.raises(UsageError, match="ending that nobody writes"):
        write(loaded, tmp_path / "a.xlsx")
    with pytest.raises(UsageError, match="cannot be written to"):
        write(loaded, dense_between / "recording.json" / "a.csv")
    np.save(tmp_path / "sums.npy", due(COUNTS))
    untimed = routeprof.load(tmp_path / "sums.npy")
    with pytest.raises(LevelRequiredError, match="when steps ran is not known"):
        write(untimed, tmp_path / "a.trace.json")
    for text in ("", "[]", '{"traceEvents": 3}', '{"traceEvents": []}'):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="pass a trace"):
            write_beside(loaded, tmp_path / "bad.json", tmp_path / "both.json")


def test_endings_are_of_one_writer_each():
    endings = [ending for one in WRITERS.values() for ending in one.suffixes]
    assert len(endings) == len(set(endings))
