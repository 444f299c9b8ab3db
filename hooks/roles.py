"""The part that this process plays, where a launcher such as torchrun started several."""

from __future__ import annotations

import os
from typing import Any

from routeprof.topology import RankRole


def rank_here() -> int:
    """This process's number among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def world_size() -> int:
    """How many processes a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def role_of(model: Any) -> RankRole:
    """This process's part in running a transformers model.

    Ranks see batches of their own, but for those of one tensor-parallel group: they run the same
    tokens, and all but the first are twins.
    """
    rank, world = rank_here(), world_size()
    if world == 1:
        return RankRole()
    tp_size = getattr(model, "_tp_size", None) or 1
    tp, pp = _coordinate(model, "tp", rank % tp_size), _coordinate(model, "pp", 0)
    return RankRole(
        rank=rank,
        world_size=world,
        tp=tp if tp_size > 1 else 0,
        dp=rank // tp_size,
        pp=pp,
        owns_tokens=tp_size == 1 or tp == 0,
    )


def _coordinate(model: Any, axis: str, otherwise: int) -> int:
    """Where this rank stands along an axis of the mesh that transformers left on the model."""
    mesh = getattr(model, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.get_local_rank(axis)) if mesh is not None and axis in names else otherwise
