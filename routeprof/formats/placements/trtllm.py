"""TensorRT-LLM's load-balancer configuration, YAML with a row for every MoE layer by its number.

``num_slots``, ``initial_global_assignments`` and ``layer_updates_per_iter`` are all fields that
``MoeLoadBalancerConfig`` takes; it refuses others.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import integers, map_of_rows, opened


def write(placement: ExpertMap, path: Path) -> None:
    """Write a .yaml file; experts stay where it puts them (``layer_updates_per_iter: 0``)."""
    lines = [f"num_slots: {placement.slots.shape[1]}", "initial_global_assignments:"]
    for layer, row in zip(placement.deployment.layers, placement.slots.tolist(), strict=True):
        lines.append(f"  {layer}: {row}")
    lines.append("layer_updates_per_iter: 0")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .yaml file.

    Raises:
        UsageError: it is no placement, one for another model, or PyYAML is not installed.
    """
    data = opened(path, _load)
    rows = data.get("initial_global_assignments") if isinstance(data, dict) else None
    if not isinstance(rows, dict) or not all(type(layer) is int for layer in rows):
        raise UsageError(
            f"{path} has no initial_global_assignments by layer: pass a load balancer's "
            f"configuration that has them"
        )
    slots = integers(path, list(rows.values()))
    if data.get("num_slots") != slots.shape[1]:
        raise UsageError(
            f"{path} has rows of {slots.shape[1]} slots and num_slots {data.get('num_slots')}: "
            f"make them the same"
        )
    return map_of_rows(path, slots, deployment, list(rows))


def _load(path: Path) -> Any:
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise UsageError("reading YAML needs PyYAML; run: pip install pyyaml") from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
