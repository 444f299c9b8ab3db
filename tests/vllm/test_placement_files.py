"""Placement arrays of ours beside those that vLLM derives from the same map."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routeprof.formats.placements import Deployment, ExpertMap, read_placement, write_placement
from tests.vllm.conftest import LIMIT, ROOT

PLACE = Deployment((1, 2, 4), 12, 4, 6)


def placement() -> ExpertMap:
    random = np.random.default_rng(1)
    experts = [*range(12), *range(3), 0]
    return ExpertMap(PLACE, np.stack([random.permutation(experts) for _ in range(3)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our ``vllm.npz``, and ``theirs.npz``, what vLLM makes of it."""
    folder = tmp_path_factory.mktemp("maps")
    write_placement(placement(), folder, ["vllm"])
    ours = dict(np.load(folder / "vllm.npz", allow_pickle=False))
    loads = np.random.default_rng(2).integers(1, 999, (3, 12))
    np.savez(folder / "given.npz", loads=loads, **ours)
    command = [sys.executable, "-m", "tests.vllm.maps", "given.npz", "theirs.npz"]
    files = [str(folder / name) for name in command[-2:]]
    subprocess.run([*command[:-2], *files], cwd=ROOT, check=True, timeout=LIMIT)
    return folder


def test_arrays_are_those_that_vllm_derives(folder: Path):
    ours, theirs = (np.load(folder / f"{name}.npz") for name in ("vllm", "theirs"))
    for name in ("logical_to_physical_map", "logical_replica_count"):
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].tolist() == theirs[name].tolist()


def test_what_vllms_balancer_decides_is_read(folder: Path):
    decided = np.load(folder / "theirs.npz")["decided"]
    np.savez(folder / "decided.npz", physical_to_logical_map=decided)
    assert read_placement(folder / "decided.npz", PLACE).slots.tolist() == decided.tolist()
