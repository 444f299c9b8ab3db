"""vLLM-Ascend's expert map (``expert_map_path``), JSON with a list of experts for every device.

Layers are numbered among the MoE layers alone; the engine takes them by their place in the list.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import integers, map_of_rows, read_json, require_gpus


def write(placement: ExpertMap, path: Path) -> None:
    """Write a .json file.

    Raises:
        UsageError: an expert is on a GPU twice; the engine would number the GPU's slots wrongly.
    """
    repeated = placement.repeated()
    if repeated is not None:
        layer, gpu, expert = repeated
        raise UsageError(
            f"vLLM-Ascend cannot hold expert {expert} of layer {layer} twice on GPU {gpu}: place "
            f"without repeats (--no-repeats)"
        )
    layers = [
        {
            "layer_id": number,
            "device_count": len(devices),
            "device_list": [
                {"device_id": device, "device_expert": experts}
                for device, experts in enumerate(devices)
            ],
        }
        for number, devices in enumerate(placement.by_gpu.tolist())
    ]
    data = {"moe_layer_count": len(layers), "layer_list": layers}
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def read(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .json file.

    Raises:
        UsageError: it is no expert map, or one for another model.
    """
    return of_data(path, read_json(path), deployment)


def of_data(path: Path, data: Any, deployment: Deployment) -> ExpertMap:
    """The map in what a file held.

    Raises:
        UsageError: there is none, or it is one for another model.
    """
    try:
        layers = [
            [device["device_expert"] for device in layer["device_list"]]
            for layer in data["layer_list"]
        ]
        count = data["moe_layer_count"]
        sizes = {len(experts) for devices in layers for experts in devices}
        rows = [[expert for experts in devices for expert in experts] for devices in layers]
    except (TypeError, KeyError, IndexError):
        raise UsageError(
            f"{path} is no expert map: it must have layer_list with device_list and device_expert"
        ) from None
    if count != len(layers):
        raise UsageError(
            f"{path} has {len(layers)} layers and moe_layer_count {count}: make them the same"
        )
    if len(sizes) > 1 or len({len(devices) for devices in layers}) != 1:
        raise UsageError(f"{path} has devices with different numbers of experts: pass equal ones")
    require_gpus(path, len(layers[0]), deployment)
    return map_of_rows(path, integers(path, rows), deployment)
