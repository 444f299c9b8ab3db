"""What the hooks make of batches and routers; no engine is needed, nor SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import routeprof
from routeprof.hooks import sglang
from routeprof.hooks.session import Session, Settings, open_session
from routeprof.hooks.sglang_layers import Rows
from routeprof.hooks.sglang_steps import Requests, read_step
from routeprof.topology import Layer, ModelInfo, RankRole

LAYER = Layer(0, "model.layers.0.mlp", experts=6, top_k=2, router="softmax", gate="logits")
WHOLE = Rows()


def batch(mode: str, **fields: Any) -> SimpleNamespace:
    given = {
        "forward_mode": SimpleNamespace(name=mode),
        "rids": ["a", "b"],
        "global_num_token_non_padded_cpu": 2,
        "input_ids": None,
        "seq_lens_cpu": None,
        "extend_seq_lens_cpu": None,
        "extend_prefix_lens_cpu": None,
    }
    return SimpleNamespace(**given | fields)


# -- steps


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        ("EXTEND", "prefill"),
        ("DECODE", "decode"),
        ("MIXED", "mixed"),
        ("TARGET_VERIFY", "verify"),
        ("DLLM_EXTEND", "unknown"),
        ("SPLIT_PREFILL", None),
    ],
)
def test_phase(mode: str, phase: str | None):
    step = read_step(batch(mode))
    assert step is not None
    assert (step.rows, step.phase, step.requests) == (2, phase, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"rids": None},
        {"rids": []},
        {"rids": ["HEALTH_CHECK_1"]},
        {"global_num_token_non_padded_cpu": 0},
        {"encoder_swa_replay": True},
        {"forward_mode": SimpleNamespace(name="IDLE")},
    ],
)
def test_passes_that_serve_nobody(fields: dict[str, Any]):
    assert read_step(batch("EXTEND", **fields)) is None


def rows(requests: Requests, *args: Any, count: int, **fields: Any) -> Any:
    found = requests.rows(batch(*args, **fields), count)
    return None if found is None else tuple(column.tolist() for column in found)


def test_rows_of_requests():
    requests = Requests()
    prompts = {"extend_seq_lens_cpu": [3, 2], "extend_prefix_lens_cpu": [0, 4]}
    assert rows(requests, "EXTEND", count=5, **prompts) == ([0, 0, 0, 1, 1], [0, 1, 2, 4, 5])
    lengths = {"seq_lens_cpu": torch.tensor([7, 4]), "rids": ["b", "a"]}
    assert rows(requests, "DECODE", count=2, **lengths) == ([1, 0], [6, 3])
    mixed = {"extend_seq_lens_cpu": [2, 1], "extend_prefix_lens_cpu": [0, 7], "rids": ["c", "b"]}
    assert rows(requests, "MIXED", count=3, **mixed) == ([2, 2, 1], [0, 1, 7])


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("DECODE", {}),
        ("EXTEND", {}),
        ("TARGET_VERIFY", {"seq_lens_cpu": torch.tensor([7, 4])}),
        ("DECODE", {"seq_lens_cpu": torch.tensor([7])}),
    ],
)
def test_rows_that_the_host_does_not_know(mode: str, fields: dict[str, Any]):
    assert Requests().rows(batch(mode, **fields), 2) is None


def test_cached_tokens():
    """Of new requests only: a prompt in pieces follows on itself."""
    requests = Requests()
    prefixes = {"extend_seq_lens_cpu": [3, 2], "extend_prefix_lens_cpu": [16, 4]}
    assert requests.follow(batch("EXTEND", **prefixes)) == 20
    more = {"rids": ["c", "a"], "extend_prefix_lens_cpu": [5, 19]}
    assert requests.follow(batch("MIXED", **more)) == 5
    assert requests.follow(batch("DECODE")) == 0


def test_requests_under_way_are_not_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("routeprof.hooks.sglang_steps.MAX_REQUESTS", 2)
    requests = Requests()
    numbers = [requests._number(name) for name in "abacadab"]
    assert numbers == [0, 1, 0, 2, 0, 3, 0, 4]


# -- routers


def session(folder: Path, *layers: Layer) -> Session:
    settings = Settings(folder / "out", level="tokens")
    return open_session(settings, layers, ModelInfo(), RankRole(), torch.device("cpu"))


def route(config: Any, ids: Tensor, weights: Tensor | None = None, logits: Any = None) -> None:
    weights = torch.full(ids.shape, 0.5) if weights is None else weights
    sglang._routed(ids, weights, topk_config=config, router_logits=logits, layer_id=0)


def watched(folder: Path, rows: Rows = WHOLE) -> tuple[Session, Any, SimpleNamespace]:
    """A session, the watch of its runner, and the configuration of its only router."""
    opened, config = session(folder, LAYER), SimpleNamespace()
    setattr(config, sglang._MARK, sglang._take(opened, LAYER, rows))
    return opened, sglang.Watch(opened, folder / "placements.json"), config


def counted(opened: Session) -> list[int]:
    opened.recording.stop()
    return np.asarray(routeprof.load(opened.recording.directory).counts)[0].tolist()


IDS = torch.tensor([[0, 1], [2, 1], [5, 4], [0, 3]], dtype=torch.int32)


def test_fused_shared_experts_and_padding_are_left_out(tmp_path: Path):
    opened, watch, config = watched(tmp_path)
    watch.begin(batch("DECODE"))
    shared = torch.full((4, 1), 6, dtype=torch.int32)
    route(config, torch.cat([IDS, shared], 1), logits=torch.randn(4, 6))
    watch.end()
    assert counted(opened) == [1, 2, 1, 0, 0, 0]
    totals = routeprof.load(tmp_path / "out").totals
    assert totals.sums["invalid"].sum() == 0
    assert totals.sums["gate_rows"].sum() == 2


def test_other_routers_and_other_passes_do_not_count(tmp_path: Path):
    opened, watch, config = watched(tmp_path)
    route(config, IDS)
    watch.begin(batch("IDLE"))
    route(config, IDS)
    watch.end()
    watch.begin(batch("DECODE"))
    route(SimpleNamespace(), IDS)
    route(config, IDS[:2])
    watch.end()
    assert counted(opened) == [1, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("shard", "expected"), [(0, [1, 2, 1, 0, 0, 0]), (1, [0, 0, 0, 0, 1, 1]), (2, [0] * 6)]
)
def test_shards_of_a_pass(tmp_path: Path, shard: int, expected: list[int]):
    """Three rows in shards of two: one is whole, one has padding, one has nothing else."""
    opened, watch, config = watched(tmp_path, Rows(shard=shard))
    watch.begin(batch("DECODE", global_num_token_non_padded_cpu=3))
    route(config, IDS[2:] if shard else IDS[:2])
    watch.end()
    assert counted(opened) == expected


def test_a_layer_in_pieces_is_missed(tmp_path: Path):
    opened, watch, config = watched(tmp_path)
    watch.begin(batch("SPLIT_PREFILL"))
    route(config, IDS)
    watch.end()
    assert opened.capture is not None
    assert (opened.capture.missed, opened.capture.missed_tokens) == (1, 2)
    opened.recording.stop()


def test_failures_are_ours_alone(tmp_path: Path):
    opened, watch, config = watched(tmp_path)
    watch.begin(None)
    watch.begin(batch("DECODE"))
    route(config, torch.tensor(3))
    watch.end()
    assert opened.capture is not None
    assert opened.capture.failures.count == 2
    opened.recording.stop()


def test_a_pass_that_fails(tmp_path: Path):
    opened, watch, config = watched(tmp_path)
    runner = SimpleNamespace(**{sglang._MARK: watch})

    def forward(self: Any, forward_batch: Any) -> str:
        route(config, IDS)
        if forward_batch.rids == ["a", "b"]:
            raise MemoryError
        return "done"

    with pytest.raises(MemoryError):
        sglang._forward(forward, runner, batch("DECODE"))
    again = batch("DECODE", rids=["c"], global_num_token_non_padded_cpu=1)
    assert sglang._forward(forward, runner, forward_batch=again) == "done"
    assert counted(opened) == [1, 1, 0, 0, 0, 0]


def test_inside_a_compiled_graph(tmp_path: Path):
    """A graph without a break, that goes on counting after it was traced."""
    opened, watch, config = watched(tmp_path)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(logits: Tensor) -> Tensor:
        weights, ids = logits.softmax(-1).topk(2)
        route(config, ids, weights, logits)
        return weights * 2

    logits = torch.eye(6)[:4] + torch.arange(6) * 0.01
    forward(logits)  # warm-up: nobody's rows
    for _ in range(3):
        watch.begin(batch("DECODE", global_num_token_non_padded_cpu=3))
        forward(logits)
        watch.end()
    assert counted(opened) == [3, 3, 3, 0, 0, 9]


def test_dormant(monkeypatch: pytest.MonkeyPatch):
    """Without a request to record, nothing of SGLang is looked at."""
    monkeypatch.delenv("ROUTEPROF_RUN", raising=False)
    monkeypatch.setattr(sglang, "_watch", lambda wanted: pytest.fail("it did something"))
    sglang.register()
