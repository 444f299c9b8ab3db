"""SGLang's ``--init-expert-location``, as .json or .pt.

The engine wants ``physical_to_logical_map`` with a row for every layer of the model, dense ones
too, and nothing beside it: it passes all keys on as arguments (``ExpertLocationMetadata``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import integers, map_of_rows, opened

KEY = "physical_to_logical_map"


def write_json(placement: ExpertMap, path: Path) -> None:
    """Write a .json file."""
    path.write_text(json.dumps({KEY: placement.of_all_layers.tolist()}) + "\n", encoding="utf-8")


def write_pt(placement: ExpertMap, path: Path) -> None:
    """Write a .pt file: a dict that holds one int64 tensor."""
    import torch

    torch.save({KEY: torch.from_numpy(placement.of_all_layers)}, path)


def read_pt(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .pt file; nothing is unpickled but tensors and plain containers.

    Raises:
        UsageError: it is no placement, or one for another model.
    """
    import torch

    def load(path: Path) -> Any:
        data = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(data, dict) and isinstance(data.get(KEY), torch.Tensor):
            return {**data, KEY: data[KEY].numpy()}
        return data

    return of_data(path, opened(path, load), deployment)


def of_data(path: Path, data: Any, deployment: Deployment) -> ExpertMap:
    """The map in what a file held.

    Raises:
        UsageError: there is none, or it is one for another model.
    """
    if isinstance(data, dict) and "logical_count" in data and KEY not in data:
        raise UsageError(f"{path} holds counts of tokens, no placement: pass a file with {KEY}")
    if not isinstance(data, dict) or KEY not in data:
        raise UsageError(f"{path} has no {KEY}: pass a file for --init-expert-location")
    rows = integers(path, data[KEY])
    if len(rows) != deployment.model_layers:
        raise UsageError(
            f"{path} has {len(rows)} layers, and the model {deployment.model_layers}: pass a "
            f"placement for this model"
        )
    layers = list(deployment.layers)
    return map_of_rows(path, rows[layers], deployment, layers)
