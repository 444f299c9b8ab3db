"""Arrays as EPLB returns them and as vLLM holds them, in NumPy's .npz, and bare maps in .npy.

Rows are MoE layers alone. Beside the three arrays a .npz of ours has ``layers``, their numbers in
the model, and ``gpus``; both may be missing in others'.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.formats.placements import omni
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import integers, map_of_rows, opened, require_gpus


class Names(NamedTuple):
    """What a tool calls the expert in every slot, the slots of every expert, and their number."""

    slots: str
    slots_of_experts: str
    replicas: str


EPLB = Names("phy2log", "log2phy", "logcnt")
VLLM = Names("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")


def write_eplb(placement: ExpertMap, path: Path) -> None:
    """Write a .npz file with EPLB's names."""
    _write(placement, path, EPLB)


def write_vllm(placement: ExpertMap, path: Path) -> None:
    """Write a .npz file with vLLM's names."""
    _write(placement, path, VLLM)


def _write(placement: ExpertMap, path: Path, names: Names) -> None:
    values = (placement.slots, placement.slots_of_experts, placement.replicas)
    arrays: dict[str, npt.NDArray[Any]] = dict(zip(names, values, strict=True))
    arrays["layers"] = np.array(placement.deployment.layers, dtype=np.int64)
    arrays["gpus"] = np.array(placement.deployment.gpus, dtype=np.int64)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def read_npz(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .npz file with EPLB's or vLLM's names.

    Raises:
        UsageError: it is no placement, one for another model, or its arrays disagree.
    """
    arrays = opened(path, _load)
    if isinstance(arrays, np.ndarray):
        raise UsageError(f"{path} is a .npy file: name it so")
    names = next((names for names in (EPLB, VLLM) if names.slots in arrays), None)
    if names is None:
        raise UsageError(f"{path} has neither {EPLB.slots} nor {VLLM.slots}: pass a placement")
    layers = arrays.get("layers")
    if layers is not None and (layers.dtype.kind not in "iu" or layers.ndim != 1):
        raise UsageError(f"{path} has layers that are no numbers: pass a placement")
    rows = integers(path, arrays[names.slots])
    if layers is not None and len(layers) != len(rows):
        raise UsageError(f"{path} has {len(layers)} layers for {len(rows)} rows: pass a placement")
    if "gpus" in arrays and arrays["gpus"].shape == ():
        require_gpus(path, int(arrays["gpus"]), deployment)
    found = map_of_rows(path, rows, deployment, None if layers is None else layers.tolist())
    _require_agreement(path, arrays, names, rows, deployment.experts)
    return found


def read_npy(path: Path, deployment: Deployment) -> ExpertMap:
    """Read a .npy file: ``[layers, slots]``, or the pattern that Omni writes.

    Raises:
        UsageError: it is no placement, or one for another model.
    """
    array = opened(path, _load)
    if isinstance(array, np.ndarray) and array.ndim == 3:
        return omni.of_pattern(path, array, deployment)
    return map_of_rows(path, integers(path, array), deployment)


def _load(path: Path) -> dict[str, npt.NDArray[Any]] | npt.NDArray[Any]:
    loaded = np.load(BytesIO(path.read_bytes()), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        wanted = {*EPLB, *VLLM, "layers", "gpus"}.intersection(loaded.files)
        return {name: loaded[name] for name in wanted}


def _require_agreement(
    path: Path,
    arrays: dict[str, npt.NDArray[Any]],
    names: Names,
    rows: npt.NDArray[Any],
    experts: int,
) -> None:
    """The numbers of replicas must be those of the slots."""
    said = arrays.get(names.replicas)
    counted = np.stack([np.bincount(row, minlength=experts) for row in rows])
    if said is not None and not np.array_equal(said, counted):
        raise UsageError(
            f"{path} has {names.replicas} that is not of its {names.slots}: pass arrays of one "
            f"placement"
        )
