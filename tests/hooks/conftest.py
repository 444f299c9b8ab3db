"""Recordings of tiny models, and how to compare them with what a witness saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import routeprof
from routeprof import Profile, Recording
from routeprof.topology import Layer
from tests.zoo.families import BY_TYPE, EXPERTS, build

Record = Callable[..., Recording]
TOP_K = 3


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """``routeprof.record`` into a new directory each time, all of it in one window."""
    numbers = count()

    def start(model: nn.Module, **options: Any) -> Recording:
        directory = tmp_path / f"recording-{next(numbers)}"
        return routeprof.record(model, directory, **{"window": 3600.0, **options})

    return start


@pytest.fixture
def mixtral() -> nn.Module:
    return model_of("mixtral")


def model_of(model_type: str, *, seed: int = 0, implementation: str = "eager") -> nn.Module:
    return build(BY_TYPE[model_type], seed=seed, experts_implementation=implementation)


def profile_of(recording: Recording) -> Profile:
    return routeprof.load(recording.directory)


def problems_of(profile: Profile) -> dict[str, Any]:
    assert profile.files is not None
    (rank,) = profile.files.ranks
    assert rank.state is not None
    return rank.state.problems


def moe_layers(profile: Profile) -> list[Layer]:
    return [layer for layer in profile.info.layers if layer.kind == "moe"]


def counts_of(profile: Profile) -> dict[str, list[int]]:
    """Counts of every captured layer, by its block."""
    layers = [profile.info.layers[position] for position in profile.captured]
    rows = np.asarray(profile.counts).tolist()
    return {
        block(layer.name): row[: layer.experts] for layer, row in zip(layers, rows, strict=True)
    }


def by_block(counts: Mapping[str, Tensor], times: int = 1) -> dict[str, list[int]]:
    """What a witness counted, in the form of ``counts_of``."""
    return {block(name): (times * value).tolist() for name, value in counts.items()}


def block(name: str) -> str:
    """The oracle names most layers by their experts module, recordings by its parent."""
    return name.removesuffix(".experts")


def selected(truth_ids: Mapping[str, Tensor], keep: Tensor) -> dict[str, list[int]]:
    """Counts of the rows that ``keep`` [rows] has."""
    return {
        block(name): ids[keep.bool()].flatten().bincount(minlength=EXPERTS).tolist()
        for name, ids in truth_ids.items()
    }


def hooks_left(model: nn.Module) -> list[str]:
    """Modules that still have a hook of any kind."""
    kinds = [name for name in vars(nn.Module()) if "forward" in name and "hooks" in name]
    assert len(kinds) >= 5
    return [
        path for path, module in model.named_modules() for kind in kinds if getattr(module, kind)
    ]
