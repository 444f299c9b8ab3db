"""Placement files of ours, given to SGLang's engine: where it says its experts are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from routeprof.formats.placements import Deployment, ExpertMap, write_placement
from tests.sglang.conftest import Engines, check_closed_form, scene
from tests.sglang.models import SHAPES


def placement(model: str, redundant: int) -> ExpertMap:
    """Any placement with replicas of the first experts."""
    shape = SHAPES[model]
    random = np.random.default_rng(1)
    experts = [*range(shape.experts), *range(redundant)]
    rows = np.stack([random.permutation(experts) for _ in shape.moe])
    layers = len(shape.moe) + len(shape.dense)
    return ExpertMap(Deployment(shape.moe, shape.experts, 1, layers), rows)


# On a CPU the engine runs no replicas of the model that has a dense layer.
@pytest.mark.parametrize(
    ("model", "file", "redundant"), [("glm", "sglang.json", 0), ("qwen3", "sglang.pt", 4)]
)
def test_the_engine_holds_what_the_file_says(
    engines: Engines, tmp_path: Path, model: str, file: str, redundant: int
):
    made = placement(model, redundant)
    write_placement(made, tmp_path, ["sglang"])
    run = engines.run(
        model,
        [scene(9, 17)],
        {"gate": False},
        ep_num_redundant_experts=redundant,
        init_expert_location=str(tmp_path / file),
        ep_dispatch_algorithm="dynamic",
        expert_distribution_recorder_mode="stat",
    )
    (noted,) = json.loads((run.out / "rank-00000" / "placements.json").read_text())
    held = np.array(noted["physical_to_logical"])
    assert held[list(made.deployment.layers)].tolist() == made.slots.tolist()
    assert len(held) == made.deployment.model_layers
    check_closed_form(run.profile, run.shape, run.computed())
