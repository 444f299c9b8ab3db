"""Engines in processes of their own, what they say they did, and what was recorded of them.

Nothing here imports vLLM: where it is not installed, the tests of this folder are skipped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof import Profile
from tests.vllm import compiler
from tests.vllm.models import SHAPES, Shape, write

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT = 240
"""Seconds that one engine may take in all; it takes 15 to 40."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The worker in the driver's process, for a third of the imports; other tests do without it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The processor says what it can do; Inductor would compile a program for each thing to see.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here: make test-vllm")
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(skip)


# -- what is asked of an engine


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, as token ids."""
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(length)] for length in lengths]


MIXED_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 7)
"""Prompts from a single token on: a batch where prompts and answers of all lengths meet."""


def scene(*calls: Sequence[Any], new: int = 24, lengths: Sequence[int] = MIXED_LENGTHS, **other):
    """One round of requests."""
    given = other or {"prompts": prompts(*lengths)}
    return {"calls": calls, "new": new, **given}


# -- what came of it


@dataclass(frozen=True)
class Run:
    """One engine that served its rounds and is gone.

    Attributes:
        model: its name in ``models.SHAPES``.
        said: what the driver wrote.
        log: what the engine printed.
        out: where its recording is, if it was recorded.
    """

    model: str
    said: dict[str, Any]
    log: str
    out: Path

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def checkpoint(self) -> Path:
        return self.out.parent.parent / "models" / self.model

    @cached_property
    def profile(self) -> Profile:
        return routeprof.load(self.out)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [request for one in self.said["rounds"] for request in one["requests"]]

    @property
    def generated(self) -> list[list[int]]:
        return [request["generated"] for request in self.requests]

    @property
    def computed(self) -> int:
        """Tokens that must have gone through the model, if nobody was preempted.

        The last token of each answer is never fed back.
        """
        return sum(
            len(request["prompt"]) - request["cached"] + len(request["generated"]) - 1
            for request in self.requests
        )

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The scheduler's steps, as the first worker saw them."""
        return self.said["oracle"][0]["steps"]

    def oracle(self, name: str, rank: int = 0) -> dict[int, list[float]]:
        """Sums of an oracle by layer."""
        return {int(layer): sums for layer, sums in self.said["oracle"][rank][name].items()}


def check_closed_form(profile: Profile, shape: Shape, tokens: int) -> None:
    """Every layer routed every token, nothing else, and nothing is amiss."""
    assert tuple(profile.layer_indices) == shape.moe
    assert profile.in_state("dense") == shape.dense
    assert np.asarray(profile.counts).sum(1).tolist() == [tokens * shape.top_k] * len(shape.moe)
    assert profile.coverage == 1.0
    assert problems(profile) == {}
    table = profile.layers(breakdown=True)
    assert (table["invalid"] == 0).all()
    by_phase = table[table["phase"] != "all"].groupby("layer")["assignments"].sum()
    assert by_phase.tolist() == [tokens * shape.top_k] * len(shape.moe)


def problems(profile: Profile) -> dict[str, Any]:
    """Problems of all ranks, but for windows that a slow machine ended late."""
    assert profile.files is not None
    found = {}
    for rank in profile.files.ranks:
        assert rank.state is not None
        assert rank.state.state == "stopped"
        found |= rank.state.problems
    return {name: value for name, value in found.items() if name != "late_windows"}


def counts(profile: Profile) -> dict[int, list[int]]:
    """Assignments of each expert, by layer."""
    return dict(zip(profile.layer_indices, np.asarray(profile.counts).tolist(), strict=True))


# -- starting engines


@dataclass
class Engines:
    """Starts engines one after the other.

    Attributes:
        folder: where everything goes.
        cache: what vLLM keeps between engines, if a test does not bring its own.
    """

    folder: Path
    started: int = 0
    cache: Path = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.folder / "cache"

    def fresh_cache(self, name: str) -> Path:
        """A cache without graphs; what vLLM knows of model classes is kept, it takes long."""
        fresh = self.folder / name
        fresh.mkdir()
        known = self.cache / "modelinfos"
        if known.is_dir():
            shutil.copytree(known, fresh / "modelinfos")
        return fresh

    def environment(self, cache: Path | None = None, **variables: str) -> dict[str, str]:
        """Environment of an engine."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "ROUTEPROF_", "PYTHONWARNINGS"))
        }
        cache = cache or self.cache
        own = {
            "VLLM_CACHE_ROOT": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "CXX": str(FOLDER / "compiler.py"),
            compiler.FOLDER: str(self.folder / "kernels"),
        }
        return inherited | ENVIRONMENT | own | variables

    def run(
        self,
        model: str,
        *rounds: dict[str, Any],
        record: dict[str, Any] | None = None,
        oracle: str = "tests.vllm.oracle.Oracle",
        cache: Path | None = None,
        variables: dict[str, str] | None = None,
        piecewise: bool = False,
        **engine: Any,
    ) -> Run:
        """Serve the rounds with an engine, and wait for its end.

        Args:
            record: settings of the recording; None for an engine without routeprof.
            oracle: the worker extension; empty for none.
            piecewise: compile as on GPUs.
            engine: arguments of ``vllm.LLM``.
        """
        self.started += 1
        folder = self.folder / f"{self.started:02}-{model}"
        folder.mkdir()
        environment = self.environment(cache, **variables or {})
        if record is not None:
            settings = {"out": str(folder / "recording"), "window": 1.0} | record
            environment["ROUTEPROF_RUN"] = json.dumps(settings)
        engine = {"model": str(self.folder / "models" / model)} | engine
        if oracle:
            engine["worker_extension_cls"] = oracle
        scenario, result = folder / "scenario.json", folder / "result.json"
        scenario.write_text(
            json.dumps({"engine": engine, "rounds": rounds, "piecewise": piecewise})
        )
        command = [sys.executable, "-m", "tests.vllm.drive", str(scenario), str(result)]
        log = (folder / "log").open("w+")
        with log:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=LIMIT
            )
            log.seek(0)
            text = log.read()
        assert ended.returncode == 0, f"the engine failed:\n{text[-6000:]}"
        return Run(model, json.loads(result.read_text()), text, folder / "recording")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("vllm")
    for name in SHAPES:
        write(folder / "models" / name, name)
    return Engines(folder)
