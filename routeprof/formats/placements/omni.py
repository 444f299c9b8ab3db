"""Omni's placement patterns: 1 where a GPU holds an expert, ``[gpus, layers, experts]`` in .npy.

Read alone. The order of a GPU's slots is not in them; experts are taken in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.formats.placements.rows import map_of_rows, require_gpus


def of_pattern(path: Path, pattern: npt.NDArray[Any], deployment: Deployment) -> ExpertMap:
    """The map that a pattern is.

    Raises:
        UsageError: it is no pattern, GPUs hold different numbers of experts, or it is one for
            another model.
    """
    if pattern.dtype.kind not in "iub" or not pattern.size or not np.isin(pattern, (0, 1)).all():
        raise UsageError(f"{path} is no pattern of 0 and 1 [gpus, layers, experts]: pass one")
    gpus, layers, experts = pattern.shape
    require_gpus(path, gpus, deployment)
    if experts != deployment.experts:
        raise UsageError(
            f"{path} places {experts} experts, and the model has {deployment.experts}: pass a "
            f"placement for this model"
        )
    held = pattern.sum(axis=2)
    if held.min() != held.max():
        raise UsageError(
            f"{path} has {held.min()} to {held.max()} experts on a GPU: pass a pattern with as "
            f"many on each, in all layers"
        )
    found = np.nonzero(pattern.transpose(1, 0, 2))[2].reshape(layers, -1)
    return map_of_rows(path, found.astype(np.int64), deployment)
