"""Engines in processes of their own, what they say they did, and what was recorded of them.

Nothing here imports SGLang: where it is not installed, its engines are not started.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import routeprof
from routeprof import Profile
from tests.sglang import models
from tests.sglang.models import SHAPES, Shape

ROOT = Path(__file__).parents[2]
LIMIT = 240
"""Seconds that one engine may take in all; it takes 20 to 40."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    # A few routers would be compiled for half a minute otherwise.
    "TORCHDYNAMO_DISABLE": "1",
    # A core for each rank where there are several.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}


# -- what is asked of an engine


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, as token ids."""
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(length)] for length in lengths]


def scene(*lengths: int, new: int = 8, seed: int = 0, **other: Any) -> dict[str, Any]:
    """One round of requests."""
    return {"prompts": prompts(*lengths, seed=seed), "new": new, **other}


# -- what came of it


@dataclass(frozen=True)
class Run:
    """One engine that served its rounds and is gone.

    Attributes:
        said: what the driver wrote.
        log: what the engine printed.
        out: where its recording is, if it was recorded.
    """

    said: dict[str, Any]
    log: str
    out: Path
    shape: Shape

    @cached_property
    def profile(self) -> Profile:
        return routeprof.load(self.out)

    @property
    def generated(self) -> list[list[list[int]]]:
        """Generated ids by round and request."""
        rounds = self.said["rounds"]
        return [[request["generated"] for request in one["requests"]] for one in rounds]

    def requests(self, *rounds: int) -> list[dict[str, Any]]:
        """Requests of these rounds, of all without any."""
        chosen = rounds or range(len(self.said["rounds"]))
        return [request for one in chosen for request in self.said["rounds"][one]["requests"]]

    def computed(self, *rounds: int) -> int:
        """Tokens that must have gone through the model in these rounds, in all without any.

        The last token of each answer is never fed back.
        """
        return sum(
            len(request["prompt"]) - request["cached"] + len(request["generated"]) - 1
            for request in self.requests(*rounds)
        )

    def records(self, *rounds: int) -> list[dict[str, Any]]:
        """Passes that SGLang's recorder wrote in these rounds (modes per_pass, per_token)."""
        return [record for one in rounds for record in self.dump(one)["records"]]

    def dump(self, number: int) -> dict[str, Any]:
        """What SGLang's recorder wrote after a round."""
        path = self.said["rounds"][number]["dump"]
        return torch.load(path, map_location="cpu", weights_only=True)


def check_closed_form(profile: Profile, shape: Shape, tokens: int) -> None:
    """Every layer routed every token, nothing else, and nothing is amiss."""
    assert tuple(profile.layer_indices) == shape.moe
    assert profile.in_state("dense") == shape.dense
    assert np.asarray(profile.counts).sum(1).tolist() == [tokens * shape.top_k] * len(shape.moe)
    assert profile.coverage == 1.0
    assert problems(profile) == {}
    for position in profile.captured:
        layer = profile.info.layers[position]
        assert (layer.experts, layer.top_k) == (shape.experts, shape.top_k)
        assert (layer.router, layer.shared_experts) == (shape.router, shape.shared)
    assert profile.info.model.engine == "sglang"
    table = profile.layers(breakdown=True)
    assert (table["invalid"] == 0).all()
    by_phase = table[table["phase"] != "all"].groupby("layer")["assignments"].sum()
    assert by_phase.tolist() == [tokens * shape.top_k] * len(shape.moe)


def problems(profile: Profile) -> dict[str, Any]:
    """Problems of all ranks, but for passes that outlast a window where many share two cores."""
    assert profile.files is not None
    found = {}
    for rank in profile.files.ranks:
        assert rank.state is not None
        assert rank.state.state == "stopped"
        found |= rank.state.problems
    found.pop("late_windows", None)
    return found


def counts(profile: Profile, **selection: Any) -> list[list[int]]:
    """Assignments of each expert, by layer."""
    chosen = profile.select(**selection) if selection else profile
    return np.asarray(chosen.counts).tolist()


# -- starting engines


@dataclass
class Engines:
    """Starts engines one after the other.

    Attributes:
        folder: where everything goes.
    """

    folder: Path
    started: int = 0

    def run(
        self,
        model: str,
        rounds: Sequence[dict[str, Any]],
        record: dict[str, Any] | None = None,
        prefix: Sequence[str] = (),
        **engine: Any,
    ) -> Run:
        """Serve the rounds with an engine, and wait for its end.

        Args:
            record: settings of the recording; None for an engine without routeprof.
            prefix: what to put before the interpreter, such as ``routeprof run``; OUT in it is
                where the recording is to go.
            engine: arguments of ``sglang.Engine``.
        """
        self.started += 1
        folder = self.folder / f"{self.started:02}-{model}"
        (folder / "dumps").mkdir(parents=True)
        environment = self._environment(folder, record)
        engine = {"model_path": str(self.folder / "models" / model)} | engine
        scenario, result = folder / "scenario.json", folder / "result.json"
        scenario.write_text(json.dumps({"engine": engine, "rounds": rounds}))
        words = [str(folder / "recording") if word == "OUT" else word for word in prefix]
        drive = [sys.executable, "-m", "tests.sglang.drive", str(scenario), str(result)]
        log = (folder / "log").open("w+")
        with log:
            ended = subprocess.run(
                [*words, *drive], cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=LIMIT
            )
            log.seek(0)
            text = log.read()
        assert ended.returncode == 0, f"the engine failed:\n{text[-6000:]}"
        return Run(json.loads(result.read_text()), text, folder / "recording", SHAPES[model])

    def _environment(self, folder: Path, record: dict[str, Any] | None) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SGLANG_", "ROUTEPROF_", "PYTHONWARNINGS"))
        }
        own = {
            "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder / "dumps"),
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
        }
        if record is not None:
            settings = {"out": str(folder / "recording"), "window": 1.0} | record
            own["ROUTEPROF_RUN"] = json.dumps(settings)
        return inherited | ENVIRONMENT | own


def _other_models() -> list[str]:
    """Modules of SGLang's models that would be imported for nothing."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "models"
    return [path.stem for path in folder.glob("*.py") if path.stem not in models.MODULES]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: make test-sglang")
    folder = tmp_path_factory.mktemp("sglang")
    models.make(folder / "models")
    return Engines(folder)
