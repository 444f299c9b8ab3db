"""Words and cells of the memory plan against the plan's own figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from routeprof.plan.hotness import Measured
from routeprof.plan.memory import Plan, Setting, plan
from routeprof.plan.model import load_model
from routeprof.plan.parameters import by_part, total
from routeprof.plan.precision import precision
from routeprof.report.plan_json import plan_json
from routeprof.report.plan_page import columns, loads_text, parts_rows, spanning, verdict
from routeprof.report.summary import share, size

GIB = 1024**3
HYBRID = "qwen3-next-80b-a3b"
LOADS = Measured((0, 1), (np.array([8, 4, 2, 2]), np.array([4, 4, 4, 4])))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(
        '{"model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, '
        '"num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 4, '
        '"num_experts_per_tok": 1}'
    )
    return path


def measured(path: Path, told: str = "") -> Plan:
    setting = Setting(GIB, precision=precision("bf16", hot=told or None, hot_experts=0.25))
    return plan(load_model(str(path)), setting, gpus=2, measured=LOADS)


def test_each_column_shows_its_own_figure() -> None:
    made = plan(load_model(HYBRID), Setting(80 * GIB, batch=3), gpus=8)
    shown = {column.name: cell for column, cell in columns(made)}
    for row in made.splits:
        figures = {
            "weights": row.weights_bytes,
            "free": row.free,
            "held": row.held_back,
            "kv": row.kv,
            "state": row.state,
            "activations": row.activations,
            "dispatch": row.dispatch,
            "combine": row.combine,
        }
        for name, value in figures.items():
            assert shown[name](row) == ("-" if value < 0 else "") + size(abs(value)), name
        assert shown["sequences"](row) == f"{row.sequences:,}"
    # Cells that are told apart by what they show.
    first = made.splits[0]
    assert len({shown[name](first) for name in ("weights", "free", "held", "kv", "state")}) == 5


def test_shares_of_parts_are_of_bytes() -> None:
    made = plan(
        load_model(HYBRID), Setting(GIB, precision=precision("bf16", experts="int4")), gpus=1
    )
    rows = {name: (bytes_, part) for name, _, bytes_, part in parts_rows(made)}
    routed = made.weights["routed_experts"]
    assert rows["routed experts"] == (size(routed), share(routed / sum(made.weights.values())))
    assert rows["routed experts"][1] != share(
        by_part(made.model.weights)["routed_experts"] / total(made.model.weights)
    )


def test_what_is_lacking_adds_up() -> None:
    made = plan(load_model("deepseek-v3"), Setting(80 * 10**9), gpus=8)
    row = min(
        (row for row in made.splits if not row.why),
        key=lambda row: row.weights_bytes + row.cache_bytes + row.held_back,
    )
    short = row.weights_bytes + row.cache_bytes + row.held_back - 80 * 10**9
    assert f"{row.layout} comes closest and lacks {size(short)} on each GPU" in verdict(made)


def test_the_fullest_rank_is_of_the_layer_with_the_fullest(two_layers: Path) -> None:
    text = loads_text(measured(two_layers))
    assert text == f"as recorded: the fullest of 2 ranks gets up to {12 / 8:.2f} x the mean"
    made = measured(two_layers, "bf16")
    assert loads_text(made).endswith(f"the hot experts get {share(12 / 32)} of the assignments")
    assert plan_json(made)["hot_experts_share_of_assignments"] == 12 / 32


def test_layouts_that_leave_a_node_are_counted() -> None:
    made = plan(load_model("mixtral-8x7b"), Setting(80 * GIB), gpus=16, nodes=2)
    count = sum(max(row.layout.tp, row.layout.etp) > 8 for row in made.splits)
    assert 0 < count < len(made.splits) / 2
    assert spanning(made).startswith(f"{count} layouts share")


@pytest.mark.parametrize(("memory", "fits"), [(80, None), (8, False)])
def test_what_is_not_known_is_neither_yes_nor_no(memory: int, fits: bool | None) -> None:
    unknown = replace(load_model("mixtral-8x7b"), kept=None)
    made = plan(unknown, Setting(memory * GIB), gpus=8)
    assert plan_json(made)["fits"] is fits
    assert "nan" not in verdict(made)
